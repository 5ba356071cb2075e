"""An interrupt (Ctrl-C) may come between two lines of a context manager, which then is left half."""

from asyncio import CancelledError
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
from traceback import walk_stack, walk_tb
from typing import ParamSpec, TypeVar

import torch
from torch import _C, overrides
from torch.utils import _python_dispatch as dispatch

from .passes import begun_pass, leave_passes
from .reads import leave_watchers, num_watchers
from .restore import cached_weights, forget_cached, forget_casts
from .warn import is_users

P = ParamSpec("P")
R = TypeVar("R")
Modes = tuple[list, ...]
# Of the modes that a thread is in, by kind: how many, the one at a place, how to leave and to enter.
_STACKS = (
    (
        _C._len_torch_dispatch_stack,
        _C._get_dispatch_stack_at,
        dispatch._pop_mode,
        dispatch._push_mode,
    ),
    (
        _C._len_torch_function_stack,
        _C._get_function_stack_at,
        overrides._pop_mode,
        overrides._push_mode,
    ),
)
_NONE: Modes = [], []


def raise_interrupt(error: BaseException) -> None:
    """Raises the interrupt that an error, as it is caught, has taken the place of, if there is one:
    where that came in one of torch's modes, leaving them has failed with an error of its own."""
    interrupt = interrupt_within(error)
    try:
        if interrupt is not None:
            raise interrupt from None
    finally:
        # This frame, which it holds, would keep it, and what a forward has made.
        del interrupt, error


def interrupt_within(error: BaseException) -> BaseException | None:
    """The interrupt that an error, as it is caught, has taken the place of, or None. What closes
    generators, or cancels coroutines, is none: their own errors come in its place."""
    for link in _links(error):
        if not isinstance(link, (Exception, GeneratorExit, CancelledError)):
            return link
    return None


def _links(error: BaseException) -> Iterator[BaseException]:
    """An error that is caught, and what it has taken the place of. What somebody around was handling
    before is not of these: it has come up to one of the frames around the one that catches. Nor is
    an interrupt that somebody has made an error of, by `raise from`."""
    link: BaseException | None = error
    here, seen = _frame(error), set()
    around = {None, *(frame for frame, _ in walk_stack(here))} - {here}
    while link is not None and id(link) not in seen and _frame(link) not in around:
        seen.add(id(link))  # others may have made a ring
        yield link
        before = link.__context__
        made = link.__suppress_context__ and not isinstance(before, Exception)
        link = None if made else before


def _frame(error: BaseException):
    """The outermost that it has come to."""
    return error.__traceback__ and error.__traceback__.tb_frame


def _end_frames(error: BaseException) -> None:
    """Ends the generators that frames on the way hold, the innermost first, but for the user's own:
    at a later time they would put back what was true inside."""
    for link in [*_links(error)]:
        for frame, _ in reversed([*walk_tb(link.__traceback__)]):
            if not is_users(frame):
                with suppress(RuntimeError):  # of a frame that runs
                    frame.clear()


def _modes() -> Modes:
    """Those that this thread is in, of both kinds, the innermost last."""
    if not _C._len_torch_dispatch_stack() and not _C._len_torch_function_stack():
        return _NONE
    return tuple([*map(at, range(depth()))] for depth, at, *_ in _STACKS)


def _without_ours(now: Modes, before: Modes) -> Modes:
    """Modes that have been `before`, and those of others: a model may have entered one to stay."""
    return tuple(
        [m for m in modes if _is_among(m, old) or not _is_ours(m)]
        for modes, old in zip(now, before, strict=True)
    )


def _is_among(mode, modes: list) -> bool:
    return any(mode is other for other in modes)


def _is_ours(mode) -> bool:
    return type(mode).__module__.partition(".")[0] == __package__


def _go_to(wanted: Modes) -> None:
    """Leaves and enters modes so that this thread is in those alone."""
    for (depth, at, pop, push), modes in zip(_STACKS, wanted, strict=True):
        same = 0
        while same < min(depth(), len(modes)) and at(same) is modes[same]:
            same += 1
        while (entered := depth()) > same:
            mode = at(entered - 1)
            if not _is_among(mode, modes):
                with suppress(Exception):  # of one that is left half
                    mode.__exit__(None, None, None)
            if depth() == entered:
                pop()
        for mode in modes[same:]:
            push(mode)


def leaving_nothing_behind(function: Callable[P, R]) -> Callable[P, R]:
    """The function, after which the thread is in no mode of this package that it was not in before,
    and torch's caches (autocast's, `parametrize.cached()`'s) keep no weights that it has put there
    without gradients, and after whose errors it is again in the pass and in the grad mode that it
    was called in. After interrupts, which no error takes the place of, it is in torch's modes too."""

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **options)
        outer, gradients = begun_pass(), torch.is_grad_enabled()
        modes, watchers, cached = _modes(), num_watchers(), cached_weights()
        try:
            result = function(*args, **options)
        except BaseException as error:
            interrupted = not isinstance(error, Exception) or interrupt_within(error) is not None
            leave_watchers(watchers)
            if interrupted:
                _end_frames(error)
            _go_to(modes if interrupted else _without_ours(_modes(), modes))
            leave_passes(outer)
            torch.set_grad_enabled(gradients)
            if isinstance(error, Exception):
                raise_interrupt(error)
            raise
        finally:
            forget_casts()
            forget_cached(cached)
        if (now := _modes()) != modes:
            _go_to(_without_ours(now, modes))
        return result

    return call
