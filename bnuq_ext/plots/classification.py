"""What class probabilities look like: their entropy, their calibration, one image's verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..metrics.arguments import check_sums
from ..metrics.classification import bins_of, ece
from ..ops.checks import check_integer, check_shape, refuse
from .canvas import (
    BLUE,
    CLASS_COLORS,
    GREY,
    LIGHT_GREY,
    ORANGE,
    Values,
    begin_at,
    check_entries,
    check_labels,
    class_colors,
    curve_styles,
    ground,
    legend_columns,
    make_room,
    share_axes,
    take_array,
    take_axes,
    take_finite,
    take_numbers,
    take_options,
    take_probs,
    text_points,
    text_width,
    wrapped,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def entropy_cdf(
    entropies: Mapping[Any, Values],
    *,
    num_classes: int | None = None,
    styles: Mapping[Any, dict[str, Any]] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """The fraction of inputs whose predictive entropy is at most the abscissa, one curve per entry.

    Args:
        entropies: dict of label -> (N,) entropies in nats.
        num_classes: K; marks log K, the entropy of knowing nothing.
        styles: dict of label -> arguments of `Axes.step`.
        ax: where to draw.

    Returns:
        Axes.
    """
    op = "entropy_cdf"
    check_entries(op, "entropies", entropies)
    styles = take_options(op, "styles", styles, "arguments")
    check_labels(op, "styles", styles, entropies)
    columns = legend_columns([str(label) for label in entropies], 5.4, 8.33, 2)
    more = max(0, math.ceil(len(entropies) / columns) - 2)
    ax = take_axes(ax, height=3.6 + 0.17 * more)
    ordered = {label: np.sort(take_finite(op, label, v)) for label, v in entropies.items()}
    most = 0 if num_classes is None else np.log(check_integer(op, "num_classes", num_classes, 1))
    right = max(most, *(values[-1] for values in ordered.values()))
    for (label, values), style in zip(
        ordered.items(), curve_styles(CLASS_COLORS, ax), strict=False
    ):
        fraction = np.arange(len(values) + 1) / len(values)
        edges = np.concatenate([[0], values])
        if label in styles:  # which may have its linestyle as `ls`
            style = {"color": style["color"]} | styles[label]
        (line,) = ax.step(edges, fraction, where="post", label=label, **style)
        look = line.get_color(), line.get_linestyle()
        ax.hlines(1, values[-1], right, *look, linewidth=line.get_linewidth())  # where all end
    if num_classes is not None:
        ax.axvline(most, color=GREY, linewidth=0.8)
        ax.annotate(f" log {num_classes}", (most, 0.6), color=GREY, rotation=90, ha="right")
    ax.set(xlabel="predictive entropy [nats]", ylabel="fraction of inputs at or below")
    ax.set_ylim(0, 1.02)
    begin_at(ax, "x", 0)
    columns = legend_columns(ax.get_legend_handles_labels()[1], 5.4, 8.33, 2)
    above = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": columns}
    ax.legend(frameon=False, fontsize="small", **above)
    return ax


def reliability_diagram(
    probs: Values, y: Values, *, num_bins: int = 15, ax: Axes | None = None
) -> Axes:
    """How often the most probable class is right, against its probability.

    The bins are those of `metrics.ece`: of equal width, (lower, upper]. The gap from a bin's
    accuracy to its mean confidence, weighted with the fraction of rows in it, sums to the ECE that
    the plot names.

    Args:
        probs: (N, K, *) probabilities; a pixel counts as a row.
        y: (N, *) integer labels in [0, K).
        num_bins: bins over [0, 1].
        ax: where to draw.

    Returns:
        Axes.
    """
    op, ax = "reliability_diagram", take_axes(ax)
    probs, y = _take_labelled(op, probs, y)
    num_bins = check_integer(op, "num_bins", num_bins, 1)
    confidence = probs.max(1)
    bins = bins_of(torch.from_numpy(confidence), num_bins).numpy()
    count, right, total = (
        np.bincount(bins, weights, num_bins) for weights in (None, probs.argmax(1) == y, confidence)
    )
    seen, edges = count > 0, np.linspace(0, 1, num_bins + 1)
    accuracy, claimed = right[seen] / count[seen], total[seen] / count[seen]
    error = ece(torch.tensor(probs, device="cpu"), torch.from_numpy(y.astype(np.int64)), num_bins)
    left, gap = edges[:-1][seen], "gap to the mean confidence"
    place = {"align": "edge", "width": 1 / num_bins}
    hatched = {"facecolor": "none", "edgecolor": ORANGE, "hatch": "////", "linewidth": 0.8}
    handles = [
        ax.bar(left, accuracy, color=BLUE, alpha=0.5, ec="white", label="accuracy", **place),
        ax.bar(left, claimed - accuracy, bottom=accuracy, label=gap, **place, **hatched),
        ax.stairs(
            count / len(y), edges, color=ax.xaxis.label.get_color(), label="fraction of rows"
        ),
        *ax.plot([0, 1], [0, 1], "--", color=GREY, linewidth=1, label="calibrated"),
    ]
    ax.set(xlabel="confidence, the largest probability", ylabel="accuracy, fraction of rows")
    ax.set(xlim=(0, 1), title=f"ECE {error:.3f} in {num_bins} bins", yticks=np.linspace(0, 1, 6))
    _legend_above_one(ax, handles)
    return ax


def _legend_above_one(ax, handles) -> None:
    """In the axis, above what the bars can reach; in two columns, small enough for its width."""
    points = text_points("small")
    widths = [text_width(handle.get_label(), points) for handle in handles]
    # In heights of a letter: a handle and the space around it 4.8, a row 1.6, around all rows 2.
    needed = max(widths[:2]) + max(widths[2:]) + 2 * 4.8 * points / 72
    width, height = 0.9 * ax.bbox.size / ax.figure.dpi  # a layout may yet take some of it
    points *= min(1, width / needed)
    share = (2 * 1.6 + 2) * points / (72 * height)
    ax.set_ylim(0, 1 / (1 - min(share, 0.5)))
    style = {"framealpha": 0.8, "fontsize": points, **ground(ax)}
    ax.legend(handles=handles, loc="upper center", ncols=2, **style)


def _take_labelled(op: str, probs, y) -> tuple:
    """Probabilities (N, K) and labels (N,), of pixels too."""
    probs, y = take_probs(op, "probs", probs), take_array(y)
    if probs.ndim < 2 or probs.size == 0:
        refuse(op, "probs", "have shape (N, K, *) with N > 0", list(probs.shape))
    probs = np.moveaxis(probs, 1, -1)
    check_shape(op, "y", y, probs.shape[:-1])
    probs, y = probs.reshape(-1, probs.shape[-1]), y.reshape(-1)
    check_sums(op, probs)
    if y.dtype.kind not in "iu":
        refuse(op, "y", "hold integer labels", y.dtype, TypeError)
    if not (0 <= y.min() and y.max() < probs.shape[1]):
        refuse(op, "y", f"lie in [0, {probs.shape[1]})", [y.min().item(), y.max().item()])
    return probs, y


def stacked_probabilities(probs: Values, *, shown: Iterable[int], ax: Axes | None = None) -> Axes:
    """One column per prediction, its class probabilities stacked;
    the classes not `shown` are one, "others".

    Args:
        probs: (T, K) probabilities.
        shown: the classes to draw, from the bottom up, in the order of `class_colors`.
        ax: where to draw.

    Returns:
        Axes.
    """
    op, ax = "stacked_probabilities", take_axes(ax)
    probs = take_probs(op, "probs", probs)
    if probs.ndim != 2 or len(probs) == 0:
        refuse(op, "probs", "have shape (T, K) with T > 0", list(probs.shape))
    K, shown = probs.shape[1], _take_classes(shown)
    if not all(0 <= k < K for k in shown):
        refuse(op, "shown", f"lie in [0, {K})", shown)
    if len(set(shown)) < len(shown):
        refuse(op, "shown", "name each class once", shown)
    columns, bottom = np.arange(1, len(probs) + 1), np.zeros(len(probs))
    colors = class_colors(len(shown))
    parts = [(str(k), color, probs[:, k]) for k, color in zip(shown, colors, strict=True)]
    others = np.delete(probs, shown, axis=1).sum(1)
    if others.any():
        parts.append(("others", LIGHT_GREY, others))
    # Of more columns the edges would be most of what is seen.
    edges = {"edgecolor": "white", "lw": 0.4} if len(probs) <= 100 else {"antialiased": False}
    for label, color, part in parts:
        ax.bar(columns, part, 1.0, bottom, color=color, label=label, **edges)
        bottom = bottom + part
    ax.set(xlim=(0.5, len(probs) + 0.5), ylim=(0, 1), xlabel="prediction", ylabel="probability")
    ax.set_xticks(sorted({1, len(probs)}))
    beside = {"loc": "center left", "bbox_to_anchor": (1, 0.5), "ncols": -(-len(parts) // 12)}
    ax.legend(title="class", frameon=False, reverse=True, **beside)
    return ax


def _take_classes(shown) -> list[int]:
    op = "stacked_probabilities"
    if not isinstance(shown, Iterable):
        refuse(op, "shown", "be a list of classes", type(shown).__name__, TypeError)
    return [check_integer(op, "shown", k, -math.inf) for k in shown]


def verdict(
    image: Values,
    plug_in: Values,
    replicas: Values,
    *,
    clean: Values | None = None,
    truth: int | str | None = None,
    visible: float = 0.02,
    ax: Axes | None = None,
) -> Axes:
    """A noisy image, what one network says about it, and what its replicas say.

    Args:
        image: (H, W) pixels, or (H, W, 3) in colour.
        plug_in: (K,) probabilities of ordinary batch norm.
        replicas: (T, K) probabilities of the replicas; drawn in the order of their verdicts.
        clean: like image, the image without noise, shown before it.
        truth: the true class.
        visible: a class has a colour of its own if its mean probability somewhere reaches this.
        ax: where to draw.

    Returns:
        Axes of the replicas; before it in the figure are those labelled "clean" (where given),
        "image" and "plug-in".
    """
    plug_in, replicas = _take_verdicts(plug_in, replicas)
    mean = replicas.mean(0)
    by_mean = np.argsort(-mean)
    shown = [int(k) for k in by_mean if max(mean[k], plug_in[k]) >= visible]
    rank = np.argsort(by_mean)[replicas.argmax(1)]
    order = np.lexsort((-replicas.max(1), rank))
    ax = take_axes(ax, 9.4 if clean is None else 11.4, 2.9)
    pictures = {"image": image} if clean is None else {"clean": clean, "image": image}
    panels = _verdict_panels(ax, [*pictures, "plug-in", "replicas"], len(shown))
    size = "medium" if ax.bbox.width > 3 * ax.figure.dpi else "small"
    _draw_pictures(panels, pictures, truth, size)
    middle = panels["plug-in"]
    stacked_probabilities(plug_in[None], shown=shown, ax=middle)
    middle.get_legend().remove()
    middle.set_xticks([])
    middle.set_ylabel("probability", fontsize=size)
    said = [f"“{plug_in.argmax()}”,", f"{plug_in.max():.0%}"]
    _write_around(middle, "plug-in BN", said, size)
    stacked_probabilities(replicas[order], shown=shown, ax=ax)
    ax.set(yticks=[], ylabel="")
    together = ["together:", f"“{mean.argmax()}”, {mean.max():.0%}"]
    title = f"{len(replicas)} replicas, one column each"
    share = 0.8 if size == "small" else 1  # a layout may yet take some for the legend
    _write_around(ax, title, ["replicas,", "sorted", "by", "verdict;", *together], size, share)
    if "\n" in ax.get_xlabel():  # which takes the place of the ticks' words
        ax.set_xticks([])
    # Two lines below fit where matplotlib's own figures have one and the words of ticks.
    make_room(panels.values(), 1.2 * (ax.get_xlabel().count("\n") - 1))
    return ax


def _verdict_panels(ax, names: list[str], num_shown: int) -> dict:
    ratios = {"clean": 0.5, "image": 0.5, "plug-in": 0.2, "replicas": 1.0}
    # Room for a scale and its label behind the image, for the legend behind the replicas.
    gaps = {"clean": 1, "image": 5.5, "plug-in": 2, "replicas": 2 + 7 * math.ceil(num_shown / 11)}
    chosen = [[sizes[name] for name in names] for sizes in (ratios, gaps)]
    drawn = share_axes(ax, names, len(names) - 1, ratios=chosen[0], gaps=chosen[1])
    return dict(zip(names, drawn, strict=True))


def _draw_pictures(panels: dict, pictures: dict, truth, size: str) -> None:
    titles = {"clean": "without noise", "image": "the input"}
    if truth is not None:
        titles = {"clean": f"a {truth}", "image": f"a noisy {truth}"}
    for name, pixels in pictures.items():
        panels[name].imshow(_take_pixels(name, pixels), cmap="gray_r", interpolation="nearest")
        panels[name].set(xticks=[], yticks=[])
        _write_around(panels[name], titles[name], [], size)


def _write_around(ax, title: str, below: list[str], size: str, share: float = 1) -> None:
    """In lines that are no wider than this share of the axis."""
    points = text_points(size)
    inches = share * ax.bbox.width / ax.figure.dpi + 0.5 * points / 72
    # Above the words of a scale's end, too.
    ax.set_title(wrapped(title.split(), inches, points), fontsize=size, pad=0.9 * text_points())
    ax.set_xlabel(wrapped(below, inches, points), fontsize=size)


def _take_pixels(name: str, pixels):
    shape = take_numbers("verdict", name, pixels).shape
    if len(shape) != 2 and shape[2:] != (3,):
        refuse("verdict", name, "have shape (H, W) or (H, W, 3)", list(shape))
    return take_array(pixels)  # colours from 0 to 255 are known by their type


def _take_verdicts(plug_in, replicas) -> tuple:
    plug_in = take_probs("verdict", "plug_in", plug_in)
    replicas = take_probs("verdict", "replicas", replicas)
    if plug_in.ndim != 1:
        refuse("verdict", "plug_in", "have shape (K,)", list(plug_in.shape))
    if replicas.ndim != 2 or len(replicas) == 0 or replicas.shape[1] != len(plug_in):
        requirement = f"have shape (T, {len(plug_in)}) with T > 0"
        refuse("verdict", "replicas", requirement, list(replicas.shape))
    return plug_in, replicas
