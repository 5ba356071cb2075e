"""What plain attributes hold, item by item, as values to compare."""

from __future__ import annotations

from argparse import Namespace
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dis import get_instructions
from functools import cached_property, lru_cache, partial
from hashlib import sha256
from itertools import chain, islice
from types import (
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    SimpleNamespace,
)
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

SCALARS = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.Size})
CONTAINERS = (list, dict, set, deque)
_VIEWS = (tuple, frozenset, MappingProxyType, ChainMap)
_RECORDS = (SimpleNamespace, Namespace, UserDict, UserList)
# Packages whose objects are not looked into, and others than the model's own whose objects are.
_FOREIGN = {"builtins", "functools", "torch", "bnuq_ext"}
_CONFIGURED_BY = {"omegaconf", "ml_collections"}
_FLAGS = {bool, str, type(None)}  # of foreign objects: a trainer counts its steps in others
_LOADS = {"LOAD_GLOBAL", "LOAD_NAME"}
_DEEPEST = 8  # of objects in objects
LONGEST = 1024  # items of a container that are `SCALARS`; of a dict keys and values
_SHORTEST = 128  # of others, where nothing else is said
_LARGEST = 1 << 16  # bytes of an array
_MOST = 4096  # objects of a model, with `_SHORTEST` items of a container; in proportion with more
_FIELDS_ALONE: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def identity(value) -> tuple:
    """Of an object: its address, and what tells it from a later one at the same address,
    where that can be."""
    try:
        return id(value), ref(value)
    except TypeError:
        return (id(value),)


