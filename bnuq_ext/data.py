"""Data sets that need no download, split and scaled for the experiments."""

from typing import NamedTuple

import torch
from torch import Tensor

from .ops.checks import refuse


class Part(NamedTuple):
    """Inputs x (N, ...) and integer labels y (N,)."""

    x: Tensor
    y: Tensor


class Split(NamedTuple):
    """Three disjoint parts of a data set."""

    train: Part
    validation: Part
    test: Part


def digits(*, num_train=300, num_validation=300, seed=0, classes=range(10)) -> Split:
    """Scikit-learn's 1,797 handwritten digits of 8x8 pixels, split at random, class by class in proportion.

    Args:
        num_train, num_validation: rows of these parts; the rest is the test part.
        seed: of the split.
        classes: the digits to keep; labels stay as they are.

    Returns:
        Split; x (N, 64) float32 in [0, 1], y (N,) int64.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ModuleNotFoundError as error:
        requirement = "be installed (pip install 'bnuq_ext[demo]')"
        refuse("digits", "scikit-learn", requirement, error, ModuleNotFoundError)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
    rows = torch.isin(y, torch.as_tensor(list(classes))).nonzero().squeeze(1)
    if min(num_train, num_validation) < 1 or num_train + num_validation >= len(rows):
        requirement = f"be positive and leave test rows out of {len(rows)}"
        refuse("digits", "num_train and num_validation", requirement, (num_train, num_validation))

    def take(some, count):
        first, rest = train_test_split(some, train_size=count, stratify=y[some], random_state=seed)
        return Part(x[first], y[first]), rest

    train, rest = take(rows, num_train)
    validation, rest = take(rest, num_validation)
    return Split(train, validation, Part(x[rest], y[rest]))


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
