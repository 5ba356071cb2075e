"""Whether a forward looks at values of its rows,
so that what it does next may depend on all of them."""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager, nullcontext, suppress
from threading import get_ident

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .chosen import MASKS, Chosen
from .contents import copy_of, memory_of
from .inputs import has_rows, tensors
from .macs import macs_of
from .passes import DoesNotFold, begun_pass
from .untraced import uncompiled

_aten = torch.ops.aten
# These reach no dispatcher.
_ARRAYS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}
# These read tensors in a list past the dispatcher.
_LISTS = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}
# Whatever was there, or what a kernel that is started beside the dispatcher will write.
_UNWRITTEN = {
    *(_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.empty_permuted),
    *(_aten.new_empty, _aten.new_empty_strided),
}

# Given infinities these end the process: the library behind them does.
_FINITE = {_aten.linalg_eig, _aten.linalg_eigvals, _aten._linalg_eigvals}

# By thread what its `Reads` and `Ranges` have entered, the innermost last. No threading.local: a forked
# process ends those of threads that it has not.
_WATCHERS: dict[int, list] = defaultdict(list)

READS = "its forward reads values of its rows, to branch or to compute apart"
COUNTS = "its forward asks how many rows values have chosen, as by len, shape or [:n] of h[mask]"


class Reads:
    """Around forwards, any number of times: notes whether they read values of tensors,
    in Python or TorchScript.

    `if h.sum() > 0` takes one branch for T*N rows where T replicas may take two, and the rows of a
    trial need not show it. Parameters and buffers may be read, inputs without rows, and what is
    made of these alone or of no tensor (a mask of ones): they are the same for all replicas.

    How many rows `h[h > 0]` has depends on values too. That couples replicas where Python asks for
    it, or where such rows come into a stochastic layer,
    which knows a replica's rows by their number.

    Args:
        modules: all modules of the model.
        inputs: what it is given.
        num_rows: in the first dimension of inputs that have rows.

    Attributes:
        found: what of values is read, in words; empty where nothing is.
        lasting: whether that would be found the next time too.
        casts: whether floating-point values of rows became integers, which may be indices.
        draws: whether random numbers were drawn by operations of torch.
        finite: whether operations must not be given infinities.
        largest: bytes of the largest activation after the first call of a stochastic layer.
        largest_before: bytes of the largest before the first such call, the input's rows included.
        diverged: whether one was called, so that replicas are no longer the same.
        overwritten: copies of parameters and what else is guarded, made before an operation writes into them.
        macs: of all operations; see `macs_of`.
    """

    def __init__(self, modules: list[nn.Module], inputs, num_rows: int):
        self._parameters: dict = defaultdict(list)  # that none has written into, by address
        for p in (p for m in modules for p in m.parameters(False)):
            self._parameters[storage_of(p)].append(p)
        shared = {storage_of(t) for t in tensors(inputs) if not has_rows(t, num_rows)}
        given = [t for t in tensors(inputs) if has_rows(t, num_rows)]
        own = self._parameters.keys() | {storage_of(t) for m in modules for t in m.buffers(False)}
        self.constants = (own | shared) - {storage_of(t) for t in given} - {None}
        self.constant_tensors: dict = {}  # by address, which is theirs for as long as they are kept
        self.num_rows = num_rows
        self.found = ""
        self.lasting = True
        self.casts = self.draws = self.finite = False
        self.selections = 0  # how often values of rows have chosen rows
        self.largest, self.diverged = 0, False
        self.largest_before = sum([_held_bytes(t) for t in given])
        self.overwritten: dict[Tensor, Tensor] = {}
        self.macs = 0

    def __enter__(self) -> None:
        _enter(_Functions(self), _Operations(self))

    def __exit__(self, *error) -> None:
        _leave(*error)

    def guard(self, others: list[Tensor]) -> None:
        """Copies these too before an operation writes into them."""
        for tensor in others:
            self._parameters[storage_of(tensor)].append(tensor)

    def note_read(self, args) -> None:
        if not self.is_constant(args):
            self.found = READS

    def copy_guarded(self, targets: list[Tensor]) -> None:
        """Copies what is guarded and whose memory an operation is about to write into."""
        for tensor in targets:
            for parameter in self._parameters.pop(storage_of(tensor), ()):
                self.overwritten[parameter] = copy_of(parameter)

    def look_at_operation(self, func, args: tuple, kwargs: dict) -> None:
        """Notes what an operation on rows makes of their values."""
        place = _cast(func, args, kwargs)
        if place is not None:
            self.casts |= not self.is_constant(args[place])
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        self.finite |= func.overloadpacket in _FINITE
        if torch.Tag.dynamic_output_shape in func.tags:
            given = (args, kwargs)
            if func is _aten.index.Tensor:  # integers that index have as many rows as before
                given = [t for t in tensors((args[1:], kwargs)) if t.dtype in MASKS]
            self.selections += not self.is_constant(given)

    def follow(self, func, args: tuple, kwargs: dict, result) -> None:
        """What an operation makes of constants, or of no tensor, is one; what it writes another
        tensor's values into is none, and what it draws or leaves unwritten neither."""
        given = (args, kwargs)
        if func is _aten.lift_fresh.default and result.dim() == 0:
            given = ()  # a number; a list may have been one of tensors
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        if drawn or func.overloadpacket in _UNWRITTEN or not self.add_constants(given, result):
            for tensor in (*made_by(func, args, kwargs, result), *written(func, args, kwargs)):
                self.constants.discard(storage_of(tensor))
                self.constant_tensors.pop(storage_of(tensor), None)

    def note_size(self, result) -> None:
        """Notes how large the result of an operation on rows is. Before the first stochastic layer
        replicas may share it; behind the model there is output_fn, outside of the pass."""
        active = begun_pass()
        self.diverged |= active is not None and bool(active.calls)
        made = max([_held_bytes(t) for t in tensors(result) if not self.is_constant(t)], default=0)
        if self.diverged:
            self.largest = max(self.largest, made)
        else:
            self.largest_before = max(self.largest_before, made)

    def add_constants(self, given, result) -> bool:
        """Takes what is made of constants as constant; whether it is made of these alone."""
        if not self.is_constant(given):
            return False
        made = {storage_of(t): t for t in tensors(result)}
        self.constant_tensors |= made
        self.constants |= made.keys() - {None}
        return True

    def is_constant(self, args) -> bool:
        """Whether tensors are the same whatever the rows are, as far as has been followed."""
        return all(storage_of(t) in self.constants for t in tensors(args))

    def check(self, calls: dict[str, int]) -> None:
        """Raises DoesNotFold if values decide about more than themselves; `calls`:
        rows of stochastic calls."""
        if self.found:
            raise DoesNotFold(self.found)
        if self.selections and any(rows % self.num_rows for rows in calls.values()):
            raise DoesNotFold("a stochastic layer gets rows that are chosen by their values")


