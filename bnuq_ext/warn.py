"""Warnings that name the user's own line, however deep in this package they arise."""

import sys
import warnings
from types import FrameType

_PASSED_OVER = {__package__, "contextlib", "torch"}


def is_users(frame: FrameType) -> bool:
    """Whether a frame belongs neither to this package nor to torch."""
    return frame.f_globals.get("__name__", "").partition(".")[0] not in _PASSED_OVER


def warn(text: str) -> None:
    """Warns at the line of the nearest caller that is neither this package nor torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and not is_users(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
