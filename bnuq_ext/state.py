"""What forwards change of a model, to put it back."""

import pickle
import random
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from .contents import (
    CONTAINERS,
    LONGEST,
    Contents,
    copy_of,
    each_once,
    is_freed,
    is_lazy_module,
    memory_of,
    slots_of,
)
from .structure import Structure, is_of_torch

OWN_BANK = "_bnuq_bank"  # attribute of a model that `attach` gave a bank: that of its layers, in copies too
OF_EVERY_MODULE = frozenset({*nn.Module().__dict__, OWN_BANK})
# Of objects of these classes: what they hold, as a value of its own, and how that is put back.
_GENERATORS: dict[type, tuple[Callable, Callable]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (
        lambda g: pickle.dumps(g.get_state()),
        lambda g, saved: g.set_state(pickle.loads(saved)),
    ),
    np.random.Generator: (
        lambda g: pickle.dumps(g.bit_generator.state),
        lambda g, saved: setattr(g.bit_generator, "state", pickle.loads(saved)),
    ),
}
_HOLDERS = {
    **_GENERATORS,
    np.ndarray: (np.copy, lambda held, saved: held.__setitem__(..., saved)),
    bytearray: (bytes, lambda held, saved: held.__setitem__(slice(None), saved)),
    array: (array.tobytes, lambda held, saved: _refill(held, saved)),
}
_LARGE = 1 << 26  # bytes: a tensor of more is copied when an operation writes into it, an array not


def generators_in(owners: Iterable) -> list:
    """The random generators that are attributes of these objects, each once."""
    values = [value for owner in owners for value in [*attributes_of(owner).values()]]
    return [*{id(value): value for value in values if type(value) in _GENERATORS}.values()]


def attributes_of(owner) -> dict:
    """An object's own, whatever its class makes of them."""
    try:
        held = object.__getattribute__(owner, "__dict__")
    except Exception:  # none, or a property's own error
        return {}
    return held if isinstance(held, dict) else {}


def kept(generator) -> Callable[[], None]:
    """What puts a random generator back."""
    get, put = _GENERATORS[type(generator)]
    return partial(put, generator, get(generator))


def modules_of(model: nn.Module) -> list[nn.Module]:
    """`list(model.modules())` in half the time."""
    return list(names_of(model))


def names_of(model: nn.Module) -> dict[nn.Module, str]:
    """The modules of a model and their qualified names, each once, in the order of `modules()`."""
    found: dict[nn.Module, str] = {}
    ahead: list[tuple[str, nn.Module | None]] = [("", model)]
    while ahead:
        name, module = ahead.pop()
        if module is not None and module not in found:
            found[module] = name
            if module._modules:
                prefix = f"{name}." if name else ""
                ahead += [(prefix + key, m) for key, m in reversed(module._modules.items())]
    return found


def all_names_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """`names_of`, of shared modules with each of their names."""
    found: dict[nn.Module, list[str]] = {}

    def visit(name: str, module: nn.Module, around: tuple[nn.Module, ...]) -> None:
        found.setdefault(module, []).append(name)
        for key, child in module._modules.items():
            if child is not None and not any(child is m for m in (module, *around)):
                visit(f"{name}.{key}" if name else key, child, (module, *around))

    visit("", model, ())
    return found


def is_training(module: nn.Module) -> bool:
    """Its flag, which what torch.jit.freeze has made has not."""
    return getattr(module, "training", False)


