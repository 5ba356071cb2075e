"""What a call allocates on the CPU."""

import itertools

import torch


def most_allocated(function) -> int:
    """Largest sum of live bytes that the function allocated, inside operators too."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(acc_events=True, activities=activities, profile_memory=True) as p:
        function()
    events = p.profiler.kineto_results.events()
    return max(
        itertools.accumulate(e.nbytes() for e in events if e.name() == "[memory]"), default=0
    )
