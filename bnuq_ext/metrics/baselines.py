"""What an uncertainty is measured against: a constant variance, and the best one of each point."""

import math

import torch
from torch import Tensor

from ..ops.checks import check_number, check_one_of, refuse
from .arguments import check_fittable, per_row, reduce, take_means, take_numbers
from .regression import LOG_TWO_PI


def best_pll(mean: Tensor, y: Tensor, *, min_var: float = 0.0, reduction: str = "mean") -> Tensor:
    """The highest log-likelihood that a variance can give a Gaussian about the mean, at each point.

    That variance is e² with e = y - mean, so the value is -log(2 pi) / 2 - log(e²) / 2 - 1/2
    (Teye et al. 2018, section 4.2), summed over the outputs.

    Args:
        mean: (N, *) predictive means.
        y: targets of the shape of `mean`.
        min_var: the variance is held at or above it, in the unit of y squared. With 0 a point that
            is hit exactly has the value inf, and so has the mean.
        reduction: "mean" over the rows, or "none".

    Returns:
        () or (N,) in nats, float64.
    """
    mean, y = take_means("best_pll", mean, y)
    check_number("best_pll", "min_var", min_var)
    if not min_var >= 0:
        refuse("best_pll", "min_var", "not be negative", min_var)
    squared = (y - mean).square()
    variance = squared.clamp_min(min_var)
    share = torch.where(variance == 0, 1.0, squared / variance)
    values = -0.5 * (LOG_TWO_PI + variance.log() + share)
    return reduce("best_pll", per_row(values).sum(-1), reduction)


def best_crps(mean: Tensor, y: Tensor, *, reduction: str = "mean") -> Tensor:
    """The least CRPS that any standard deviation can give a Gaussian about the mean, at each point.

    With e = |y - mean| that standard deviation is e / sqrt(log 2) and the score
    e (2 Phi(sqrt(log 2)) - 1), which is 0.594904 e: the upper bound of Teye et al. 2018, section
    4.2, in closed form.

    Args:
        mean: (N, *) predictive means.
        y: targets of the shape of `mean`.
        reduction: "mean" over the rows, or "none".

    Returns:
        () or (N,) in the unit of y, float64, the mean over the outputs.
    """
    mean, y = take_means("best_crps", mean, y)
    values = math.erf((math.log(2) / 2) ** 0.5) * (y - mean).abs()
    return reduce("best_crps", per_row(values).mean(-1), reduction)


def fit_constant_variance(mean: Tensor, y: Tensor, score: str = "crps") -> float:
    """The one variance for all points with the best mean score of N(mean, variance).

    "pll": the mean squared error. "crps": the root of mean exp(-e² / (2 variance)) = 1 / sqrt(2),
    monotone in the variance, so its logarithm is bisected. Teye et al. 2018, section 4.2, fit the
    CRPS on validation data: their baselines CUBN and CUDO.

    Args:
        mean: (N, *) predictive means for validation data, N > 0; finite.
        y: targets of the shape of `mean`; finite.
        score: "crps" or "pll".

    Returns:
        the variance in the unit of y squared; 0 if y is the mean everywhere, for "crps" at 71 % of
        the points.
    """
    mean, y = take_means("fit_constant_variance", mean, y)
    check_one_of("fit_constant_variance", "score", score, ("crps", "pll"))
    check_fittable("fit_constant_variance", "mean", mean)
    check_fittable("fit_constant_variance", "y", y)
    squared = (y - mean).square().flatten()
    if score == "pll":
        return squared.mean().item()
    missed = squared[squared > 0]
    level = 0.5**0.5
    if len(squared) - len(missed) >= level * len(squared):
        return 0.0
    # At the low end every exponential is 0, at the high end none is below the level.
    low = math.log(missed.min().item()) - math.log(2000)
    high = math.log(missed.max().item()) - math.log(math.log(2))
    for _ in range(64):
        middle = (low + high) / 2
        wide = torch.exp(squared / (-2 * math.exp(middle))).mean() > level
        low, high = (low, middle) if wide else (middle, high)
    return math.exp((low + high) / 2)


def normalised_score(
    score: float | Tensor, constant: float | Tensor, best: float | Tensor
) -> Tensor:
    """What part of the way from a constant variance to the best one a score has gone, in percent.

    100 (score - constant) / (best - constant): 0 is no better than constant, 100 the bound,
    negative is worse (Teye et al. 2018, section 4.2). The same for CRPS and for PLL, whichever way
    is better.

    Args:
        score, constant, best: means over one test set, so one value a run; numbers, or tensors that
            broadcast. One ratio per run comes first, then the mean over the runs.

    Returns:
        of their common shape, float64; nan where all three are equal.
    """
    given = {"score": score, "constant": constant, "best": best}
    values = [take_numbers("normalised_score", name, value) for name, value in given.items()]
    try:
        score, constant, best = torch.broadcast_tensors(*values)
    except RuntimeError:
        shapes = [list(value.shape) for value in values]
        refuse("normalised_score", "score", "fit constant and best", f"shapes {shapes}")
    return 100 * (score - constant) / (best - constant)
