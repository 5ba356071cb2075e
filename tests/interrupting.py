"""Interrupts (Ctrl-C) at a chosen line."""

import sys


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
