"""What of a call the plan for it is remembered by."""

from collections.abc import Mapping
from inspect import ismethod
from weakref import WeakMethod, ref

from torch import Tensor


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


def identity(function):
    """What stands for a function in a key, without keeping what it holds alive.

    A function written anew at each call (a lambda) is the same if its code is and it holds nothing.
    """
    if function is None:
        return None
    code = getattr(function, "__code__", None)
    if code is not None and not (function.__closure__ or function.__defaults__):
        return code
    try:
        return WeakMethod(function) if ismethod(function) else ref(function)
    except TypeError:
        return type(function), repr(function)
