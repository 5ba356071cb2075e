"""The ops: one Python function each, over kernels for CPU and CUDA."""

from .. import _library  # noqa: F401 - first: it brings the ops that the modules call
from . import batch_norm_grad  # noqa: F401 - it registers rules for them
from .batch_norm import batch_norm_bank as batch_norm_bank
from .batch_norm import batch_norm_fitted as batch_norm_fitted
from .kl import gaussian_kl as gaussian_kl
from .kl import mixture_kl as mixture_kl
from .linear import bayes_linear as bayes_linear
from .philox import new_seed as new_seed
from .philox import philox_normal as philox_normal
from .philox import snapshot_indices as snapshot_indices
from .predictive import PredictiveStatistics as PredictiveStatistics
from .predictive import predictive_accumulate_ as predictive_accumulate_
from .predictive import predictive_statistics as predictive_statistics
