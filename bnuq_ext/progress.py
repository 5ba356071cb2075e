"""Progress of long work on stderr."""

import sys

from tqdm import tqdm

_SECONDS = 60  # between two lines


class _Lines:
    """A stream for the states of a bar, each of which becomes a line of stderr."""

    def write(self, text: str) -> None:
        if text.strip():
            sys.stderr.write(text.strip() + "\n")

    def flush(self) -> None:
        sys.stderr.flush()


def _is_terminal(stream) -> bool:
    try:
        return stream.isatty()
    except Exception:  # it is closed, or no file
        return False


def progress_bar(*args, shown: bool, **options) -> tqdm:
    """A `tqdm` bar if it is to be shown; where stderr is no terminal it is a line a minute instead,
    none for less."""
    if shown and sys.stderr is not None and not _is_terminal(sys.stderr):
        lines = {"mininterval": _SECONDS, "maxinterval": _SECONDS, "delay": _SECONDS}
        options |= {"file": _Lines(), "position": 0, **lines}
    return tqdm(*args, disable=not shown or sys.stderr is None, **options)
