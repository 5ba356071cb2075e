"""What forwards change of a model, to put it back."""

import pickle
import random
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from .contents import CONTAINERS, is_freed, is_record
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
    np.ndarray: (np.copy, lambda array, saved: array.__setitem__(..., saved)),
    bytearray: (bytes, lambda array, saved: array.__setitem__(slice(None), saved)),
}
_DEEPEST = 3  # of containers in containers that are put back


def _held(value):
    """The fields of a record as their dict (a model's configuration is often one);
    any other value itself."""
    if isinstance(value, (nn.Module, *CONTAINERS)) or not is_record(value):
        return value
    return getattr(value, "__dict__", value)


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
    """A model's structure, buffers and plain attributes, and of its parameters those that forwards
    write into, to put back what they have changed."""

    def __init__(self, modules: list[nn.Module], within: list[nn.Module] | None = None):
        """`within`: modules whose structure counts, if they are others."""
        self.structures = [Structure(module) for module in within or modules]
        self.lazy = [module for module in modules if _is_lazy(module)]
        others = [module for module in modules if not (_is_lazy(module) and is_of_torch(module))]
        self.saved = [(m, _copies(_attributes(m)), _copies(m._buffers)) for m in others]
        self.memories = [
            (p, p.detach()) for m in modules for p in m._parameters.values() if _lies(p)
        ]
        self.overwritten: list[dict[nn.Parameter, Tensor]] = []

    def follow(self, overwritten: dict[nn.Parameter, Tensor]) -> None:
        """Takes copies of parameters that are made as they are written into; see `Reads`."""
        self.overwritten.append(overwritten)

    def completed(self) -> bool:
        """Whether lazy layers have been made since."""
        return not all(map(_is_lazy, self.lazy))

    def rebuilt(self) -> bool:
        """Whether the structure has changed, or the content of a parameter."""
        if any([s.changed() for s in self.structures] + [_has_moved(*m) for m in self.memories]):
            return True
        return self._changed([pair for copies in self.overwritten for pair in copies.items()])

    def written(self) -> bool:
        """Whether the structure has changed, the content of a tensor, by way of `.data` too, of which
        no version tells, or of an array, or the state of a generator."""
        pairs = [pair for _, *both in self.saved for saved in both for pair in saved.values()]
        return self.rebuilt() or self._changed(pairs)

    def _changed(self, pairs: list[tuple]) -> bool:
        return any(_differs(value, saved) for value, saved in pairs)

    def restore(self) -> None:
        for structure in self.structures:
            structure.restore()
        with torch.no_grad():
            for module, attributes, buffers in self.saved:
                for name in _attributes(module).keys() - attributes.keys():
                    del vars(module)[name]
                for name, saved in attributes.items():
                    vars(module)[name] = _put_back(*saved)
                for name, saved in buffers.items():
                    module._buffers[name] = _put_back(*saved)
            for parameter, memory in self.memories:
                if _has_moved(parameter, memory):
                    parameter.data = memory
            for copies in reversed(self.overwritten):
                for parameter, saved in copies.items():
                    _put_back(parameter, saved)
            self._restore_made()

    def _restore_made(self) -> None:
        """Torch's lazy layers, which a first call has made for good: as it has made them."""
        for module in self.lazy:
            if isinstance(module, _NormBase) and not _is_lazy(module):
                module.reset_running_stats()


def _is_lazy(module: nn.Module) -> bool:
    return isinstance(module, LazyModuleMixin) and module.has_uninitialized_params()


def _attributes(module: nn.Module) -> dict:
    """Its plain attributes that a forward may set; `not_by_forwards` of its class names others."""
    others = getattr(type(module), "not_by_forwards", ())
    return {
        name: value
        for name, value in vars(module).items()
        if name not in OF_EVERY_MODULE and name not in others
    }


def _copies(values: dict) -> dict:
    return {name: (value, _copy(value)) for name, value in values.items()}


def _equal(now: Tensor, before: Tensor) -> bool:
    try:
        if torch.equal(now, before):
            return True
    except NotImplementedError:  # of sparse tensors only the version tells
        return True
    if now.shape != before.shape or not (now.is_floating_point() or now.is_complex()):
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


def _lies(parameter: nn.Parameter | None) -> bool:
    """Whether it is one with memory of its own, which no other package makes of its class."""
    return type(parameter) is nn.Parameter and _is_filled(parameter) and not parameter.is_sparse


def _has_moved(parameter: nn.Parameter, memory: Tensor) -> bool:
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
    """Whether it is a tensor, and not that of a lazy layer which has never been called, nor freed."""
    return isinstance(value, Tensor) and not is_lazy(value) and not is_freed(value)


def _copy(value, depth: int = 0):
    """What `_put_back` needs; None for a container that is too deep inside others."""
    value = _held(value)
    if _is_filled(value):
        return value.detach().clone()
    if type(value) in _HOLDERS:
        return _HOLDERS[type(value)][0](value)
    if isinstance(value, CONTAINERS) and depth == _DEEPEST:
        return None
    if isinstance(value, dict):
        return {key: (item, _copy(item, depth + 1)) for key, item in value.items()}
    if isinstance(value, (list, deque)):
        return [(item, _copy(item, depth + 1)) for item in value]
    return set(value) if isinstance(value, set) else value


def _put_back(value, saved):
    """The same object with its old content."""
    if _is_filled(value):
        if value.shape != saved.shape:
            value.data = saved.clone()
        elif not _equal(value, saved):
            value.copy_(saved)
    elif type(value) in _HOLDERS:
        if _differs(value, saved):  # an array may be one to read
            _HOLDERS[type(value)][1](value, saved)
    elif isinstance(held := _held(value), CONTAINERS) and saved is not None:
        if isinstance(held, dict):
            saved = {key: _put_back(*pair) for key, pair in saved.items()}
        elif not isinstance(held, set):
            saved = [_put_back(*pair) for pair in saved]
        held.clear()
        held.extend(saved) if isinstance(held, (list, deque)) else held.update(saved)
    return value
