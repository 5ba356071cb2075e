"""What ends the process on a GPU, an index out of range, as an error before it is computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from ..inputs import tensors
from ..passes import DoesNotFold
from ..reads import MASKS, DispatchMode, is_integer, watched

_aten = torch.ops.aten
_OWN = {"aten", "prims", "profiler", "quantized", "mkldnn", "onednn", "bnuq"}


@contextmanager
def checked_indices(inputs):
    """Around forwards on a GPU: numbers that do not suit an operation, which would end the process,
    raise an IndexError, as indices out of range do on the CPU. An operation that is not torch's is
    not known so far: one that is given integers raises DoesNotFold."""
    if not any(_ends_process(t) for t in tensors(inputs)):
        yield
        return
    with watched(nullcontext(), _Checks()):
        yield


def _ends_process(t: Tensor) -> bool:
    return t.device.type != "cpu"


class _Checks(DispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        suits = _CHECKS.get(func, _CHECKS.get(func.overloadpacket))
        if suits is not None and not suits(*args):
            raise IndexError(f"numbers out of range for {func}")
        if func.namespace not in _OWN and any(is_integer(t.dtype) for t in tensors((args, kwargs))):
            raise DoesNotFold(f"on a GPU, integers that its forward gives {func} cannot be checked")
        return func(*args, **(kwargs or {}))


def _within(numbers: Tensor, low: float, high: float) -> bool:
    return bool(((numbers >= low) & (numbers <= high)).all())


def _below(index: Tensor, size: int, signed: bool = False) -> bool:
    return _within(index, -size if signed else 0, size - 1)


def _along(t: Tensor, dim: int, index: Tensor, *others, signed: bool = False) -> bool:
    return _below(index, t.size(dim) if t.dim() else 1, signed)


def _filled(t: Tensor, dim: int, index: Tensor, *others) -> bool:
    return _along(t, dim, index, signed=True)


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


def _classes(t: Tensor, target: Tensor, weight, reduction: int, ignored: int) -> bool:
    return _below(target[target != ignored], t.size(1 if t.dim() > 1 else 0))


def _unpooled(t: Tensor, indices: Tensor, size: list[int], *others) -> bool:
    return _below(indices, math.prod(size))


def _scattered(t: Tensor, mask: Tensor, source: Tensor) -> bool:
    return int(torch.broadcast_tensors(t, mask)[1].sum()) <= source.numel()


def _probabilities(t: Tensor, *others) -> bool:
    return _within(t, 0, 1)


def _drawn_with(t: Tensor, p: Tensor) -> bool:
    return _probabilities(p)


def _weights(t: Tensor, *others) -> bool:
    return _within(t, 0, torch.finfo(t.dtype).max) and bool((t.sum(-1) > 0).all())


def _counts(t: Tensor, *others) -> bool:
    return _within(t, 0, math.inf)


def _true(t: Tensor, *others) -> bool:
    return bool(t)


def _packets(*names: str) -> list:
    return [getattr(_aten, name) for name in names]


_SUITS: dict[Callable[..., bool], list] = {
    _along: _packets(
        *("index_select", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_"),
        *("scatter_reduce", "scatter_reduce_", "index_add", "index_add_", "index_copy"),
        *("index_copy_", "index_reduce", "index_reduce_"),
    ),
    _filled: _packets("index_fill", "index_fill_"),
    _at: _packets(
        *("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"),
        "_unsafe_index_put",
    ),
    _anywhere: _packets("take", "put", "put_"),
    _in_table: _packets("embedding", "_embedding_bag", "_embedding_bag_forward_only"),
    _classes: _packets("nll_loss_forward", "nll_loss2d_forward"),
    _unpooled: _packets("max_unpool2d", "max_unpool3d"),
    _scattered: _packets("masked_scatter", "masked_scatter_"),
    _probabilities: [_aten.binary_cross_entropy, _aten.bernoulli.default],
    _drawn_with: [_aten.bernoulli.Tensor, _aten.bernoulli_.Tensor],
    _weights: _packets("multinomial"),
    _counts: _packets("repeat_interleave"),
    _true: _packets("_assert_async"),
}
_CHECKS = {operation: suits for suits, given in _SUITS.items() for operation in given}
