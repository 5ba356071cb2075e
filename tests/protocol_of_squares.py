"""A small protocol for the runner's tests: squares of numbers."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from bnuq_ext.progress import progress_bar
from bnuq_ext.protocols.results import Report, Table, Unit

TITLE = "Squares"
WITHOUT_DATA = None


@dataclass(frozen=True)
class Settings:
    numbers: tuple[int, ...] = (2, 3, 4)
    fail_at: int | None = None
    kill_at: int | None = None
    wait_at: int | None = None


QUICK, FULL = Settings(), Settings((2, 3, 4, 5))


def make_units(settings, data_root):
    return [Unit(f"of-{n}", {"n": n}) for n in settings.numbers]


def sources(settings, data_root):
    return [f for f in [Path(data_root) / "numbers"] if f.exists()]


def compute(unit, settings, data_root):
    n = unit.arguments["n"]
    if data_root is not None:  # mended by a file that a test makes
        if n == settings.fail_at and not (Path(data_root) / "mended").exists():
            raise ValueError(f"squares: n must not be {n}, got {n}")
        if n == settings.kill_at and not (Path(data_root) / "mended").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        if n == settings.wait_at:
            progress_bar(shown=False)  # as of what a unit calls
            (Path(data_root) / "waiting").write_text(str(os.getpid()))
            time.sleep(600)
        with open(Path(data_root) / "computed", "a") as file:
            file.write(f"{n}\n")
    return {"square": n * n, "threads": torch.get_num_threads()}


def report(results, settings, folder):
    (folder / "squares.png").write_bytes(b"")
    rows = [[name, found["square"], found["square"] / 3, None] for name, found in results.items()]
    columns = ["unit", "square", "a third", "paper|s"]
    return Report([Table("squares", "All squares", columns, rows)], ["squares.png"], ["All are."])
