"""Peak extra memory of a call."""

import weakref
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operators returned and that are still alive,
    and the most there were."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.known = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage() for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor):
                self.count(tensor.untyped_storage(), given)
        return result

    def count(self, storage, given):
        if storage in given or storage in self.known:
            return
        self.known.add(storage)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.release, storage.nbytes())

    def release(self, size):
        self.live -= size


def peak_extra_bytes(function: Callable, device) -> int:
    """The most memory that one call holds beyond what was there before it.

    On the CPU what operators return is counted, not the scratch inside one operator.
    """
    if torch.device(device).type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    with LiveBytes() as counter:
        function()
    return counter.peak
