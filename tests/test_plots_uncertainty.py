"""Figures of regression, calibration, segmentation and statistics: their numbers and words."""

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from scipy import stats

from bnuq_ext import metrics, plots

RNG = np.random.default_rng(0)
MEAN, STD = RNG.normal(size=50), RNG.permutation(np.linspace(0.5, 2, 50))
Y = MEAN + STD * RNG.normal(size=50)


def texts(legend):
    return [text.get_text() for text in legend.get_texts()]


def top(band):
    """The upper edge of a filled area from 0, by abscissa."""
    points = band.get_paths()[0].vertices
    return {x: points[points[:, 0] == x, 1].max() for x in np.unique(points[:, 0])}


def test_uncertainty_error():
    ax = plots.uncertainty_error(MEAN, STD, Y, constant_std=1.5, window=7, ylabel="error [kg]")
    order = np.argsort(STD)
    error = np.abs(Y - MEAN)[order]
    wide, narrow = ax.collections
    for band, level in ((wide, 0.95), (narrow, 0.5)):
        edge = stats.halfnorm.ppf(level, scale=STD[order])
        np.testing.assert_allclose([top(band)[x] for x in range(1, 51)], edge, rtol=1e-5)
    assert wide.get_alpha() < narrow.get_alpha()
    dots, running, constant = ax.lines
    np.testing.assert_allclose(dots.get_data(), [np.arange(1, 51), error])
    assert (dots.get_color(), dots.get_linestyle()) == (plots.GREY, "None")
    place, value = running.get_data()
    np.testing.assert_allclose(place, np.arange(4, 48))
    np.testing.assert_allclose(value, [error[i : i + 7].mean() for i in range(44)])
    np.testing.assert_allclose(constant.get_ydata(), stats.halfnorm.ppf(0.95, scale=1.5), rtol=1e-5)
    assert constant.get_linestyle() == "--"
    assert texts(ax.get_legend()) == [
        "95 % of the errors, as estimated",
        "50 % of the errors, as estimated",
        "absolute errors",
        "their running mean over 7",
        "95 %, constant uncertainty",
    ]
    assert ax.get_xlabel() == "test points, sorted by estimated uncertainty"
    assert ax.get_ylabel() == "error [kg]" and ax.get_ylim()[0] == 0 and ax.get_xlim() == (1, 50)


def test_the_constant_may_be_a_tensor():
    constant = torch.tensor(1.5, requires_grad=True)
    ax = plots.uncertainty_error(MEAN, STD, Y, constant_std=constant)
    assert ax.lines[-1].get_ydata()[0] == pytest.approx(stats.halfnorm.ppf(0.95, scale=1.5))
    ax = plots.regression_band(Y, MEAN, STD, constant_std=constant)
    width = stats.halfnorm.ppf(0.95, scale=1.5)
    np.testing.assert_allclose(ax.lines[1].get_ydata() - ax.lines[0].get_ydata(), width, rtol=1e-5)


def test_uncertainty_error_of_few_and_of_many_points():
    few = plots.uncertainty_error([0.0], [1.0], [2.0])
    assert few.lines[0].get_ydata() == [2] and few.lines[1].get_ydata() == [2]
    many = plots.uncertainty_error(np.zeros(9000), np.ones(9000), np.ones(9000))
    assert 1 < many.lines[0].get_markersize() < few.lines[0].get_markersize() / 2
    assert many.lines[0].get_alpha() < few.lines[0].get_alpha() == 1
    assert len(many.lines) == 2 and texts(many.get_legend())[-1] == "their running mean over 900"


def test_one_wide_band_does_not_press_the_errors_into_the_foot():
    std, zeros = np.append(np.ones(999), 50.0), np.zeros(1000)
    for error, highest in ((4.0, 4.0), (1.0, stats.halfnorm.ppf(0.95))):
        ax = plots.uncertainty_error(zeros, std, np.full(1000, error))
        assert ax.get_ylim() == pytest.approx((0, 1.05 * highest), rel=1e-6)
    assert plots.uncertainty_error([0.0], [0.0], [0.0]).get_ylim() == (0, 1)
    assert plots.uncertainty_error([0, 1], [1, np.nan], [2, np.nan]).get_ylim() == (0, 2.1)
    above = plots.uncertainty_error([0.0], [1.0], [1.0], constant_std=9).get_ylim()[1]
    assert above == pytest.approx(1.05 * stats.halfnorm.ppf(0.95, scale=9))


