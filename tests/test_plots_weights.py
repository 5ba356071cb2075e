"""Figures of weights with a posterior, and of errors in training."""

import io
import itertools

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from test_plots import texts

from bnuq_ext import plots
from bnuq_ext.plots.canvas import new_figure


def test_error_over_epochs():
    ax = plots.error_over_epochs(
        {"a": [9.0, 4.0, 5.0], "b": [3.0]}, levels={"theirs": 1.7}, best={"a": 2}
    )
    a, best, b, level = ax.lines
    np.testing.assert_allclose(a.get_data(), [[1, 2, 3], [9, 4, 5]])
    np.testing.assert_allclose(best.get_data(), [[2], [4]])
    np.testing.assert_allclose(b.get_data(), [[1], [3]])
    np.testing.assert_allclose(level.get_ydata(), 1.7)
    assert best.get_color() == a.get_color() != b.get_color()
    assert texts(ax.get_legend()) == ["a", "b", "theirs"]
    assert best.get_zorder() > max(line.get_zorder() for line in (a, b, level))
    assert ax.get_ylabel() == "test error [%]" and ax.get_ylim()[0] == 0
    ax.figure.savefig(io.BytesIO())
    for epochs, shown in ((1, {1}), (3, {1, 2, 3}), (100, {20, 100}), (600, {100, 300, 600})):
        ticks = plots.error_over_epochs({"a": np.ones(epochs)}).get_xticks()
        assert shown <= {*ticks} and (ticks % 1 == 0).all()
    ax = plots.error_over_epochs({"a": [2.0], "b": [1.0]}, best={"b": 1}, colors={"b": "red"})
    assert [line.get_color() for line in ax.lines] == [plots.BLUE, "red", "red"]


def test_axes_that_are_shared_hold_all_curves():
    figure = new_figure(6, 3)
    lower, higher = figure.subplots(1, 2, sharex=True, sharey=True)
    plots.error_over_epochs({"a": [9.0] * 50}, ax=higher)
    plots.error_over_epochs({"a": [2.0, 1.0]}, ax=lower)
    assert higher.get_ylim() == lower.get_ylim() == (0, pytest.approx(9.45))
    assert higher.get_xlim() == lower.get_xlim() == (1, pytest.approx(1 + 1.05 * 49))


def test_weight_histograms():
    weights = {"one": [-0.25, 0.1, 0.15, 0.9], "two": [0.1, 0.1, 0.8, -0.9]}
    lower = plots.weight_histograms(weights, num_bins=3, initial=[0.0, -0.2])
    upper = lower.figure.axes[1]
    assert lower.figure.axes == [lower, upper] and upper.get_label() == "one"
    assert lower.get_xlim() == upper.get_xlim() == (-0.3, 0.3)
    values, edges, _ = upper.patches[0].get_data()
    np.testing.assert_allclose(values, [25, 0, 50])
    np.testing.assert_allclose(edges, [-0.3, -0.1, 0.1, 0.3])
    np.testing.assert_allclose(upper.patches[1].get_data().values, [50, 50, 0])
    np.testing.assert_allclose(lower.patches[0].get_data().values, [0, 0, 50])
    words = [[t.get_text() for t in ax.texts] for ax in (upper, lower)]
    assert words == [["25.0% outside"], ["50.0% outside"]]
    inside = plots.weight_histograms({"a": [-0.3, 0.3, 0.0]})
    assert list(inside.texts) == []
    assert texts(lower.get_legend()) == ["two", "before training"]
    assert lower.get_xlabel() == "mean of a weight"
    lower = plots.weight_histograms(weights, colors={"two": "red"})
    faces = [to_rgb(ax.patches[0].get_facecolor()) for ax in (lower.figure.axes[1], lower)]
    assert faces == [to_rgb(plots.BLUE), to_rgb("red")]


def test_signal_to_noise():
    snr = np.geomspace(0.1, 10, 1001)
    lower = plots.signal_to_noise(snr, cuts=(0.5, 0.75), num_bins=10)
    upper = lower.figure.axes[1]
    assert lower.figure.axes == [lower, upper] and upper.get_label() == "histogram"
    values, edges, _ = upper.patches[0].get_data()
    np.testing.assert_allclose(values, 10, atol=0.2)
    np.testing.assert_allclose(values.sum(), 100)
    np.testing.assert_allclose(edges[[0, -1]], [0.1, 10], rtol=1e-2)
    x, y = lower.lines[0].get_data()
    np.testing.assert_allclose(x, snr)
    np.testing.assert_allclose(y, np.arange(1, 1002) / 1001)
    assert lower.lines[0].get_drawstyle() == "steps-post" and upper.get_xscale() == "log"
    for lines in (upper.lines, lower.lines[1:]):
        np.testing.assert_allclose([line.get_xdata()[0] for line in lines], [1, 10**0.5], rtol=1e-6)
    assert texts(lower.get_legend()) == ["50% below 1", "75% below 3.16"]
    assert plots.signal_to_noise(snr, cuts=()).get_legend() is None
    assert texts(plots.signal_to_noise(snr, cuts=[0.125]).get_legend()) == ["12.5% below 0.178"]
    with pytest.raises(ValueError, match="signal_to_noise: snr must not be negative, got -0.5"):
        plots.signal_to_noise([2.0, -0.5])
    # Ratios of 0 have no logarithm; they stay in the count.
    zeros = plots.signal_to_noise(np.array([0.0] * 5 + [1.0] * 5)).figure.axes[1].patches[0]
    np.testing.assert_allclose(zeros.get_data().values[[0, -1]], 50)


def test_signal_to_noise_says_what_lies_below_the_first_bin():
    snr = np.concatenate([[0.0] * 4, np.linspace(2, 9, 4996)])
    for values, words in (
        (snr, ["first bin: also the 0.1% below 2"]),
        ([0.0, 1.0], ["first bin: also the 50.0% below 0.001"]),
        (np.ones(9), []),
    ):
        upper = plots.signal_to_noise(values).figure.axes[1]
        assert [text.get_text() for text in upper.texts] == words


@pytest.mark.parametrize("low, high", [(2, 70), (1.1e4, 9e5), (1, 1.0001), (1e-6, 300)])
def test_labels_of_signal_to_noise_do_not_overlap(low, high):
    ax = plots.signal_to_noise(np.geomspace(low, high, 500))
    ax.figure.canvas.draw()
    boxes = [t.get_window_extent() for t in ax.get_xticklabels(which="both") if t.get_text()]
    shown = [b for b in boxes if ax.bbox.x0 <= (b.x0 + b.x1) / 2 <= ax.bbox.x1]
    shown.sort(key=lambda b: b.x0)
    assert len(shown) >= 3
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(shown))
