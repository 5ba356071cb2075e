"""What ends the process on a GPU, an index out of range, as an error before it is computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from ..chosen import MASKS
from ..inputs import tensors
from ..passes import DoesNotFold, begun_pass
from ..reads import DispatchMode, is_integer, watched

_aten = torch.ops.aten
_OWN = {"aten", "prims", "bnuq"}


@contextmanager
def checked_indices(inputs):
    """Around forwards: numbers that would end the process raise an error instead. Anywhere those
    that a sparse tensor is made of, which torch does not look at by default; on a GPU an
    IndexError, as far as torch's operations are known here. Nothing is known of another package's:
    given integers it raises DoesNotFold."""
    checks = Checks()
    needed = any(_ends_process(t) for t in tensors(inputs))
    with torch.sparse.check_sparse_tensor_invariants():
        with watched(nullcontext(), checks) if needed else nullcontext():
            yield checks


def _ends_process(t: Tensor) -> bool:
    return t.device.type != "cpu"


class Checks(DispatchMode):
    """`met`: whether a model's forward has an operation to check."""

    met = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        suits = _CHECKS.get(func, _CHECKS.get(func.overloadpacket))
        self.met |= suits is not None and begun_pass() is not None
        if suits is not None and not suits(*args, **kwargs):
            raise IndexError(f"numbers out of range for {func}")
        if func.namespace not in _OWN and any(is_integer(t.dtype) for t in tensors((args, kwargs))):
            raise DoesNotFold(f"on a GPU, integers that its forward gives {func} cannot be checked")
        return func(*args, **kwargs)


def _within(numbers: Tensor, low: float, high: float) -> bool:
    return bool(((numbers >= low) & (numbers <= high)).all())


def _below(index: Tensor, size: int, signed: bool = False) -> bool:
    return _within(index, -size if signed else 0, size - 1)


def _along(t: Tensor, dim: int, index: Tensor, *others, signed: bool = False, **options) -> bool:
    return _below(index, t.size(dim) if t.dim() else 1, signed)


def _at(t: Tensor, indices: list[Tensor | None], *others) -> bool:
    """`None` and an index stand for a dimension each, a mask for as many as it has."""
    dim = 0
    for index in indices:
        mask = index is not None and index.dtype in MASKS
        if index is not None and not mask and not _below(index, t.size(dim), signed=True):
            return False
        dim += index.dim() if mask else 1
    return True


def _anywhere(t: Tensor, index: Tensor, *others) -> bool:
    return _below(index, t.numel(), signed=True)


def _in_table(weight: Tensor, indices: Tensor, *others) -> bool:
    return _below(indices, len(weight))


def _in_bags(weight: Tensor, indices: Tensor, offsets: Tensor, *others) -> bool:
    ends = torch.cat([offsets.new_zeros(1), offsets, offsets.new_tensor([len(indices)])])
    return _in_table(weight, indices) and bool((ends.diff() >= 0).all())


def _classes(t: Tensor, target: Tensor, *others) -> bool:
    return _below(target, t.size(1 if t.dim() > 1 else 0))


def _classes_or_ignored(t: Tensor, target: Tensor, weight, reduction: int, ignored: int) -> bool:
    return _classes(t, target[target != ignored])


def _labels(t: Tensor, target: Tensor, reduction: int) -> bool:
    return _within(target, -1, t.size(-1) - 1)


def _unpooled(t: Tensor, indices: Tensor, size: list[int], *others) -> bool:
    return _below(indices, math.prod(size))


def _scattered(t: Tensor, mask: Tensor, source: Tensor) -> bool:
    return int(torch.broadcast_tensors(t, mask)[1].sum()) <= source.numel()


def _probabilities(t: Tensor, *others, **options) -> bool:
    return _within(t, 0, 1)


def _drawn_with(t: Tensor, p: Tensor, **options) -> bool:
    return _probabilities(p)


def _weights(t: Tensor, *others, **options) -> bool:
    return _within(t, 0, torch.finfo(t.dtype).max) and bool((t.sum(-1) > 0).all())


def _rates(t: Tensor, *others) -> bool:
    return _within(t, 0, math.inf)


def _repeats(t: Tensor, output_size: int | None = None) -> bool:
    return _within(t, 0, math.inf) and output_size in (None, int(t.sum()))


def _true(t: Tensor, *others) -> bool:
    return bool(t)


def _packets(names: str) -> list:
    """Operations, and those in place."""
    both = [name + end for name in names.split() for end in ("", "_")]
    return [getattr(_aten, name) for name in both if hasattr(_aten, name)]


_OPERATIONS: dict[Callable[..., bool], list] = {
    _along: _packets(
        "index_select gather scatter scatter_add scatter_reduce index_add index_copy index_reduce"
    ),
    partial(_along, signed=True): _packets("index_fill"),
    _at: _packets("index index_put"),
    _anywhere: _packets("take put"),
    _in_table: _packets("embedding embedding_renorm"),
    _in_bags: _packets("_embedding_bag _embedding_bag_forward_only"),
    _classes: _packets("multi_margin_loss"),
    _classes_or_ignored: _packets("nll_loss_forward nll_loss2d_forward"),
    _labels: _packets("multilabel_margin_loss_forward"),
    _unpooled: _packets("max_unpool2d max_unpool3d"),
    _scattered: _packets("masked_scatter"),
    _probabilities: [_aten.binary_cross_entropy, _aten.bernoulli.default],
    _drawn_with: [_aten.bernoulli.Tensor, _aten.bernoulli_.Tensor],
    _weights: _packets("multinomial"),
    _rates: _packets("poisson"),
    _repeats: _packets("repeat_interleave"),
    _true: _packets("_assert_async"),
}
_CHECKS = {operation: suits for suits, given in _OPERATIONS.items() for operation in given}
