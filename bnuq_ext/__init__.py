"""bnuq_ext: fast predictive distributions from batch normalisation."""

from . import ops as ops
from .adapters import register_adapter as register_adapter
from .convert import convert as convert
from .convert import revert as revert
from .nn import StochasticBatchNorm1d as StochasticBatchNorm1d
from .nn import StochasticBatchNorm2d as StochasticBatchNorm2d
from .nn import StochasticBatchNorm3d as StochasticBatchNorm3d
from .nn import StochasticSyncBatchNorm as StochasticSyncBatchNorm
