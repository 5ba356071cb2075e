"""Priors over the weights of a Bayesian layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .ops import gaussian_kl, mixture_kl
from .ops.checks import check_fraction, check_positive, refuse


class Prior(Protocol):
    """What a prior of one's own needs."""

    def divergence(
        self, mu: Tensor, rho: Tensor, seed: Tensor, stream: int, num_samples: int
    ) -> Tensor:
        """KL(N(mu, sigma^2) || prior), the sum over the weights, in nats."""


@dataclass(frozen=True)
class GaussianPrior:
    """N(0, std^2) over every weight; its divergence has a closed form.

    Args:
        std: standard deviation; positive, finite. Weights in float32 need one above 5.42e-20.

    Raises:
        ValueError, TypeError: std is out of range, or no number.
    """

    std: float = 1.0

    def __post_init__(self):
        check_positive("GaussianPrior", "std", self.std)

    def divergence(
        self, mu: Tensor, rho: Tensor, seed: Tensor, stream: int, num_samples: int
    ) -> Tensor:
        """See `ops.gaussian_kl`; the samples do not matter."""
        return gaussian_kl(mu, rho, self.std)


@dataclass(frozen=True)
class ScaleMixturePrior:
    """pi N(0, std1^2) + (1 - pi) N(0, std2^2) over every weight;
    its divergence is a Monte Carlo mean.

    Args:
        pi: weight of the broader component, in [0, 1].
        std1: standard deviation of the broader component; positive, finite.
        std2: that of the narrower; positive, at most `std1`.
            Weights in float32 need one above 5.42e-20.

    Raises:
        ValueError, TypeError: an argument is out of range, or no number.

    Source: Blundell et al., Weight Uncertainty in Neural Networks (2015), equation 7.
    """

    pi: float = 0.5
    std1: float = 1.0
    std2: float = math.exp(-6)

    def __post_init__(self):
        op = "ScaleMixturePrior"
        check_fraction(op, "pi", self.pi)
        check_positive(op, "std1", self.std1)
        check_positive(op, "std2", self.std2)
        if not self.std1 >= self.std2:
            refuse(op, "std1", f"be at least std2 = {self.std2}", self.std1)

    def divergence(
        self, mu: Tensor, rho: Tensor, seed: Tensor, stream: int, num_samples: int
    ) -> Tensor:
        """See `ops.mixture_kl`."""
        return mixture_kl(
            mu, rho, seed, stream, num_samples, pi=self.pi, std1=self.std1, std2=self.std2
        )


def check_prior(op: str, prior) -> None:
    if isinstance(prior, type) or not callable(getattr(prior, "divergence", None)):
        refuse(op, "prior", "be GaussianPrior, ScaleMixturePrior or like them", prior, TypeError)
