"""The vocabulary of argument checks: `<op>: <argument> must <requirement>, got <value>`."""

import math
import operator
import os
from numbers import Real
from typing import NoReturn

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics, parameters and sums for activations of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def refuse(op: str, name: str, requirement: str, got, error=ValueError) -> NoReturn:
    """Raises `error` with the message that every refused argument has;
    of many values it shows the shape."""
    if isinstance(got, Tensor) and got.numel() > 1:
        got = f"a tensor of shape {list(got.shape)}"
    raise error(f"{op}: {name} must {requirement}, got {got}")


def is_dense(value: Tensor) -> bool:
    return value.layout is torch.strided and not value.is_nested  # a nested one may say strided


def is_finite(x: Tensor) -> bool:
    # Sparse and nested tensors have no isfinite; what they lead to shows in the statistics.
    return not (is_dense(x) and x.is_floating_point()) or bool(torch.isfinite(x).all())


def check_tensor(op: str, name: str, value, kind: str = "a tensor") -> None:
    if not isinstance(value, Tensor):
        refuse(op, name, f"be {kind}", type(value).__name__, TypeError)
    if not is_dense(value):
        got = "a nested one" if value.is_nested else value.layout
        refuse(op, name, "be a dense tensor", got, TypeError)


def check_dtype(op: str, name: str, value) -> None:
    """Of activations: one of the dtypes that the kernels take."""
    check_tensor(op, name, value)
    if value.dtype not in DTYPES:
        refuse(op, name, "be float32, float16, bfloat16 or float64", value.dtype, TypeError)


def check_floating(op: str, name: str, value) -> None:
    check_tensor(op, name, value)
    if not value.is_floating_point():
        refuse(op, name, "be a floating-point tensor", value.dtype, TypeError)


def check_shape(op: str, name: str, value: Tensor, shape: tuple) -> None:
    if value.shape != shape:
        refuse(op, name, f"have shape {list(shape)}", list(value.shape))


def check_device(op: str, name: str, value: Tensor, device: torch.device) -> None:
    if value.device != device:
        refuse(op, name, f"be on {device}", value.device)


def check_named_device(op: str, device) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        refuse(op, "device", "name a torch device", repr(device))


def check_usable_device(op: str, device) -> torch.device:
    found = check_named_device(op, device)
    try:
        torch.empty(0, device=found)
    except Exception:  # torch has one for each reason
        refuse(op, "device", "be one that this machine has", repr(str(found)))
    return found


def check_has_numbers(op: str, name: str, device: torch.device) -> None:
    if device.type == "meta":
        refuse(op, name, "hold numbers", "meta tensors")


def check_parameter(op: str, name: str, value: Tensor, shape: tuple, device) -> None:
    if isinstance(value, Tensor) and value.shape == shape and value.device == device:
        if value.dtype in DTYPES and value.layout == torch.strided:
            return
    check_floating(op, name, value)
    check_shape(op, name, value, shape)
    check_device(op, name, value, device)


def check_seed(op: str, seed, device: torch.device | None = None) -> None:
    """Of an op's seed, which is an integer or a tensor on its device."""
    if not isinstance(seed, Tensor) and _is_integer(seed):
        return check_key_range(op, seed)
    check_tensor(op, "seed", seed, "an integer or a tensor")
    if seed.dtype != torch.int64:
        refuse(op, "seed", "be int64", seed.dtype, TypeError)
    check_shape(op, "seed", seed, (2,))
    if device is not None:
        check_device(op, "seed", seed, device)


def check_integer(op: str, name: str, value, least: float) -> int:
    """The value as an int: TypeError for what is no integer, ValueError below `least`."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        refuse(op, name, "be an integer", _readable(value), TypeError)
    if number < least:
        refuse(op, name, f"be at least {least}", number)
    return number


def check_first_replica(op: str, value, num_samples: int) -> int:
    """The value as an int, so that the numbers of all replicas have 63 bits."""
    if num_samples > 2**63:
        refuse(op, "num_samples", "be at most 2^63", num_samples)
    number = check_integer(op, "first_replica", value, 0)
    if number + num_samples > 2**63:
        refuse(op, "first_replica", f"be at most 2^63 - {num_samples}", number)
    return number


def check_one_of(op: str, name: str, value, choices) -> None:
    if not isinstance(value, str) or value not in choices:  # an array would be compared by entries
        refuse(op, name, f"be one of {', '.join(choices)}", repr(value))


def check_flags(op: str, **flags) -> None:
    """Checks that each is True or False: "no" would be true."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            refuse(op, name, "be True or False", _readable(value), TypeError)