def test_columns_of_one_output_are_drawn():
    column = torch.from_numpy(MEAN)[:, None], torch.from_numpy(STD)[:, None], Y[:, None]
    dots, flat = plots.uncertainty_error(*column), plots.uncertainty_error(MEAN, STD, Y)
    np.testing.assert_array_equal(dots.lines[0].get_ydata(), flat.lines[0].get_ydata())


def test_regression_band():
    x = RNG.permutation(50) / 10
    ax = plots.regression_band(
        x, MEAN, STD, data=([1, 2], [3, 4]), constant_std=0.5, xlabel="t [s]", ylabel="v [m/s]"
    )
    order = np.argsort(x)
    for band, level in zip(ax.collections, (0.95, 0.5), strict=True):
        low, high = stats.norm.interval(level, MEAN[order], STD[order])
        points = band.get_paths()[0].vertices
        for place, lower, upper in zip(x[order], low, high, strict=True):
            edge = points[points[:, 0] == place, 1]
            np.testing.assert_allclose([edge.min(), edge.max()], [lower, upper], rtol=1e-5)
    assert ax.collections[0].get_alpha() < ax.collections[1].get_alpha()
    line, upper, lower, dots = ax.lines
    np.testing.assert_allclose(line.get_data(), [x[order], MEAN[order]])
    for dashed, sign in ((upper, 1), (lower, -1)):
        expected = MEAN[order] + sign * stats.norm.ppf(0.975) * 0.5
        np.testing.assert_allclose(dashed.get_ydata(), expected, rtol=1e-5)
        assert dashed.get_linestyle() == "--"
    np.testing.assert_allclose(dots.get_data(), [[1, 2], [3, 4]])
    names = ["95 % band", "50 % band", "predictive mean", "95 %, constant uncertainty"]
    assert texts(ax.get_legend()) == [*names, "training data"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("t [s]", "v [m/s]")
    bare = plots.regression_band(x, MEAN, STD)
    assert len(bare.lines) == 1 and texts(bare.get_legend()) == names[:3]


def test_statistic_marginals():
    values = np.exp(RNG.normal(0.2, 0.3, size=500))
    fits = {"fitted": ("lognormal", 0.2, 0.3), "theirs": ("normal", 1.2, 0.4)}
    ax = plots.statistic_marginals(values, fits, xlabel="batch std of unit 3", num_bins=20)
    heights, edges, _ = ax.patches[0].get_data()
    np.testing.assert_allclose(heights * np.diff(edges) * 500, np.histogram(values, 20)[0])
    fitted, theirs = ax.lines
    points = fitted.get_xdata()
    assert points[0] < values.min() and points[-1] > values.max()
    assert ax.get_xlim() == (points[0], points[-1])
    expected = stats.lognorm.pdf(points, 0.3, scale=np.exp(0.2))
    np.testing.assert_allclose(fitted.get_ydata(), expected, rtol=1e-9)
    expected = stats.norm.pdf(theirs.get_xdata(), 1.2, 0.4)
    np.testing.assert_allclose(theirs.get_ydata(), expected, rtol=1e-9)
    assert fitted.get_color() != theirs.get_color()
    assert fitted.get_linestyle() != theirs.get_linestyle()
    assert texts(ax.get_legend()) == ["500 batches", "fitted", "theirs"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("batch std of unit 3", "density")


def test_statistic_marginals_that_do_not_vary_and_below_zero():
    ax = plots.statistic_marginals(np.ones(9), {"a": ("lognormal", 0.0, 1.0)})
    heights, edges, _ = ax.patches[0].get_data()
    np.testing.assert_allclose((heights * np.diff(edges)).sum(), 1)
    ax = plots.statistic_marginals([-1.0, 1.0], {"a": ("lognormal", 0.0, 1.0)})
    points, density = ax.lines[0].get_data()
    assert (density[points <= 0] == 0).all() and (density[points > 0.1] > 0).all()


@pytest.mark.parametrize("num_bins", [1, 5, 15])
def test_reliability_diagram(num_bins):
    logits = torch.from_numpy(3 * RNG.normal(size=(400, 4)))
    probs, y = logits.softmax(1), torch.from_numpy(RNG.integers(0, 4, 400))
    ax = plots.reliability_diagram(probs, y, num_bins=num_bins)
    accuracy, gap = ax.containers
    heights, edges, _ = ax.patches[-1].get_data()
    np.testing.assert_allclose(edges, np.linspace(0, 1, num_bins + 1))
    confidence = probs.max(1).values.numpy()
    np.testing.assert_allclose(heights, np.histogram(confidence, edges)[0] / 400)
    for bar, rest in zip(accuracy, gap, strict=True):
        inside = (confidence > bar.get_x()) & (confidence <= bar.get_x() + bar.get_width())
        right = (probs.argmax(1) == y).numpy()[inside].mean()
        np.testing.assert_allclose([bar.get_height(), rest.get_y()], right)
        np.testing.assert_allclose(rest.get_y() + rest.get_height(), confidence[inside].mean())
    shares = heights[heights > 0]
    ece = metrics.ece(probs, y, num_bins).item()
    np.testing.assert_allclose(shares @ np.abs([bar.get_height() for bar in gap]), ece)
    assert ax.get_title() == f"ECE {ece:.3f} in {num_bins} bins"
    np.testing.assert_allclose(ax.lines[0].get_data(), [[0, 1], [0, 1]])
    assert texts(ax.get_legend()) == [
        "accuracy",
        "gap to the mean confidence",
        "fraction of rows",
        "calibrated",
    ]
    assert ax.get_xlabel() == "confidence, the largest probability"
    assert ax.get_ylabel() == "accuracy, fraction of rows"


PROBS = np.moveaxis(np.eye(3)[[[0, 1, 1], [2, 2, 0]]], -1, 0)
IMAGE, SPREAD = np.linspace(0, 1, 18).reshape(2, 3, 3), np.array([[0.0, 0.1, 0.2], [0.3, 0.2, 0.1]])


def test_segmentation_maps():
    colors = ["red", "lime", "blue"]
    ax = plots.segmentation_maps(
        IMAGE,
        PROBS,
        SPREAD,
        truth=[[0, 1, 7], [0, 0, -2]],
        class_names=["sky", "road", "car"],
        colors=colors,
        label="entropy [nats]",
    )
    names = ["image", "truth", "prediction", "uncertainty"]
    assert [text.get_text() for text in ax.texts] == names
    assert [drawn.get_label() for drawn in ax.images] == names
    image, truth, prediction, spread = ax.images
    np.testing.assert_array_equal(image.get_array(), IMAGE)
    palette = np.array([to_rgb(color) for color in [*colors, "white"]])
    np.testing.assert_array_equal(prediction.get_array(), palette[[[0, 1, 1], [2, 2, 0]]])
    np.testing.assert_array_equal(truth.get_array(), palette[[[0, 1, 3], [0, 0, 3]]])
    np.testing.assert_array_equal(spread.get_array(), SPREAD)
    assert spread.get_clim() == (0, 0.3) and spread.colorbar.ax.get_ylabel() == "entropy [nats]"
    assert texts(ax.get_legend()) == ["sky", "road", "car", "not labelled"]
    faces = [patch.get_facecolor()[:3] for patch in ax.get_legend().get_patches()]
    np.testing.assert_array_equal(faces, palette)
    # Side by side in equal sizes, each under its name, all of them inside.
    edges = np.array([drawn.get_extent()[:2] for drawn in ax.images])
    assert all(drawn.get_extent()[2:] == [2, 0] for drawn in ax.images)  # the first row is above
    np.testing.assert_allclose(edges[:, 1] - edges[:, 0], 3)
    assert (edges[1:, 0] > edges[:-1, 1]).all()
    np.testing.assert_allclose([text.xy[0] for text in ax.texts], edges.mean(1))
    assert ax.get_xlim() == (edges[0, 0], edges[-1, 1]) and ax.get_ylim() == (2, 0)


@pytest.mark.parametrize("shape, count", [((64, 128), 19), ((64, 128), 2), ((60, 30), 21)])
def test_segmentation_maps_fit_into_their_figure(shape, count):
    probs = np.moveaxis(np.eye(count)[np.arange(np.prod(shape)) % count].reshape(*shape, -1), -1, 0)
    ax = plots.segmentation_maps(np.zeros(shape), probs, np.ones(shape), truth=np.ones(shape, int))
    canvas = FigureCanvasAgg(ax.figure)
    canvas.draw()
    used, page = ax.get_tightbbox(canvas.get_renderer()), ax.figure.bbox
    assert page.x0 <= used.x0 and used.x1 <= page.x1
    assert page.y0 <= used.y0 and used.y1 <= page.y1
    assert used.width > 0.95 * page.width


def test_labels_of_segmentation_maps_are_integers():
    with pytest.raises(TypeError) as caught:
        plots.segmentation_maps(IMAGE, PROBS, SPREAD, truth=np.ones((2, 3)))
    assert str(caught.value) == "segmentation_maps: truth must hold integer labels, got float64"


def test_segmentation_maps_without_truth_names_what_appears():
    probs = np.stack([PROBS[0], np.zeros((2, 3)), PROBS[1] + PROBS[2]])
    ax = plots.segmentation_maps(IMAGE[..., 0], torch.tensor(probs), torch.tensor(SPREAD))
    assert [drawn.get_label() for drawn in ax.images] == ["image", "prediction", "uncertainty"]
    assert texts(ax.get_legend()) == ["0", "2"]
    least = plots.segmentation_maps(IMAGE, PROBS, SPREAD + 0.5).images[-1]
    assert least.get_clim() == (0, 0.8)  # none is the end of the scale, whatever the least is
    assert ax.images[-1].colorbar.ax.get_ylabel() == "uncertainty"
    label = "variance, mean over the classes"
    ax = plots.segmentation_maps(IMAGE, PROBS, SPREAD, label=label)
    assert ax.images[-1].colorbar.ax.get_ylabel() == "variance, mean over the\nclasses"


CALLS = {
    "uncertainty_error": lambda **ax: plots.uncertainty_error(MEAN, STD, Y, **ax),
    "regression_band": lambda **ax: plots.regression_band(MEAN, MEAN, STD, **ax),
    "statistic_marginals": lambda **ax: plots.statistic_marginals(
        Y, {"a": ("normal", 0.0, 1.0)}, **ax
    ),
    "reliability_diagram": lambda **ax: plots.reliability_diagram([[0.3, 0.7]], [1], **ax),
    "entropy_cdf": lambda **ax: plots.entropy_cdf({"a": [1.0]}, **ax),
    "against_batch_size": lambda **ax: plots.against_batch_size(
        [2, 4], {"a": [1, 2]}, ylabel="", **ax
    ),
    "stacked_probabilities": lambda **ax: plots.stacked_probabilities([[1.0]], shown=[0], **ax),
    "error_over_epochs": lambda **ax: plots.error_over_epochs({"a": [1.0, 2.0]}, **ax),
    "segmentation_maps": lambda **ax: plots.segmentation_maps(IMAGE, PROBS, SPREAD, **ax),
    "information_and_nll": lambda **ax: plots.information_and_nll(
        [2, 4], {"a": [1, 2]}, {"a": [1, 2]}, **ax
    ),
    "verdict": lambda **ax: plots.verdict([[0]], [1.0], [[1.0]], **ax),
    "weight_histograms": lambda **ax: plots.weight_histograms({"a": [0.1], "b": [0.2]}, **ax),
    "signal_to_noise": lambda **ax: plots.signal_to_noise([0.1, 0.2, 0.5], **ax),
}


def test_every_figure_is_listed_here():
    functions = {name for name in vars(plots) if callable(getattr(plots, name))}
    assert functions == CALLS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_a_given_ax_is_used_and_a_new_one_made(name):
    assert isinstance(CALLS[name](), Axes)
    assert CALLS[name]().figure is not CALLS[name]().figure
    figure = Figure(layout="constrained")
    ax, other = figure.subplots(1, 2)
    assert CALLS[name](ax=ax) is ax and ax.has_data() and not other.has_data()
    figure.draw_without_rendering()
    assert max(panel.get_window_extent().x1 for panel in {*figure.axes} - {other}) < other.bbox.x0


@pytest.mark.parametrize("name", CALLS)
def test_drawing_changes_no_style_and_leaves_no_figure(name):
    before = dict(matplotlib.rcParams)
    CALLS[name]().figure.draw_without_rendering()
    assert dict(matplotlib.rcParams) == before
    assert pyplot.get_fignums() == []


REFUSED = [
    (
        lambda: plots.uncertainty_error([], [], []),
        "uncertainty_error: mean must have shape (N,) with N > 0, got [0]",
    ),
    (
        lambda: plots.uncertainty_error(MEAN, STD[:3], Y),
        "uncertainty_error: std must have 50 values like mean, got 3",
    ),
    (
        lambda: plots.uncertainty_error(MEAN, STD, Y[:3]),
        "uncertainty_error: y must have 50 values like mean, got 3",
    ),
    (
        lambda: plots.uncertainty_error([0.0], [-0.5], [0.0]),
        "uncertainty_error: std must not be negative, got -0.5",
    ),
    (
        lambda: plots.uncertainty_error(MEAN, STD, Y, window=51),
        "uncertainty_error: window must lie in [1, 50], got 51",
    ),
    (
        lambda: plots.regression_band(MEAN[:2], MEAN, STD),
        "regression_band: x must have 50 values like mean, got 2",
    ),
    (
        lambda: plots.regression_band([0.0], [0.0], [[1.0, 2.0]]),
        "regression_band: std must have shape (N,) with N > 0, got [1, 2]",
    ),
    (
        lambda: plots.statistic_marginals([], {}),
        "statistic_marginals: values must have shape (N,) with N > 0, got [0]",
    ),
    (
        lambda: plots.statistic_marginals(Y, {"a": ("gamma", 1, 1)}),
        "statistic_marginals: family must be normal or lognormal, got 'gamma'",
    ),
    (
        lambda: plots.statistic_marginals(Y, {"a": ("normal", 1, 0)}),
        "statistic_marginals: scale must be positive, got 0.0",
    ),
    (
        lambda: plots.reliability_diagram([0.3, 0.7], [0]),
        "reliability_diagram: probs must have shape (N, K, *) with N > 0, got [2]",
    ),
    (
        lambda: plots.reliability_diagram([[0.3, 0.7], [float("nan"), 0.5]], [0, 1]),
        "reliability_diagram: probs must lie in [0, 1], got nan",
    ),
    (
        lambda: plots.reliability_diagram([[[0.4], [0.5]]], [[0]]),
        "reliability_diagram: probs must have shape (N, K, *) and sum to 1 over K, got 0.9",
    ),
    (
        lambda: plots.reliability_diagram([[0.3, 0.7]], [0, 1]),
        "reliability_diagram: y must have shape [1], got [2]",
    ),
    (
        lambda: plots.reliability_diagram([[0.3, 0.7], [0.4, 0.6]], [1, 2]),
        "reliability_diagram: y must lie in [0, 2), got [1, 2]",
    ),
    (
        lambda: plots.reliability_diagram([[0.3, 0.7]], [0], num_bins=0),
        "reliability_diagram: num_bins must be at least 1, got 0",
    ),
    (
        lambda: plots.segmentation_maps(IMAGE, PROBS[0], SPREAD),
        "segmentation_maps: probs must have shape (K, H, W), each at least 1, got [2, 3]",
    ),
    (
        lambda: plots.segmentation_maps(IMAGE[:1], PROBS, SPREAD),
        "segmentation_maps: image must have shape [2, 3] or [2, 3, 3], got [1, 3, 3]",
    ),
    (
        lambda: plots.segmentation_maps(IMAGE, PROBS, SPREAD.T),
        "segmentation_maps: uncertainty must have shape [2, 3], got [3, 2]",
    ),
    (
        lambda: plots.segmentation_maps(IMAGE, PROBS, SPREAD, truth=[[0]]),
        "segmentation_maps: truth must have shape [2, 3], got [1, 1]",
    ),
    (
        lambda: plots.segmentation_maps(IMAGE, PROBS, SPREAD, class_names=["a"]),
        "segmentation_maps: class_names must have 3 entries, one a class, got 1",
    ),
    (
        lambda: plots.segmentation_maps(IMAGE, PROBS, SPREAD, colors=["red"] * 4),
        "segmentation_maps: colors must have 3 entries, one a class, got 4",
    ),
    (
        lambda: plots.reliability_diagram([[0.5, 2.5]], [0]),
        "reliability_diagram: probs must lie in [0, 1], got 2.5",
    ),
    (
        lambda: plots.statistic_marginals([1.0, np.nan], {}),
        "statistic_marginals: values must be finite, got 1 values that are not",
    ),
]


@pytest.mark.parametrize("call, message", REFUSED, ids=[r[1] for r in REFUSED])
def test_rejects(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == message
