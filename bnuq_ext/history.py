"""The tensors that a forward has made, from which a backward may compute parts of it again."""

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from torch import Tensor, nn

from .state import OF_EVERY_MODULE, modules_of
from .untraced import untraced

_DEEPEST = 3  # of containers in containers that are looked into
_LATEST = 64  # items of a container that are looked into


@untraced
def next_node() -> int:
    """The number that the next node of this thread's graph will have."""
    return torch._C._autograd._get_sequence_nr()


def made_since(start: int, model: nn.Module, outputs: Iterable[Tensor]) -> list[Tensor]:
    """Of the outputs and of the tensors that a model's modules hold as attributes (an output kept
    for another loss) those with a history that ends at the node `start` of this thread's graph
    or later."""
    modules = modules_of(model) if torch.is_grad_enabled() else []
    held = [value for module in modules for value in _plain_and_buffers(module)]
    return [t for t in (*outputs, *_tensors_in(held)) if _number(t) >= start]


def _number(tensor: Tensor) -> int:
    """Of the node that made it; -1 without one."""
    try:
        node = tensor.grad_fn
    except RuntimeError:  # a view whose base was written since, from which nobody can go back
        return -1
    return -1 if node is None else node._sequence_nr()


def _plain_and_buffers(module: nn.Module) -> list:
    attributes = list(vars(module).items())  # at once: other threads may call the model
    own = [value for name, value in attributes if name not in OF_EVERY_MODULE]
    return own + list(module._buffers.values())


def _tensors_in(values: Iterable, depth: int = 0) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple, dict)) and depth < _DEEPEST:
            items = value.values() if isinstance(value, dict) else value
            # The last ones: what a forward adds comes at the end.
            yield from _tensors_in(list(islice(reversed(items), _LATEST)), depth + 1)
