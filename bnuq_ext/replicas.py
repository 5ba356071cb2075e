"""What a stochastic layer does now: the current pass, held in a context variable.

Outside every pass a stochastic layer is the layer that it was made from. Inside one it hands its input to
the pass, so that the state of a prediction or a collection lives neither in the model nor in a global, and
threads do not meet.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor, nn

_CURRENT: ContextVar[Pass | None] = ContextVar("bnuq_ext_pass", default=None)


def current_pass() -> Pass | None:
    """The pass that this thread (or task) is in, or None."""
    return _CURRENT.get()


@contextmanager
def running(active: Pass):
    """Make `active` the current pass for the body."""
    token = _CURRENT.set(active)
    try:
        yield active
    finally:
        _CURRENT.reset(token)


class Pass:
    """One forward of a model with its stochastic layers doing something else than usual.

    Args:
        layers: the stochastic layers of the model and their names, `named_stochastic_layers(model)`.
    """

    def __init__(self, layers: dict[str, nn.Module]):
        self.names = {id(layer): name for name, layer in layers.items()}
        self.streams = {name: stream for stream, name in enumerate(layers)}
        self.calls: Counter[str] = Counter()

    def visit(self, layer: nn.Module, x: Tensor) -> Tensor:
        """What the layer returns for x; a layer of another model behaves as usual."""
        name = self.names.get(id(layer))
        if name is None:
            return layer.plain_forward(x)
        call = self.calls[name]
        self.calls[name] += 1
        key = name if call == 0 else f"{name}#{call}"
        # A layer has 65,536 calls before its streams reach the next layer's.
        return self.normalise(layer, x, key, (self.streams[name] << 16) + call)

    def normalise(self, layer: nn.Module, x: Tensor, key: str, stream: int) -> Tensor:
        raise NotImplementedError
