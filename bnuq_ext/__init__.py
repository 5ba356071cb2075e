"""bnuq_ext: fast predictive distributions from batch normalisation."""

from . import ops as ops
from ._version import __version__ as __version__
from .adapters import register_adapter as register_adapter
from .bank import Bank as Bank
from .bank import attach as attach
from .collect import collect as collect
from .context import replicas as replicas
from .convert import convert as convert
from .convert import revert as revert
from .doctor import doctor as doctor
from .nn import StochasticBatchNorm1d as StochasticBatchNorm1d
from .nn import StochasticBatchNorm2d as StochasticBatchNorm2d
from .nn import StochasticBatchNorm3d as StochasticBatchNorm3d
from .nn import StochasticSyncBatchNorm as StochasticSyncBatchNorm
from .predict import predict as predict
from .prediction import Prediction as Prediction
