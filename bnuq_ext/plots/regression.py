"""Regression: what the uncertainty says beside what the errors are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date
from typing import TYPE_CHECKING

import numpy as np

from ..ops.checks import check_integer, refuse
from .canvas import (
    BLUE,
    GREY,
    Values,
    dots,
    ground,
    take_array,
    take_axes,
    take_numbers,
    take_one,
    take_values,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.typing import ColorType

# Half the width of the central interval of a Gaussian, in standard deviations.
HALF_WIDTHS = {"95 %": 1.959964, "50 %": 0.674490}
ALPHAS = {"95 %": 0.2, "50 %": 0.45}


def _take_like(op: str, name: str, values, mean):
    """As many values as there are means."""
    values = take_values(op, name, values)
    if len(values) != len(mean):
        refuse(op, name, f"have {len(mean)} values like mean", len(values))
    return values


def _take_std(op: str, std, mean):
    std = _take_like(op, "std", std, mean)
    if (std < 0).any():
        refuse(op, "std", "not be negative", std.min())
    return std


def _constant_half_width(op: str, std) -> float:
    """Half the width of the constant baseline's 95 % interval."""
    std = take_one(op, "constant_std", std)
    if not std >= 0:
        refuse(op, "constant_std", "not be negative", std)
    return HALF_WIDTHS["95 %"] * std


