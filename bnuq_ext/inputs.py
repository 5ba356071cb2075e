"""What a model is given: a tensor, a tuple of arguments or a dict of keyword arguments."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import Dataset

from .ops.checks import refuse

# As arguments of ours. A tuple, a dict and a loader are iterable.
Inputs = Tensor | Iterable[Any]
Data = Dataset[Any] | Iterable[Any]

_TARGETS = ("target", "y", "targets", "label", "labels")  # in a dict, the first that it has
_ATOMS = {type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout}


def model_input(op: str, batch, input_fn: Callable | None):
    """The model's input in a batch, for `call`: that of `split_batch`, or what `input_fn` makes of
    the batch, which is to be a tensor, a tuple of arguments or a dict of keyword arguments."""
    if input_fn is None:
        found, targets = split_batch(op, batch)
        if isinstance(found, tuple) and isinstance(targets, (tuple, list)):
            _refuse_batch(op, batch)  # samples that nothing has collated, or images and their boxes
        return found
    made = input_fn(batch)
    if not is_one_input(made):
        refuse(op, "input_fn", "return a tensor, a tuple or a dict", type(made).__name__, TypeError)
    return made


def split_batch(op: str, batch) -> tuple:
    """A batch as (the model's input, targets or None).

    Args:
        op: who asks, for the message.
        batch: an input, or (input, targets); or a dict with an input under "input" or "x". An input
            is a tensor, a tuple of arguments or a dict of keyword arguments, the latter two only
            beside targets or in a dict.

    Raises:
        TypeError: the batch is something else.
    """
    if isinstance(batch, Mapping):
        found = batch.get("input", batch.get("x"))
        targets = next((batch[k] for k in _TARGETS if k in batch), None)
    elif isinstance(batch, (tuple, list)):
        found, targets = (*batch, None, None)[:2]
    else:
        found, targets = batch, None
    found = _collated(found, targets) or found
    if not is_one_input(found):
        _refuse_batch(op, batch)
    return found, targets


def _refuse_batch(op: str, batch) -> NoReturn:
    others = "input_fn takes it out of anything else"
    if op != "collect":  # the others take no input_fn
        others = "a generator or a data set of your own makes it of others"
    requirement = (
        "be a tensor, a tuple (input, targets), or a dict with the input under 'input' or 'x', "
        f"the input being a tensor, a tuple or a dict ({others})"
    )
    refuse(op, "a batch", requirement, _describe(batch), TypeError)


def _collated(found, targets) -> tuple[Tensor, ...] | None:
    """The arguments that a DataLoader has collated from a data set's tuples into a list: each has a
    row per target, which a list of images of several sizes has not."""
    if isinstance(found, list) and isinstance(targets, Tensor) and targets.dim() > 0:
        if all(isinstance(t, Tensor) and t.shape[:1] == targets.shape[:1] for t in found):
            return tuple(found)
    return None


def is_one_input(x) -> bool:
    """Whether x is what a model may be given, rather than a loader of such."""
    return isinstance(x, (Tensor, tuple, Mapping))


def check_one_input(op: str, x) -> None:
    """TypeError for what is not one input of a model."""
    if not is_one_input(x):
        refuse(op, "x", "be a tensor, a tuple or a dict", type(x).__name__, TypeError)


def _describe(batch) -> str:
    kind = type(batch).__name__
    if isinstance(batch, Mapping):
        return f"{kind} with keys {list(batch)}"
    if isinstance(batch, (tuple, list)):
        return f"{kind} of {type(batch[0]).__name__}" if batch else f"an empty {kind}"
    return kind


def tensors(inputs) -> list[Tensor]:
    """The tensors of an input, those inside tuples, lists and dicts too, in order."""
    found: list[Tensor] = []
    _gather((inputs,), found)
    return found


def _gather(values: Iterable[Any], found: list[Tensor]) -> None:
    """Called for each operation of a trial: most of what it is given are tensors and numbers."""
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif type(value) in _ATOMS:
            continue
        elif isinstance(value, (tuple, list)):
            _gather(value, found)
        elif isinstance(value, Mapping):  # slow to tell
            _gather(value.values(), found)


def has_rows(t: Tensor, rows: int) -> bool:
    return t.dim() > 0 and t.shape[0] == rows


def num_rows(op: str, inputs) -> int:
    """Size of the first dimension of the first tensor."""
    if isinstance(inputs, Tensor) and inputs.dim() > 0:
        return inputs.shape[0]
    first = next((t for t in tensors(inputs) if t.dim() > 0), None)
    if first is None:
        requirement = "hold a tensor with rows (wrap a model of other objects)"
        refuse(op, "an input", requirement, f"none in {_describe(inputs)}")
    return first.shape[0]


def other_sizes(inputs) -> list[int]:
    """What may be the rows too: the second size of the first tensor, or 0, and the first size of
    each; of those that have sizes, which nested ones have not."""
    shapes = [t.shape for t in tensors(inputs) if t.dim() > 0 and not t.is_nested]
    second = shapes[0][1] if shapes and len(shapes[0]) > 1 else 0
    return [second, *(shape[0] for shape in shapes)]


def first_list(inputs) -> list:
    """The first argument of a model where that is a list, else an empty one."""
    if isinstance(inputs, Mapping):
        inputs = tuple(inputs.values())
    listed = isinstance(inputs, tuple) and isinstance(inputs[0], list)
    return inputs[0] if listed else []


def are_images(entries: list) -> bool:
    """Whether they are images (C, H, W), as detectors take them, of at most four channels: not
    the parts of an input, of which each has all rows."""
    shapes = [t.shape if isinstance(t, Tensor) else () for t in entries]
    same = len({shape[:1] for shape in shapes}) == 1
    return same and all(len(shape) == 3 and shape[0] <= 4 for shape in shapes)


def map_tensors(inputs, fn: Callable[[Tensor], Tensor]):
    """The input with fn of each of its tensors, in the order of `tensors`;
    one in several places stays one."""
    if isinstance(inputs, Tensor):
        return fn(inputs)
    made: dict[int, tuple[Tensor, Tensor]] = {}

    def once(t: Tensor) -> Tensor:
        if id(t) not in made:
            made[id(t)] = t, fn(t)  # kept, so that its address stays its own
        return made[id(t)][1]

    return _map(inputs, once)


def _map(inputs, fn: Callable[[Tensor], Tensor]):
    if isinstance(inputs, Tensor):
        return fn(inputs)
    if isinstance(inputs, Mapping):
        return _like(inputs, {key: _map(value, fn) for key, value in inputs.items()})
    if isinstance(inputs, tuple) and hasattr(inputs, "_fields"):
        return type(inputs)(*(_map(value, fn) for value in inputs))
    if isinstance(inputs, (tuple, list)):
        return type(inputs)(_map(value, fn) for value in inputs)
    return inputs


def _like(inputs: Mapping, made: dict) -> Mapping:
    """`made` in the class of `inputs`, if that takes a dict or its copies take items: a model may ask
    for its attributes."""
    if type(inputs) is dict:
        return made
    for make in (type(inputs), lambda made: _filled(inputs.copy(), made)):
        try:
            alike = make(made)
            if len(alike) == len(inputs) and all(alike[key] is made[key] for key in made):
                return alike
        except Exception:  # a class of other arguments, or for tensors of one size
            continue
    return made


def _filled(mapping: Mapping, made: dict) -> Mapping:
    for key, value in made.items():
        mapping[key] = value
    return mapping


def expand(op: str, inputs, num_samples: int):
    """The input with its rows T times over, replica-major."""
    rows = num_rows(op, inputs)

    def repeat(t: Tensor) -> Tensor:
        return t.expand(num_samples, *t.shape).flatten(0, 1) if has_rows(t, rows) else t

    return map_tensors(inputs, repeat)


def copied(inputs):
    """What to give a forward, which may write into its input: each replica has the caller's."""
    return map_tensors(inputs, torch.clone)


def move(inputs, device: torch.device):
    """The input with its tensors on `device`. Waits for copies: a loader may fill pinned tensors
    again."""
    return map_tensors(inputs, lambda t: t.to(device))


def call(model: nn.Module, inputs):
    """model(x), model(*arguments) or model(**keywords)."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    several = isinstance(inputs, tuple) and not isinstance(inputs, PackedSequence)
    return model(*inputs) if several else model(inputs)


def device_of(modules: Iterable[nn.Module]) -> torch.device:
    """Device of a model's first parameter or buffer; the CPU without any."""
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                return tensor.device
    return torch.device("cpu")


def as_rows_of(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(N, 1) as (N,), or (N,) as (N, 1), where that gives the shape; else as they are."""
    longer, shorter = (values.shape, shape) if values.dim() > len(shape) else (shape, values.shape)
    return values.reshape(shape) if longer == (*shorter, 1) else values
