"""What torch.compile leaves alone: our functions, and models while they are watched."""

import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from .forks import free_in_children

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """The function, around which a compiled caller breaks its graph: traced, it would be compiled
    for minutes, and again for each number of rows."""

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **options)
        return function(*args, **options)

    return call


def unrecorded():
    """Inside, torch.jit.trace records nothing: what a cache holds it would find only once, and at the
    shape of a parameter it fails with an error that ends the process where it is caught."""
    state = torch._C._get_tracing_state()
    return nullcontext() if state is None else _aside(state)


@contextmanager
def _aside(state):
    torch._C._set_tracing_state(None)
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)


# torch keeps "in a dispatch mode" in globals: threads that leave out of order would leave it set.
ONE_MODE = free_in_children(threading.RLock())


@contextmanager
def uncompiled():
    """What torch.compile has compiled runs as it was written: it can be watched, and trials do not
    use up the few times that it is compiled again for what differs among passes."""
    with ONE_MODE, _eager_stance():
        yield


def _eager_stance():
    dynamo = sys.modules.get("torch._dynamo")
    set_stance = getattr(dynamo, "set_stance", None)
    if set_stance is None:  # not imported, or on the way in another thread
        return nullcontext()
    # An interrupt may end an inner body after the outer one, whose stance it would put back.
    stance = getattr(dynamo.eval_frame, "_stance", None)
    if getattr(stance, "stance", None) == "force_eager":
        return nullcontext()
    try:
        return set_stance("force_eager")
    except RuntimeError:  # called by compiled code
        return nullcontext()
