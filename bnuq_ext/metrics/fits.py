"""What is fitted on validation data: the temperature of logits, the variance of the noise."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..ops.checks import check_one_of, refuse
from .arguments import check_fittable, take_labels, take_logits, take_samples
from .regression import gaussian_crps, gaussian_pll


def fit_temperature(logits: Tensor, y: Tensor) -> float:
    """The temperature with the least NLL of softmax(logits / temperature).

    The NLL is convex in 1 / temperature, so its slope, mean_n E_p[logits_n - logits[n, y_n]], is
    bisected (Guo et al. 2017, section 4.2).

    Args:
        logits: (N, K, *) outputs for validation data, N > 0; finite.
        y: (N, *) integer labels in [0, K).

    Returns:
        the temperature, held in [0.01, 100] (labels that are all right have no finite optimum); 1
        where all logits of each row are equal, so that none is better.
    """
    logits = take_logits("fit_temperature", "logits", logits)
    y = take_labels("fit_temperature", y, logits)
    check_fittable("fit_temperature", "logits", logits)
    logits = logits - logits.gather(1, y.unsqueeze(1))
    if not logits.any():
        return 1.0
    low, high = 0.01, 100.0
    for _ in range(60):
        inverse = (low * high) ** 0.5
        slope = ((logits * inverse).softmax(1) * logits).sum(1).mean()
        # 0 where all labels are right and no other class has a probability left.
        low, high = (inverse, high) if slope <= 0 else (low, inverse)
    return 1 / (low * high) ** 0.5


def fit_noise_variance(samples: Tensor, y: Tensor, score: str = "crps") -> float:
    """The variance of the observation noise that gives the replicas the best mean score.

    "crps": of N(mean_t f_t, Var_t f_t + noise_var), as Teye et al. 2018, section 4.3, choose tau =
    1 / noise_var. "pll": of the mixture of `gaussian_pll`. Neither has to have one optimum alone:
    the best of a grid of four values a decade is refined by golden section, to a relative 1e-7.

    Args:
        samples: (T, N, *) outputs of the replicas for validation data, N > 0; finite.
            Those of several folds are put together along dim 1.
        y: (N, *) targets; finite.
        score: "crps" or "pll".

    Returns:
        the variance in the unit of y squared, at least a millionth of the mean squared error (for
        "pll" that of the replicas, so that a PLL exists) and 0 only without an error.
    """
    op = "fit_noise_variance"
    samples, y = take_samples(op, samples, y)
    check_one_of(op, "score", score, ("crps", "pll"))
    check_fittable(op, "samples", samples)
    check_fittable(op, "y", y)
    var, mean = torch.var_mean(samples, 0, correction=0)
    error = (y - (mean if score == "crps" else samples)).square()
    if not error.any():
        return 0.0
    # A bound of every variance below: the replicas', and the noise's, of at most error / log 2.
    if not (2 * (error.sum() + var.sum())).isfinite():
        got = f"distances of up to {(y - samples).abs().max():.3g}"
        refuse(op, "samples", "have squared distances from y of a finite sum", got)

    def loss(log_var: float) -> float:
        if score == "pll":
            return -gaussian_pll(samples, y, math.exp(log_var)).item()
        return gaussian_crps(mean, (var + math.exp(log_var)).sqrt(), y).item()

    # Above the largest squared error of any replica both scores only fall.
    largest = error.max() / math.log(2) if score == "crps" else error.max()
    low = math.log(1e-6 * error.mean().item())
    return math.exp(_least(loss, low, math.log(largest.item())))


def _least(loss: Callable[[float], float], low: float, high: float) -> float:
    """Where a function is least in [low, high]: a grid, a golden section about its best point."""
    count = 2 + int((high - low) / math.log(10) * 4)
    step = (high - low) / (count - 1)
    best = min(range(count), key=lambda i: loss(low + i * step))
    left, right = low + max(best - 1, 0) * step, low + min(best + 1, count - 1) * step
    ratio = (5**0.5 - 1) / 2
    inner = [right - ratio * (right - left), left + ratio * (right - left)]
    values = [loss(x) for x in inner]
    for _ in range(35):
        if values[0] <= values[1]:
            right = inner[1]
            inner = [right - ratio * (right - left), inner[0]]
            values = [loss(inner[0]), values[0]]
        else:
            left = inner[0]
            inner = [inner[1], left + ratio * (right - left)]
            values = [values[1], loss(inner[1])]
    return (left + right) / 2
