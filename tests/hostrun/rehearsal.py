"""A plugin beside `on_cpu`: what tests ask of torch.cuda, answered on the CPU,
as far as there is an answer.

    PYTHONPATH=tests python -m pytest -p hostrun.on_cpu -p hostrun.rehearsal \\
        tests/test_gpu.py tests/test_gpu_bayes.py

"cuda" means the CPU, a stream is the only one, and peaks of memory are the profiler's: the tests
themselves are shown to be sound, before they meet a GPU.
"""

import contextlib
import itertools

import torch
from hostrun import on_cpu
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

CPU = torch.device("cpu")


class OnCpu(TorchFunctionMode):
    """Every function of torch, with "cuda" among its arguments meaning "cpu"."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*tree_map(here, args), **tree_map(here, kwargs or {}))


def here(value):
    if isinstance(value, torch.device):
        return CPU if value.type == "cuda" else value
    return CPU if isinstance(value, str) and value == "cuda" else value


class Stream:
    """The one queue that there is."""

    def wait_stream(self, other):
        pass

    def synchronize(self):
        pass


class Peak:
    """The most memory that was held since the last reset, beyond what was held then."""

    profile = None

    @classmethod
    def reset(cls):
        activities = [torch.profiler.ProfilerActivity.CPU]
        cls.profile = torch.profiler.profile(
            activities=activities, profile_memory=True, acc_events=True
        )
        cls.profile.start()

    @classmethod
    def read(cls):
        cls.profile.stop()
        events = cls.profile.profiler.kineto_results.events()
        found = [event.nbytes() for event in events if event.name() == "[memory]"]
        return max(itertools.accumulate(found), default=0)


STAND_INS = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "mem_get_info": lambda: (0, 0),  # tests of gigabytes are left out
    "synchronize": lambda: None,
    "empty_cache": lambda: None,
    "_sleep": lambda cycles: None,
    "Stream": Stream,
    "current_stream": Stream,
    "stream": lambda stream: contextlib.nullcontext(),
    "memory_allocated": lambda: 0,
    "reset_peak_memory_stats": Peak.reset,
    "max_memory_allocated": Peak.read,
}
on_cpu.LEFT_OUT |= {  # what has no answer here either
    "a_graph": "nothing records what runs on the CPU",
    "streams_share_no_draw": "there is one stream",
    "out_of_memory": "the CPU's memory has no limit",
    "no_memory_is_left_behind": "the CPU's allocator does not count",
    "outside_the_bank_is_nan": "snapshots on the CPU are looked at before the call",
}


def pytest_configure():
    for name, stand_in in STAND_INS.items():
        setattr(torch.cuda, name, stand_in)
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self: self
    OnCpu().__enter__()
