"""Figures of uncertainty: arrays or tensors in, matplotlib Axes out.

Each function draws into `ax` and returns it; where there are several panels, the others take part
of its place. Nothing here changes a style, shows a window or writes a file. With `ax=None` a new
figure is made, outside pyplot: `ax.figure.savefig(path)` writes it, a notebook shows `ax.figure`.
An argument of the wrong shape or value is a ValueError, of another type a TypeError; without
matplotlib every function raises ModuleNotFoundError.
"""

from .batch_size import against_batch_size, information_and_nll
from .canvas import BLUE, COLORS, GREY, ORANGE
from .classification import entropy_cdf, reliability_diagram, stacked_probabilities, verdict
from .regression import regression_band, uncertainty_error
from .segmentation import segmentation_maps
from .statistics import statistic_marginals
from .weights import error_over_epochs, signal_to_noise, weight_histograms

__all__ = [
    "BLUE",
    "COLORS",
    "GREY",
    "ORANGE",
    "against_batch_size",
    "entropy_cdf",
    "error_over_epochs",
    "information_and_nll",
    "regression_band",
    "reliability_diagram",
    "segmentation_maps",
    "signal_to_noise",
    "stacked_probabilities",
    "statistic_marginals",
    "uncertainty_error",
    "verdict",
    "weight_histograms",
]
