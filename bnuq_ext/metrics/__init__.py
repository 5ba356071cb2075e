"""Scores of predictive distributions: pure functions on tensors, evaluated in float64.

N rows, K classes, T replicas; entropies and likelihoods in nats. A row has one output, (N,) or
(N, 1), or several, (N, *); a single row may also be (). With `reduction="none"` a function returns
its value per row, with `"mean"` (the default) the mean over the rows. A nan in a row makes its
value nan; a fit refuses what is not finite. An argument of the wrong shape, dtype or value is a
ValueError or a TypeError that names the function and the argument.
"""

from .baselines import best_crps, best_pll, fit_constant_variance, normalised_score
from .classification import (
    accuracy,
    auroc,
    brier,
    categorical_pll,
    ece,
    mutual_information,
    nll,
    predictive_entropy,
)
from .evaluation import evaluate
from .fits import fit_noise_variance, fit_temperature
from .regression import ensemble_crps, gaussian_crps, gaussian_nll, gaussian_pll, rmse
from .significance import t_test

__all__ = [
    "accuracy",
    "auroc",
    "best_crps",
    "best_pll",
    "brier",
    "categorical_pll",
    "ece",
    "ensemble_crps",
    "evaluate",
    "fit_constant_variance",
    "fit_noise_variance",
    "fit_temperature",
    "gaussian_crps",
    "gaussian_nll",
    "gaussian_pll",
    "mutual_information",
    "nll",
    "normalised_score",
    "predictive_entropy",
    "rmse",
    "t_test",
]
