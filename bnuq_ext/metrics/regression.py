"""Scores of regression: log-likelihoods, continuous ranked probability scores, errors.

A density of several outputs is joint, so log-likelihoods are summed over the outputs of a row; the
ranked scores are of one output each and their mean over the outputs is taken.
"""

import math

import torch
from torch import Tensor

from ..ops.checks import check_one_of, refuse
from .arguments import per_row, reduce, take_means, take_samples, take_scale

LOG_TWO_PI = math.log(2 * math.pi)


def _take_std(op: str, std: float | Tensor, y: Tensor) -> Tensor:
    std = take_scale(op, "std", std, y)
    if (std < 0).any():
        refuse(op, "std", "not be negative", std.min().item())
    return std


def rmse(mean: Tensor, y: Tensor, *, reduction: str = "mean") -> Tensor:
    """Root mean squared error of the predictive mean, sqrt(mean (y - mean)²).

    The score of Teye et al. 2018, appendix, Table 7.

    Args:
        mean: (N, *) predictive means.
        y: targets of the shape of `mean`.
        reduction: "mean" for the root of the mean over rows and outputs, or "none" for that over
            the outputs of each row.

    Returns:
        () or (N,) in the unit of y, float64.
    """
    mean, y = take_means("rmse", mean, y)
    squared = per_row((y - mean).square()).mean(-1)
    if reduction == "mean":
        return squared.mean().sqrt()
    return reduce("rmse", squared.sqrt(), reduction)


def gaussian_pll(
    samples: Tensor, y: Tensor, noise_var: float | Tensor, *, reduction: str = "mean"
) -> Tensor:
    """Predictive log-likelihood of T replicas, log 1/T sum_t N(y | f_t, noise_var).

    As logsumexp_t(-sum_d (y_d - f_td)² / (2 noise_var)) - log T - D/2 log(2 pi noise_var), with D
    outputs, it stays finite however far y lies in the tail. With tau = 1 / noise_var this is the
    PLL of Teye et al. 2018, section 4.1.

    Args:
        samples: (T, N, *) outputs of the replicas, T at least 1.
        y: (N, *) targets.
        noise_var: variance of the observation noise, in the unit of y squared; positive; a number
            or a tensor that broadcasts to y.
        reduction: "mean" over the rows, or "none".

    Returns:
        () or (N,) in nats, float64; higher is better. It counts in the unit of y: y / s gives log s
        more an output.
    """
    samples, y = take_samples("gaussian_pll", samples, y)
    variance = take_scale("gaussian_pll", "noise_var", noise_var, y)
    if not ((variance > 0) & variance.isfinite()).all():
        refuse("gaussian_pll", "noise_var", "be finite and positive", noise_var)
    log_density = (y - samples).square() / variance + variance.log() + LOG_TWO_PI
    exponent = -0.5 * per_row(log_density, 2).sum(-1)
    return reduce("gaussian_pll", exponent.logsumexp(0) - math.log(len(samples)), reduction)


def gaussian_nll(
    mean: Tensor, std: float | Tensor, y: Tensor, *, reduction: str = "mean"
) -> Tensor:
    """Negative log-likelihood of one Gaussian, ((y - mean) / std)² / 2 + log std + log(2 pi) / 2,
    summed over the outputs.

    The score of Lakshminarayanan et al. 2017, equation 1.

    Args:
        mean: (N, *) predictive means.
        std: predictive standard deviation, noise included; a number or a tensor that broadcasts to
            y; not negative. Where it is 0 the value is inf, or -inf if y is the mean.
        y: targets of the shape of `mean`.
        reduction: "mean" over the rows, or "none".

    Returns:
        () or (N,) in nats, float64; lower is better.
    """
    mean, y = take_means("gaussian_nll", mean, y)
    std = _take_std("gaussian_nll", std, y)
    # 0 / 0 is an exact hit, not nan.
    z = torch.where(y == mean, 0.0, (y - mean) / std)
    # The square is infinite where the logarithm of 0 is, and outweighs it.
    values = torch.where(z.isinf(), torch.inf, z.square() / 2 + std.log() + LOG_TWO_PI / 2)
    return reduce("gaussian_nll", per_row(values).sum(-1), reduction)


def gaussian_crps(
    mean: Tensor, std: float | Tensor, y: Tensor, *, reduction: str = "mean"
) -> Tensor:
    """Continuous ranked probability score of a Gaussian, the integral of (F(v) - 1[v >= y])² dv.

    In closed form std (z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi)) with z = (y - mean) / std
    (Gneiting and Raftery 2007); where std is 0 it is the absolute error.

    Args:
        mean: (N, *) predictive means.
        std: predictive standard deviation, noise included; a number or a tensor that broadcasts to
            y; not negative.
        y: targets of the shape of `mean`.
        reduction: "mean" over the rows, or "none".

    Returns:
        () or (N,) in the unit of y, float64, the mean over the outputs; lower is better.
    """
    mean, y = take_means("gaussian_crps", mean, y)
    std, error = _take_std("gaussian_crps", std, y), (y - mean).abs()
    z = error / std.clamp_min(torch.finfo(torch.float64).tiny)
    z = z.clamp_max(40.0)  # erf is 1 there; an infinite z would make gradients NaN
    peak = (2 / math.pi) ** 0.5 * torch.exp(-0.5 * z.square()) - math.pi**-0.5
    values = error * torch.erf(z / 2**0.5) + std * peak
    return reduce("gaussian_crps", per_row(values).mean(-1), reduction)


def ensemble_crps(
    samples: Tensor, y: Tensor, estimator: str = "fair", *, reduction: str = "mean"
) -> Tensor:
    """Continuous ranked probability score of T draws x_t, mean_t |x_t - y| - 1/2 E|X - X'|.

    "biased" takes the mean of |x_s - x_t| over all T² pairs, the score of the draws' own step
    function; "fair" over the T (T - 1) pairs of different draws, which has the expectation of the
    score of the distribution that they come from (Ferro 2014). Sorted draws give the sum over pairs
    in T log T.

    Args:
        samples: (T, N, *) draws from the predictive distribution, noise included; T at
            least 1, or 2 if fair.
        y: (N, *) targets.
        estimator: "fair" or "biased".
        reduction: "mean" over the rows, or "none".

    Returns:
        () or (N,) in the unit of y, float64, the mean over the outputs; lower is better; a fair one
        can be negative.
    """
    samples, y = take_samples("ensemble_crps", samples, y)
    check_one_of("ensemble_crps", "estimator", estimator, ("fair", "biased"))
    count = len(samples)
    if estimator == "fair" and count < 2:
        refuse("ensemble_crps", "samples", 'have at least 2 replicas with estimator "fair"', count)
    error = (samples - y).abs().mean(0)
    # The weights sum to 0: an offset changes nothing but the rounding.
    ordered = (samples - samples.mean(0)).sort(0).values
    weights = 2 * torch.arange(count, device=y.device, dtype=torch.float64) - (count - 1)
    half_spread = torch.tensordot(weights, ordered, 1)
    pairs = count * (count - 1) if estimator == "fair" else count**2
    values = error - half_spread / pairs
    return reduce("ensemble_crps", per_row(values).mean(-1), reduction)
