"""What a model's forward depends on, as a value to compare, and its state before a trial run."""

from __future__ import annotations

import copy
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor, nn

_BASE = frozenset(nn.Module().__dict__)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
OURS = "_bnuq_hook"  # attribute of a hook that this package sets for a while
_SCALARS = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.Size})
_CONTAINERS = (list, dict, set, deque)


class Fingerprint(NamedTuple):
    """What a model is, and apart from it the versions of its parameters and buffers, which training changes."""

    structure: list
    versions: list


def fingerprint(modules: list[nn.Module]) -> Fingerprint:
    """Identity, type, plain attributes, hooks, and identity and version of every parameter and buffer.

    Two equal fingerprints of one model mean that its forward is still the same function, as far as it
    can be seen from outside: in-place changes of tensors count, changes inside foreign objects do not.
    The training flags are left out.
    """
    seen, versions = [], []
    for module in modules:
        attributes = module.__dict__
        seen += (id(module), type(module))
        for hooks in _HOOKS:
            if attributes[hooks]:
                seen += [id(hook) for hook in attributes[hooks].values() if not hasattr(hook, OURS)]
        for tensors in (attributes["_parameters"], attributes["_buffers"]):
            for tensor in tensors.values():
                identity, *version = _of_tensor(tensor)
                seen.append(identity)
                versions += version
        for name, value in attributes.items():
            if name not in _BASE:
                seen.append(name)
                if type(value) in _SCALARS:  # nearly all are
                    seen.append(value)
                else:
                    _append(seen, value)
    return Fingerprint(seen, versions)


def _append(seen: list, value) -> None:
    kind = type(value)
    if kind in _SCALARS:
        seen.append(value)
    elif isinstance(value, Tensor):
        seen += _of_tensor(value)
    elif kind is tuple:
        for item in value:
            _append(seen, item)
    else:
        seen.append(id(value))
        if isinstance(value, _CONTAINERS):
            seen.append(len(value))


def _of_tensor(tensor: Tensor | None) -> tuple:
    if tensor is None:
        return (None,)
    # Inference tensors do not count their versions.
    return id(tensor), -1 if tensor.is_inference() else tensor._version


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
