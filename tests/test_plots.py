"""The figures hold the numbers that they were given, with labels, units and legends."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from bnuq_ext import Prediction, plots
from bnuq_ext.plots import canvas


def texts(legend):
    return [text.get_text() for text in legend.get_texts()]


def test_entropy_cdf():
    styles = {"out": {"color": "red", "linestyle": "--"}}
    ax = plots.entropy_cdf({"in": [0.3, 0.1], "out": [0.5] * 4}, num_classes=5, styles=styles)
    x, y = ax.lines[0].get_data()
    np.testing.assert_allclose(x, [0, 0.1, 0.3])
    np.testing.assert_allclose(y, [0, 0.5, 1])
    # Behind each value its own fraction, which counts it.
    assert [line.get_drawstyle() for line in ax.lines[:2]] == ["steps-post"] * 2
    assert (ax.lines[1].get_color(), ax.lines[1].get_linestyle()) == ("red", "--")
    assert (ax.lines[0].get_linestyle(), ax.lines[0].get_color()) == ("-", plots.BLUE)
    assert texts(ax.get_legend()) == ["in", "out"]
    assert ax.get_xlabel() == "predictive entropy [nats]"
    np.testing.assert_allclose(ax.lines[2].get_xdata(), np.log(5))


def test_all_entropies_lie_below_the_end():
    styles = {"out": {"color": "red", "ls": "--", "lw": 3}}
    ax = plots.entropy_cdf({"in": [0.0, 0.0], "out": [0.2, 0.7]}, num_classes=4, styles=styles)
    ends = [line.get_segments()[0].tolist() for line in ax.collections]
    assert ends == [[[0, 1], [np.log(4), 1]], [[0.7, 1], [np.log(4), 1]]]
    assert [to_hex(line.get_color()[0]) for line in ax.collections] == [
        plots.BLUE.lower(),
        "#ff0000",
    ]
    assert ax.collections[1].get_linewidth() == 3
    assert texts(ax.get_legend()) == ["in", "out"]


def test_against_batch_size():
    curves = {"clean": [1.0, 0.5, 0.0], "noisy": [3.0, 2.0, 1.0]}
    ax = plots.against_batch_size(
        [4, 16, 300], curves, ylabel="NLL [nats]", levels={"noisy": 2.5}, marks={300: "= N"}
    )
    clean, noisy, level, mark = ax.lines
    np.testing.assert_allclose(clean.get_data(), [[4, 16, 300], [1.0, 0.5, 0.0]])
    np.testing.assert_allclose(noisy.get_ydata(), curves["noisy"])
    np.testing.assert_allclose(level.get_ydata(), 2.5)
    assert level.get_color() == noisy.get_color() and level.get_linestyle() == "--"
    np.testing.assert_allclose(mark.get_xdata(), 300)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["4", "16", "300\n= N"]
    assert texts(ax.get_legend()) == ["clean", "noisy", "noisy, plug-in BN"]
    assert ax.get_ylabel() == "NLL [nats]" and ax.get_xscale() == "log"


def test_a_mark_between_the_sizes_has_its_word():
    ax = plots.against_batch_size([4, 300], {"a": [1.0, 0.0]}, ylabel="NLL", marks={16: "training"})
    assert [label.get_text() for label in ax.get_xticklabels()] == ["4", "16\ntraining", "300"]


def test_words_of_neighbouring_marks_have_lines_of_their_own():
    sizes = [2**k for k in range(1, 11)]
    marks = {32: "training", 64: "best by NLL", 128: "best by ELBO", 1024: "= N"}
    ax = plots.against_batch_size(sizes, {"a": np.ones(10)}, ylabel="NLL", marks=marks)
    words = {label.get_text() for label in ax.get_xticklabels()}
    assert {"32\ntraining", "64\n\nbest by NLL", "128\n\n\nbest by ELBO", "1024\n= N"} <= words


def test_a_marked_size_without_room_is_named_beside_its_word():
    marks = {15: "training", 16: "chosen", 17: "best"}
    sizes = [[2**k] for k in range(1, 11)]
    ax = plots.against_batch_size(sizes, {"a": np.ones(10)}, ylabel="NLL", marks=marks)
    words = {label.get_text() for label in ax.get_xticklabels()}
    assert {"\n15 training", "\n\n16 chosen", "17\n\n\nbest"} <= words


def test_no_two_of_many_curves_look_alike():
    many = {str(k): [1.0, 2.0] for k in range(20)}
    for ax in (
        plots.against_batch_size([4, 16], many, ylabel=""),
        plots.entropy_cdf(many),
        plots.error_over_epochs(many),
    ):
        assert len({(line.get_color(), line.get_linestyle()) for line in ax.lines}) == 20
    ax = plots.error_over_epochs({"a": [1.0]}, levels={"b": 1.0, "c": 2.0})
    assert [line.get_linestyle() for line in ax.lines[1:]] == ["--", ":"]


def test_labels_of_batch_sizes_do_not_touch():
    sizes = [2**k for k in range(1, 14)] + [10000]
    curve = {"a": np.ones(len(sizes))}
    left = plots.information_and_nll(sizes, curve, curve, marks={64: "training", 10000: "= N"})
    left.figure.canvas.draw()
    for ax in left.figure.axes:
        assert ax.get_xticks().tolist() == sizes
        labels = [t for t in ax.get_xticklabels() if t.get_text()]
        words = [t.get_text() for t in labels]
        assert {"2", "64\ntraining", "10000\n= N"} <= {*words} and len(words) >= 7
        for label, word in zip(labels, words, strict=True):
            label.set_text(word.split("\n")[0])
        boxes = [label.get_window_extent() for label in labels]
        assert all(a.x1 + 3 < b.x0 for a, b in itertools.pairwise(boxes))


def test_against_batch_size_draws_every_curve():
    ax = plots.against_batch_size([4, 16], {str(k): [k, k] for k in range(7)}, ylabel="")
    assert texts(ax.get_legend()) == list("0123456")
    assert len({line.get_color() for line in ax.lines}) == 7


def test_information_and_nll():
    curves = {"a": [1, 0.5]}, {"a": [2, 3]}
    left = plots.information_and_nll([4, 8], *curves, levels={"a": 2.5}, marks={8: "= N"})
    right = left.figure.axes[1]
    assert right.get_label() == "nll" and left.figure.axes == [left, right]
    np.testing.assert_allclose(left.lines[0].get_ydata(), [1, 0.5])
    np.testing.assert_allclose(right.lines[0].get_ydata(), [2, 3])
    np.testing.assert_allclose(right.lines[1].get_ydata(), 2.5)
    assert len(left.lines) == 2 and len(right.lines) == 3 and left.get_ylim()[0] == 0
    for ax in (left, right):
        np.testing.assert_allclose(ax.lines[-1].get_xdata(), 8)
        assert [label.get_text() for label in ax.get_xticklabels()] == ["4", "8\n= N"]
    assert left.get_ylabel() == "mutual information [nats]"
    assert right.get_ylabel() == "negative log-likelihood [nats]"


def test_stacked_probabilities():
    probs = np.array([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]])
    ax = plots.stacked_probabilities(probs, shown=[2, 0])
    lower, upper, others = ax.containers
    np.testing.assert_allclose([bar.get_height() for bar in others], [0.5, 0.3])
    np.testing.assert_allclose([bar.get_y() for bar in others], [0.5, 0.7])
    np.testing.assert_allclose([bar.get_height() for bar in lower], [0.3, 0.1])
    np.testing.assert_allclose([bar.get_height() for bar in upper], [0.2, 0.6])
    np.testing.assert_allclose([bar.get_y() for bar in upper], [0.3, 0.1])
    assert texts(ax.get_legend()) == ["others", "0", "2"]
    assert ax.get_legend().get_title().get_text() == "class"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("prediction", "probability")
    assert ax.get_xticks().tolist() == [1, 2]
    np.testing.assert_allclose([bar.get_center()[0] for bar in upper], [1, 2])
    assert lower[0].get_facecolor() != upper[0].get_facecolor()


def test_ten_classes_have_ten_colours():
    ax = plots.stacked_probabilities(np.full((2, 10), 0.1), shown=range(10))
    assert len({bars[0].get_facecolor() for bars in ax.containers}) == 10


def test_many_classes_leave_the_bars_their_height():
    for K in (12, 25):
        ax = plots.stacked_probabilities(np.full((2, K), 1 / K), shown=range(K))
        ax.figure.canvas.draw()
        legend, figure = ax.get_legend().get_window_extent(), ax.figure.bbox
        assert legend.height < figure.height and ax.get_position().height > 0.5


def test_verdict():
    replicas = np.array([[0.1, 0.9, 0.0], [0.8, 0.19, 0.01], [0.4, 0.59, 0.01]])
    right = plots.verdict(np.eye(8), [0.01, 0.98, 0.01], replicas, clean=np.ones((8, 8)), truth=0)
    axes = {ax.get_label(): ax for ax in right.figure.axes}
    plug_in = axes["plug-in"]
    assert axes["clean"].get_title() == "a 0" and axes["image"].get_title() == "a noisy 0"
    np.testing.assert_array_equal(axes["image"].images[0].get_array(), np.eye(8))
    np.testing.assert_array_equal(axes["clean"].images[0].get_array(), np.ones((8, 8)))
    assert {axes[name].images[0].get_cmap().name for name in ("clean", "image")} == {"gray_r"}
    heights = [[bar.get_height() for bar in bars] for bars in plug_in.containers]
    np.testing.assert_allclose(heights, [[0.98], [0.01], [0.01]])
    assert plug_in.get_xlabel() == "“1”, 98%" and plug_in.get_ylabel() == "probability"
    assert right.get_xlabel() == "replicas, sorted by verdict; together: “1”, 56%"
    unknown = plots.verdict(np.eye(8), [0.01, 0.98, 0.01], replicas, clean=np.ones((8, 8)))
    titles = {ax.get_label(): ax.get_title() for ax in unknown.figure.axes}
    assert (titles["clean"], titles["image"]) == ("without noise", "the input")
    # The surest of the most frequent verdict first; class 2 is too rare for a colour.
    assert texts(right.get_legend()) == ["others", "0", "1"] and plug_in.get_legend() is None
    np.testing.assert_allclose([bar.get_height() for bar in right.containers[0]], [0.9, 0.59, 0.19])


def test_verdict_groups_the_replicas_and_draws_what_either_side_says():
    replicas = np.array([[0, 0, 0.6, 0.4], [0, 0, 1, 0], [0, 0, 0.1, 0.9]])
    replicas = np.vstack([replicas, [0.004, 0.006, 0.69, 0.3]])
    right = plots.verdict(np.eye(8), [0.95, 0.01, 0.02, 0.02], replicas)
    # Class 0 is the plug-in's alone; that of class 3, though sure, stands behind all of class 2.
    assert texts(right.get_legend()) == ["others", "0", "3", "2"]
    heights = [[bar.get_height() for bar in bars] for bars in right.containers]
    expected = [[1, 0.69, 0.6, 0.1], [0, 0.3, 0.4, 0.9], [0, 0.004, 0, 0], [0, 0.006, 0, 0]]
    np.testing.assert_allclose(heights, expected)
    axes = {ax.get_label(): ax for ax in right.figure.axes}
    right.figure.draw_without_rendering()
    widths = [ax.get_window_extent().width for ax in (axes["plug-in"], axes["image"], right)]
    assert 2 * widths[0] < widths[1] < widths[2]


def test_panels_stand_in_the_place_of_their_axes():
    figure = Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1)
    upper.set(xlabel="x", ylabel="y")
    plots.weight_histograms({"a": [0.1], "b": [0.2], "c": [0.2]}, ax=lower)
    figure.draw_without_rendering()
    panels = [*figure.axes[2:], lower]
    assert [ax.get_label() for ax in panels[:2]] == ["a", "b"]
    boxes = [ax.get_window_extent() for ax in panels]
    for above, box in zip([upper.get_tightbbox(), *boxes], boxes, strict=False):
        assert above.y0 > box.y1
    assert lower.get_tightbbox().y0 > 0
    np.testing.assert_allclose([box.height for box in boxes], boxes[0].height)
    np.testing.assert_allclose(
        [(box.x0, box.x1) for box in boxes], [(boxes[0].x0, boxes[0].x1)] * 3
    )


def test_panels_of_axes_that_stand_in_no_grid():
    figure = Figure()
    ax = figure.add_axes((0.1, 0.2, 0.5, 0.6))
    plots.signal_to_noise([0.1, 0.2, 0.5], ax=ax)
    upper = figure.axes[1].get_position()
    np.testing.assert_allclose((ax.get_position().p0, upper.p1), [(0.1, 0.2), (0.6, 0.8)])
    np.testing.assert_allclose((upper.x0, upper.x1), (0.1, 0.6))
    assert upper.y0 > ax.get_position().y1


def test_tensors_of_any_kind_are_drawn():
    values = torch.tensor([0.25, 0.5], requires_grad=True)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        ax = plots.entropy_cdf({"a": values.to(dtype)})
        np.testing.assert_array_equal(ax.lines[0].get_xdata(), [0, 0.25, 0.5])
    ax = plots.against_batch_size(torch.tensor([2, 4]), {"a": values}, ylabel="")
    np.testing.assert_array_equal(ax.lines[0].get_data(), [[2, 4], [0.25, 0.5]])
    assert [label.get_text() for label in ax.get_xticklabels()] == ["2", "4"]
    probs = torch.stack([values, 1 - values], 1)
    bars = plots.stacked_probabilities(probs, shown=[1]).containers[0]
    np.testing.assert_array_equal([bar.get_height() for bar in bars], [0.75, 0.5])
    assert (
        plots.reliability_diagram(probs, torch.tensor([1, 0])).get_title() == "ECE 0.375 in 15 bins"
    )
    ax = plots.regression_band([0, 1], [0, 0], [1, 1], data=(values, values))
    np.testing.assert_array_equal(ax.lines[-1].get_data(), [[0.25, 0.5]] * 2)
    ax = plots.verdict(probs, values, probs)
    np.testing.assert_array_equal(ax.figure.axes[1].images[0].get_array(), probs.detach())


def test_pixels_count_as_rows_in_a_reliability_diagram():
    rng = np.random.default_rng(0)
    rows, y = rng.dirichlet(np.ones(3), 40), rng.integers(0, 3, 40)
    pixels = np.moveaxis(rows.reshape(2, 4, 5, 3), -1, 1)
    one, other = (
        plots.reliability_diagram(probs, labels, num_bins=5)
        for probs, labels in ((rows, y), (pixels, y.reshape(2, 4, 5)))
    )
    assert other.get_title() == one.get_title() and "ECE 0.000" not in one.get_title()
    for bar, expected in zip(other.patches[:-1], one.patches[:-1], strict=True):
        assert bar.get_bbox().bounds == expected.get_bbox().bounds
    with pytest.raises(ValueError, match=r"y must have shape \[2, 4, 5\], got \[40\]$"):
        plots.reliability_diagram(pixels, y)


REFUSED = [
    (plots.entropy_cdf, [{"none": []}], {}, "none must have shape (N,) with N > 0, got [0]"),
    (plots.against_batch_size, [[2, 4], {"a": [1.0]}], {"ylabel": ""}, "a must have one value for each of 2 batch sizes, got 1"),
    (plots.error_over_epochs, [{"a": []}], {}, "a must have shape (N,) with N > 0, got [0]"),
    (plots.error_over_epochs, [{"a": [2, 1]}], {"best": {"a": 3}}, "best must lie in [1, 2], got 3"),
    (plots.weight_histograms, [{"a": [[1, 2]]}], {}, "a must have shape (N,) with N > 0, got [1, 2]"),
    (plots.weight_histograms, [{"a": [0, np.nan]}], {}, "a must be finite, got 1 values that are not"),
    (plots.weight_histograms, [{}], {}, "weights must have an entry, got 0"),
    (plots.weight_histograms, [{"a": [1]}], {"initial": []}, "initial must have shape (N,) with N > 0, got [0]"),
    (plots.weight_histograms, [{"a": [0.1]}], {"num_bins": 0}, "num_bins must be at least 1, got 0"),
    (plots.weight_histograms, [{"a": [0.1]}], {"limit": -1}, "limit must be positive, got -1"),
    (plots.signal_to_noise, [[]], {}, "snr must have shape (N,) with N > 0, got [0]"),
    (plots.signal_to_noise, [[1, np.inf]], {}, "snr must be finite, got 1 values that are not"),
    (plots.signal_to_noise, [[0, 0]], {}, "snr must have a positive value, got 0.0"),
    (plots.signal_to_noise, [[1, 2]], {"cuts": (0.5, 75)}, "cuts must lie in [0, 1], got [0.5, 75.0]"),
    (plots.signal_to_noise, [[1, 2]], {"num_bins": 0}, "num_bins must be at least 1, got 0"),
    (plots.verdict, [[[0]], [0.5, 0.5], [0.5, 0.5]], {}, "replicas must have shape (T, 2) with T > 0, got [2]"),
    (plots.verdict, [[[0]], [[0.5, 0.5]], [[0.5, 0.5]]], {}, "plug_in must have shape (K,), got [1, 2]"),
]  # fmt: skip


@pytest.mark.parametrize("draw, arguments, options, text", REFUSED, ids=[r[3] for r in REFUSED])
def test_rejects(draw, arguments, options, text):
    with pytest.raises(ValueError) as caught:
        draw(*arguments, **options)
    assert str(caught.value) == f"{draw.__name__}: {text}"


def test_rejects_other_types():
    for call, name in (
        (plots.entropy_cdf, "entropies"),
        (plots.error_over_epochs, "errors"),
        (plots.weight_histograms, "weights"),
    ):
        with pytest.raises(TypeError) as caught:
            call([1.0])
        assert str(caught.value) == (
            f"{call.__name__}: {name} must be a dict of label -> values, got list"
        )
    with pytest.raises(TypeError, match="^statistic_marginals: densities must be a dict of label"):
        plots.statistic_marginals([1.0, 2.0], [1.0])
    with pytest.raises(TypeError, match="^reliability_diagram: y must hold integer labels, got"):
        plots.reliability_diagram([[0.3, 0.7]], [0.5])
    with pytest.raises(TypeError, match="^against_batch_size: curves must be a dict of label"):
        plots.against_batch_size([2], [1.0], ylabel="")
    some = Prediction.from_samples(torch.zeros(2, 3, 4), "categorical")
    for call, name in (
        (lambda values: plots.entropy_cdf({"a": values}), "entropy_cdf: a"),
        (lambda values: plots.reliability_diagram(values, [0]), "reliability_diagram: probs"),
        (lambda values: plots.verdict([[0]], values, [[1.0]]), "verdict: plug_in"),
        (lambda values: plots.verdict([[0]], [1.0], values), "verdict: replicas"),
        (lambda p: plots.stacked_probabilities(p, shown=[0]), "stacked_probabilities: probs"),
    ):
        for values, got in ((some, "Prediction"), ("high", "str"), ([1.0, [2.0]], "list")):
            with pytest.raises(TypeError) as caught:
                call(values)
            assert str(caught.value) == f"{name} must be numbers, got {got}"
    with pytest.raises(TypeError) as caught:
        plots.entropy_cdf({"a": [1.0]}, ax=np.array([1]))
    assert str(caught.value) == "plots: ax must be one matplotlib Axes, got ndarray"


def test_missing_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        plots.entropy_cdf({"a": [1.0]})
    assert str(caught.value).startswith(
        "plots: matplotlib must be installed (pip install 'bnuq_ext[demo]'), got "
    )


def test_a_matplotlib_that_is_too_old_is_named(monkeypatch):
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert f'"matplotlib>={".".join(map(str, canvas.OLDEST_MATPLOTLIB))}"' in project
    monkeypatch.setattr("matplotlib.__version__", "3.6.3")
    monkeypatch.setattr("matplotlib.__version_info__", (3, 6, 3, "final", 0))
    with pytest.raises(ImportError) as caught:
        plots.entropy_cdf({"a": [1.0]})
    assert str(caught.value) == (
        "plots: matplotlib must be 3.7 or newer (pip install 'bnuq_ext[demo]'), got 3.6.3"
    )


def test_import_leaves_matplotlib_alone():
    code = "import sys; from bnuq_ext import plots; assert 'matplotlib' not in sys.modules"
    place = os.environ | {"PYTHONPATH": str(Path(plots.__file__).parent.parent)}
    subprocess.run([sys.executable, "-c", code], check=True, env=place)


def test_a_lognormal_density_is_zero_at_zero():
    ax = plots.statistic_marginals([0.5], {"a": ("lognormal", -1.0, 0.5)})
    x, density = ax.lines[0].get_data()
    assert x[0] == density[0] == 0 and np.isfinite(density).all() and density.max() > 1
