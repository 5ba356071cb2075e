"""What stands for an input and an output_fn in the key of a plan."""

from collections.abc import Callable, Mapping
from enum import Enum
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..contents import SCALARS, Contents, identity, version_of
from ..inputs import has_rows
from ..ops.modes import is_captured

_PLAIN = (
    *SCALARS,
    torch.device,
    torch.layout,
    torch.memory_format,
    Enum,
    np.number,
    np.bool_,
    range,
)
_LARGEST = 1 << 20  # bytes of a tensor whose content is looked at
_READ = WeakTensorKeyDictionary()  # of tensors on a GPU: their version, and what `_values_of` gave


def signature(inputs, from_dim: int, rows: int) -> tuple:
    """Shapes, dtypes and devices of the tensors of an input, and the values of what has no rows,
    which all replicas share; of real numbers only whether they are zero."""
    if isinstance(inputs, Tensor):
        form = inputs.dim(), inputs.dtype, inputs.device
        return tuple(inputs.shape[from_dim:]), *form, *_values_in(inputs, rows)
    if isinstance(inputs, Mapping):
        return tuple((key, signature(value, from_dim, rows)) for key, value in inputs.items())
    if isinstance(inputs, (tuple, list)):
        return type(inputs), *(signature(value, from_dim, rows) for value in inputs)
    if isinstance(inputs, slice):  # without a hash in older Pythons
        parts = inputs.start, inputs.stop, inputs.step
        return slice, *(signature(value, from_dim, rows) for value in parts)
    if type(inputs) is float:
        return float, inputs == 0
    # An object() is equal to nothing else: what is unknown is found out each time.
    return type(inputs), inputs if isinstance(inputs, _PLAIN) else object()


def _values_in(tensor: Tensor, rows: int) -> tuple:
    if has_rows(tensor, rows):
        return ()
    values = _values_of(tensor)
    return values[:2] if tensor.is_floating_point() else values


def reals_of(inputs, rows: int) -> tuple:
    """The real numbers of what has no rows in an input, in order."""
    if isinstance(inputs, Tensor):
        shared = inputs.is_floating_point() and not has_rows(inputs, rows)
        return _values_of(inputs) if shared else ()
    if isinstance(inputs, Mapping):
        inputs = tuple(inputs.values())
    if isinstance(inputs, (tuple, list)):
        return tuple(reals_of(value, rows) for value in inputs)
    return (inputs.hex(),) if type(inputs) is float else ()


def _values_of(tensor: Tensor) -> tuple:
    """What stands for the values of a tensor: whether some and all are zero, and the content; of a
    large one, or one that cannot be read, who it is."""
    version = version_of(tensor)
    known, values = _READ.get(tensor, (None, ())) if tensor.is_cuda else (None, ())
    if known is not None and known == version >= 0:
        return values  # without waiting for the device, which a capture of a CUDA graph must not
    values = None, None, *identity(tensor), version
    if not is_captured(tensor.device) and tensor.numel() * tensor.element_size() <= _LARGEST:
        try:
            values = _content(tensor.detach().cpu().contiguous())
        except (RuntimeError, TypeError):  # of a kind without bytes of its own
            return values
        if tensor.is_cuda:
            _READ[tensor] = version, values
    return values


def _content(tensor: Tensor) -> tuple:
    read = tensor.flatten().view(torch.uint8).numpy()
    nonzero = int(tensor.count_nonzero()) if tensor.numel() else 0
    return nonzero < tensor.numel(), nonzero == 0, tuple(tensor.shape), sha256(read).digest()


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
