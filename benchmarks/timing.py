"""Interleaved timing: the cases take turns, and each one's median counts."""

import os
import statistics
import time

import torch

FULL = os.environ.get("BNUQ_BENCH", "full") == "full"
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


class Times(dict):
    """Median milliseconds of each case, by name; `samples` has those of every round."""

    def __init__(self, samples: dict[str, list[float]]):
        super().__init__({name: statistics.median(times) for name, times in samples.items()})
        self.samples = samples

    def ratios(self, name: str) -> list[float]:
        """What `name` takes over what "ours" takes, in each round."""
        pairs = zip(self.samples[name], self.samples["ours"], strict=True)
        return [theirs / mine for theirs, mine in pairs]


def seconds_of(fn, device="cpu", calls: int = 1) -> float:
    """What one of several calls takes, the work on a GPU included."""
    sync = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    sync()
    start = time.perf_counter()
    for _ in range(calls):
        fn()
    sync()
    return (time.perf_counter() - start) / calls


def compare(
    cases: dict,
    *,
    rounds: int = 11,
    sample_ms: float = 5.0,
    seconds: float = float("inf"),
    device="cpu",
) -> Times:
    """Median milliseconds of each case.

    Args:
        cases: name to a function of no arguments. They take turns, `rounds` times each.
        sample_ms: a sample repeats the call until it takes about this long.
        seconds: about how long all rounds may take; at least three are made.
    """
    calls, round_seconds = {}, 0.0
    for name, fn in cases.items():
        fn()
        once = max(seconds_of(fn, device), 1e-7)
        calls[name] = max(1, round(sample_ms / 1e3 / once))
        round_seconds += calls[name] * once
    samples = {name: [] for name in cases}
    for _ in range(int(max(3, min(rounds, seconds // round_seconds)))):
        for name, fn in cases.items():
            samples[name].append(1e3 * seconds_of(fn, device, calls[name]))
    return Times(samples)


def in_a_graph(step):
    """A replay of the step, captured after a few turns on a stream of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def record(benchmark, case: str, times: Times, moved=None, copied=None, **details):
    """Puts a comparison into the benchmark's record.

    Args:
        times: what `compare` returned: of our case, "ours", and of yardsticks.
        moved: bytes that our case moves.
        copied: bytes that the yardstick "copy_" moves.
        details: what else `report` prints: target, memory_mb, skipped; and ways, which it does not.
    """
    ratios = {name: times.ratios(name) for name in times if name != "ours"}
    benchmark.extra_info.update(
        case=case,
        ours_ms=times["ours"],
        rounds=len(times.samples["ours"]),
        yardsticks={name: times[name] for name in ratios},
        ratio={name: statistics.median(values) for name, values in ratios.items()},
        ratio_range={
            name: statistics.quantiles(values, n=4)[::2] for name, values in ratios.items()
        },
        gb_s=moved / times["ours"] / 1e6 if moved else None,
        copy_gb_s=copied / times["copy_"] / 1e6 if copied else None,
        **details,
    )
