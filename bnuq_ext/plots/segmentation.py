"""Segmentation: an image, the classes that its pixels are given, and how sure that is."""

import numpy as np

from ..ops.checks import refuse
from .canvas import COLORS, GREY, new_figure

# Twelve that stay apart side by side; more classes start over.
CLASS_COLORS = [*COLORS, "#882255", "#332288", "#999933", "#44aa99"]


def _take_map(name: str, values, shape):
    values = np.asarray(values)
    if values.shape != shape:
        refuse("segmentation_maps", name, f"have shape {list(shape)}", list(values.shape))
    return values


def _draw_classes(ax, labels, colors):
    """Labels as colours; what is no class stays white."""
    from matplotlib.colors import to_rgb

    palette = np.array([to_rgb(color) for color in colors] + [(1.0, 1.0, 1.0)])
    known = (labels >= 0) & (labels < len(colors))
    ax.imshow(palette[np.where(known, labels, len(colors))], interpolation="nearest")


def segmentation_maps(
    image,
    probs,
    uncertainty,
    *,
    truth=None,
    class_names=None,
    colors=None,
    label="variance, mean over the classes",
):
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

    Returns:
        Figure with Axes labelled "image", "truth" (where given), "prediction" and "uncertainty".
    """
    probs = np.asarray(probs)
    if probs.ndim != 3:
        refuse("segmentation_maps", "probs", "have shape (K, H, W)", list(probs.shape))
    count, shape = len(probs), probs.shape[1:]
    names = [str(k) for k in range(count)] if class_names is None else class_names
    colors = (
        [CLASS_COLORS[k % len(CLASS_COLORS)] for k in range(count)] if colors is None else colors
    )
    for name, given in (("class_names", names), ("colors", colors)):
        if len(given) != count:
            refuse("segmentation_maps", name, f"have {count} entries, one a class", len(given))
    _take_map("image", np.asarray(image)[..., 0] if np.ndim(image) == 3 else image, shape)
    maps = {"prediction": probs.argmax(0)}
    if truth is not None:
        maps = {"truth": _take_map("truth", truth, shape), **maps}

    places = ["image", *maps, "uncertainty"]
    figure = new_figure(3.1 * len(places) + 0.4, 2.8 * shape[0] / shape[1] + 0.9)
    axes = figure.subplot_mosaic([places])
    axes["image"].imshow(image, cmap="gray", interpolation="nearest")
    for name, labels in maps.items():
        _draw_classes(axes[name], labels, colors)
    uncertainty = _take_map("uncertainty", uncertainty, shape)
    drawn = axes["uncertainty"].imshow(uncertainty, cmap="viridis", vmin=0)
    figure.colorbar(drawn, ax=axes["uncertainty"], label=label, shrink=0.85)
    for name, ax in axes.items():
        ax.set(xticks=[], yticks=[], title=name)
    from matplotlib.patches import Patch

    seen = np.unique([*maps.values()])
    patches = [Patch(color=colors[k], label=names[k]) for k in seen if 0 <= k < count]
    if seen[0] < 0 or seen[-1] >= count:
        patches.append(Patch(facecolor="white", edgecolor=GREY, label="not labelled"))
    place = {"loc": "outside lower center", "ncols": 2 * len(places)}
    figure.legend(handles=patches, frameon=False, **place)
    return figure
