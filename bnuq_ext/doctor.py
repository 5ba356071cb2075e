"""Says which batch norm of a model the converted layers do not cover, and what else is wrong."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from .batch_norm_like import describe, survey
from .inputs import Inputs, call, check_one_input, copied
from .interrupts import leaving_nothing_behind
from .nn import check_model, named_stochastic_layers, uncompiled_name
from .norm_calls import BatchNormCounter, count_uncovered
from .passes import Pass, running
from .restore import evaluating, preserved_rng, without_gradients
from .state import modules_of
from .traps import DropoutTrace, warnings_of
from .wrappers import unwrapped


@dataclass(frozen=True)
class DoctorReport:
    """What `doctor` found; shown as text.

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
            `state_dict()`, layers that the forward calls in another thread.
    """

    covered: int
    excluded: int
    uncovered: int
    converted: dict[str, int]
    excluded_layers: list[str]
    unconverted: dict[str, str]
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        idle = [name for name, calls in self.converted.items() if calls == 0]
        number = len(self.unconverted)
        others = f"; modules that are not converted: {number}" if number else ""
        lines = [
            f"{self.covered + self.excluded + self.uncovered} batch-norm calls: {self.covered} by "
            f"{len(self.converted)} stochastic layers, {self.excluded} by excluded layers, "
            f"{self.uncovered} not covered{others}",
            *(f"  stochastic, never called: {name}" for name in idle),
            *(f"  excluded: {name}" for name in self.excluded_layers),
            *(f"  not converted: {describe({n: r})}" for n, r in self.unconverted.items()),
            *(f"  warning: {text}" for text in self.warnings),
        ]
        return "\n".join(lines)


@leaving_nothing_behind
def doctor(model: nn.Module, x: Inputs) -> DoctorReport:
    """Run one forward, in eval, without gradients; tell which batch norm is not covered
    and what else is wrong.

    Calls of functions (`torch.nn.functional.batch_norm`) and of compiled or scripted code are seen
    too, batch norm written out in arithmetic is not. An excluded layer without parameters and
    without running statistics cannot be told from a function.

    Args:
        model: converted or not; left as it was found, but for what its own forward changes in eval
            (lazy layers, counters). Data-parallel wrappers around it are left aside.
        x: its input: a tensor, a tuple of arguments or a dict of keyword arguments.

    Returns:
        a DoctorReport, which `print` shows in words.

    Raises:
        TypeError: for a model or an x of another type.
    """
    check_model("doctor", model)
    model = unwrapped(model)
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
    found = survey(model)  # of what the forward has made of lazy layers
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
        warnings=(*warnings_of(model, list(trace.after)), *counter.remarks(), *watch.remarks()),
    )


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
