"""Scores of predictive distributions: pure functions on tensors, evaluated in float64.

N rows, K classes, T replicas; entropies and likelihoods in nats. A row has one output, (N,) or
(N, 1), or several, (N, *); a single row may also be (). With `reduction="none"` a function returns
its value per row, with `"mean"` (the default) the mean over the rows. A nan in a row makes its
value nan; a fit refuses what is not finite. An argument of the wrong shape, dtype or value is a
ValueError or a TypeError that names the function and the argument.
"""

from .baselines import best_crps as best_crps
from .baselines import best_pll as best_pll
from .baselines import fit_constant_variance as fit_constant_variance
from .baselines import normalised_score as normalised_score
from .classification import accuracy as accuracy
from .classification import auroc as auroc
from .classification import brier as brier
from .classification import categorical_pll as categorical_pll
from .classification import ece as ece
from .classification import mutual_information as mutual_information
from .classification import nll as nll
from .classification import predictive_entropy as predictive_entropy
from .evaluation import evaluate as evaluate
from .fits import fit_noise_variance as fit_noise_variance
from .fits import fit_temperature as fit_temperature
from .regression import ensemble_crps as ensemble_crps
from .regression import gaussian_crps as gaussian_crps
from .regression import gaussian_nll as gaussian_nll
from .regression import gaussian_pll as gaussian_pll
from .regression import rmse as rmse
from .significance import t_test as t_test