class State:
    """A model's structure, buffers, plain attributes and those of its classes, what `Contents` finds
    in the plain ones, and of parameters and large tensors those that forwards write into, to put back
    what they have changed.

    Attributes:
        others: large tensors and other modules' parameters, to be copied as parameters are.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        within: list[nn.Module] | None = None,
        around: Iterable[nn.Module] = (),
        *,
        followed: bool = True,
    ):
        """
        Args:
            within: modules whose structure counts, if they are others.
            around: modules that are let be, and their classes, wherever they are found.
            followed: whether `follow` will tell of writes; if not, large tensors are copied now.
        """
        within = within or modules
        self.structures = [Structure(module) for module in within]
        self.lazy = [module for module in modules if is_lazy_module(module)]
        own = [module for module in modules if not (is_lazy_module(module) and is_of_torch(module))]
        self.attributes = [(m, _attributes(m)) for m in own]
        self.buffers = [(m, dict(m._buffers.items())) for m in own]
        contents = Contents([], within, around, longest=LONGEST)
        classes = contents.classes.difference(*(type(module).__mro__ for module in around))
        self.members = [(cls, vars(cls).copy()) for cls in classes]
        first = len(contents.visited)
        for _, named in (*self.attributes, *self.buffers):
            contents.append_all(named.values(), 0)
        objects = [*contents.visited.values()][first:]
        tensors = [t for t in contents.tensors.values() if _is_filled(t)]
        large = [t for t in tensors if followed and _is_large(t)]
        self.others = [*(t for t in tensors if isinstance(t, nn.Parameter)), *large]
        self._keep_fields(objects, contents.is_open)
        self._keep_values(objects, tensors)
        parameters = [p for m in modules for p in m._parameters.values()]
        self.memories = [(p, p.detach()) for p in (*parameters, *self.others) if _lies(p)]
        self.overwritten: list[dict[Tensor, Tensor]] = []

    def _keep_fields(self, objects: list, is_open: Callable) -> None:
        functions = [v for v in objects if isinstance(v, FunctionType)]
        owners = [*functions, *(v for v in objects if is_open(v))]
        cells = [cell for function in functions for cell in function.__closure__ or ()]
        self.items = [(v, _items(v)) for v in objects if isinstance(v, CONTAINERS)]
        self.tables = [(v, dict(attributes_of(v))) for v in owners]
        self.slots = [(v, _slots(v)) for v in (*owners, *cells)]  # none too: they may be set later

    def _keep_values(self, objects: list, tensors: list[Tensor]) -> None:
        others = {*map(id, self.others)}
        values = [*(t for t in tensors if id(t) not in others), *objects]
        self.values = [(v, _copy(v)) for v in values if _has_content(v)]

    def follow(self, overwritten: dict[Tensor, Tensor]) -> None:
        """Takes copies of parameters that are made as they are written into; see `Reads`."""
        self.overwritten.append(overwritten)

    def completed(self) -> bool:
        """Whether lazy layers have been made since."""
        return not all(map(is_lazy_module, self.lazy))

    def rebuilt(self) -> bool:
        """Whether the structure has changed, or the content of a parameter."""
        if any([s.changed() for s in self.structures] + [_has_moved(*m) for m in self.memories]):
            return True
        return self._changed([pair for copies in self.overwritten for pair in copies.items()])

    def written(self) -> bool:
        """Whether the structure has changed, the content of a tensor, by way of `.data` too, of which
        no version tells, or of an array, or the state of a generator."""
        return self.rebuilt() or self._changed(self.values)

    def _changed(self, pairs: list[tuple]) -> bool:
        return any(_differs(value, saved) for value, saved in pairs)

    def restore(self) -> None:
        for structure in self.structures:
            structure.restore()
        for module, attributes in self.attributes:
            _restore_names(attributes, _attributes(module), *_in_table(vars(module)))
        for module, buffers in self.buffers:
            for name, buffer in buffers.items():
                module._buffers[name] = buffer
        for owner, fields in self.tables:
            table = attributes_of(owner)  # which may be another one now
            _restore_names(fields, table, *_in_table(table))
        for owner, slots in self.slots:
            ways = partial(_set_slot, owner), partial(object.__delattr__, owner)
            _restore_names(slots, _slots(owner), *ways)
        for cls, members in self.members:  # past what the class's own class makes of its attributes
            ways = partial(type.__setattr__, cls), partial(type.__delattr__, cls)
            _restore_names(members, vars(cls).copy(), *ways)
        for container, items in self.items:
            _restore_items(container, items)
        with torch.no_grad():
            for parameter, memory in self.memories:
                if _has_moved(parameter, memory):
                    parameter.data = memory
            copies = [pair for copies in reversed(self.overwritten) for pair in copies.items()]
            for value, saved in (*self.values, *copies):
                _put_back(value, saved)
            self._restore_made()

    def _restore_made(self) -> None:
        """Torch's lazy layers, which a first call has made for good: as it has made them."""
        for module in self.lazy:
            if isinstance(module, _NormBase) and not is_lazy_module(module):
                module.reset_running_stats()


def _attributes(module: nn.Module) -> dict:
    """Its plain attributes that a forward may set; `not_by_forwards` of its class names others."""
    others = getattr(type(module), "not_by_forwards", ())
    return {
        name: value
        for name, value in vars(module).copy().items()  # another thread may add some
        if name not in OF_EVERY_MODULE and name not in others
    }


def _equal(now: Tensor, before: Tensor) -> bool:
    if now.shape != before.shape:
        return False
    once = each_once(now), each_once(before)
    if once[0].shape == once[1].shape:
        now, before = once
    try:
        if torch.equal(now, before):
            return True
    except NotImplementedError:  # of sparse tensors only the version tells
        return True
    if not (now.is_floating_point() or now.is_complex()):
        return False
    return bool(((now == before) | (now.isnan() & before.isnan())).all())


