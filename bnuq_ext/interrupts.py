"""An interrupt (Ctrl-C) may come between two lines of a context manager, which then is left half."""

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from traceback import walk_tb
from typing import ParamSpec, TypeVar

import torch
from torch import _C, overrides
from torch.utils._python_dispatch import _pop_mode

from .passes import begun_pass, leave_passes
from .reads import leave_watchers, num_watchers
from .warn import is_users

P = ParamSpec("P")
R = TypeVar("R")


def _end_frames(error: BaseException) -> None:
    """Ends the generators that frames on the way hold, the innermost first, but for the user's own:
    at a later time they would put back what was true inside."""
    for frame, _ in reversed([*walk_tb(error.__traceback__)]):
        if not is_users(frame):
            with suppress(RuntimeError):  # of a frame that runs: the decorated function's caller
                frame.clear()


def _leave_modes(dispatch: int, functions: int) -> None:
    """Leaves the modes that this thread has entered since it was in so many."""
    for before, depth, at, pop in (
        (dispatch, _C._len_torch_dispatch_stack, _C._get_dispatch_stack_at, _pop_mode),
        (functions, _C._len_torch_function_stack, _C._get_function_stack_at, overrides._pop_mode),
    ):
        while (entered := depth()) > before:
            with suppress(Exception):  # of one that is left half
                at(entered - 1).__exit__(None, None, None)
            if depth() == entered:
                pop()


def leaving_nothing_behind(function: Callable[P, R]) -> Callable[P, R]:
    """The function, after whose errors the thread is again in the pass and in the grad mode that it
    was called in, after interrupts in torch's modes too."""

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **options)
        outer, gradients = begun_pass(), torch.is_grad_enabled()
        modes = _C._len_torch_dispatch_stack(), _C._len_torch_function_stack()
        watchers = num_watchers()
        try:
            return function(*args, **options)
        except BaseException as error:
            if not isinstance(error, Exception):
                leave_watchers(watchers)
                _end_frames(error)
                _leave_modes(*modes)
            leave_passes(outer)
            torch.set_grad_enabled(gradients)
            raise

    return call
