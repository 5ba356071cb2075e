"""Moments of a bank's statistics over its snapshots,
and what they would be at another batch size."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .ops.batch_norm_checks import LEAST_SPREAD


class Rescaling(NamedTuple):
    """From the bank's 1/(B-1) variances to those of random batches of M0 rows, and of M rows.

        v(M) = v1 / c * (M0 / M) (1 - M / N),   c = (1 - M0/N) + disjoint * M0/N

    for batches drawn without replacement from N rows; `disjoint` is the fraction of pairs of
    snapshots without a common row. c is 1 for one pass over the data, and 1 - M0/N for independent
    draws (1 for independent draws with replacement,
    whose v1 is that of M0 out of infinitely many rows; they count as disjoint).

    Measured with bounded inputs, M0 = 32: stds within 7 % from M0/2 to 8 M0, in every layer; with
    M0 = 16 or 8 that of ln std in a first layer within 15 % or 30 %, and of inputs of two values
    three times too large at 8 M0: the first order, which this is, vanishes for them. With
    heavy-tailed ones (squared normals) those of deeper layers' means were 25 % too large at M0/2
    and too small at 4 M0: behind another batch norm the noise of a mean cancels to first order,
    and the rest falls faster.
    """

    bank_factor: float  # v(M0) / v1
    factor: float  # v(M) / v1

    @classmethod
    def between(cls, M0: int, M: int, N: int, disjoint: float) -> Rescaling:
        """From batches of M0 rows to batches of M, of N in all; `disjoint`: see `Bank`."""
        c = (1 - M0 / N) + disjoint * M0 / N
        if c == 0:  # M0 = M = N
            return cls(0.0, 0.0)
        return cls((1 - M0 / N) / c, M0 / M * (1 - M / N) / c)


class Moments(NamedTuple):
    """Of one layer's call, in float64; B snapshots, C channels.

    Attributes:
        mean, spread, log_spread: (C,) centres of batch mean, batch std and its logarithm.
        mean_deviations, log_deviations: (B, C) of the snapshots from the bank's own centres.
        mean_std, spread_std, log_spread_std: (C,) standard deviations, rescaled.
    """

    mean: Tensor
    spread: Tensor
    log_spread: Tensor
    mean_deviations: Tensor
    log_deviations: Tensor
    mean_std: Tensor
    spread_std: Tensor
    log_spread_std: Tensor

    def params(self, family: str) -> Tensor:
        """(4, C) of `ops.batch_norm_fitted`."""
        if family == "lognormal":
            spread, spread_std = self.log_spread, self.log_spread_std
        else:
            spread, spread_std = self.spread, self.spread_std
        return torch.stack([self.mean, self.mean_std, spread, spread_std])


def fit(mean: Tensor, var: Tensor, rescaling: Rescaling) -> Moments:
    """Moments over the snapshots, rescaled in spread and shifted in the centre of the spread.

    A smaller batch has a smaller biased std. The variance of the population is E[var_M] +
    Var[mean_M] for every M, and Var[std] / E[std]^2 falls as the other variances do, hence
        E[var](M) = E[var](M0) + Var[mean](M0) - Var[mean](M),
        E[std](M)^2 = E[var](M) / (1 + Var[std](M) / E[std]^2),
        E[ln std](M) = ln E[std](M) - Var[ln std](M) / 2   (of a log-normal std),
    of which only the difference between M and M0 is used: at M0 the centres are the bank's own.
    E[var](M) is held above 1/64 of the bank's, the centre of the std above 1/8 of the bank's.

    Args:
        mean, var: (B, C), B at least 2.
        rescaling: to another batch size.
    """
    mean, var = mean.double(), var.double()
    spread = var.sqrt()
    centre = spread.mean(0)
    # Without a floor one snapshot of a nearly dead channel makes the logarithm's variance huge.
    floor = (centre * LEAST_SPREAD).clamp(min=1e-20)
    log_spread = torch.maximum(spread, floor).log()
    mean_centre, log_centre = mean.mean(0), log_spread.mean(0)
    mean_var, spread_var = mean.var(0), spread.var(0)

    log_var, added = log_spread.var(0), rescaling.factor - rescaling.bank_factor
    expected, relative = var.mean(0), spread_var / centre.square().clamp(min=1e-40)
    shifted = torch.maximum(expected - mean_var * added, expected * LEAST_SPREAD**2)
    then = _expected_spread(expected, relative * rescaling.bank_factor)
    now = _expected_spread(shifted, relative * rescaling.factor)
    scale = rescaling.factor**0.5
    return Moments(
        mean=mean_centre,
        spread=torch.maximum(centre + (now - then), centre * LEAST_SPREAD),
        log_spread=log_centre + (now / then).log() - added * log_var / 2,
        mean_deviations=mean - mean_centre,
        log_deviations=log_spread - log_centre,
        mean_std=scale * mean_var.sqrt(),
        spread_std=scale * spread_var.sqrt(),
        log_spread_std=scale * log_var.sqrt(),
    )


def _expected_spread(expected_var: Tensor, relative_var: Tensor) -> Tensor:
    """E[std] from E[var] and Var[std] / E[std]^2."""
    return (expected_var / (1 + relative_var)).clamp(min=1e-40).sqrt()
