"""Weights with a posterior: histograms, signal-to-noise ratios, the error in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ops.checks import check_integer, check_positive, refuse
from .canvas import (
    BLUE,
    COLORS,
    GREY,
    Values,
    begin_at,
    check_entries,
    check_labels,
    curve_styles,
    ground,
    share_axes,
    take_axes,
    take_finite,
    take_numbers,
    take_options,
    take_values,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.typing import ColorType


def error_over_epochs(
    errors: Mapping[Any, Values],
    *,
    levels: Mapping[Any, float] | None = None,
    best: Mapping[Any, int] | None = None,
    colors: Mapping[Any, ColorType] | None = None,
    ylabel: str = "test error [%]",
    ax: Axes | None = None,
) -> Axes:
    """Curves of an error against the epoch, counted from 1.

    Args:
        errors: dict of label -> (E,) errors in percent, one per epoch.
        levels: dict of label -> an error to compare with, drawn dashed, dotted or both.
        best: dict of label of a curve -> the epoch that is marked on it.
        colors: dict of label of a curve -> its colour; by default those of `COLORS` in turn.
        ylabel: what the error is, and its unit.
        ax: where to draw.

    Returns:
        Axes.
    """
    ax = take_axes(ax)
    from matplotlib.ticker import MaxNLocator

    op = "error_over_epochs"
    levels, best = take_options(op, "levels", levels), take_options(op, "best", best, "epochs")
    colors = take_options(op, "colors", colors, "colours")
    check_entries(op, "errors", errors)
    check_labels(op, "best", best, errors)
    for (label, values), style in zip(errors.items(), curve_styles(COLORS, ax), strict=False):
        values = take_values(op, label, values)
        if label in colors:
            style = {"color": colors[label]}
        point = len(values) == 1  # on the frame
        style = {"linewidth": 1.4, "marker": "." if point else "", "clip_on": not point, **style}
        ax.plot(np.arange(1, len(values) + 1), values, label=label, **style)
        if label in best:
            epoch = check_integer(op, "best", best[label], 1)
            if epoch > len(values):
                refuse(op, "best", f"lie in [1, {len(values)}]", epoch)
            color = style["color"]
            ax.plot(epoch, values[epoch - 1], marker="o", color=color, mec="white", zorder=3)
    for (label, level), dash in zip(levels.items(), cycle(("--", ":", "-.")), strict=False):
        ax.axhline(level, color=GREY, linestyle=dash, linewidth=1, label=label)
    ax.set(xlabel="epoch", ylabel=ylabel)
    begin_at(ax, "x", 1)
    begin_at(ax, "y", 0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    ax.legend(framealpha=0.9, **ground(ax))
    return ax


def weight_histograms(
    weights: Mapping[Any, Values],
    *,
    limit: float = 0.3,
    num_bins: int = 120,
    initial: Values | None = None,
    colors: Mapping[Any, ColorType] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """One histogram of weights per entry, one under the other, over the same bins.

    Args:
        weights: dict of label -> (W,) weights.
        limit: the bins span [-limit, limit]; the fraction outside is written into the plot, from
            0.05 % on.
        num_bins: their number.
        initial: (W,) weights before training, drawn as a grey line in each.
        colors: dict of label of an entry -> its colour; by default those of `COLORS` in turn.
        ax: where to draw.

    Returns:
        Axes of the last entry; above it in the figure are those labelled by the other entries.
    """
    op = "weight_histograms"
    check_entries(op, "weights", weights)
    check_positive(op, "limit", limit)
    num_bins = check_integer(op, "num_bins", num_bins, 1)
    colors = take_options(op, "colors", colors, "colours")
    edges = np.linspace(-limit, limit, num_bins + 1)
    ax = take_axes(ax, 5.4, 0.6 + 1.5 * len(weights))
    panels = share_axes(ax, [*weights], len(weights) - 1, rows=True, sharex=ax)
    for panel, (label, values), color in zip(panels, weights.items(), cycle(COLORS), strict=False):
        values = take_finite(op, label, values)
        _histogram(panel, values, edges, colors.get(label, color), label, initial)
        panel.tick_params(labelbottom=panel is ax)
    ax.set_xlabel("mean of a weight")
    ax.figure.align_ylabels(panels)
    return ax


def _histogram(ax, values, edges, color, label, initial):
    """The share of the weights in each bin, in percent, and what lies outside of all."""
    shares = np.histogram(values, edges)[0] / len(values)
    ax.stairs(100 * shares, edges, fill=True, color=color, label=label)
    if initial is not None:
        initial = take_finite("weight_histograms", "initial", initial)
        before = np.histogram(initial, edges)[0] / len(initial)
        ax.stairs(100 * before, edges, color=GREY, label="before training")
    outside = np.mean(np.abs(values) > edges[-1])
    if outside >= 5e-4:
        _note(ax, f"{outside:.1%} outside")
    top = 1.4 * ax.dataLim.y1 or 1  # room for the legend
    ax.set(xlim=edges[[0, -1]], ylim=(0, top), ylabel="% a bin")
    ax.legend(frameon=False, fontsize="small", loc="upper right", ncols=2)


def _note(ax, text: str) -> None:
    words = {"xycoords": "axes fraction", "va": "top", "fontsize": "small", "color": GREY}
    blank = {"facecolor": ax.get_facecolor(), "edgecolor": "none", "pad": 1}  # over lines of cuts
    ax.annotate(text, (0.015, 0.93), bbox=blank, **words)


def signal_to_noise(
    snr: Values,
    *,
    cuts: Sequence[float] = (0.25, 0.5, 0.75, 0.95),
    num_bins: int = 120,
    ax: Axes | None = None,
) -> Axes:
    """Histogram of the weights' signal-to-noise ratios over their distribution function.

    Args:
        snr: (W,) |mu| / sigma, finite, not negative; the least thousandth may lie below the first
            bin and is counted in it, as the plot then says.
        cuts: fractions of the weights; the ratio below which each lies is marked in both.
        num_bins: of equal width in the logarithm of the ratio.
        ax: where to draw.

    Returns:
        Axes of the distribution function; above it in the figure are those labelled "histogram".
    """
    op = "signal_to_noise"
    snr = np.sort(take_finite(op, "snr", snr))
    if snr[0] < 0:
        refuse(op, "snr", "not be negative", snr[0])
    if not snr[-1] > 0:
        refuse(op, "snr", "have a positive value", snr[-1])
    cuts = take_numbers(op, "cuts", cuts).reshape(-1)
    if not ((cuts >= 0) & (cuts <= 1)).all():
        refuse(op, "cuts", "lie in [0, 1]", cuts.tolist())
    num_bins = check_integer(op, "num_bins", num_bins, 1)
    ax = take_axes(ax, 5.4, 4.6)
    upper, _ = share_axes(ax, ["histogram", "distribution"], 1, rows=True, sharex=ax)
    low, high = _draw_histogram(upper, snr, num_bins)
    ax.step(snr, np.arange(1, len(snr) + 1) / len(snr), where="post", color=BLUE)
    for cut, color in zip(cuts, cycle(COLORS[1:]), strict=False):
        value = snr[min(int(cut * len(snr)), len(snr) - 1)]
        for panel in (upper, ax):
            panel.axvline(
                value, color=color, linewidth=1.2, label=f"{100 * cut:g}% below {value:.3g}"
            )
    if high < 100 * low:
        _label_within_decades(ax.xaxis)
    upper.tick_params(labelbottom=False, which="both")
    ax.set(xlabel="signal-to-noise ratio |mean| / std", ylabel="fraction at or below")
    ax.set_ylim(0, 1.02)
    ax.figure.align_ylabels([upper, ax])
    if len(cuts):
        ax.legend(frameon=False, fontsize="small", loc="upper left")
    return ax


def _draw_histogram(ax, snr: np.ndarray, num_bins: int) -> tuple[float, float]:
    """Of sorted values, into bins of equal logarithms; their first and last edge."""
    # The least thousandth may reach down to 0, which has no logarithm.
    low, high = max(np.quantile(snr, 1e-3), snr[-1] * 1e-6), snr[-1]
    if high <= low:  # equal ones have no range of their own
        low, high = low / 2, 2 * high
    edges = np.geomspace(low, high * (1 + 1e-6), num_bins + 1)
    counts = np.histogram(np.maximum(snr, low), edges)[0]
    ax.stairs(100 * counts / len(snr), edges, fill=True, color=BLUE)
    if snr[0] < low:
        _note(ax, f"first bin: also the {np.mean(snr < low):.1%} below {low:.2g}")
        ax.set_ylim(0, 1.25 * ax.dataLim.y1)  # room for the note
    ax.set(xscale="log", xlim=(edges[0], edges[-1]), ylabel="% of weights a bin")
    return low, high


def _label_within_decades(axis):
    """Ticks at 1, 2 and 5 times a power of ten: where powers are few matplotlib's labels
    overlap."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())
