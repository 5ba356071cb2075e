"""Whether a forward computes something from several replicas, even if no value shows it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from ..inputs import tensors
from ..passes import DoesNotFold, begun_pass
from ..reads import DispatchMode, storage_of, written
from ..samplers import Draw

_aten = torch.ops.aten
# Whether torch calls these, which copy nothing, depends on who else holds the tensor.
_NAMES = {_aten.alias, _aten.detach, _aten.lift_fresh}
# These take no more than the shape of the tensor that they are given.
_FACTORIES = {
    *(_aten.new_empty, _aten.new_empty_strided, _aten.new_full, _aten.new_ones, _aten.new_zeros),
    *(_aten.empty_like, _aten.full_like, _aten.ones_like, _aten.zeros_like),
    *(_aten.rand_like, _aten.randn_like),
}
# How many numbers these return depends on values; of the second set on those of an index.
_CHOICES = {
    _aten.masked_select,
    _aten.nonzero,
    _aten.repeat_interleave,
    _aten._pack_padded_sequence,
}
_CHOICES_BY = {_aten.index, _aten.index_select, _aten.gather, _aten.embedding, _aten.take}
_SORTS = {_aten.sort, _aten.topk}
# These compute a number from others along some dimensions, or from all.
_ALONG = {
    *(_aten.cumsum, _aten.cumsum_, _aten.cumprod, _aten.cumprod_, _aten.logcumsumexp),
    *(_aten.cummax, _aten.cummin, _aten._softmax, _aten._log_softmax),
    *(_aten.flip, _aten.roll, _aten._fft_r2c, _aten._fft_c2c, _aten._fft_c2r),
    *_SORTS,
}
_ATTENTION = {
    *(_aten._scaled_dot_product_flash_attention_for_cpu, _aten._scaled_dot_product_flash_attention),
    *(_aten._scaled_dot_product_efficient_attention, _aten._scaled_dot_product_cudnn_attention),
    _aten._scaled_dot_product_fused_attention_overrideable,
}
# In training all their results are made of the statistics, which are one of them.
_BATCH_NORMS = {
    *(_aten.native_batch_norm, _aten._native_batch_norm_legit, _aten._batch_norm_with_update),
    *(_aten.cudnn_batch_norm, _aten.miopen_batch_norm),
}
# Counts of rows by group, and their sums, are offsets for what reads or multiplies rows there.
_PLACES = {_aten.bincount, _aten.histc, _aten.cumsum}
_AT_PLACES = _CHOICES_BY | {
    _aten._grouped_mm,
    _aten._embedding_bag,
    _aten._embedding_bag_forward_only,
}
# What these make of counts is no offset: a limit drops rows by how many came before.
_DECISIONS = {
    *(_aten.lt, _aten.le, _aten.gt, _aten.ge, _aten.eq, _aten.ne, _aten.where),
    *(_aten.clamp, _aten.clamp_, _aten.clamp_min, _aten.clamp_max, _aten.minimum, _aten.maximum),
}


def _last(dims: int) -> Callable[..., list[int]]:
    return lambda t, *others: [*t.shape[-dims:]]


def _steps(t: Tensor, *others) -> list[int]:
    """Of cuDNN's recurrent layers, with packed sequences."""
    batch_first, batch_sizes = others[9], others[13]
    return [len(batch_sizes) or t.size(1 if batch_first else 0)]


