"""bnuq_ext: fast predictive distributions from batch normalisation."""

from . import ops as ops
from ._version import __version__ as __version__
from .adapters import register_adapter as register_adapter
from .bank import Bank as Bank
from .bank import attach as attach
from .bayes import BayesLinear as BayesLinear
from .collect import collect as collect
from .context import replicas as replicas
from .convert import convert as convert
from .convert import revert as revert
from .doctor import doctor as doctor
from .nn import StochasticBatchNorm1d as StochasticBatchNorm1d
from .nn import StochasticBatchNorm2d as StochasticBatchNorm2d
from .nn import StochasticBatchNorm3d as StochasticBatchNorm3d
from .nn import StochasticSyncBatchNorm as StochasticSyncBatchNorm
from .posterior import posterior_summary as posterior_summary
from .posterior import prune as prune
from .posterior import to_bayesian as to_bayesian
from .predict import predict as predict
from .prediction import Prediction as Prediction
from .priors import GaussianPrior as GaussianPrior
from .priors import ScaleMixturePrior as ScaleMixturePrior
from .vi import elbo_loss as elbo_loss
from .vi import kl_divergence as kl_divergence
from .vi import kl_weight as kl_weight
