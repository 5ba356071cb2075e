"""Plots: options of the wrong kind, and what a single point looks like."""

import numpy as np
import pytest

from bnuq_ext import plots

POINT, MAP = {"a": [1.0]}, np.zeros((2, 2))
REFUSED = {
    "styles": (lambda: plots.entropy_cdf(POINT, styles="red"), "styles must be a dict of label -> arguments, got str"),
    "classes": (lambda: plots.entropy_cdf(POINT, num_classes=0), "num_classes must be positive"),
    "marks": (lambda: plots.against_batch_size([2], POINT, ylabel="", marks=[2]), "marks must be a dict"),
    "order": (lambda: plots.against_batch_size([8, 2], {"a": [1, 2]}, ylabel=""), r"batch_sizes must ascend, got \[8.0, 2.0\]"),
    "nan": (lambda: plots.segmentation_maps(MAP, np.full((3, 2, 2), np.nan), MAP), r"probs must lie in \[0, 1\], got nan"),
    "no pixels": (lambda: plots.segmentation_maps(MAP[:0], np.ones((3, 0, 2)), MAP[:0]), r"each at least 1, got \[3, 0, 2\]"),
    "sizes": (lambda: plots.against_batch_size([0], POINT, ylabel=""), "batch_sizes must be positive"),
    "no sizes": (lambda: plots.against_batch_size(None, POINT, ylabel=""), "batch_sizes must have shape"),
    "levels": (lambda: plots.error_over_epochs(POINT, levels=[1.0]), "levels must be a dict of label"),
    "best": (lambda: plots.error_over_epochs(POINT, best={"a": 0.5}), "best must be an integer, got 0.5"),
    "colors": (lambda: plots.weight_histograms(POINT, colors="red"), "colors must be a dict of label"),
    "std": (lambda: plots.uncertainty_error(*np.ones((3, 2)), constant_std=-1), "not be negative, got -1.0"),
    "stds": (lambda: plots.regression_band(*np.ones((3, 2)), constant_std=[1, 2]), "be one number, got 2"),
    "data": (lambda: plots.regression_band(*np.ones((3, 2)), data=np.ones(5)), r"be \(x, y\) of one length"),
    "pairs": (lambda: plots.regression_band(*np.ones((3, 2)), data=([1], [1, 2])), r"length, got \[1, 2\]"),
    "no data": (lambda: plots.regression_band(*np.ones((3, 2)), data=3), r"data must hold x and y, got int"),
    "no column": (lambda: plots.stacked_probabilities([1.0], shown=[0]), r"probs must have shape \(T, K\) with T > 0, got \[1\]"),
    "no class": (lambda: plots.stacked_probabilities([[0.5, 0.5]], shown=[1, 2]), r"shown must lie in \[0, 2\), got \[1, 2\]"),
    "twice": (lambda: plots.stacked_probabilities([[0.5, 0.5]], shown=[1, 1]), r"shown must name each class once, got \[1, 1\]"),
    "a level": (lambda: plots.against_batch_size([2], POINT, ylabel="", levels={"b": 1}), r"levels must name some of the curves \['a'\], got \['b'\]"),
    "a best": (lambda: plots.error_over_epochs(POINT, best={"b": 1}), r"best must name some of the curves \['a'\], got \['b'\]"),
    "plug-in": (lambda: plots.verdict([[0]], [2.0, 3.0], [[0.5, 0.5]]), "plug_in must lie in .*got 2.0"),
    "shown": (lambda: plots.stacked_probabilities([[0.5]], shown=0), "shown must be a list of classes, got int"),
    "a class": (lambda: plots.stacked_probabilities([[0.5]], shown=["a"]), "shown must be an integer, got 'a'"),
    "cuts": (lambda: plots.signal_to_noise([1.0, 2.0], cuts=("a",)), "cuts must be numbers, got tuple"),
    "a mark": (lambda: plots.against_batch_size([2], POINT, ylabel="", marks={"a": "b"}), "marks must be a number, got 'a'"),
    "mark 0": (lambda: plots.against_batch_size([2], POINT, ylabel="", marks={0: "b"}), "marks must be positive, got 0"),
    "bins": (lambda: plots.statistic_marginals([1.0], {}, num_bins=0), "num_bins must be at least 1, got 0"),
    "density": (lambda: plots.statistic_marginals([1.0], {"a": ("normal", 0)}), r"densities must hold \(family, location, scale\), got"),
    "location": (lambda: plots.statistic_marginals([1.0], {"a": ("normal", "b", 1)}), "densities must be numbers, got str"),
    "image": (lambda: plots.verdict([0.0], [0.5, 0.5], [[0.5, 0.5]]), r"verdict: image must have shape \(H, W\) or \(H, W, 3\), got \[1\]"),
    "clean": (lambda: plots.verdict([[0.0]], [1.0], [[1.0]], clean=[0.0]), r"verdict: clean must have shape"),
    "stack": (lambda: plots.stacked_probabilities([[0.5, 9.0]], shown=[0]), "probs must lie in .*got 9.0"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_rejects(case):
    call, text = REFUSED[case]
    types = "be a dict", "be an integer", "be a number", "be numbers", "be a list", "must hold"
    error = TypeError if any(words in text for words in types) else ValueError
    with pytest.raises(error, match=text):
        call()


def markers(ax):
    return {line.get_label(): line.get_marker() for line in ax.lines}


def test_a_single_point_is_seen():
    assert markers(plots.error_over_epochs({"a": [3.0], "b": [3.0, 2.0]})) == {"a": ".", "b": ""}
    assert markers(plots.regression_band([1.0], [2.0], [0.1]))["predictive mean"] == "o"
    ax = plots.uncertainty_error([0.0, 1.0], [1.0, 1.0], [0.0, 1.0], window=2)
    assert markers(ax)["their running mean over 2"] == "o"


def test_no_uncertainty_has_a_scale_from_zero_on():
    maps = np.zeros((2, 2)), np.full((2, 2, 2), 0.5), np.zeros((2, 2))
    ax = plots.segmentation_maps(*maps)
    assert ax.images[-1].get_clim() == (0, 1)


@pytest.mark.parametrize("rows, window", [(1, 1), (4, 4), (8, 5), (49, 5), (120, 12)])
def test_the_running_mean_of_few_errors_is_not_the_errors(rows, window):
    values = np.random.default_rng(0).normal(size=(2, rows))
    ax = plots.uncertainty_error(values[0], np.ones(rows), values[1])
    running = {line.get_label(): line for line in ax.lines}[f"their running mean over {window}"]
    assert len(running.get_ydata()) == rows - window + 1
    error = np.abs(values[1] - values[0])
    np.testing.assert_allclose(running.get_ydata()[0], error[:window].mean())


def test_an_infinite_spread_leaves_the_figure():
    ax = plots.uncertainty_error([0.0, 1.0], [1.0, np.inf], [3.0, 2.0])
    assert ax.get_ylim()[1] == pytest.approx(1.05 * 3)
    plots.uncertainty_error([0.0, 1.0], [np.inf, np.inf], [3.0, 2.0])


def test_equal_signal_to_noise_ratios_lie_in_the_middle():
    ax = plots.signal_to_noise(np.full(50, 2.0))
    assert ax.get_xlim() == pytest.approx((1, 4), rel=1e-3)
