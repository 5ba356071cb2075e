"""Peak extra memory of a call."""

import itertools
from collections.abc import Callable

import torch


def peak_extra_bytes(function: Callable, device="cpu") -> int:
    """The most memory that one call holds beyond what was there before it, inside operators too."""
    if torch.device(device).type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(acc_events=True, activities=activities, profile_memory=True) as p:
        function()
    events = p.profiler.kineto_results.events()
    sizes = (e.nbytes() for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(sizes), default=0)
