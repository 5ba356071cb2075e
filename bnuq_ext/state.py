"""What forwards change of a model, to put it back."""

from collections import deque

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .contents import CONTAINERS, is_freed, is_record
from .structure import Structure

OWN_BANK = "_bnuq_bank"  # attribute of a model that `attach` gave a bank: that of its layers, in copies too
OF_EVERY_MODULE = frozenset({*nn.Module().__dict__, OWN_BANK})
_DEEPEST = 3  # of containers in containers that are put back


def _held(value):
    """The fields of a record as their dict (a model's configuration is often one);
    any other value itself."""
    if isinstance(value, (nn.Module, *CONTAINERS)) or not is_record(value):
        return value
    return getattr(value, "__dict__", value)


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


def is_training(module: nn.Module) -> bool:
    """Its flag, which what torch.jit.freeze has made has not."""
    return getattr(module, "training", False)


class State:
    """A model's structure, buffers, frozen parameters and plain attributes,
    to put back what a forward has changed."""

    def __init__(self, modules: list[nn.Module]):
        self.structures = [Structure(module) for module in modules]
        self.saved = [
            (m, _copies(_attributes(m)), _copies(m._buffers), _copies(_frozen(m))) for m in modules
        ]

    def written(self) -> bool:
        """Whether the structure has changed, the content of a tensor, by way of `.data` too, of which
        no version tells, or the state of a generator."""
        if any([structure.changed() for structure in self.structures]):
            return True
        pairs = [pair for _, *both in self.saved for saved in both for pair in saved.values()]
        return any(not _equal(now, before) for v, before in pairs for now in _content(v))

    def restore(self) -> None:
        for structure in self.structures:
            structure.restore()
        with torch.no_grad():
            for module, attributes, buffers, frozen in self.saved:
                for name in _attributes(module).keys() - attributes.keys():
                    del vars(module)[name]
                for name, saved in attributes.items():
                    vars(module)[name] = _put_back(*saved)
                for name, saved in buffers.items():
                    module._buffers[name] = _put_back(*saved)
                for name, saved in frozen.items():
                    module._parameters[name] = _put_back(*saved)


def _attributes(module: nn.Module) -> dict:
    """Its plain attributes that a forward may set; `not_by_forwards` of its class names others."""
    others = getattr(type(module), "not_by_forwards", ())
    return {
        name: value
        for name, value in vars(module).items()
        if name not in OF_EVERY_MODULE and name not in others
    }


def _frozen(module: nn.Module) -> dict[str, nn.Parameter]:
    """Its parameters that gradients do not move, where a forward in train() may:
    a moving average of a network."""
    owned = module._parameters.items() if is_training(module) else ()
    return {name: p for name, p in owned if p is not None and not p.requires_grad}


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


def _content(value) -> list[Tensor]:
    if isinstance(value, torch.Generator):
        return [value.get_state()]
    return [value] if _is_filled(value) else []


def _is_filled(value) -> bool:
    """Whether it is a tensor, and not that of a lazy layer which has never been called, nor freed."""
    return isinstance(value, Tensor) and not is_lazy(value) and not is_freed(value)


def _copy(value, depth: int = 0):
    """What `_put_back` needs; None for a container that is too deep inside others."""
    value = _held(value)
    if _is_filled(value):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
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
    elif isinstance(value, torch.Generator):
        value.set_state(saved)
    elif isinstance(held := _held(value), CONTAINERS) and saved is not None:
        if isinstance(held, dict):
            saved = {key: _put_back(*pair) for key, pair in saved.items()}
        elif not isinstance(held, set):
            saved = [_put_back(*pair) for pair in saved]
        held.clear()
        held.extend(saved) if isinstance(held, (list, deque)) else held.update(saved)
    return value
