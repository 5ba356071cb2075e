"""Figures of any size, in a given axis too: no text lies on another, no legend on the data."""

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
