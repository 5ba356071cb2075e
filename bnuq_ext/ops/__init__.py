"""The ops: one Python function each, over kernels for CPU and CUDA."""

from .. import _library  # noqa: F401 - first: it brings the ops that the modules call
from . import batch_norm_grad  # noqa: F401 - it registers rules for them
from .batch_norm import batch_norm_bank, batch_norm_fitted
from .kl import gaussian_kl, mixture_kl
from .linear import bayes_linear
from .philox import new_seed, philox_normal, snapshot_indices
from .predictive import PredictiveStatistics, predictive_accumulate_, predictive_statistics

__all__ = [
    "PredictiveStatistics",
    "batch_norm_bank",
    "batch_norm_fitted",
    "bayes_linear",
    "gaussian_kl",
    "mixture_kl",
    "new_seed",
    "philox_normal",
    "predictive_accumulate_",
    "predictive_statistics",
    "snapshot_indices",
]
