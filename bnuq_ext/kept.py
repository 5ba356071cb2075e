"""Tensors that a forward keeps outside of the model, in what hooks and globals hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode

from .contents import FOREIGN, Contents, package_of, version_of
from .inputs import tensors

_DATA = Tensor.data.__get__


class KeptTensors(Contents):
    """The tensors that the hooks of a model, the methods of its own classes and output_fn hold: in
    closures, in objects, and in globals that they name.

    Attributes:
        found: {address: (tensor, its version)}.
    """

    def __init__(self, modules: list[nn.Module], output_fn: Callable | None):
        self.found: dict[int, tuple] = {}
        super().__init__([], modules)
        methods = [m for cls in self.own for m in vars(cls).values() if isinstance(m, FunctionType)]
        for function in (*_hooks(modules), *methods, *([output_fn] if output_fn else ())):
            if isinstance(function, FunctionType):
                self.packages |= {package_of(function)} - FOREIGN
            self.append_function(function)

    def append(self, value, depth: int = 0) -> None:
        if isinstance(value, Tensor) and id(value) not in self._registered:
            self.found[id(value)] = value, version_of(value)
        super().append(value, depth)

    def changed(self, now: KeptTensors) -> set[int]:
        """Addresses of those that are not there now, or not as they were."""
        there = {key: version for key, (_, version) in now.found.items()}
        return {key for key, (_, version) in self.found.items() if there.get(key) != version}


class Uses(TorchFunctionMode):
    """Inside, notes which tensors torch's functions are given, by address.

    Attributes:
        found: all of them.
        opened: those whose `.data` was asked for, as a rule to write into it.
    """

    def __init__(self):
        super().__init__()
        self.found: set[int] = set()
        self.opened: set[int] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        given = {id(t) for t in tensors((args, kwargs or {}))}
        self.found |= given
        if func == _DATA:
            self.opened |= given
        return func(*args, **(kwargs or {}))


def _hooks(modules: list[nn.Module]) -> Iterator[Callable]:
    for module in modules:
        yield from list(module._forward_pre_hooks.values())
        yield from list(module._forward_hooks.values())
    yield from list(torch_module._global_forward_pre_hooks.values())
    yield from list(torch_module._global_forward_hooks.values())
