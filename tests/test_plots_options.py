"""Plots: options of the wrong kind, and what a single point looks like."""

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.colors import to_hex

from bnuq_ext import plots

POINT, MAP = {"a": [1.0]}, np.zeros((2, 2))
REFUSED = {
    "styles": (lambda: plots.entropy_cdf(POINT, styles="red"), "styles must be a dict of label -> arguments, got str"),
    "classes": (lambda: plots.entropy_cdf(POINT, num_classes=0), "num_classes must be at least 1, got 0"),
    "marks": (lambda: plots.against_batch_size([2], POINT, ylabel="", marks=[2]), "marks must be a dict"),
    "order": (lambda: plots.against_batch_size([8, 2], {"a": [1, 2]}, ylabel=""), r"batch_sizes must ascend, got \[8.0, 2.0\]"),
    "nan": (lambda: plots.segmentation_maps(MAP, np.full((3, 2, 2), np.nan), MAP), r"probs must lie in \[0, 1\], got nan"),
    "no pixels": (lambda: plots.segmentation_maps(MAP[:0], np.ones((3, 0, 2)), MAP[:0]), r"each at least 1, got \[3, 0, 2\]"),
    "channels first": (lambda: plots.segmentation_maps(np.zeros((3, 2, 2)), np.ones((4, 2, 2)), MAP), r"image must have shape \[2, 2\] or \[2, 2, 3\], got \[3, 2, 2\]"),
    "two channels": (lambda: plots.segmentation_maps(np.zeros((2, 2, 2)), np.ones((4, 2, 2)), MAP), r"\[2, 2, 3\], got \[2, 2, 2\]"),
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
    "a style": (lambda: plots.entropy_cdf({"a": [1.0]}, styles={"b": {}}), r"styles must name some of the curves \['a'\], got \['b'\]"),
    "a best": (lambda: plots.error_over_epochs(POINT, best={"b": 1}), r"best must name some of the curves \['a'\], got \['b'\]"),
    "plug-in": (lambda: plots.verdict([[0]], [2.0, 3.0], [[0.5, 0.5]]), "plug_in must lie in .*got 2.0"),
    "entropies": (
        lambda: plots.entropy_cdf({"a": [0.0, np.nan]}),
        "a must be finite, got 1 values that are not",
    ),
    "level": (
        lambda: plots.against_batch_size([2], {"a": [1.0]}, ylabel="", levels={"a": "high"}),
        "levels must be numbers, got str",
    ),
    "levels of one curve": (
        lambda: plots.against_batch_size([2], {"a": [1.0]}, ylabel="", levels={"a": [1, 2]}),
        "levels must be one number a curve, got 2 of them",
    ),
    "infinite size": (
        lambda: plots.against_batch_size([2, np.inf], {"a": [1.0, 2.0]}, ylabel=""),
        "batch_sizes must be positive and finite",
    ),
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
    ax = plots.error_over_epochs({"a": [3.0], "b": [3.0, 2.0]})
    assert markers(ax) == {"a": ".", "b": ""}
    assert [line.get_clip_on() for line in ax.lines] == [False, True]  # it lies on the frame
    (mean,) = plots.regression_band([1.0], [2.0], [0.1]).lines
    assert mean.get_xydata().tolist() == [[0.5, 2.0], [1.5, 2.0]]
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


def test_legends_are_as_wide_as_their_names_let_them():
    for letters, columns in ((8, 2), (24, 2), (40, 1)):
        entropies = {"a" * letters: [0.5], "b" * letters: [1.0]}
        assert plots.entropy_cdf(entropies).get_legend()._ncols == columns
    image, probs = np.zeros((4, 4)), np.full((12, 4, 4), 1 / 12)
    truth = np.arange(16, dtype=np.uint64).reshape(4, 4) % 12
    for letters, columns in ((4, 8), (22, 4)):
        names = [f"{k:0{letters}}" for k in range(12)]
        ax = plots.segmentation_maps(image, probs, image, truth=truth, class_names=names)
        assert ax.get_legend()._ncols == columns
        ax.figure.canvas.draw()
        box, all_of_it = ax.get_legend().get_window_extent(), ax.figure.bbox
        assert box.x0 >= 0 and box.x1 <= all_of_it.width


def test_lines_show_on_any_background():
    line = [0.0, 1.0]
    with pyplot.style.context("dark_background"):
        made = [
            plots.reliability_diagram([[0.2, 0.8], [0.7, 0.3]], [1, 0]).patches[-1].get_edgecolor(),
            plots.regression_band(line, line, line, constant_std=1.0).lines[-1].get_color(),
            plots.uncertainty_error(line, line, line, constant_std=1.0).lines[-1].get_color(),
        ]
    assert [to_hex(color) for color in made] == ["#ffffff"] * 3


def test_many_columns_keep_their_colours():
    for rows, edge in ((100, 0.4), (1000, 0.0)):
        ax = plots.stacked_probabilities(np.full((rows, 2), 0.5), shown=[0, 1])
        lines = {(bar.get_edgecolor()[:3] == (1, 1, 1)) * bar.get_linewidth() for bar in ax.patches}
        assert lines == {edge}


def test_thousands_of_points_lie_behind_the_mean():
    few, many = (
        plots.regression_band([0, 1], [0, 1], [1, 1], data=np.zeros((2, n))).lines
        for n in (100, 50_000)
    )
    assert many[1].get_markersize() < few[1].get_markersize() == 2 and many[1].get_alpha() == 0.4
    assert many[1].get_zorder() < many[0].get_zorder()


def test_a_narrow_density_reaches_its_height():
    values = np.random.default_rng(0).normal(size=300)
    ax = plots.statistic_marginals(values, {"narrow": ("normal", 0.3, 1e-4)})
    heights = ax.lines[0].get_ydata()
    np.testing.assert_allclose(heights.max(), 1 / (1e-4 * (2 * np.pi) ** 0.5), rtol=1e-9)
    assert ax.get_ylim()[1] > heights.max()
    wide = {"a": ("lognormal", 0.0, 300.0), "b": ("normal", 1e308, 5e307)}
    plots.statistic_marginals(values, wide).figure.canvas.draw()
    with np.errstate(all="raise"):
        plots.statistic_marginals(values, {"narrow": ("normal", 0.0, 0.01)})
