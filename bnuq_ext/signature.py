"""What of a call the plan for it is remembered by."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from .contents import Contents


def signature(inputs, from_dim: int) -> tuple:
    """Shapes, dtypes and devices of the tensors of an input, and its other values."""
    if isinstance(inputs, Tensor):
        return tuple(inputs.shape[from_dim:]), inputs.dim(), inputs.dtype, inputs.device
    if isinstance(inputs, Mapping):
        return tuple((key, signature(value, from_dim)) for key, value in inputs.items())
    if isinstance(inputs, (tuple, list)):
        return type(inputs), *(signature(value, from_dim) for value in inputs)
    # An object() is equal to nothing else: what is unknown is found out each time.
    return (inputs if isinstance(inputs, (int, float, bool, str, type(None))) else object(),)


class _Values:
    """Values as part of a key, though some have no hash."""

    def __init__(self, values: list):
        self.values = values

    def __eq__(self, other) -> bool:
        return isinstance(other, _Values) and self.values == other.values

    def __hash__(self) -> int:
        return hash(len(self.values))


def key_of(function: Callable | None, modules: list[nn.Module]):
    """What stands for a function in a key, without keeping what it holds alive.

    A function written anew at each call (a lambda) is the same if its code is, and what it holds
    and which globals it names. `modules`: of the model, which are not looked into.
    """
    if function is None:
        return None
    seen: list = [type(function)]
    Contents(seen, modules).append_function(function)
    return _Values(seen)
