"""An interrupt (Ctrl-C) may come between two lines of a context manager, which then is left half."""

from collections.abc import Callable
from contextlib import suppress
from functools import wraps

import torch

from .passes import begun_pass, leave_passes
from .warn import is_users


def _end_frames(error: BaseException) -> None:
    """Ends the generators that frames on the way hold, but for the user's own: at a later time they
    would put back what was true inside."""
    trace = error.__traceback__
    while trace is not None:
        if not is_users(trace.tb_frame):
            with suppress(RuntimeError):  # of a frame that runs: the decorated function's caller
                trace.tb_frame.clear()
        trace = trace.tb_next


def leaving_nothing_behind(function: Callable) -> Callable:
    """The function, after whose errors the thread is again in the pass and in the grad mode that it
    was called in."""

    @wraps(function)
    def call(*args, **options):
        if torch.compiler.is_compiling():
            return function(*args, **options)
        outer, gradients = begun_pass(), torch.is_grad_enabled()
        try:
            return function(*args, **options)
        except BaseException as error:
            if not isinstance(error, Exception):
                _end_frames(error)
            leave_passes(outer)
            torch.set_grad_enabled(gradients)
            raise

    return call
