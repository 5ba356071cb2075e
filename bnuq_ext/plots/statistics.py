"""Batch statistics: how they are distributed, and what was fitted to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ops.checks import check_integer, refuse
from .canvas import (
    BLUE,
    COLORS,
    Values,
    begin_at,
    check_mapping,
    take_axes,
    take_finite,
    take_numbers,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OP = "statistic_marginals"


def _take_density(entry) -> tuple:
    try:
        family, location, scale = entry
    except (TypeError, ValueError):
        requirement = "hold (family, location, scale)"
        refuse(OP, "densities", requirement, repr(entry), TypeError)
    return family, *(take_numbers(OP, "densities", v) for v in (location, scale))


def _points(ends: tuple, family: str, location: float, scale: float):
    """Over the axis, and closer where a density much narrower than that stands."""
    with np.errstate(over="ignore"):
        near = location + scale * np.linspace(-4, 4, 201)
        if family == "lognormal":  # a wide one is steep at 0 alone
            near = np.exp(near) if scale < 1 else near[:0]
    return np.union1d(np.linspace(*ends, 400), near[(near > ends[0]) & (near < ends[1])])


def _density(family: str, location: float, scale: float, points):
    """The density of N(location, scale²), or of what has this as its logarithm."""
    if family not in ("normal", "lognormal"):
        refuse(OP, "family", "be normal or lognormal", repr(family))
    if not scale > 0:
        refuse(OP, "scale", "be positive", scale)
    if family == "lognormal":
        density = np.zeros_like(points)
        above = points > 0
        density[above] = _density("normal", location, scale, np.log(points[above])) / points[above]
        return density
    with np.errstate(under="ignore"):
        return np.exp(-0.5 * ((points - location) / scale) ** 2) / (scale * (2 * np.pi) ** 0.5)


def statistic_marginals(
    values: Values,
    densities: Mapping[Any, tuple[str, float, float]],
    *,
    xlabel: str = "batch mean of one unit",
    num_bins: int | str = "auto",
    ax: Axes | None = None,
) -> Axes:
    """Histogram of one unit's batch statistic over many batches, under the densities fitted to it.

    The axis spans the values, so a density that is much too wide shows as a flat line.

    Args:
        values: (B,) the statistic in each of B batches; finite.
        densities: dict of label -> (family, location, scale): "normal" with mean and standard
            deviation, or "lognormal" with those of the logarithm.
        xlabel: which statistic of what, and its unit.
        num_bins: of equal width over the values; a number, or a rule of `numpy.histogram`.
        ax: where to draw.

    Returns:
        Axes.
    """
    ax = take_axes(ax)
    values = take_finite(OP, "values", values)
    check_mapping(OP, "densities", densities, "(family, location, scale)")
    if not isinstance(num_bins, str):
        num_bins = check_integer(OP, "num_bins", num_bins, 1)
    low, high = values.min(), values.max()
    margin = 0.15 * (high - low) or 0.5
    heights, edges = np.histogram(values, num_bins, density=True)
    label = f"{len(values)} batches"
    ax.stairs(heights, edges, fill=True, color=BLUE, alpha=0.35, label=label)
    ends = low - margin, high + margin
    for i, (label, entry) in enumerate(densities.items()):
        color, line = COLORS[(2, 5, 3, 7)[i % 4]], ("-", "--", "-.", ":")[i % 4]
        entry = _take_density(entry)
        points = _points(ends, *entry)
        ax.plot(points, _density(*entry, points), line, color=color, label=label)
    ax.set(xlabel=xlabel, ylabel="density", xlim=ends)
    begin_at(ax, "y", 0)
    ax.legend(frameon=False, fontsize="small")
    return ax
