"""CRPS of Gaussian predictions by its definition, an integral."""

import math

import numpy as np
from scipy import integrate, stats


def crps(mean, std, target):
    """Integral of (F(v) - [v >= target])^2 over v, for one Gaussian."""
    below = integrate.quad(lambda v: stats.norm.cdf(v, mean, std) ** 2, mean - 12, target)[0]
    above = integrate.quad(lambda v: stats.norm.sf(v, mean, std) ** 2, target, mean + 12)[0]
    return below + above


def crps_scores(mean, std, y, plain_std):
    """Means over the rows: the CRPS, that with one plain_std,
    and where the first lies between it and the best, in %."""
    own = np.mean([crps(*row) for row in zip(mean, std, y, strict=True)])
    rows = list(zip(mean, y, strict=True))
    constant = np.mean([crps(m, plain_std, v) for m, v in rows])
    best = np.mean([crps(m, abs(v - m) / math.log(2) ** 0.5, v) for m, v in rows])
    return own, constant, 100 * (own - constant) / (best - constant)
