"""Figures in any style, and axes that hold something already: what is drawn shows."""

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.colors import to_hex, to_rgb, to_rgba
from matplotlib.figure import Figure

from bnuq_ext import plots
from bnuq_ext.plots import canvas

LINE = [0.0, 1.0]


def dark_axes():
    """Made in a dark style that is no longer on when they are drawn into."""
    with pyplot.style.context("dark_background"):
        return Figure().subplots()


def test_notes_stand_on_the_ground_of_their_axes():
    with pyplot.style.context("dark_background"):
        upper = plots.signal_to_noise([0.0, 1.0]).figure.axes[1]
    for ax in (plots.weight_histograms({"a": [0.1, 0.9]}, ax=dark_axes()), upper):
        assert to_hex(ax.texts[0].get_bbox_patch().get_facecolor()) == "#000000"


LEGENDS = {
    "uncertainty_error": lambda ax: plots.uncertainty_error(LINE, LINE, LINE, ax=ax),
    "regression_band": lambda ax: plots.regression_band(LINE, LINE, LINE, data=(LINE, LINE), ax=ax),
    "reliability_diagram": lambda ax: plots.reliability_diagram([[0.3, 0.7]], [1], ax=ax),
    "error_over_epochs": lambda ax: plots.error_over_epochs({"a": LINE}, ax=ax),
    "against_batch_size": lambda ax: plots.against_batch_size(
        [2, 4], {"a": LINE}, ylabel="", ax=ax
    ),
}


@pytest.mark.parametrize("name", LEGENDS)
def test_legends_stand_on_the_ground_of_their_axes(name):
    legend = LEGENDS[name](dark_axes()).get_legend()
    assert legend.get_frame().get_facecolor()[:3] == (0, 0, 0)
    assert {to_hex(text.get_color()) for text in legend.get_texts()} == {"#ffffff"}
    clear = Figure().subplots()
    clear.set_facecolor("none")
    assert LEGENDS[name](clear).get_legend().get_frame().get_facecolor() == (0, 0, 0, 0)


def test_the_running_mean_and_the_training_data_show_on_dark_ground():
    error = plots.uncertainty_error(LINE, LINE, LINE, ax=dark_axes())
    band = plots.regression_band(LINE, LINE, LINE, data=(LINE, LINE), ax=dark_axes())
    drawn = {line.get_label(): line.get_color() for ax in (error, band) for line in ax.lines}
    for label in ("their running mean over 2", "training data"):
        assert to_rgba(drawn[label]) == (1, 1, 1, 1)


TWICE = {
    "entropy_cdf": plots.entropy_cdf,
    "error_over_epochs": plots.error_over_epochs,
    "against_batch_size": lambda curves, ax: plots.against_batch_size(
        [2, 4], curves, ylabel="", ax=ax
    ),
}


@pytest.mark.parametrize("name", TWICE)
def test_curves_of_a_second_call_have_the_next_colours(name):
    together = TWICE[name]({"a": LINE, "b": LINE, "c": LINE}, ax=Figure().subplots())
    ax = TWICE[name]({"a": LINE}, ax=Figure().subplots())
    assert TWICE[name]({"b": LINE, "c": LINE}, ax=ax) is ax
    colors, expected = ([line.get_color() for line in one.lines] for one in (ax, together))
    assert colors == expected and len(set(colors)) == 3
    many = {str(k): LINE for k in range(40)}  # more than there are styles
    TWICE[name](many, ax=ax)
    assert len(ax.lines) == 43


def test_a_second_call_keeps_the_width_of_long_names():
    ax = plots.entropy_cdf({"a" * 40: LINE})
    assert plots.entropy_cdf({"b": LINE}, ax=ax).get_legend()._ncols == 1
    with pytest.warns(UserWarning, match="No artists with labels"):  # matplotlib's own
        plots.entropy_cdf({"_hidden": LINE})


@pytest.mark.parametrize("count", [3, 12, 13, 30, 150, 1000])
def test_no_two_classes_share_a_colour(count):
    many = np.eye(count)[:, None, :]
    ax = plots.segmentation_maps(np.zeros((1, count)), many, np.zeros((1, count)))
    faces = np.array([patch.get_facecolor()[:3] for patch in ax.get_legend().get_patches()])
    first = [to_rgb(color) for color in canvas.CLASS_COLORS]
    np.testing.assert_array_equal(faces[:12], first[:count])
    apart = np.linalg.norm(faces[:, None] - [*faces, (1, 1, 1)], axis=2)
    apart[range(count), range(count)] = np.inf
    assert apart.min() > (0.2 if count <= 30 else 0.05)
    ax = plots.stacked_probabilities(np.full((2, count), 1 / count), shown=range(count))
    bars = [bars[0].get_facecolor()[:3] for bars in ax.containers]
    np.testing.assert_array_equal(bars, faces)