def check_number(op: str, name: str, value, kind: str = "a number") -> None:
    """TypeError for what is no real number, ValueError for an integer beyond every float."""
    if type(value) is float:
        return
    if isinstance(value, bool) or not isinstance(value, Real):
        refuse(op, name, f"be {kind}", _readable(value), TypeError)
    try:
        float(value)
    except OverflowError:
        refuse(op, name, "fit into a float", "a larger number")


def _readable(value):
    """A string in quotes, and the like; a tensor of many values is left to `refuse`."""
    return value if isinstance(value, Tensor) and value.numel() > 1 else repr(value)


def check_scalar(op: str, name: str, value) -> None:
    """`check_number` that torch.compile can follow. A tensor is refused:
    its gradient would be lost."""
    # Older dynamo cannot ask one of its numbers for an attribute.
    number = torch.compiler.is_compiling() or _has(value, "__float__")
    if isinstance(value, Tensor) or not number:
        refuse(op, name, "be a number", type(value).__name__, TypeError)


def broadcasts(shape: tuple, to: torch.Size) -> bool:
    """Whether a tensor of the one shape can be expanded to the other."""
    try:
        return torch.broadcast_shapes(shape, to) == to
    except RuntimeError:
        return False


def check_fraction(op: str, name: str, value) -> None:
    check_number(op, name, value)
    check_fraction_value(op, name, value)


def check_fraction_value(op: str, name: str, value) -> None:
    """Of what is known to be a number."""
    if not 0 <= value <= 1:
        refuse(op, name, "lie in [0, 1]", value)


AnyPath = str | os.PathLike[str]


def check_path(op: str, name: str, value) -> None:
    if not isinstance(value, (str, os.PathLike)):
        refuse(op, name, "be a str or an os.PathLike", type(value).__name__, TypeError)
    if not os.fspath(value):  # which would be the current folder
        refuse(op, name, "not be empty", repr(value))


def check_callable(op: str, name: str, value) -> None:
    """TypeError for what is neither None nor a function."""
    if value is not None and not callable(value):
        refuse(op, name, "be callable", type(value).__name__, TypeError)


def check_positive(op: str, name: str, value) -> None:
    check_number(op, name, value)
    check_positive_value(op, name, value)


def check_positive_scalar(op: str, name: str, value) -> None:
    """`check_positive` that torch.compile can follow."""
    check_scalar(op, name, value)
    check_positive_value(op, name, value)


def check_positive_value(op: str, name: str, value) -> None:
    """Of what is known to be a number."""
    if not value > 0:
        refuse(op, name, "be positive", value)
    if value == math.inf:
        refuse(op, name, "be finite", value)


def check_stream(op: str, stream: int) -> None:
    check_within(op, "stream", stream, 0, 2**32, "[0, 2^32)")


def check_key_range(op: str, seed) -> None:
    check_within(op, "seed", seed, -(2**63), 2**63, "[-2^63, 2^63)")


def check_within(op: str, name: str, value, low: int, end: int, interval: str) -> None:
    """Of an integer in [low, end), which `interval` writes out; torch.compile can follow it."""
    if not _is_integer(value):
        refuse(op, name, "be an integer", _readable(value), TypeError)
    if not low <= value < end:
        refuse(op, name, f"lie in {interval}", value)


def _is_integer(value) -> bool:
    if type(value) is int:
        return True
    if isinstance(value, bool | Tensor):
        return False
    return isinstance(value, int | torch.SymInt) or _has(value, "__index__")


def _has(value, conversion: str) -> bool:
    """Whether it is a number by a method of its class; arrays and classes themselves are none."""
    single = not isinstance(value, type) and not hasattr(value, "__len__")
    return single and hasattr(value, conversion)


def check_num_samples(op: str, num_samples) -> None:
    if not _is_integer(num_samples):
        refuse(op, "num_samples", "be an integer", _readable(num_samples), TypeError)
    if num_samples < 1:
        refuse(op, "num_samples", "be at least 1", num_samples)
    if num_samples >= 2**63:
        refuse(op, "num_samples", "be below 2^63", num_samples)