class Ranges:
    """Around forwards: floats that a forward casts to integers, which may be indices, are held in
    the range that this cast had in the first of the forwards; a trial's values lie far outside."""

    def __init__(self):
        self.found: list[tuple[Tensor, Tensor]] = []
        self.recorded, self.place = False, 0

    def __enter__(self) -> None:
        self.place = 0
        _enter(nullcontext(), _Casts(self))

    def __exit__(self, *error) -> None:
        self.recorded = True
        _leave(*error)

    def within(self, values: Tensor) -> Tensor:
        """The values of the next cast, held to their range."""
        if not self.recorded:
            self.found.append((values.min(), values.max()))
            return values
        low, high = self.found[self.place]  # an IndexError ends a forward with more casts
        self.place += 1
        return torch.where(values.isnan(), low, values).clamp(low, high)


@contextmanager
def watched(functions, operations):
    """Both modes, with operations as they are under gradients."""
    gradients = torch.is_grad_enabled()
    with (
        uncompiled(),
        torch.inference_mode(False),  # inside it, operations show only as a whole
        torch.set_grad_enabled(gradients),
        functions,
        operations,
    ):
        yield


def _enter(functions, operations) -> None:
    watching = watched(functions, operations)
    _WATCHERS[get_ident()].append(watching)  # first: an interrupt may come after any line
    watching.__enter__()


