"""Scores against the batch size of the statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ops.checks import check_positive, refuse
from .canvas import (
    BLUE,
    COLORS,
    GREY,
    ORANGE,
    Values,
    check_entries,
    check_labels,
    curve_styles,
    ground,
    make_room,
    share_axes,
    take_array,
    take_axes,
    take_one,
    take_options,
    take_values,
    text_points,
    text_width,
    wrapped,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ORDER = (BLUE, ORANGE, GREY, *COLORS[1:5])


def against_batch_size(
    batch_sizes: Values,
    curves: Mapping[Any, Values],
    *,
    ylabel: str,
    levels: Mapping[Any, float] | None = None,
    marks: Mapping[float, str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Curves of some score against the batch size M of the statistics, M on a logarithmic axis.

    Args:
        batch_sizes: (P,) values of M, ascending.
        curves: dict of label -> (P,) scores; in the order blue, orange, grey, then others.
        ylabel: the score and its unit.
        levels: dict of label of a curve -> its height without sampling, drawn dashed.
        marks: dict of batch size -> a word put under it, with a line through the plot.
        ax: where to draw.

    Returns:
        Axes.
    """
    op, ax = "against_batch_size", take_axes(ax)
    levels, marks = take_options(op, "levels", levels), take_options(op, "marks", marks)
    check_entries(op, "curves", curves)
    check_labels(op, "levels", levels, curves)
    batch_sizes = _take_sizes(op, batch_sizes)
    for m in marks:
        check_positive(op, "marks", m)
    for (label, values), style in zip(curves.items(), curve_styles(ORDER, ax), strict=False):
        values = take_values(op, label, values)
        if len(values) != len(batch_sizes):
            requirement = f"have one value for each of {len(batch_sizes)} batch sizes"
            refuse(op, label, requirement, len(values))
        ax.plot(batch_sizes, values, marker="o", markersize=4, label=label, **style)
        if label in levels:
            level = {"color": style["color"], "linestyle": "--", "linewidth": 1}
            ax.axhline(
                take_one(op, "levels", levels[label], "be one number a curve"),
                label=f"{label}, plug-in BN",
                **level,
            )
    for m in marks:
        ax.axvline(m, color=GREY, linewidth=0.6, zorder=0)
    ax.set_xscale("log", base=2)
    width = ax.bbox.width / ax.figure.dpi
    _label_sizes(ax, sorted({*batch_sizes, *marks}), marks, width)
    xlabel = "batch size M of the statistics".split()
    ax.set(xlabel=wrapped(xlabel, width, text_points("axes.labelsize")), ylabel=ylabel)
    small = {"fontsize": "small"} if width < 3 else {}
    ax.legend(framealpha=0.9, **small, **ground(ax))
    return ax


def _label_sizes(ax, places: list, marks: Mapping, width: float) -> None:
    """Ticks at all places; their sizes and the words of marks where they touch no other."""
    # A layout may yet make the axis wider.
    digit = text_width("0", text_points("xtick.labelsize")) / min(1.1 * width, 3.5)
    shown = {places[i] for i in _apart(places, marks, digit)}
    words = {m: str(word) if m in shown else f"{m} {word}" for m, word in marks.items()}
    below = _words_below(words, places, digit)
    ax.set_xticks(places, [f"{m if m in shown else ''}{below.get(m, '')}" for m in places])
    ax.minorticks_off()


def _take_sizes(op: str, batch_sizes) -> list:
    sizes = take_values(op, "batch_sizes", batch_sizes)
    if not ((sizes > 0) & np.isfinite(sizes)).all():
        refuse(op, "batch_sizes", "be positive and finite", sizes.tolist())
    if (np.diff(sizes) < 0).any():
        refuse(op, "batch_sizes", "ascend", sizes.tolist())
    return take_array(batch_sizes).reshape(-1).tolist()


def _words_below(words: dict, places: list, digit: float) -> dict:
    """Each mark's word, on the first line below where it touches no other."""
    below, span, ends = {}, _span(places), []
    for m in sorted(words):
        place, half = np.log2(m) / span, digit * len(words[m]) / 2
        line = next((i for i, end in enumerate(ends) if end <= place - half), len(ends))
        ends[line : line + 1] = [place + half]
        below[m] = "\n" * (line + 1) + words[m]
    return below


def _span(batch_sizes: list) -> float:
    return max(np.log2(batch_sizes[-1] / batch_sizes[0]), 1e-9)


def _apart(batch_sizes: list, marks, digit: float) -> set[int]:
    """Places of the sizes whose labels do not touch, of digits of that width in widths of the
    axis: marked ones, and from the largest down what fits between."""
    places, span = np.log2(batch_sizes), _span(batch_sizes)
    widths = [digit * (len(str(m)) + 1) for m in batch_sizes]
    shown = set()
    for i in sorted(range(len(places)), key=lambda i: (batch_sizes[i] not in marks, -i)):
        if all(abs(places[i] - places[j]) / span > (widths[i] + widths[j]) / 2 for j in shown):
            shown.add(i)
    return shown


def information_and_nll(
    batch_sizes: Values,
    information: Mapping[Any, Values],
    nll: Mapping[Any, Values],
    *,
    levels: Mapping[Any, float] | None = None,
    marks: Mapping[float, str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Mutual information and negative log-likelihood against the batch size, side by side.

    Args:
        batch_sizes, levels, marks: see `against_batch_size`; `levels` are of the likelihood.
        information, nll: dict of label -> (P,) values in nats.
        ax: where to draw.

    Returns:
        Axes of the mutual information; beside it in the figure are those labelled "nll".
    """
    ax = take_axes(ax, 9.2, 3.5)
    _, right = share_axes(ax, ["information", "nll"], 0, gaps=(5.5, 0))
    label = "mutual information [nats]"
    against_batch_size(batch_sizes, information, ylabel=label, marks=marks, ax=ax)
    ax.set_ylim(bottom=0)
    label = "negative log-likelihood [nats]"
    against_batch_size(batch_sizes, nll, ylabel=label, levels=levels, marks=marks, ax=right)
    words = max(label.get_text().count("\n") for label in ax.get_xticklabels())
    make_room((ax, right), 1.2 * (words + ax.get_xlabel().count("\n")))
    return ax
