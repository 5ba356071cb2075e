"""Counts the batch-norm calls of a forward and says which the converted layers do not cover."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .batch_norm_like import EXCLUDED, describe, listed, survey
from .guards import DropoutTrace, warnings_of
from .inputs import call, check_one_input, copied
from .interrupts import leaving_nothing_behind
from .nn import check_model, named_stochastic_layers, uncompiled_name
from .passes import Pass, running
from .reads import DispatchMode, storage_of
from .restore import evaluating, preserved_rng, without_gradients
from .state import modules_of
from .untraced import ONE_MODE


@dataclass(frozen=True)
class DoctorReport:
    """What `doctor` found.

    Attributes:
        covered: batch-norm calls made by stochastic layers.
        excluded: calls made by layers that `filter_fn` has left out.
        uncovered: all other calls, of modules and of functions.
        converted: names of the stochastic layers, with the calls of each.
        excluded_layers: names of the layers that `filter_fn` has left out.
        unconverted: names of the other modules that do batch norm, with class and reason.
        warnings: what is known to go wrong and was found: batch norm whose input went through
            dropout, batch norm in train(), a bank of small batches, far from the running statistics or
            of layers that are gone, running statistics that the model takes out of `buffers()` or
            `state_dict()`,
            layers that the forward calls in another thread.
    """

    covered: int
    excluded: int
    uncovered: int
    converted: dict[str, int]
    excluded_layers: list[str]
    unconverted: dict[str, str]
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        idle = [name for name, calls in self.converted.items() if calls == 0]
        lines = [
            f"{self.covered + self.excluded + self.uncovered} batch-norm calls: {self.covered} by "
            f"{len(self.converted)} stochastic layers, {self.excluded} by excluded layers, "
            f"{self.uncovered} not covered",
            *(f"  stochastic, never called: {name}" for name in idle),
            *(f"  excluded: {name}" for name in self.excluded_layers),
            *(f"  not converted: {describe({n: r})}" for n, r in self.unconverted.items()),
            *(f"  warning: {text}" for text in self.warnings),
        ]
        return "\n".join(lines)


@leaving_nothing_behind
def doctor(model: nn.Module, x) -> DoctorReport:
    """Run one forward, in eval, without gradients; tell which batch norm is not covered
    and what else is wrong.

    Calls of functions (`torch.nn.functional.batch_norm`) and of compiled or scripted code are seen
    too, batch norm written out in arithmetic is not. An excluded layer without parameters and
    without running statistics cannot be told from a function.

    Args:
        model: converted or not; left as it was found.
        x: its input: a tensor, a tuple of arguments or a dict of keyword arguments.

    Returns:
        a DoctorReport, which `print` shows in words.

    Raises:
        TypeError: for a model or an x of another type.
    """
    check_model("doctor", model)
    check_one_input("doctor", x)
    layers = named_stochastic_layers(model)
    with (
        evaluating(modules_of(model)),
        preserved_rng(),
        without_gradients(),
        count_uncovered(model) as counter,
    ):
        watch, trace = DoctorPass(layers, counter), DropoutTrace(model)
        with running(watch), trace:
            call(model, copied(x))
    found = survey(model)
    return DoctorReport(
        covered=sum(watch.calls.values()),
        excluded=counter.excluded,
        uncovered=counter.uncovered,
        converted={name: watch.calls.get(name, 0) for name in layers},
        excluded_layers=[uncompiled_name(name) for name in found.excluded],
        unconverted={
            **{uncompiled_name(n): type(m).__name__ for n, m in found.convertible.items()},
            **{uncompiled_name(n): reason for n, reason in found.unsupported.items()},
        },
        warnings=(
            *warnings_of(model, list(trace.after)),
            *counter.remarks(),
            *watch.remarks(),
        ),
    )


@contextmanager
def count_uncovered(model: nn.Module):
    """Count the batch-norm calls in the body; yields a BatchNormCounter.

    Inside a pass whose layers run this package's own ops, `uncovered` counts every call that
    belongs to no stochastic layer and to no layer that `filter_fn` has left out.
    """
    counter = BatchNormCounter(model)
    with ONE_MODE, counter, _WithoutInstanceNorm(counter):
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
                given = {id(arg) for arg in tree_leaves((args, kwargs))}
                self.read.update(self._running[i] for i in given & self._running.keys())
        return func(*args, **(kwargs or {}))

    def _count(self, args: tuple) -> None:
        if self._is_of_a_weight(args):
            return
        if any(id(arg) in self._excluded_tensors for arg in args):
            self.excluded += 1
        else:
            self.uncovered += 1

    def _is_of_a_weight(self, args: tuple) -> bool:
        """As in normaliser-free networks, which standardise weights, not batches."""
        return any(isinstance(x, Tensor) and storage_of(x) in self._weights for x in args[:1])

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


class DoctorPass(Pass):
    """Layers behave as usual, and their calls are not counted as uncovered."""

    def __init__(self, layers: dict[str, nn.Module], counter: BatchNormCounter):
        super().__init__(layers)
        self.counter = counter

    def normalise(self, layer: nn.Module, x: Tensor, key: str, stream: int) -> Tensor:
        with self.counter.ignoring():
            return layer.plain_forward(x)

    def statistic(self, layer: nn.Module, kind: str, own: Tensor) -> Tensor:
        return own.detach()  # one that the counter does not know: a prediction gives the replica's


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
