"""What a data set is here: parts of inputs and targets."""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.checks import (
    check_floating,
    check_integer,
    check_key_range,
    check_number,
    check_path,
    refuse,
)


class Part(NamedTuple):
    """Inputs x (N, ...) and targets y (N,): integer labels, or numbers; a label per pixel is
    (N, H, W)."""

    x: Tensor
    y: Tensor


class Split(NamedTuple):
    """Three disjoint parts of a data set: to fit by, to choose by, to report."""

    train: Part
    validation: Part
    test: Part


def as_path(op: str, name: str, value) -> Path:
    check_path(op, name, value)
    return Path(value)


def check_file(op: str, path: Path, requirement: str) -> None:
    """Raises for a path where no file lies."""
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "a missing file"
        refuse(op, "path", requirement, f"{path}, {kind}")


def take(part: Part, rows) -> Part:
    """Some rows of a part: a slice, a mask or indices."""
    return Part(part.x[rows], part.y[rows])


def hold_out(op: str, train: Part, num_validation: int, test: Part) -> Split:
    """The last `num_validation` training rows become the validation part."""
    if len(train.x) == 0:
        refuse(op, "root", "hold images to train on", "none")
    if check_integer(op, "num_validation", num_validation, 0) >= len(train.x):
        refuse(op, "num_validation", f"lie in [0, {len(train.x)})", num_validation)
    cut = len(train.x) - num_validation
    return Split(take(train, slice(cut)), take(train, slice(cut, None)), test)


def check_classes(op: str, split: Split, num_classes: int, root: str = "data_root") -> None:
    """Raises for a part of the files in `root` that has no rows, or labels beyond the classes."""
    for name, part in zip(split._fields, split, strict=True):
        if len(part.x) == 0:
            refuse(op, root, f"hold images for the {name} part", "none")
        if part.y.max() >= num_classes:
            requirement = f"hold labels in [0, {num_classes})"
            refuse(op, root, requirement, f"{part.y.max()} in the {name} part")


def add_noise(x: Tensor, std: float, *, seed: int) -> Tensor:
    """x + std * z with z standard normal; values are not clipped.

    Args:
        x: (*) pixels, in the unit of `std`.
        std: standard deviation of the noise; not negative.
        seed: of the noise; the same z for every `std`.

    Returns:
        (*) like x.

    Raises:
        ValueError, TypeError: std or seed is out of range, or x is no floating-point tensor.
    """
    check_floating("add_noise", "x", x)
    check_number("add_noise", "std", std)
    if not 0 <= std < math.inf:
        refuse("add_noise", "std", "be finite and not negative", std)
    check_key_range("add_noise", seed)
    generator = torch.Generator("cpu").manual_seed(int(seed))
    z = torch.randn(x.shape, generator=generator, dtype=torch.float32, device="cpu")
    return x + std * z.to(x)
