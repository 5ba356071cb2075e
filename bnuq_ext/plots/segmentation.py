"""Segmentation: an image, the classes that its pixels are given, and how sure that is."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..ops.checks import check_shape, refuse
from .canvas import GREY, Values, class_colors, legend_columns, take_array, take_axes, take_probs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.typing import ColorType

OP = "segmentation_maps"
GAP = 0.05  # between two maps, in widths of one


def _take_map(name: str, values, shape):
    values = take_array(values)
    check_shape(OP, name, values, shape)
    return values


def _take_names(count: int, class_names, colors) -> tuple:
    names = [str(k) for k in range(count)] if class_names is None else class_names
    colors = class_colors(count) if colors is None else colors
    for name, given in (("class_names", names), ("colors", colors)):
        if len(given) != count:
            refuse(OP, name, f"have {count} entries, one a class", len(given))
    return names, colors


def _colored(labels, colors):
    """Labels as colours; what is no class stays white."""
    from matplotlib.colors import to_rgb

    palette = np.array([to_rgb(color) for color in colors] + [(1.0, 1.0, 1.0)])
    known = (labels >= 0) & (labels < len(colors))
    return palette[np.where(known, labels, len(colors))]


def segmentation_maps(
    image: Values,
    probs: Values,
    uncertainty: Values,
    *,
    truth: Values | None = None,
    class_names: Sequence[str] | None = None,
    colors: Sequence[ColorType] | None = None,
    label: str = "uncertainty",
    ax: Axes | None = None,
) -> Axes:
    """An image, its true classes where given, the most probable ones, and their uncertainty.

    Args:
        image: (H, W) or (H, W, 3) pixels, as `Axes.imshow` takes them.
        probs: (K, H, W) mean probabilities of the replicas.
        uncertainty: (H, W), such as `Prediction.variance.mean(1)` of one image (Teye et al. 2018,
            figure 6).
        truth: (H, W) labels; one outside [0, K) is not labelled and stays white.
        class_names: K names for the legend, which holds the classes that appear; by default their
            numbers.
        colors: K colours.
        label: what the uncertainty is, and its unit.
        ax: where to draw.

    Returns:
        Axes, with the images side by side: "image", "truth" (where given), "prediction" and
        "uncertainty", each with its name above it and as its label.
    """
    probs, image = take_probs(OP, "probs", probs), take_array(image)
    if probs.ndim != 3 or probs.size == 0:
        requirement = "have shape (K, H, W), each at least 1"
        refuse(OP, "probs", requirement, list(probs.shape))
    count, shape = len(probs), probs.shape[1:]
    names, colors = _take_names(count, class_names, colors)
    if image.shape[:2] != shape or image.shape[2:] not in ((), (1,), (3,), (4,)):
        requirement = f"have shape {list(shape)} or {[*shape, 3]}"
        refuse(OP, "image", requirement, list(image.shape))
    classes = {"prediction": probs.argmax(0)}
    if truth is not None:
        truth = _take_map("truth", truth, shape)
        if truth.dtype.kind not in "biu":
            refuse(OP, "truth", "hold integer labels", truth.dtype, TypeError)
        classes = {"truth": truth.astype(np.int64), **classes}
    maps = {"image": image} | {name: _colored(c, colors) for name, c in classes.items()}
    maps["uncertainty"] = _take_map("uncertainty", uncertainty, shape)

    patches = _patches(np.unique([*classes.values()]), names, colors)
    width, height = 3.1 * len(maps) + 0.4, 2.9 * shape[0] / shape[1]
    columns = legend_columns([p.get_label() for p in patches], width - 1, 10, 2 * len(maps))
    ax = take_axes(ax, width, height + 0.45 + 0.22 * math.ceil(len(patches) / columns))
    _draw_side_by_side(ax, maps, shape)
    bar = ax.inset_axes([1.01, 0.0, 0.05 / len(maps), 1.0])
    # No longer than the bar is: some 14 letters an inch.
    label = textwrap.fill(label, max(10, int(14 * height)))
    ax.figure.colorbar(ax.images[-1], cax=bar, label=label)
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0)}
    ax.legend(handles=patches, frameon=False, ncols=columns, **place)
    return ax


def _draw_side_by_side(ax, maps: dict, shape: tuple) -> None:
    height, width = shape
    step = (1 + GAP) * width
    for i, (name, pixels) in enumerate(maps.items()):
        style = {"cmap": "gray"}
        if name == "uncertainty":  # 0 everywhere where nothing is drawn
            largest = np.max(pixels, where=np.isfinite(pixels), initial=0)
            style = {"cmap": "viridis", "vmin": 0, "vmax": largest or 1}
        extent = (i * step, i * step + width, height, 0)
        ax.imshow(pixels, extent=extent, interpolation="nearest", label=name, **style)
        place = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom"}
        ax.annotate(name, (i * step + width / 2, 1.02), **place)
    ax.set(xlim=(0, (len(maps) - 1) * step + width), ylim=(height, 0))
    ax.set_axis_off()


def _patches(seen, names, colors) -> list:
    """What the legend shows: the classes that are seen, and whether there are pixels of none."""
    from matplotlib.patches import Patch

    patches = [Patch(color=colors[k], label=names[k]) for k in seen if 0 <= k < len(names)]
    if seen[0] < 0 or seen[-1] >= len(names):
        patches.append(Patch(facecolor="white", edgecolor=GREY, label="not labelled"))
    return patches