class Contents:
    """Appends what values are and hold to a list; two equal lists mean the same values.

    It looks into lists, dicts and sets, records and small arrays, what functions and methods are
    bound to, modules that are no part of the model, and into objects of the packages that the
    model's modules come from, or whose class has no methods: a configuration, but not a trainer that
    counts steps, of which flags and names count alone. Of the modules' classes of these packages the
    attributes count, but not what they hold, and the flags of those that are dicts; of the classes
    of other objects flags and functions; of functions their code too. Each object is looked into
    once, and no property is called.

    Args:
        seen: what is appended to.
        modules: all modules of the model, which are not looked into.
        around: other modules that are not.
        longest: how many items of a container are looked into, and with it how many objects.

    Attributes:
        visited: by address these modules, and the objects that have been looked into, or None.
        tensors: by address those that have been met.
    """

    def __init__(
        self,
        seen: list,
        modules: list[nn.Module],
        around: Iterable[nn.Module] = (),
        longest: int = _SHORTEST,
    ):
        self.seen, self.modules, self.longest = seen, modules, longest
        self.visited: dict[int, object] = {id(m): m for m in (*modules, *around)}
        self.tensors: dict[int, Tensor] = {}
        self.most = len(self.visited) + _MOST * longest // _SHORTEST
        self.classes: set[type] = set()
        self.packages = {_package(type(m)) for m in modules} - _FOREIGN
        for cls in dict.fromkeys(map(type, modules)):
            self._append_classes(cls)
            # A library may replace the forward of a class of torch's.
            found = (vars(base)["forward"] for base in cls.__mro__ if "forward" in vars(base))
            self.append(next(found, None), _DEEPEST)

    def append(self, value, depth: int = 0) -> None:
        """Of a value that is none of `SCALARS`, which stand for themselves."""
        seen = self.seen
        if isinstance(value, Tensor):
            seen += id(value), ref(memory_of(value)), layout_of(value)
            self.tensors[id(value)] = value
            if id(value) not in self._registered:
                seen.append(version_of(value))
        elif type(value) is tuple:
            seen.append(len(value))
            self.append_all(value, depth)
        else:
            seen += (*identity(type(value)), *identity(value))
            if isinstance(value, FunctionType):
                seen.append(value.__code__)  # which a reload of the source exchanges
            new = id(value) not in self.visited and len(self.visited) < self.most
            if new and depth < _DEEPEST:
                self.visited[id(value)] = value
                self._look_into(value, depth)

    def _append_classes(self, cls: type, flags_alone: bool = False) -> None:
        """Notes the attributes of a class and of its bases, if they are of the model's packages: of a
        dict among them the flags; with `flags_alone`, for classes that may count their objects'
        steps, flags and functions."""
        new = [c for c in cls.__mro__ if c not in self.classes and _package(c) in self.packages]
        self.classes.update(new)
        noted: list = []
        for member in [m for c in new for m in [*vars(c).values()]]:  # other threads may add
            if isinstance(member, dict):
                noted += _flags(member)
            elif not flags_alone or isinstance(member, FunctionType) or type(member) in _FLAGS:
                noted.append(member)
        self.append_all(noted, _DEEPEST)

    def append_function(self, function: Callable) -> None:
        """Notes a function by its code, what it holds and the globals that it names,
        any other callable as an object."""
        if isinstance(function, MethodType):
            self._append_callable(function.__self__)
            function = function.__func__
        if isinstance(function, partial):
            self.append_function(function.func)
            for part in (function.args, tuple(function.keywords.items())):
                self.append(part)
        elif isinstance(function, FunctionType):
            self.seen.append(function.__code__)
            for part in (*self._parts(function), _globals(function)):
                self.append_all(part, 0)
        else:
            self._append_callable(function)

    def _append_callable(self, value) -> None:
        self.packages |= {_package(type(value))} - _FOREIGN
        if len(identity(value)) == 1:  # an operator.itemgetter: a later one may lie at its address
            self.seen.append(repr(value))
            self._look_into(value, 0)
        else:
            self.append(value)

    @cached_property
    def _registered(self) -> set[int]:
        """Addresses of parameters and buffers, whose versions count apart."""
        return {
            id(t) for m in self.modules for t in (*m._parameters.values(), *m._buffers.values())
        }

    def _look_into(self, value, depth: int) -> None:
        try:
            for part in self._parts(value):
                self.append_all(part, depth + 1)
        except Exception:  # a proxy of nothing, a mock, an array without bytes: who it is must do
            self.seen.append(None)
            self.visited[id(value)] = None

    def append_all(self, values: Iterable, depth: int) -> None:
        for value in values:
            if type(value) in SCALARS:
                self.seen += (type(value), value)  # 1 == 1.0 == True
            else:
                self.append(value, depth)

    def _parts(self, value) -> Iterable[Iterable]:
        """Groups of what an object holds."""
        if isinstance(value, (*CONTAINERS, *_VIEWS)):
            self.seen.append(len(value))
            items = chain.from_iterable(value.items()) if isinstance(value, Mapping) else value
            items = list(islice(items, LONGEST))
            yield items[: self.longest]
            plain = tuple(v for v in items[self.longest :] if type(v) in SCALARS)
            self.seen += (tuple(map(type, plain)), plain)
            if isinstance(value, ChainMap):
                yield (value.maps,)
        elif isinstance(value, FunctionType):
            yield _cells(value)
            yield value.__defaults__ or ()
            yield (value.__kwdefaults__ or {}).items()
            yield vars(value).items()
        elif isinstance(value, MethodType):
            yield (value.__func__, value.__self__)
        elif isinstance(value, partial):
            yield (value.func, value.args, value.keywords)
        elif isinstance(value, (np.ndarray, bytearray, array)):
            yield _bytes(value)
        fields = getattr(value, "__dict__", {})
        if self.is_open(value):
            self._append_classes(type(value), flags_alone=True)
            yield [*fields.items()]
            yield slots_of(value).items()
        elif isinstance(value, type):
            self._append_classes(value)
        elif _package(type(value)) not in _FOREIGN:
            yield _flags(fields)

    def is_open(self, value) -> bool:
        """Whether the fields of an object count. Those of a lazy layer do not: its first call, which
        makes another object of it, cannot be taken back."""
        if is_lazy_module(value):
            return False
        package = _package(type(value))
        return (
            is_record(value)
            or isinstance(value, nn.Module)
            or package in _CONFIGURED_BY
            or (package in self.packages and not isinstance(value, type))
        )


def is_lazy_module(value) -> bool:
    """Whether it is a lazy layer that has never been called."""
    return isinstance(value, LazyModuleMixin) and value.has_uninitialized_params()


