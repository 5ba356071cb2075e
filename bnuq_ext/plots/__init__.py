"""Figures of uncertainty: arrays or tensors in, matplotlib Axes out.

Each function draws into `ax` and returns it; where there are several panels, the others take part
of its place. Nothing here changes a style, shows a window or writes a file. With `ax=None` a new
figure is made, outside pyplot: `ax.figure.savefig(path)` writes it, a notebook shows `ax.figure`.
An argument of the wrong shape or value is a ValueError, of another type a TypeError; without
matplotlib every function raises ModuleNotFoundError.
"""

from .batch_size import against_batch_size as against_batch_size
from .batch_size import information_and_nll as information_and_nll
from .canvas import BLUE as BLUE
from .canvas import COLORS as COLORS
from .canvas import GREY as GREY
from .canvas import ORANGE as ORANGE
from .classification import entropy_cdf as entropy_cdf
from .classification import reliability_diagram as reliability_diagram
from .classification import stacked_probabilities as stacked_probabilities
from .classification import verdict as verdict
from .regression import regression_band as regression_band
from .regression import uncertainty_error as uncertainty_error
from .segmentation import segmentation_maps as segmentation_maps
from .statistics import statistic_marginals as statistic_marginals
from .weights import error_over_epochs as error_over_epochs
from .weights import signal_to_noise as signal_to_noise
from .weights import weight_histograms as weight_histograms