def _padded(t: Tensor, pads: list[int], *others) -> list[int]:
    if not t.is_floating_point():  # numbers of rows in groups
        return []
    dims = [i // 2 for i, pad in enumerate(pads) if pad]
    return [t.size(-1 - dim) for dim in dims]


# The sizes that an operation computes one number from: of all, of some dimensions, of windows.
_SPANS: dict[object, Callable[..., list[int]]] = {
    **dict.fromkeys(
        (
            *(_aten.bincount, _aten._unique2, _aten.unique_dim, _aten.unique_consecutive),
            *(_aten.quantize_per_tensor_dynamic, _aten.masked_scatter, _aten.masked_scatter_),
        ),
        lambda t, *others: [t.numel()],
    ),
    _aten.renorm: lambda t, p, dim, most: [t.numel() // max(t.size(dim), 1)],
    **dict.fromkeys(
        (_aten.native_layer_norm, _aten._fused_rms_norm), lambda t, shape, *others: [*shape]
    ),
    _aten.native_group_norm: lambda t, w, b, N, C, S, groups, eps: [C * S // groups],
    _aten.unfold: lambda t, dim, *others: [t.size(dim)],
    _aten.constant_pad_nd: _padded,
    **dict.fromkeys((_aten.linalg_pinv, _aten.tril, _aten.triu), _last(2)),
    **dict.fromkeys((_aten.reflection_pad1d, _aten.replication_pad1d), _last(1)),
    **dict.fromkeys((_aten.avg_pool2d, _aten.max_pool2d_with_indices, _aten.im2col), _last(2)),
    **dict.fromkeys((_aten.avg_pool3d, _aten.max_pool3d_with_indices), _last(3)),
    **dict.fromkeys(
        (
            *(_aten.convolution, _aten.grid_sampler_2d, _aten.grid_sampler_3d),
            _aten.cudnn_grid_sampler,
            *(_aten.upsample_nearest1d, _aten.upsample_nearest2d, _aten.upsample_nearest3d),
            *(_aten.upsample_linear1d, _aten.upsample_bilinear2d, _aten.upsample_trilinear3d),
            *(_aten.upsample_bicubic2d, _aten._upsample_bilinear2d_aa),
        ),
        lambda t, *others: [*t.shape[2:]],
    ),
    **dict.fromkeys(_ATTENTION, lambda query, key, *others: [key.size(-2)]),
    _aten.mkldnn_rnn_layer: lambda t, *others: [len(t)],
    _aten._cudnn_rnn: _steps,
}


class Operation(NamedTuple):
    """One call of the dispatcher, by the number of elements of its tensors.

    Attributes:
        called: the overload.
        given: of each argument that depends on the rows.
        fixed: of each other argument.
        made: of each result.
        along: the sizes of the dimensions that it goes along.
    """

    called: object
    given: list[int]
    fixed: list[int]
    made: list[int]
    along: list[int]

    def is_like(self, other: Operation) -> bool:
        """Whether both have as many tensors of each kind."""
        return all(len(a) == len(b) for a, b in zip(self[1:4], other[1:4], strict=True))

    def mixing(self, alone: Operation, num_samples: int) -> list[int]:
        """Which of its results are made of several replicas; `alone`: the same call for one replica."""
        given = list(zip(alone.given, self.given, strict=True))
        more = any(m != n for m, n in given)
        empty = bool(given) and not any(n for _, n in given)
        growth = max([Fraction(n, m) for m, n in given if m] + [num_samples])
        matrix = any(n > num_samples * m > 0 for m, n in zip(alone.fixed, self.fixed, strict=True))

        def mixes(m: int, n: int) -> bool:
            same, pairs = n == m > 0, n > growth * m > 0
            return (same and (more or empty)) or (more and (pairs or matrix))

        if more and self.along != alone.along:
            return list(range(len(self.made)))
        return [
            i for i, sizes in enumerate(zip(alone.made, self.made, strict=True)) if mixes(*sizes)
        ]


class CallCounter:
    """A draw's `tap` that counts the stochastic calls that have returned."""

    calls = 0

    def __call__(self, y: Tensor) -> None:
        self.calls += 1


class Mixed(DispatchMode):
    """Around forwards, entered for each, of one replica and then of `num_samples`: which tensors of
    the second are made of several replicas.

    The two are compared operation by operation, by the sizes of tensors. One that is given more
    numbers than for a single replica, and returns as many, was a maximum, a mean or another choice
    of all of them; one that returns more than in proportion has paired rows with rows; and some go
    along the rows. What is made of such tensors is one too. Further turns of a Python loop over the
    rows are left out: the comparison goes on at the first forward's next operation, or behind the
    next stochastic call.

    Args:
        is_constant: whether tensors are the same whatever the rows are.
        num_samples: of the last forward.
        in_step: whether an operation that the first forward did not do ends the comparison until the
            next stochastic call: for a single row torch calls others (a copy less).
    """

    def __init__(
        self, is_constant: Callable[[object], bool], num_samples: int, in_step: bool = False
    ):
        super().__init__()
        self.is_constant, self.num_samples, self.in_step = is_constant, num_samples, in_step
        # By the stochastic calls that were over.
        self.operations: dict[int, list[Operation]] = {}

    def __enter__(self):
        self.before, self.operations = self.operations, defaultdict(list)
        self.places: dict[int, int] = defaultdict(int)  # of the next one in a part of those before
        # By place: the memory, which stays as long, and the operation. (Not the tensor: torch makes
        # other calls for one that somebody else holds.)
        self.mixed: dict[object, tuple[torch.UntypedStorage, torch._ops.OpOverload]] = {}
        self.finished = CallCounter()
        return super().__enter__()

    def watched(self, draw: Draw) -> Draw:
        """The draw for the next forward, which tells when a stochastic call is over."""
        return draw._replace(tap=self.finished)

    def check(self, output: Tensor) -> None:
        """Raises DoesNotFold if an output of the last forward is made of several replicas."""
        source = self._source(output)
        if source is not None:
            raise DoesNotFold(
                f"its output hangs on what {source} makes of the rows of all replicas"
            )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = tensors((args, kwargs))
        sizes = [(self.is_constant(t), t.numel()) for t in given]
        source = self._source_of(func.overloadpacket, args, kwargs)
        result = func(*args, **kwargs)
        made = tensors(result) or written(func, args, kwargs)
        mixing = self._compare(_operation(func, args, kwargs, sizes, made), args, kwargs)
        if source and source.overloadpacket in _PLACES and func.overloadpacket in _DECISIONS:
            source = func
        if source or mixing:
            into = written(func, args, kwargs)
            viewed = {storage_of(t) for t in given} - {storage_of(t) for t in into}
            # cuDNN's recurrent layers hand their weights back.
            fixed = {storage_of(t) for t, (c, _) in zip(given, sizes, strict=True) if c} & viewed
            mixed = [made[i] for i in mixing if storage_of(made[i]) not in fixed]
            found = [*made, *into] if source else mixed
            self._add(found, viewed, source or func)
        return result

    def _compare(self, now: Operation, args: tuple, kwargs: dict) -> list[int]:
        """Which results of the next operation are made of several replicas."""
        packet = now.called.overloadpacket
        if packet in _NAMES or self._in_a_layer():
            return []
        alone = self._alone(now)
        chooses = packet in _CHOICES or (packet in _CHOICES_BY and not self.is_constant(args[1:]))
        if alone is None or chooses or packet in _FACTORIES:
            return []
        mixing = now.mixing(alone, self.num_samples)
        if packet in _SORTS:  # rows may be put back by the places that are the other result
            return mixing[:1]
        if packet in _BATCH_NORMS:
            trains = _told(now.called, args, kwargs, "training")
            return list(range(len(now.made))) if mixing and trains is not False else []
        return mixing

    def _alone(self, now: Operation) -> Operation | None:
        """The same operation in the forward before, if it is the next there."""
        part = self.finished.calls
        self.operations[part].append(now)
        before, place = self.before.get(part, []), self.places[part]
        if place >= len(before) or now.called is not before[place].called:
            if self.in_step:
                self.places[part] = len(before)
            return None  # one more turn of a loop over rows
        self.places[part] += 1
        return before[place] if now.is_like(before[place]) else None

    def _in_a_layer(self) -> bool:
        """Whether a stochastic layer computes, which knows the rows of each replica."""
        active = begun_pass()
        return active is not None and sum(active.calls.values()) > self.finished.calls

    def _source_of(self, packet, args: tuple, kwargs: dict):
        """The operation by which what an operation is given is mixed, or None."""
        if not self.mixed or packet in _FACTORIES:
            return None
        first, others = [
            [self._source(t) for t in tensors(a)] for a in (args[:1], (args[1:], kwargs))
        ]
        if packet in _AT_PLACES:
            others = [s for s in others if s is None or s.overloadpacket not in _PLACES]
        return next((source for source in (*first, *others) if source), None)

    def _source(self, t: Tensor):
        """The same of a tensor."""
        memory = storage_of(t)
        for place in (memory, (memory, _extent(t))) if memory else ():
            kept, source = self.mixed.get(place, (None, None))
            if kept is not None and kept.data_ptr() == memory:  # resize_ moves it
                return source
        return None

    def _add(self, made: list[Tensor], viewed: set[int | None], source) -> None:
        """Notes what was made or written; of a view of other memory the part alone."""
        for t in made:
            memory = storage_of(t)
            if memory:  # none of an empty tensor, or of a subclass
                place = (memory, _extent(t)) if memory in viewed else memory
                self.mixed[place] = t.untyped_storage(), source


def _operation(func, args: tuple, kwargs: dict, sizes: list, made: list[Tensor]) -> Operation:
    given, fixed = ([n for c, n in sizes if c == constant] for constant in (False, True))
    return Operation(func, given, fixed, [t.numel() for t in made], _along(func, args, kwargs))


def _along(func, args: tuple, kwargs: dict) -> list[int]:
    packet = func.overloadpacket
    if packet in _SPANS:
        return _SPANS[packet](*args)
    if packet not in _ALONG or not args[0].dim() or args[0].is_nested:
        return []
    if packet in _SORTS and not args[0].is_floating_point():  # numbers of experts
        return []
    dims = _dims(func, args, kwargs)
    return [args[0].size(dim) for dim in dims] or [args[0].numel()]


def _dims(func, args: tuple, kwargs: dict) -> list[int]:
    """The dimensions along which an operation was told to go; none for all of them as one."""
    dims = _told(func, args, kwargs, "dim", "dims")
    return list(dims) if isinstance(dims, (list, tuple)) else [dims]


def _told(func, args: tuple, kwargs: dict, *names: str):
    """The argument of an operation that has one of these names; None where it has none."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in names:
            given = place < len(args)
            return args[place] if given else kwargs.get(argument.name, argument.default_value)
    return None


def _extent(t: Tensor) -> tuple | None:
    return None if t.is_nested else (t.storage_offset(), t.shape, t.stride())
