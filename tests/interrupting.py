"""Interrupts (Ctrl-C) at a chosen line."""

import sys
from contextlib import _GeneratorContextManager, contextmanager

from torch.overrides import handle_torch_function


def trace_lines(run, is_cut, at=None):
    """Runs with a KeyboardInterrupt at the given (file, line, n-th time) of the code objects that
    `is_cut` names; returns the places passed."""
    passed, places = {}, []

    def local(frame, event, _):
        if event == "line":
            line = frame.f_code.co_filename, frame.f_lineno
            passed[line] = passed.get(line, 0) + 1
            places.append((*line, passed[line]))
            if places[-1] == at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, *_: local if is_cut(frame.f_code) else None)
    try:
        run()
    finally:
        sys.settrace(before)
    return places


@contextmanager
def cutting_torchs_modes(at=None):
    """In the body the `at`-th return of torch into a mode that it has left is interrupted before its
    first line; yields a list, as long as there have been returns."""
    returns, before = [], sys.gettrace()
    leave, handle = _GeneratorContextManager.__exit__.__code__, handle_torch_function.__code__

    def trace(frame, *_):
        if frame.f_code is leave and frame.f_back.f_code is handle:
            returns.append(None)
            if len(returns) == at:
                sys.settrace(before)
                raise KeyboardInterrupt

    sys.settrace(trace)
    try:
        yield returns
    finally:
        sys.settrace(before)