def _flags(named: Mapping) -> list[tuple]:
    return [pair for pair in [*named.items()] if type(pair[1]) in _FLAGS]


def is_record(value) -> bool:
    """Whether an object is there for its fields."""
    return isinstance(value, _RECORDS) or _has_fields_alone(type(value))


def _has_fields_alone(cls: type) -> bool:
    """Whether a class is a dataclass, or an ordinary one without methods but those of the
    language."""
    found = _FIELDS_ALONE.get(cls)
    if found is None:
        own = [vars(base) for base in cls.__mro__ if base is not object]
        members = [pair for base in own for pair in base.items()]
        dicts = [type(member) for name, member in members if name == "__dict__"]
        methods = [n for n, m in members if isinstance(m, FunctionType) and not n.startswith("__")]
        ordinary = set(dicts) == {GetSetDescriptorType} and _package(cls) not in _FOREIGN
        found = hasattr(cls, "__dataclass_fields__") or (ordinary and not methods)
        _FIELDS_ALONE[cls] = found
    return found


def _package(cls: type) -> str:
    return str(cls.__module__).partition(".")[0]


def memory_of(tensor: Tensor) -> object:
    """What a weak reference may go to: torch.utils.swap_tensors refuses a tensor that has one. Of
    a tensor without memory of its own (sparse, or without a shape yet) the tensor."""
    try:
        return tensor.untyped_storage()
    except (RuntimeError, ValueError, NotImplementedError):
        return tensor


def copy_of(tensor: Tensor) -> Tensor:
    """Its numbers, those that it repeats once."""
    held = tensor.detach()
    once = each_once(held)
    return once.clone() if once is held else once.clone().expand(held.shape)


def each_once(tensor: Tensor) -> Tensor:
    """The first numbers along each dimension that repeats them, as expand() does."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def is_freed(tensor: Tensor) -> bool:
    """Whether it has numbers and no memory, as FSDP leaves weights between forwards."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.numel() == 0:
        return False
    memory = memory_of(tensor)
    return memory is not tensor and memory.nbytes() == 0


def layout_of(tensor: Tensor) -> tuple | None:
    """What tells a tensor, with its memory, from a later one at the same address, and whether it gets
    a gradient."""
    try:
        kind = tensor.dtype, tensor.requires_grad
        return kind, tensor.shape, tensor.stride(), tensor.storage_offset()
    except (RuntimeError, ValueError, NotImplementedError):
        return None


def version_of(tensor: Tensor) -> int:
    try:
        return tensor._version
    except (RuntimeError, ValueError):  # of inference mode, or without a shape yet: none is counted
        return -1


def _bytes(value: np.ndarray | bytearray | array) -> tuple:
    """Shape, type and content of an array; of a large one not the content. Keys hold it, so that it
    is a hash."""
    if isinstance(value, np.ndarray):
        small = value.nbytes <= _LARGEST
        return value.shape, value.dtype.str, sha256(value.tobytes()).digest() if small else None
    size = len(value) * getattr(value, "itemsize", 1)
    return len(value), sha256(value).digest() if size <= _LARGEST else None


def _cells(function: FunctionType) -> list:
    """What a function's closure holds; a cell may be empty."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(None)
    return found


def _globals(function: FunctionType) -> list:
    """The globals that a function and those written in it name,
    but not what they call name in turn."""
    return [(n, function.__globals__.get(n)) for n in _names_of_globals(function.__code__)]


@lru_cache(maxsize=256)
def _names_of_globals(code: CodeType) -> tuple[str, ...]:
    names = {i.argval for i in get_instructions(code) if i.opname in _LOADS}
    inner = [_names_of_globals(const) for const in code.co_consts if isinstance(const, CodeType)]
    return tuple(sorted(names.union(*inner)))


def slots_of(value) -> dict[str, object]:
    """The fields in `__slots__` of an object's classes that are set."""
    found = {}
    for cls in type(value).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, MemberDescriptorType):
                with suppress(AttributeError):
                    found.setdefault(name, member.__get__(value))
    return found
