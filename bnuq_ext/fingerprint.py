"""What a model's forward depends on, as a value to compare, and its state before a trial run."""

from __future__ import annotations

import copy
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor, nn

_BASE = frozenset(nn.Module().__dict__)
OURS = "_bnuq_hook"  # attribute of a hook that this package sets for a while
_SCALARS = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.Size})
_CONTAINERS = (list, dict, set, deque)


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
    can be seen from outside: in-place changes of tensors count, changes inside foreign objects do not.
    The training flags are left out.
    """
    seen, versions = [], []
    add = seen.append
    for module in modules:
        attributes = module.__dict__
        add(id(module))
        add(type(module))
        for hooks in (attributes["_forward_hooks"], attributes["_forward_pre_hooks"]):
            if hooks:
                seen += [id(hook) for hook in hooks.values() if not hasattr(hook, OURS)]
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


def _append(seen: list, value) -> None:
    kind = type(value)
    if kind in _SCALARS:
        seen.append(value)
    elif isinstance(value, Tensor):
        # Inference tensors do not count their versions.
        seen += (id(value), -1 if value.is_inference() else value._version)
    elif kind is tuple:
        for item in value:
            _append(seen, item)
    else:
        seen.append(id(value))
        if isinstance(value, _CONTAINERS):
            seen.append(len(value))


class State:
    """A model's buffers and plain attributes, to put back what a forward has changed."""

    def __init__(self, modules: list[nn.Module]):
        self.saved = [(module, _attributes(module), _buffers(module)) for module in modules]

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


def _copy(value):
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, _CONTAINERS) else value


def _put_back(value, saved):
    """The same object with its old content."""
    if isinstance(value, Tensor):
        if not torch.equal(value, saved):
            value.copy_(saved)
        return value
    return saved
