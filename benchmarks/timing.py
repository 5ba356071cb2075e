"""Interleaved timing: the cases take turns, and each one's median counts."""

import statistics
import time

import torch


def _seconds(fn, calls: int, sync) -> float:
    sync()
    start = time.perf_counter()
    for _ in range(calls):
        fn()
    sync()
    return (time.perf_counter() - start) / calls


def compare(cases: dict, *, rounds: int = 11, sample_ms: float = 5.0, device="cpu") -> dict:
    """Median milliseconds of each case, by name.

    Args:
        cases: name to a function of no arguments. They take turns, `rounds` times each.
        sample_ms: a sample repeats the call until it takes about this long.
    """
    sync = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    calls = {}
    for name, fn in cases.items():
        fn()
        calls[name] = max(1, round(sample_ms / 1e3 / max(_seconds(fn, 1, sync), 1e-7)))
    samples = {name: [] for name in cases}
    for _ in range(rounds):
        for name, fn in cases.items():
            samples[name].append(_seconds(fn, calls[name], sync))
    return {name: 1e3 * statistics.median(times) for name, times in samples.items()}


def record(benchmark, case: str, times: dict, ours: str = "ours", moved=None, copied=None):
    """Puts a comparison into the benchmark's record.

    Args:
        times: what `compare` returned.
        ours: the name of our case; the others are yardsticks.
        moved: bytes that our case moves.
        copied: bytes that the yardstick "copy_" moves.
    """
    yardsticks = {name: ms for name, ms in times.items() if name != ours}
    benchmark.extra_info.update(
        case=case,
        ours_ms=times[ours],
        yardsticks=yardsticks,
        ratio={name: ms / times[ours] for name, ms in yardsticks.items()},
        gb_s=moved / times[ours] / 1e6 if moved else None,
        copy_gb_s=copied / times["copy_"] / 1e6 if copied else None,
    )
