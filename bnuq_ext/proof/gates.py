"""Comparisons that come out alike for all rows of a trial, and hide what they would set off."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor

from ..inputs import tensors
from ..passes import Undecided
from ..reads import DispatchMode, Reads
from .probe import together_and_alone

_aten = torch.ops.aten
_COMPARISONS = {
    *(_aten.eq, _aten.ne, _aten.lt, _aten.le, _aten.gt, _aten.ge, _aten.signbit),
    *(_aten.isnan, _aten.isinf, _aten.isposinf, _aten.isneginf, _aten.logical_not),
}


class Gates(DispatchMode):
    """Around `reads`, and so outside of other modes: comparisons of values of rows.

    The first forward says which come out alike for all: a missing value that none of the rows has,
    a threshold that all of them pass. Of what it has found some can be turned in others. A model
    that treats rows one by one does so then too, and what it does with the rows that it chooses
    shows.

    Args:
        reads: knows which tensors are the same whatever the rows are.
        found: of each comparison of the first forward its value, or None where values differ; by
            default that of the first forward inside.
        turned: numbers of comparisons that give the opposite.
    """

    def __init__(
        self, reads: Reads, found: list[bool | None] | None = None, turned: Set[int] = frozenset()
    ):
        super().__init__()
        self.reads, self.turned = reads, turned
        self.found = [] if found is None else found
        self.recorded = found is not None

    def __enter__(self):
        self.place = 0
        super().__enter__()
        self.reads.__enter__()
        return self

    def __exit__(self, *error):
        self.recorded = True
        try:
            self.reads.__exit__(*error)
        finally:
            super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not _compares(func, kwargs) or not _is_new(result, args):
            return result
        if self.reads.constant(args):
            return result
        if not self.recorded:
            self.found.append(_common(result))
        elif self.turned and self.place >= len(self.found):  # a loop over rows
            raise Undecided("replicas together make other comparisons than one")
        place, self.place = self.place, self.place + 1
        return result.logical_not() if place in self.turned else result

    def choices(self, value: bool) -> list[set[int]]:
        """What to turn of those that gave `value`: all, or where that cannot be, each of the
        first."""
        places = [i for i, found in enumerate(self.found) if found is value]
        return [{*chosen} for chosen in together_and_alone(places)]


def _compares(func, kwargs: dict) -> bool:
    """Whether an operation makes truth values: a cast does by a comparison with 0."""
    cast = func is _aten._to_copy.default and kwargs.get("dtype") == torch.bool
    return cast or func.overloadpacket in _COMPARISONS


def _is_new(result, args: tuple) -> bool:
    """Whether a result is a plain tensor, and none of those given."""
    plain = type(result) is Tensor and result.layout is torch.strided and not result.is_nested
    return plain and not any(result is t for t in tensors(args))


def _common(truths: Tensor) -> bool | None:
    if not truths.numel():
        return None
    any_true = bool(truths.any())
    return any_true if any_true == bool(truths.all()) else None
