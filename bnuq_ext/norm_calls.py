"""Counts the calls of batch norm in forwards that no stochastic layer makes."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .batch_norm_like import EXCLUDED, listed
from .inputs import tensors
from .nn import named_stochastic_layers, uncompiled_name
from .reads import DispatchMode, storage_of
from .restore import without_gradients
from .untraced import uncompiled


@contextmanager
def count_uncovered(model: nn.Module):
    """Count the batch-norm calls in the body; yields a BatchNormCounter.

    Inside a pass whose layers run this package's own ops, `uncovered` counts every call that
    belongs to no stochastic layer and to no layer that `filter_fn` has left out.
    """
    counter = BatchNormCounter(model)
    # Inside inference mode a dispatch mode has autocast pass recurrent layers by.
    casts = torch.is_inference_mode_enabled() and torch._C._is_any_autocast_enabled()
    outside = without_gradients() if casts else nullcontext()
    with outside, uncompiled(), counter, _WithoutInstanceNorm(counter):
        yield counter


class BatchNormCounter(DispatchMode):
    """Counts operators that normalise a batch, torch's own and quantised ones.

    Attributes:
        uncovered: calls counted.
        excluded: calls with a tensor of a layer that `filter_fn` has left out.
        read: names of stochastic layers whose running statistics went into an operator.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module):
        super().__init__()
        self.uncovered = self.excluded = self._ignored = 0
        self.read: set[str] = set()
        # A wrapper that sends buffers to other processes reads them.
        wrapped = any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules())
        self._running = {
            id(layer._buffers[kind]): uncompiled_name(name)
            for name, layer in named_stochastic_layers(model).items()
            for kind in ("running_mean", "running_var")
            if layer._buffers.get(kind) is not None and not wrapped
        }
        self._excluded_tensors = {
            id(tensor)
            for module in model.modules()
            if hasattr(module, EXCLUDED)
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        }
        self._weights = {storage_of(p) for p in model.parameters()} - {None, 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self._ignored:
            if _is_batch_norm(func):
                self._count(args)
            elif not _only_hands_on(func):
                given = {id(t) for t in tensors((args, kwargs))}
                self.read.update(self._running[i] for i in given & self._running.keys())
        return func(*args, **(kwargs or {}))

    def _count(self, args: tuple) -> None:
        # Normaliser-free networks standardise weights, not batches.
        if any(isinstance(x, Tensor) and storage_of(x) in self._weights for x in args[:1]):
            return
        if any(id(arg) in self._excluded_tensors for arg in args):
            self.excluded += 1
        else:
            self.uncovered += 1

    def remarks(self) -> list[str]:
        """Of what the model does with running statistics besides its stochastic layers."""
        if not self.read:
            return []
        names = listed(sorted(self.read))
        return [
            f"the forward reads the running statistics of {names} by itself: there they are those of the "
            "training data in all replicas, not the replica's"
        ]

    @contextmanager
    def ignoring(self):
        """Nothing counts in the body."""
        self._ignored += 1
        try:
            yield
        finally:
            self._ignored -= 1


class _WithoutInstanceNorm(TorchFunctionMode):
    """torch's instance norm is made of batch norm: its calls are not counted."""

    def __init__(self, counter: BatchNormCounter):
        super().__init__()
        self.counter = counter

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func not in (torch.instance_norm, nn.functional.instance_norm):
            return func(*args, **(kwargs or {}))
        with self.counter.ignoring():
            return func(*args, **(kwargs or {}))


def _only_hands_on(func) -> bool:
    """Whether an operator computes nothing with values: a copy that is kept, a tensor like it."""
    name = str(func)  # torch.cond traces this function, and can do no more with its operator
    return any(part in name for part in ("aten.detach.", "aten.clone.", "_like.", "aten.new_"))


def _is_batch_norm(func) -> bool:
    name = str(func)
    parts_of_one_call = ("backward", "stats")
    return (
        "batch_norm" in name
        and not name.startswith("bnuq.")
        and not any(part in name for part in parts_of_one_call)
    )
