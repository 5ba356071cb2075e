"""Checkpoints of torch's (`torch.utils.checkpoint`): what is known of a forward inside of one, when a
backward computes it again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from weakref import WeakKeyDictionary

import torch
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction

from .untraced import untraced

_REMEMBERED: WeakKeyDictionary[object, object] = WeakKeyDictionary()  # by what torch keeps of one


@untraced
def reentrant_checkpoints() -> int:
    """How many reentrant ones this thread is in, whose second calls nothing tells from new ones."""
    forward = CheckpointFunction.forward.__code__
    inside = [frame for frame in _stack() if frame.f_code is forward]
    return sum(any(frame.f_locals["ctx"].needs_input_grad) for frame in inside)


def remember_in_checkpoint(value: object) -> None:
    """Keeps a value with the innermost checkpoint that is not reentrant, if the forward is in one,
    for as long as the graph keeps that."""
    if torch.compiler.is_compiling():
        return
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    code = getattr(hooks[0], "__code__", None) if hooks else None
    if code is not None and _is_of_checkpoint(code) and "frame" in code.co_freevars:
        held = hooks[0].__closure__[code.co_freevars.index("frame")]
        _REMEMBERED[held.cell_contents] = value


def remembered_in_checkpoint() -> object | None:
    """The value kept with the innermost checkpoint that this thread's backward computes again."""
    if not _REMEMBERED:
        return None
    unpacked = (f for f in _stack() if f.f_code.co_name == "unpack_hook")
    held = (f.f_locals["frame"] for f in unpacked if _is_of_checkpoint(f.f_code))
    return next((_REMEMBERED[c] for c in held if c in _REMEMBERED), None)


def _is_of_checkpoint(code) -> bool:
    return code.co_filename == checkpoint.__file__


def _stack() -> Iterator[FrameType]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
