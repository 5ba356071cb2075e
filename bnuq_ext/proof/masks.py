"""Masks that are the same for all rows of a trial, and hide what a model does with rows it chooses."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor

from ..inputs import map_tensors, tensors
from ..passes import Undecided
from ..reads import DispatchMode, Reads
from .probe import together_and_alone


class Masks(DispatchMode):
    """Around forwards, outside of `reads`: boolean tensors that depend on the rows, where an
    operation makes anything but another mask with them.

    The first forward notes which of them are the same for all rows (no value is missing, all pass a
    threshold). In others some can be inverted: a model that treats rows one by one still does so,
    and what it does with the rows that a mask chooses shows.

    Args:
        reads: knows which tensors are the same whatever the rows are.
        found: for each operation of the first forward with such masks the value that all rows have
            in each, or None; nothing for one that makes a mask. By default noted inside.
        inverted: numbers of the operations that are given the opposite of masks which are the same
            for all rows.
    """

    def __init__(
        self,
        reads: Reads,
        found: list[list[bool | None]] | None = None,
        inverted: Set[int] = frozenset(),
    ):
        super().__init__()
        self.reads, self.inverted = reads, inverted
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
        given = args, kwargs or {}
        masks = list({id(t): t for t in tensors(given) if self._is_mask(t)}.values())
        if masks and self.recorded and self.inverted:
            given = self._invert(given, masks)
        result = func(*given[0], **given[1])
        if masks and not self.recorded:
            uses = not any(t.dtype == torch.bool for t in tensors(result))
            self.found.append([*map(_common, masks)] if uses else [])
        return result

    def _is_mask(self, t: Tensor) -> bool:
        plain = type(t) is Tensor and t.layout is torch.strided and not t.is_nested
        return plain and t.dtype == torch.bool and not self.reads.is_constant(t)

    def _invert(self, given: tuple, masks: list[Tensor]) -> tuple:
        if self.place >= len(self.found):  # a loop over rows
            raise Undecided("replicas together have other masks than one")
        place, self.place = self.place, self.place + 1
        if place not in self.inverted:
            return given
        found = zip(masks, self.found[place], strict=True)
        alike = {id(mask) for mask, value in found if value is not None}
        return map_tensors(given, lambda t: t.logical_not() if id(t) in alike else t)

    def choices(self, value: bool) -> list[set[int]]:
        """What to turn of what is `value` for all rows: everything, and each of the first."""
        places = [i for i, found in enumerate(self.found) if value in found]
        return [{*chosen} for chosen in together_and_alone(places)]


def _common(mask: Tensor) -> bool | None:
    if not mask.numel():
        return None
    any_true = bool(mask.any())
    return any_true if any_true == bool(mask.all()) else None
