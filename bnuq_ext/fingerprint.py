"""What a model's forward depends on, as a value to compare, and its state before a trial run."""

from __future__ import annotations

from argparse import Namespace
from collections import deque
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor, nn

_BASE = frozenset(nn.Module().__dict__)
OURS = "_bnuq_hook"  # attribute of a hook that this package sets for a while
_SCALARS = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.Size})
_CONTAINERS = (list, dict, set, deque)
_RECORDS = (SimpleNamespace, Namespace)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_DEEPEST = 3  # of containers in containers
_LONGEST = 64  # of containers whose items are looked at


class Fingerprint(NamedTuple):
    """What a model is, and apart from it the versions of its parameters and buffers, which training changes."""

    structure: list
    versions: list


def modules_of(model: nn.Module) -> list[nn.Module]:
    """`list(model.modules())` in a third of the time."""
    found: dict[nn.Module, None] = {}
    ahead = [model]
    while ahead:
        module = ahead.pop()
        if module is not None and module not in found:
            found[module] = None
            ahead += reversed(module._modules.values())
    return list(found)


def fingerprint(modules: list[nn.Module]) -> Fingerprint:
    """Identity, type, plain attributes, hooks, and identity and version of every parameter and buffer.

    Two equal fingerprints of one model mean that its forward is still the same function, as far as it
    can be seen from outside: in-place changes of tensors count, items of short lists, sets and dicts, and fields of
    records; changes inside other objects, and those of tensors by way of `.data`, do not.
    The training flags are left out.
    """
    seen, versions = [], []
    add = seen.append
    for module in modules:
        attributes = module.__dict__
        add(id(module))
        add(type(module))
        for kind in HOOKS:
            if attributes[kind]:
                # The key is new for every hook; an id may come again. Another thread may add one of ours.
                hooks = [*attributes[kind].items()]
                seen += [(key, id(hook)) for key, hook in hooks if not hasattr(hook, OURS)]
        for tensor in (*attributes["_parameters"].values(), *attributes["_buffers"].values()):
            add(id(tensor))
            if tensor is not None:
                try:
                    versions.append(tensor._version)
                except RuntimeError:  # inference tensors do not count their versions
                    versions.append(-1)
        for name, value in attributes.items():
            if name not in _BASE:
                add(name)
                if type(value) in _SCALARS:  # nearly all are
                    add(value)
                else:
                    _append(seen, value)
    return Fingerprint(seen, versions)


def _append(seen: list, value, depth: int = 0) -> None:
    kind = type(value)
    if kind in _SCALARS:
        seen.append(value)
    elif isinstance(value, Tensor):
        # Inference tensors do not count their versions.
        seen += (id(value), -1 if value.is_inference() else value._version)
    elif kind is tuple:
        for item in value:
            _append(seen, item, depth)
    else:
        seen.append(id(value))
        value = _held(value)
        if isinstance(value, _CONTAINERS):
            seen.append(len(value))
            if len(value) <= _LONGEST and depth < _DEEPEST:
                items = (*value.keys(), *value.values()) if isinstance(value, dict) else value
                for item in items:
                    _append(seen, item, depth + 1)


def _held(value):
    """The fields of a record as their dict (a model's configuration is often one); any other value itself."""
    record = isinstance(value, _RECORDS) or hasattr(type(value), "__dataclass_fields__")
    if not record or isinstance(value, (nn.Module, *_CONTAINERS)):
        return value
    return getattr(value, "__dict__", value)


class State:
    """A model's buffers and plain attributes, to put back what a forward has changed."""

    def __init__(self, modules: list[nn.Module]):
        self.saved = [(module, _attributes(module), _buffers(module)) for module in modules]

    def written(self) -> bool:
        """Whether the content of a tensor has changed, by way of `.data` too, of which no version tells, or the
        state of a generator."""
        pairs = [pair for _, *both in self.saved for saved in both for pair in saved.values()]
        return any(not torch.equal(now, before) for v, before in pairs for now in _content(v))

    def restore(self) -> None:
        with torch.no_grad():
            for module, attributes, buffers in self.saved:
                for name in [n for n in vars(module) if n not in _BASE and n not in attributes]:
                    del vars(module)[name]
                for name, saved in attributes.items():
                    vars(module)[name] = _put_back(*saved)
                for name, saved in buffers.items():
                    module._buffers[name] = _put_back(*saved)


def _attributes(module: nn.Module) -> dict:
    return {name: (v, _copy(v)) for name, v in vars(module).items() if name not in _BASE}


def _buffers(module: nn.Module) -> dict:
    return {name: (buffer, _copy(buffer)) for name, buffer in module._buffers.items()}


def _content(value) -> list[Tensor]:
    if isinstance(value, torch.Generator):
        return [value.get_state()]
    return [value] if isinstance(value, Tensor) else []


def _copy(value, depth: int = 0):
    """What `_put_back` needs; None for a container that is too deep inside others."""
    value = _held(value)
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, _CONTAINERS) and depth == _DEEPEST:
        return None
    if isinstance(value, dict):
        return {key: (item, _copy(item, depth + 1)) for key, item in value.items()}
    if isinstance(value, (list, deque)):
        return [(item, _copy(item, depth + 1)) for item in value]
    return set(value) if isinstance(value, set) else value


def _put_back(value, saved):
    """The same object with its old content."""
    if isinstance(value, Tensor):
        if not torch.equal(value, saved):
            value.copy_(saved)
    elif isinstance(value, torch.Generator):
        value.set_state(saved)
    elif isinstance(held := _held(value), _CONTAINERS) and saved is not None:
        if isinstance(held, dict):
            saved = {key: _put_back(*pair) for key, pair in saved.items()}
        elif not isinstance(held, set):
            saved = [_put_back(*pair) for pair in saved]
        held.clear()
        held.extend(saved) if isinstance(held, (list, deque)) else held.update(saved)
    return value