def _leave(*error) -> None:
    _WATCHERS[get_ident()].pop().__exit__(*error)


def num_watchers() -> int:
    return len(_WATCHERS.get(get_ident(), ()))


def leave_watchers(keep: int) -> None:
    """Leaves all but the outermost `keep`, which is what an interrupt has left entered."""
    entered = _WATCHERS[get_ident()]
    while len(entered) > keep:
        with suppress(Exception):  # of one that is left half
            entered.pop().gen.close()


def _cast(func, args: tuple, kwargs: dict) -> int | None:
    """Which argument has floating-point values that become integers."""
    if func is _aten._to_copy.default:
        place, dtype = 0, kwargs.get("dtype")
    elif func is _aten.copy_.default:
        place, dtype = 1, args[0].dtype
    else:
        return None
    floats = isinstance(args[place], Tensor) and args[place].is_floating_point()  # in vmap a number
    return place if floats and dtype is not None and is_integer(dtype) else None


def is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def written(func, args: tuple, kwargs: dict) -> list[Tensor]:
    """The tensors that an operation writes into."""
    names = [a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    return tensors([given[name] for name in names if name in given])


def made_by(func, args: tuple, kwargs: dict, result) -> list[Tensor]:
    """The results of an operation but for views of what it was given: cuDNN's recurrent layers hand
    their weights back."""
    given = {storage_of(t) for t in tensors((args, kwargs))} - {None, 0}
    return [t for t in tensors(result) if storage_of(t) not in given]


def storage_of(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError, ValueError):  # a subclass without one
        return None


def _held_bytes(tensor: Tensor) -> int:
    """Bytes of its storage that a tensor uses: fewer than it shows if it repeats numbers."""
    memory = memory_of(tensor)
    if memory is tensor:  # of parts, which have their own
        return 0
    return min(memory.nbytes(), tensor.numel() * tensor.element_size())


class DispatchMode(TorchDispatchMode):
    """A mode whose first call does not import torch._dynamo, which takes a second."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Operations(DispatchMode):
    def __init__(self, reads: Reads):
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.Tag.data_dependent_output in func.tags:  # bool(t), t.item(), torch.equal
            self.reads.note_read(args)
        if func._schema.is_mutable:
            self.reads.copy_guarded(written(func, args, kwargs))
        result = func(*args, **kwargs)
        self.reads.look_at_operation(func, args, kwargs)
        self.reads.follow(func, args, kwargs, result)
        self.reads.note_size(result)
        self.reads.macs += macs_of(func, args, result)
        return result


class _Casts(DispatchMode):
    def __init__(self, ranges: Ranges):
        super().__init__()
        self.ranges = ranges

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        place = _cast(func, args, kwargs)
        if place is not None and args[place].numel():
            args = (*args[:place], self.ranges.within(args[place]), *args[place + 1 :])
        return func(*args, **kwargs)


class _Functions(TorchFunctionMode):
    def __init__(self, reads: Reads):
        super().__init__()
        self.reads, self.chosen = reads, Chosen()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        sources = self.chosen.among((args, kwargs))
        if func in _ARRAYS:
            self.reads.note_read(args)
        elif sources and self.chosen.are_counted(func, args, kwargs):
            self.reads.found = COUNTS
        before = self.reads.selections
        result = func(*args, **kwargs)
        if func in _LISTS:
            self.reads.add_constants((args, kwargs), result)
        if sources or self.reads.selections > before:
            self.chosen.follow(func, args, kwargs, sources, result)
        return result
