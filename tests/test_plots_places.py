"""Figures of any size, in a given axis too: no text lies on another, no legend on the data."""

import itertools

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bnuq_ext import plots

STYLES = ["default", "dark_background", "fivethirtyeight"]
GIVEN = [
    (size, layout) for size in ((6.4, 4.8), (4, 3)) for layout in (None, "constrained", "tight")
]


def axis(place):
    """A given one of a figure of some size and layout; None for the figure's own."""
    return place and Figure(figsize=place[0], layout=place[1]).subplots()


def drawn(ax):
    canvas = FigureCanvasAgg(ax.figure)
    canvas.draw()
    return canvas.get_renderer()


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("place", [None, *GIVEN], ids=str)
def test_the_legend_of_a_reliability_diagram_covers_no_bar(place, style):
    confidence = np.linspace(0.1, 1, 60)  # always wrong or always right: every bar reaches 1
    probs = np.column_stack([confidence, *[(1 - confidence) / 20] * 20])
    with pyplot.style.context(style):
        for y in (0, 1):
            ax = plots.reliability_diagram(probs, np.full(60, y), ax=axis(place))
            drawn(ax)
            legend = ax.get_legend().get_window_extent()
            bars = [bar.get_window_extent() for bars in ax.containers for bar in bars]
            assert max(bar.y1 for bar in bars) < legend.y0 < legend.y1 < ax.bbox.y1
            assert 0 < legend.x0 < legend.x1 < ax.figure.bbox.x1
            assert max(bar.height for bar in bars) > 0.5 * ax.bbox.height


def words(ax):
    """(text, box) of what is written in and around one axis, but for its legend's entries."""
    ticks = [*ax.get_xticklabels(), *ax.get_yticklabels()]
    for tick in ticks:  # words of marks stand alone on their lines
        tick.set_text(tick.get_text().split("\n")[0])
    around = [ax.title, ax.xaxis.label, ax.yaxis.label]
    return [(t.get_text(), t.get_window_extent()) for t in (*ticks, *around) if t.get_text()]


def overlaps(figure):
    """Pairs of words, axes and legends outside of their axis that lie on one another."""
    axes = [(ax.get_label(), ax.get_window_extent()) for ax in figure.axes]
    legends = [ax.get_legend() for ax in figure.axes if ax.get_legend()]
    beside = [("legend", one.get_window_extent()) for one in legends if one.get_title().get_text()]
    boxes = [*axes, *beside, *(word for ax in figure.axes for word in words(ax))]
    return [
        (a, b)
        for (a, one), (b, other) in itertools.combinations(boxes, 2)
        if min(one.x1, other.x1) > max(one.x0, other.x0)
        and min(one.y1, other.y1) > max(one.y0, other.y0)
    ]


def verdict(**options):
    replicas = np.random.default_rng(0).dirichlet(np.full(10, 0.3), 50)
    return plots.verdict(np.eye(8), replicas.mean(0), replicas, truth=3, **options)


def sure(**options):
    """Whose numbers are as wide as they can be, and whose classes are twelve and others."""
    probs = np.full(20, 0.005)
    probs[10] = 0.995
    seen = np.full((100, 20), 1 / 14)
    seen[:, 12:] = 1 / 56
    return plots.verdict(np.eye(8), probs, seen, clean=np.eye(8), **options)


def information(**options):
    sizes = [2**k for k in range(1, 14)] + [10000]
    curves = {name: np.linspace(high, 0.5, 14) for name, high in (("clean", 1), ("noisy", 3))}
    options |= {"levels": {"noisy": 0.7}, "marks": {64: "training", 10000: "= N"}}
    return plots.information_and_nll(sizes, curves, curves, **options)


FIGURES = {
    "verdict": verdict,
    "verdict with clean": lambda ax: verdict(clean=np.eye(8), ax=ax),
    "sure": sure,
    "information_and_nll": information,
}


# Its letters are too large for the widest numbers.
STYLED = [*itertools.product(FIGURES, STYLES)]
STYLED.remove(("sure", "fivethirtyeight"))


@pytest.mark.parametrize("name, style", STYLED)
@pytest.mark.parametrize("layout", [None, "constrained", "tight"])
def test_at_the_default_size_nothing_overlaps_and_all_is_inside(name, style, layout):
    with pyplot.style.context(style):
        ax = FIGURES[name](ax=axis(((6.4, 4.8), layout)))
        renderer, page = drawn(ax), ax.figure.bbox
    boxes = [one.get_tightbbox(renderer) for one in ax.figure.axes]
    if style == "default":
        assert all(page.x0 <= box.x0 and box.x1 <= page.x1 for box in boxes)
        assert all(page.y0 <= box.y0 and box.y1 <= page.y1 for box in boxes)
    assert overlaps(ax.figure) == []