def _differs(value, saved) -> bool:
    """Whether a tensor, or one of `_HOLDERS`, holds something else."""
    if type(value) in _HOLDERS:
        held = _HOLDERS[type(value)][0](value)
        if isinstance(held, np.ndarray):
            return held.shape != saved.shape or held.tobytes() != saved.tobytes()
        return not (torch.equal(held, saved) if isinstance(held, Tensor) else held == saved)
    return _is_filled(value) and not _equal(value, saved)


def _lies(tensor: Tensor | None) -> bool:
    """Whether it is one with memory of its own, which no other package makes of its class."""
    return type(tensor) in (nn.Parameter, Tensor) and _is_filled(tensor)


def _has_moved(parameter: Tensor, memory: Tensor) -> bool:
    """Whether `parameter.data = other` has given it other values."""
    before = _address(memory)
    if before is None or not _lies(parameter) or _address(parameter) == before:
        return False
    return parameter.dtype != memory.dtype or not _equal(parameter, memory)


def _address(tensor: Tensor) -> int | None:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # of what a transform of torch.func has made
        return None


def _is_filled(value) -> bool:
    """Whether it is a tensor with numbers to compare: not nested or fake, not that of a lazy layer
    which has never been called, nor freed."""
    if not isinstance(value, Tensor) or is_lazy(value) or is_freed(value):
        return False
    return not (value.is_nested or isinstance(value, FakeTensor))


def _is_large(tensor: Tensor) -> bool:
    memory = memory_of(tensor)
    return memory is not tensor and memory.nbytes() > _LARGE


def _has_content(value) -> bool:
    if type(value) is np.ndarray and value.nbytes > _LARGE:
        return False  # nothing tells of a write, and a copy may not fit
    return _is_filled(value) or type(value) in _HOLDERS


def _copy(value):
    """The content of a tensor, or of one of `_HOLDERS`."""
    return copy_of(value) if isinstance(value, Tensor) else _HOLDERS[type(value)][0](value)


def _put_back(value, saved) -> None:
    """Gives the same object its old content."""
    if not _is_filled(value):
        if _differs(value, saved):  # an array may be one to read
            _HOLDERS[type(value)][1](value, saved)
    elif value.shape != saved.shape:
        value.data = saved.clone()
    elif not _equal(value, saved):
        each_once(value).copy_(each_once(saved))


def _refill(held: array, saved: bytes) -> None:
    del held[:]
    held.frombytes(saved)


def _kind(container) -> type:
    """Whose methods look into a container and fill it, past what a class makes of them: `update` of a
    Counter counts, and a table may let old items go as new ones come."""
    return next(kind for kind in (OrderedDict, *CONTAINERS) if isinstance(container, kind))


def _items(container) -> list:
    kind = _kind(container)
    return [*(kind.items if isinstance(container, dict) else kind.__iter__)(container)]


def _restore_items(container, items: list) -> None:
    """Fills the same container with the items that it had, if it has others."""
    now = _items(container)
    if isinstance(container, dict):
        same = [(id(k), id(v)) for k, v in now] == [(id(k), id(v)) for k, v in items]
    else:
        same = [*map(id, now)] == [*map(id, items)]
    if same:
        return
    kind = _kind(container)
    kind.clear(container)
    if isinstance(container, dict):
        for key, value in items:
            kind.__setitem__(container, key, value)
    else:
        (kind.update if kind is set else kind.extend)(container, items)


def _restore_names(before: dict, now: dict, put: Callable, drop: Callable) -> None:
    """Name by name: meanwhile another thread may look into an object."""
    for name in now.keys() - before.keys():
        drop(name)
    for name, value in before.items():
        if name not in now or now[name] is not value:
            put(name, value)


def _in_table(table: dict) -> tuple[Callable, Callable]:
    """How names are put into a dict and dropped from it."""
    return table.__setitem__, lambda name: table.pop(name, None)


def _slots(owner) -> dict:
    """What a cell of a closure holds, or the fields in an object's `__slots__`."""
    if not isinstance(owner, CellType):
        return slots_of(owner)
    try:
        return {"cell_contents": owner.cell_contents}
    except ValueError:  # empty
        return {}


def _set_slot(owner, name: str, value) -> None:
    """Past what a class makes of its attributes: it may refuse that they are set."""
    with suppress(AttributeError):  # behind a property of a class derived from its own
        object.__setattr__(owner, name, value)
