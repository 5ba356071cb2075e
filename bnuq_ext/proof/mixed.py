"""Whether a forward computes something of all replicas at once, even if its values do not show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..inputs import tensors
from ..passes import DoesNotFold, begun_pass
from ..reads import DispatchMode, storage_of, written
from ..samplers import Draw

_aten = torch.ops.aten
_AS_TOLD = {  # of their tensor they take its dtype, or rows that do not meet
    *(_aten.new_empty, _aten.new_empty_strided, _aten.new_full, _aten.new_ones, _aten.new_zeros),
    _aten._pack_padded_sequence,
}


# What each of these makes of a row hangs on others along a dimension. (Sorting is left out: rows may be put back.)
_ALONG = {
    *(_aten.cumsum, _aten.cumsum_, _aten.cumprod, _aten.cumprod_, _aten.logcumsumexp),
    *(_aten.cummax, _aten.cummin, _aten._softmax, _aten._log_softmax),
}


class Operation(NamedTuple):
    """One call of the dispatcher: what was called, how many numbers it took and made, and how many
    lie along a dimension that it goes along."""

    called: object
    given: list[int]
    made: list[int]
    along: int = 0

    def is_like(self, other: Operation) -> bool:
        same = self.called is other.called and len(self.given) == len(other.given)
        return same and len(self.made) == len(other.made)

    def mixing(self, alone: Operation, T: int) -> list[int]:
        """Which of its results are made of several replicas, where `alone` is of one."""
        growth = {n / m for m, n in zip(alone.given, self.given, strict=True) if m}

        def mixes(m: int, n: int) -> bool:
            same, pairs = n == m and growth != {1}, n == T * T * m and T in growth
            return same or pairs or self.along != alone.along

        sizes = zip(alone.made, self.made, strict=True)
        return [i for i, (m, n) in enumerate(sizes) if growth and mixes(m, n)]

    def goes_by_rows(self) -> bool:
        """Whether it has more, or other numbers by its definition, and mixes none."""
        chooses = torch.Tag.dynamic_output_shape in self.called.tags
        return chooses or self.called.overloadpacket in _AS_TOLD


class Mixed(DispatchMode):
    """Around forwards, entered for each, of one replica and then of `num_samples`: which numbers were
    computed of all replicas together.

    The two do the same operations one by one. Where the second gives one more numbers than the
    first did and gets as many back, it was a largest value, a mean or another choice of all of them;
    where it gives T times as many and gets T² times, rows were paired with rows. What is made of
    such numbers is such a number too. Where the operations differ nothing is said.

    Args:
        constant: whether a tensor is the same whatever the rows are.
        num_samples: of the last forward.
    """

    def __init__(self, constant: Callable[[Tensor], bool], num_samples: int):
        super().__init__()
        self.constant, self.num_samples = constant, num_samples
        self.operations: list[Operation] = []

    def __enter__(self):
        self.before, self.operations = self.operations, []
        self.comparable = bool(self.before)
        # By place: a tensor that keeps its memory, and the operation.
        self.mixed: dict[object, tuple[Tensor, str]] = {}
        self.left = 0
        return super().__enter__()

    def watched(self, draw: Draw) -> Draw:
        """The draw for the next forward: tells when a stochastic call is over."""
        return draw._replace(spoil=self._leave)

    def _leave(self, y: Tensor) -> None:
        self.left += 1

    def _in_a_layer(self) -> bool:
        """Whether a stochastic layer computes, which knows the rows of each replica."""
        active = begun_pass()
        return active is not None and sum(active.calls.values()) > self.left

    def check(self, output: Tensor) -> None:
        """Raises DoesNotFold if an output of the last forward is made of such numbers."""
        name = self._mixed_by(output)
        if name and self.comparable and len(self.operations) == len(self.before):
            raise DoesNotFold(f"its output hangs on what {name} makes of the rows of all replicas")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = list(tensors((args, kwargs)))
        sizes = [0 if self.constant(t) else t.numel() for t in given]
        name = next((name for t in given if (name := self._mixed_by(t))), "")
        result = func(*args, **kwargs)
        made, mixing = list(tensors(result)), []
        if not self._in_a_layer():
            operation = Operation(func, sizes, [t.numel() for t in made], _length(func, args))
            mixing = self._mixing(operation)
        if name or mixing:
            into = written(func, args, kwargs)
            viewed = {storage_of(t) for t in given} - {storage_of(t) for t in into}
            found = [*made, *into] if name else [made[i] for i in mixing]
            self._add(found, viewed, name or str(func))
        return result

    def _mixed_by(self, t: Tensor) -> str:
        memory = storage_of(t) if self.mixed else None
        if not memory:  # none of an empty tensor, or of a subclass
            return ""
        return (self.mixed.get(memory) or self.mixed.get((memory, *_extent(t))) or (t, ""))[1]

    def _add(self, made: list[Tensor], viewed: set[int | None], name: str) -> None:
        """Notes what was made or written; of a view of other memory the part alone."""
        for t in made:
            memory = storage_of(t)
            if memory:
                self.mixed[(memory, *_extent(t)) if memory in viewed else memory] = t, name

    def _mixing(self, now: Operation) -> list[int]:
        """Which results of the next operation are made of several replicas."""
        place = len(self.operations)
        self.operations.append(now)
        self.comparable &= place < len(self.before) and now.is_like(self.before[place])
        if not self.comparable or now.goes_by_rows():
            return []
        return now.mixing(self.before[place], self.num_samples)


def _length(func, args: tuple) -> int:
    return args[0].size(args[1]) if func.overloadpacket in _ALONG and args[0].dim() else 0


def _extent(t: Tensor) -> tuple:
    return t.storage_offset(), t.shape, t.stride()
