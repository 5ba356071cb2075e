"""bnuq_ext: fast predictive distributions from batch normalisation and from Gaussian weights."""

from . import data, metrics, ops, plots
from ._version import __version__
from .adapters import register_adapter
from .attach import attach
from .bank import Bank
from .baselines import ensemble, mc_dropout, plug_in
from .batch_size import fit_batch_size
from .batch_size_fit import BatchSizeFit
from .bayes import BayesLinear
from .collect import collect
from .convert import convert, revert
from .doctor import DoctorReport, doctor
from .freezing import freeze
from .nn import (
    StochasticBatchNorm1d,
    StochasticBatchNorm2d,
    StochasticBatchNorm3d,
    StochasticSyncBatchNorm,
)
from .normality import LayerNormality, StatisticsNormality, statistics_normality
from .posterior import PosteriorSummary, posterior_summary, prune, to_bayesian
from .predict import predict
from .prediction import Prediction
from .priors import GaussianPrior, ScaleMixturePrior
from .replicas import replicas
from .statistics_kl import StatisticsGaussian, analytic_statistics, implied_prior, statistics_kl
from .vi import Elbo, elbo_loss, kl_divergence, kl_weight

__all__ = [
    "Bank",
    "BatchSizeFit",
    "BayesLinear",
    "DoctorReport",
    "Elbo",
    "GaussianPrior",
    "LayerNormality",
    "PosteriorSummary",
    "Prediction",
    "ScaleMixturePrior",
    "StatisticsGaussian",
    "StatisticsNormality",
    "StochasticBatchNorm1d",
    "StochasticBatchNorm2d",
    "StochasticBatchNorm3d",
    "StochasticSyncBatchNorm",
    "analytic_statistics",
    "attach",
    "collect",
    "convert",
    "data",
    "doctor",
    "elbo_loss",
    "ensemble",
    "fit_batch_size",
    "freeze",
    "implied_prior",
    "kl_divergence",
    "kl_weight",
    "mc_dropout",
    "metrics",
    "ops",
    "plots",
    "plug_in",
    "posterior_summary",
    "predict",
    "prune",
    "register_adapter",
    "replicas",
    "revert",
    "statistics_kl",
    "statistics_normality",
    "to_bayesian",
    "__version__",
]