def uncertainty_error(
    mean: Values,
    std: Values,
    y: Values,
    *,
    constant_std: float | None = None,
    window: int | None = None,
    ylabel: str = "absolute error",
    color: ColorType = BLUE,
    ax: Axes | None = None,
) -> Axes:
    """Absolute errors of the test points, sorted by estimated uncertainty, over what it claims.

    A half-normal error lies in the dark band half the time and in the light one 95 % of it; where
    the uncertainty means something the running mean rises with the bands (Teye et al. 2018, figure
    2).

    Args:
        mean: (N,) predictive means.
        std: (N,) predictive standard deviations, noise included.
        y: (N,) targets.
        constant_std: the standard deviation of the constant baseline; its 95 % interval is drawn
            dashed.
        window: points in the running mean; by default N / 10, at least 5 of them.
        ylabel: what the error is of, and its unit.
        color: of the bands.
        ax: where to draw.

    Returns:
        Axes.
    """
    op, ax = "uncertainty_error", take_axes(ax)
    mean = take_values(op, "mean", mean)
    std, y = _take_std(op, std, mean), _take_like(op, "y", y, mean)
    if window is None:
        window = min(max(len(y) // 10, 5), len(y))
    window = check_integer(op, "window", window, 1)
    if window > len(y):
        refuse(op, "window", f"lie in [1, {len(y)}]", window)
    order = np.argsort(std, kind="stable")
    error, std, rank = np.abs(y - mean)[order], std[order], np.arange(1, len(y) + 1)
    for level, width in HALF_WIDTHS.items():
        style = {"color": color, "alpha": ALPHAS[level], "linewidth": 0}
        ax.fill_between(rank, 0, width * std, label=f"{level} of the errors, as estimated", **style)
    points = dots(len(y), 3)
    ax.plot(rank, error, color=GREY, clip_on=len(y) > 100, label="absolute errors", **points)
    running = np.convolve(error, np.full(window, 1 / window), "valid")
    label = f"their running mean over {window}"
    ink = ax.xaxis.label.get_color()
    style = {"color": ink, "marker": "o" if len(running) == 1 else "", "markersize": 3}
    ax.plot(np.arange(len(running)) + (window + 1) / 2, running, label=label, **style)
    # A few widest bands may leave the figure: they would press the errors into its foot.
    finite = std[np.isfinite(std)]
    heights = [*error, HALF_WIDTHS["95 %"] * (np.quantile(finite, 0.99) if len(finite) else 0)]
    if constant_std is not None:
        label = "95 %, constant uncertainty"
        heights.append(_constant_half_width(op, constant_std))
        ax.axhline(heights[-1], color=ink, ls="--", lw=1, label=label)
    top = 1.05 * max((height for height in heights if np.isfinite(height)), default=0)
    ax.set(xlabel="test points, sorted by estimated uncertainty", ylabel=ylabel)
    ax.set(xlim=(1, max(len(y), 2)), ylim=(0, top or 1))
    style = {"framealpha": 0.8, "fontsize": "small", "loc": "upper left"}
    ax.legend(markerscale=3 / points["ms"], **style, **ground(ax))
    return ax


def _are_dates(values) -> bool:
    try:
        array = take_array(values)
    except (TypeError, ValueError):
        return False
    if array.dtype != object:
        return array.dtype.kind == "M" and array.size > 0
    return array.size > 0 and all(isinstance(value, date) for value in array.flat)


def _take_places(op: str, name: str, values, dated: bool):
    """Numbers; dates in days, as matplotlib counts them."""
    if not dated:
        return take_numbers(op, name, values)
    if not _are_dates(values):
        refuse(op, name, "be dates like x", type(values).__name__, TypeError)
    from matplotlib.dates import date2num

    return date2num(take_array(values))


def _label_dates(ax, dates) -> None:
    """Of their time zone, and as short as they fit side by side."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    zone = getattr(take_array(dates).flat[0], "tzinfo", None)
    ax.xaxis_date(zone)
    locator = AutoDateLocator(zone)
    ax.xaxis.set_major_locator(locator)
    ax.xaxis.set_major_formatter(ConciseDateFormatter(locator, zone))


def regression_band(
    x: Values | Sequence[date],
    mean: Values,
    std: Values,
    *,
    data: tuple[Values | Sequence[date], Values] | None = None,
    constant_std: float | None = None,
    xlabel: str = "x",
    ylabel: str = "y",
    color: ColorType = BLUE,
    ax: Axes | None = None,
) -> Axes:
    """A predictive distribution over one input: mean, 50 % and 95 % bands, a constant one dashed.

    Args:
        x: (P,) inputs, in any order: numbers, or dates as `datetime` or numpy have them.
        mean: (P,) predictive means.
        std: (P,) predictive standard deviations, noise included.
        data: (x, y) of the training data, drawn as dots; x like `x`.
        constant_std: the standard deviation of the constant baseline; its 95 % band is drawn
            dashed.
        xlabel, ylabel: what they are, and their units.
        color: of the mean and the bands.
        ax: where to draw.

    Returns:
        Axes.
    """
    op, ax = "regression_band", take_axes(ax)
    mean = take_values(op, "mean", mean)
    std, dated = _take_std(op, std, mean), _are_dates(x)
    if dated:
        _label_dates(ax, x)
    x = _take_like(op, "x", _take_places(op, "x", x, dated), mean)
    order = np.argsort(x, kind="stable")
    x, mean, std = x[order], mean[order], std[order]
    if len(x) == 1:  # which makes no line and no band
        x, mean, std = x + [-0.5, 0.5], mean.repeat(2), std.repeat(2)
    for level, width in HALF_WIDTHS.items():
        style = {"color": color, "alpha": ALPHAS[level], "linewidth": 0, "label": f"{level} band"}
        ax.fill_between(x, mean - width * std, mean + width * std, **style)
    ax.plot(x, mean, color=color, label="predictive mean")
    if constant_std is not None:
        width = _constant_half_width(op, constant_std)
        style = {"color": ax.xaxis.label.get_color(), "linestyle": "--", "linewidth": 1}
        ax.plot(x, mean + width, label="95 %, constant uncertainty", **style)
        ax.plot(x, mean - width, **style)
    size = 2 if data is None else _draw_data(ax, data, dated)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.margins(x=0)
    ax.legend(fontsize="small", framealpha=0.8, markerscale=2 / size, **ground(ax))
    return ax


def _draw_data(ax, data, dated: bool) -> float:
    """Training data behind the lines, which thousands would bury; returns the size of a dot."""
    op = "regression_band"
    if not isinstance(data, Iterable):
        refuse(op, "data", "hold x and y", type(data).__name__, TypeError)
    points = [
        _take_places(op, f"data[{i}]", v, dated and i == 0).reshape(-1) for i, v in enumerate(data)
    ]
    if len(points) != 2 or len(points[0]) != len(points[1]):
        refuse(op, "data", "be (x, y) of one length", [len(values) for values in points])
    style = dots(len(points[0]), 2)
    color = ax.xaxis.label.get_color()
    ax.plot(*points, color=color, zorder=1.5, label="training data", **style)
    return style["ms"]
