"""What a data set is here: parts of inputs and targets."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.checks import refuse


class Part(NamedTuple):
    """Inputs x (N, ...) and targets y (N,): integer labels, or numbers; a label per pixel is (N, H, W)."""

    x: Tensor
    y: Tensor


class Split(NamedTuple):
    """Three disjoint parts of a data set."""

    train: Part
    validation: Part
    test: Part


def add_noise(x: Tensor, std: float, *, seed: int) -> Tensor:
    """x + std * z with z standard normal; values are not clipped.

    Args:
        x: (*) pixels, in the unit of `std`.
        std: standard deviation of the noise; not negative.
        seed: of the noise; the same z for every `std`.

    Returns:
        (*) like x.
    """
    if std < 0:
        refuse("add_noise", "std", "not be negative", std)
    generator = torch.Generator().manual_seed(seed)
    return x + std * torch.randn(x.shape, generator=generator).to(x)
