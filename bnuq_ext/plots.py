"""Figures of uncertainty: arrays in, matplotlib Axes (or a Figure of several) out.

Nothing here changes a style, shows a window or writes a file. With `ax=None` a new figure is made, outside
pyplot: `ax.figure.savefig(path)` writes it, and a notebook shows `ax.figure`.
"""

from itertools import cycle

import numpy as np

from .ops.checks import refuse

BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#8a8a8a"
# Stay apart for most colour-blind readers (after Okabe and Ito).
COLORS = "#0072b2 #e69f00 #009e73 #cc79a7 #56b4e9 #d55e00 #f0e442 #8a8a8a".split()


def _figure(width: float, height: float):
    """A figure that pyplot does not know, so that it needs no closing and no display."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        requirement = "be installed (pip install 'bnuq_ext[demo]')"
        refuse("plots", "matplotlib", requirement, error, ModuleNotFoundError)
    return Figure(figsize=(width, height), layout="constrained")


def _axes(ax):
    return _figure(5.4, 3.6).subplots() if ax is None else ax


def _one_dimension(op: str, name: str, values):
    values = np.asarray(values, dtype=float)
    if values.ndim != 1 or len(values) == 0:
        refuse(op, name, "have shape (N,) with N > 0", list(values.shape))
    return values


def entropy_cdf(entropies, *, num_classes=None, styles=None, ax=None):
    """The fraction of inputs whose predictive entropy is at most the abscissa, one curve per entry.

    Args:
        entropies: dict of label -> (N,) entropies in nats.
        num_classes: K; marks log K, the entropy of knowing nothing.
        styles: dict of label -> arguments of `Axes.step`.
        ax: where to draw.

    Returns:
        Axes.
    """
    ax = _axes(ax)
    for label, values in entropies.items():
        values = np.sort(_one_dimension("entropy_cdf", label, values))
        fraction = np.arange(len(values) + 1) / len(values)
        edges = np.concatenate([[0], values])
        ax.step(edges, fraction, where="post", label=label, **(styles or {}).get(label, {}))
    if num_classes is not None:
        ax.axvline(np.log(num_classes), color=GREY, linewidth=0.8)
        place = (np.log(num_classes), 0.6)
        ax.annotate(f" log {num_classes}", place, color=GREY, rotation=90, ha="right")
    ax.set(xlabel="predictive entropy [nats]", ylabel="fraction of images at or below")
    ax.set(xlim=(0, None), ylim=(0, 1.02))
    above = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": 2}
    ax.legend(frameon=False, fontsize="small", **above)
    return ax


def against_batch_size(batch_sizes, curves, *, ylabel, levels=None, marks=None, ax=None):
    """Curves of some score against the batch size M of the statistics, M on a logarithmic axis.

    Args:
        batch_sizes: (P,) values of M, ascending.
        curves: dict of label -> (P,) scores; in the order blue, orange, grey.
        ylabel: the score and its unit.
        levels: dict of label of a curve -> its height without sampling, drawn dashed.
        marks: dict of batch size -> a word put under it, with a line through the plot.
        ax: where to draw.

    Returns:
        Axes.
    """
    ax, marks = _axes(ax), marks or {}
    for (label, values), color in zip(curves.items(), (BLUE, ORANGE, GREY), strict=False):
        if len(values) != len(batch_sizes):
            requirement = f"have one value for each of {len(batch_sizes)} batch sizes"
            refuse("against_batch_size", label, requirement, len(values))
        ax.plot(batch_sizes, values, marker="o", markersize=4, color=color, label=label)
        if label in (levels or {}):
            level = {"color": color, "linestyle": "--", "linewidth": 1}
            ax.axhline(levels[label], label=f"{label}, plug-in BN", **level)
    for m in marks:
        ax.axvline(m, color=GREY, linewidth=0.6, zorder=0)
    ax.set_xscale("log", base=2)
    ticks = [f"{m}\n{marks[m]}" if m in marks else str(m) for m in batch_sizes]
    ax.set_xticks(list(batch_sizes), ticks)
    ax.minorticks_off()
    ax.set(xlabel="batch size M of the statistics", ylabel=ylabel)
    ax.legend(frameon=False)
    return ax


def information_and_nll(batch_sizes, information, nll, *, levels=None, marks=None):
    """Mutual information and negative log-likelihood against the batch size, side by side.

    Args:
        batch_sizes, levels, marks: see `against_batch_size`; `levels` are of the likelihood.
        information, nll: dict of label -> (P,) values in nats.

    Returns:
        Figure with two Axes.
    """
    figure = _figure(9.2, 3.5)
    left, right = figure.subplots(1, 2)
    label = "mutual information [nats]"
    against_batch_size(batch_sizes, information, ylabel=label, marks=marks, ax=left)
    left.set_ylim(bottom=0)
    label = "negative log-likelihood [nats]"
    against_batch_size(batch_sizes, nll, ylabel=label, levels=levels, marks=marks, ax=right)
    return figure


def stacked_probabilities(probs, *, shown, ax=None):
    """One column per prediction, its class probabilities stacked; classes not `shown` stay white.

    Args:
        probs: (T, K) probabilities.
        shown: the classes to draw, from the bottom up, in the order of `COLORS`.
        ax: where to draw.

    Returns:
        Axes.
    """
    ax = _axes(ax)
    probs = np.asarray(probs, dtype=float)
    if probs.ndim != 2:
        refuse("stacked_probabilities", "probs", "have shape (T, K)", list(probs.shape))
    bottom = np.zeros(len(probs))
    for k, color in zip(shown, cycle(COLORS), strict=False):
        columns = np.arange(1, len(probs) + 1)
        ax.bar(
            columns, probs[:, k], 1.0, bottom, color=color, edgecolor="white", lw=0.4, label=str(k)
        )
        bottom = bottom + probs[:, k]
    ax.set(xlim=(0.5, len(probs) + 0.5), ylim=(0, 1))
    return ax


def verdict(image, plug_in, replicas, *, clean=None, truth=None, visible=0.02):
    """A noisy image, what one network says about it, and what its replicas say.

    Args:
        image: (H, W) pixels.
        plug_in: (K,) probabilities of ordinary batch norm.
        replicas: (T, K) probabilities of the replicas; drawn in the order of their verdicts.
        clean: (H, W) the image without noise, shown above it.
        truth: the true class.
        visible: a class is drawn if its mean probability somewhere reaches this.

    Returns:
        Figure with Axes labelled "clean" (where given), "image", "plug-in" and "replicas".
    """
    plug_in, replicas = np.asarray(plug_in, dtype=float), np.asarray(replicas, dtype=float)
    mean = replicas.mean(0)
    by_mean = np.argsort(-mean)
    shown = [int(k) for k in by_mean if max(mean[k], plug_in[k]) >= visible]
    rank = np.argsort(by_mean)[replicas.argmax(1)]
    order = np.lexsort((-replicas.max(1), rank))
    figure = _figure(8.6, 2.9)
    rows = [["clean", "plug-in", "replicas"]] * (clean is not None) + [
        ["image", "plug-in", "replicas"]
    ]
    places = figure.subplot_mosaic(rows, width_ratios=(0.5 if len(rows) == 2 else 1, 0.55, 2.6))
    middle, right = places["plug-in"], places["replicas"]
    what = "the input" if truth is None else f"a noisy {truth}"
    for name, pixels, title in (("clean", clean, f"a {truth}"), ("image", image, what)):
        if name in places:
            places[name].imshow(pixels, cmap="gray_r", interpolation="nearest")
            places[name].set(xticks=[], yticks=[])
            places[name].set_title(title, fontsize="medium")
    stacked_probabilities(plug_in[None], shown=shown, ax=middle)
    middle.set(xticks=[], ylabel="probability")
    middle.set_title("plug-in BN", fontsize="medium")
    middle.set_xlabel(f"“{plug_in.argmax()}”, {plug_in.max():.0%}")
    stacked_probabilities(replicas[order], shown=shown, ax=right)
    right.set(yticks=[], xticks=[1, len(replicas)])
    right.set_title(f"{len(replicas)} replicas, one column each", fontsize="medium")
    right.set_xlabel(f"together: “{mean.argmax()}”, {mean.max():.0%}")
    handles, labels = right.get_legend_handles_labels()
    figure.legend(
        handles, labels, title="digit", loc="outside right center", frameon=False, reverse=True
    )
    return figure


def error_over_epochs(errors, *, levels=None, best=None, ylabel="test error [%]", ax=None):
    """Curves of an error against the epoch, counted from 1.

    Args:
        errors: dict of label -> (E,) errors in percent, one per epoch.
        levels: dict of label -> an error to compare with, drawn dashed.
        best: dict of label of a curve -> the epoch that is marked on it.
        ylabel: what the error is, and its unit.
        ax: where to draw.

    Returns:
        Axes.
    """
    ax = _axes(ax)
    from matplotlib.ticker import MaxNLocator

    for (label, values), color in zip(errors.items(), cycle(COLORS), strict=False):
        values = _one_dimension("error_over_epochs", label, values)
        ax.plot(np.arange(1, len(values) + 1), values, color=color, label=label, linewidth=1.4)
        if label in (best or {}):
            epoch = best[label]
            ax.plot(epoch, values[epoch - 1], marker="o", color=color)
    for label, level in (levels or {}).items():
        ax.axhline(level, color=GREY, linestyle="--", linewidth=1)
        words = {"xycoords": ("axes fraction", "data"), "fontsize": "small", "color": GREY}
        ax.annotate(label, (0.99, level), ha="right", va="bottom", **words)
    ax.set(xlabel="epoch", ylabel=ylabel, xlim=(1, None), ylim=(0, None))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(frameon=False)
    return ax


def weight_histograms(weights, *, limit=0.3, num_bins=120, initial=None):
    """One histogram of weights per entry, one under the other, over the same bins.

    Args:
        weights: dict of label -> (W,) weights.
        limit: the bins span [-limit, limit]; the fraction outside is written into the plot, from 0.05 % on.
        num_bins: their number.
        initial: (W,) weights before training, drawn as a grey line in each.

    Returns:
        Figure with an Axes per entry.
    """
    edges = np.linspace(-limit, limit, num_bins + 1)
    figure = _figure(5.4, 0.6 + 1.5 * len(weights))
    axes = figure.subplots(len(weights), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (label, values), color in zip(axes, weights.items(), cycle(COLORS), strict=False):
        values = _one_dimension("weight_histograms", label, values)
        density = np.histogram(values, edges)[0] / len(values)
        ax.stairs(100 * density, edges, fill=True, color=color, label=label)
        if initial is not None:
            before = np.histogram(initial, edges)[0] / len(initial)
            ax.stairs(100 * before, edges, color=GREY, label="before training")
        outside = np.mean(np.abs(values) > limit)
        if outside >= 5e-4:
            words = {"xycoords": "axes fraction", "va": "top", "fontsize": "small", "color": GREY}
            ax.annotate(f"{outside:.1%} outside", (0.015, 0.93), **words)
        top = 1.4 * ax.dataLim.y1  # room for the legend
        ax.set(xlim=(-limit, limit), ylim=(0, top), ylabel="% a bin")
        ax.legend(frameon=False, fontsize="small", loc="upper right", ncols=2)
    axes[-1].set_xlabel("mean of a weight")
    return figure


def signal_to_noise(snr, *, cuts=(0.25, 0.5, 0.75, 0.95), num_bins=120):
    """Histogram of the weights' signal-to-noise ratios over their distribution function, with cut-offs.

    Args:
        snr: (W,) |mu| / sigma; those that are 0 fall into the first bin.
        cuts: fractions of the weights; the ratio below which each lies is marked in both.
        num_bins: of equal width in the logarithm of the ratio.

    Returns:
        Figure with two Axes.
    """
    snr = np.sort(_one_dimension("signal_to_noise", "snr", snr))
    # The least thousandth may reach down to 0, which has no logarithm.
    low, high = max(np.quantile(snr, 1e-3), snr[-1] * 1e-6), snr[-1]
    edges = np.geomspace(low, high * (1 + 1e-6), num_bins + 1)
    figure = _figure(5.4, 4.6)
    upper, lower = figure.subplots(2, 1, sharex=True)
    counts = np.histogram(np.maximum(snr, low), edges)[0]
    upper.stairs(100 * counts / len(snr), edges, fill=True, color=BLUE)
    lower.step(snr, np.arange(1, len(snr) + 1) / len(snr), where="post", color=BLUE)
    for cut, color in zip(cuts, cycle(COLORS[1:]), strict=False):
        value = snr[min(int(cut * len(snr)), len(snr) - 1)]
        for ax in (upper, lower):
            ax.axvline(value, color=color, linewidth=1.2, label=f"{cut:.0%} below {value:.3g}")
    upper.set(xscale="log", xlim=(edges[0], edges[-1]), ylabel="% of weights a bin")
    lower.set(xlabel="signal-to-noise ratio |mean| / std", ylabel="fraction at or below")
    lower.set_ylim(0, 1.02)
    lower.legend(frameon=False, fontsize="small", loc="upper left")
    return figure
