"""Warnings that name the user's own line, however deep in this package they arise."""

import sys
import warnings

PASSED_OVER = {__package__, "contextlib", "torch"}  # packages whose frames are not the user's


def warn(text: str) -> None:
    """Warns at the line of the nearest caller that is neither this package nor torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in PASSED_OVER:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
