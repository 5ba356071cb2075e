"""Whether T replicas of a model can go through it as T*N rows, found out by trial and remembered.

One replica after another is the definition of the answer. Folding must prove itself:

1.  A run with T = 1 at the actual size records the rows that each stochastic call sees.
2.  On three rows, two replicas folded must equal the two one after another; once per model and trailing
    shape. If they do not, the input is expanded T-fold and that is tried.
3.  The first folded chunk of every size must agree with its last replica run alone.
4.  Every folded run must show each stochastic call the rows of the record, or T times as many, as in
    the trial, and return T times the rows of the record.

Anything else, any exception too, leads to the next way; the last is the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import ismethod
from typing import NamedTuple
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn

from .chunks import is_out_of_memory
from .fingerprint import State, fingerprint
from .inputs import call
from .known import Known, know
from .ops.checks import refuse
from .probe import (
    check_equal,
    check_informative,
    expand,
    probe_draws,
    probe_inputs,
    tolerance_of,
)
from .replicas import DoesNotFold, ReplicaPass, Undecided, running
from .restore import evaluating, preserved_rng
from .samplers import Draw, Sampler

WAYS = ("folded", "expanded", "loop")
_MOST = 256  # plans of one model; after so many input shapes it starts over


def check_output_fn(op: str, output_fn) -> None:
    """Checks that `output_fn` is None or can be called."""
    if output_fn is not None and not callable(output_fn):
        refuse(op, "output_fn", "be callable", type(output_fn).__name__, TypeError)


class Forward(NamedTuple):
    """How to run a model: what is the same for every chunk of a prediction."""

    model: nn.Module
    layers: dict[str, nn.Module]
    sampler: Sampler
    key: int
    output_fn: Callable | None
    known: Known
    op: str = "predict"
    call: Callable = call

    def draw(self, first_replica: int, num_samples: int) -> Draw:
        return self.sampler.draw(self.key, first_replica, num_samples)

    def run(self, inputs, draw: Draw, rows=None, shared=None) -> tuple[Tensor, ReplicaPass]:
        """One forward: its output, and what the stochastic calls saw."""
        active = ReplicaPass(self.layers, draw, rows, shared, self.op)
        spared = self.known.spared(inputs)
        with running(active), self.known.examining(self.op, self.model, self.layers):
            output = self.call(self.model, spared)
        if spared is not inputs:
            self.known.look_at(spared)
        active.check_calls()
        output = self._tensor(output)
        active.follow([output])
        return output, active

    def _tensor(self, output) -> Tensor:
        name = "the model's output"
        if self.output_fn is not None:
            output, name = self.output_fn(output), "output_fn's result"
        if not isinstance(output, Tensor):
            # elbo_loss has no such argument, and replicas takes any output.
            hint = self.output_fn is None and self.op != "elbo_loss"
            got = type(output).__name__ + ("; output_fn takes one out of it" if hint else "")
            refuse(self.op, name, "be a tensor", got, TypeError)
        if not output.is_floating_point():
            refuse(self.op, name, "be a floating-point tensor", output.dtype, TypeError)
        return output


class Plan(NamedTuple):
    """How replicas go through a model for inputs of one signature.

    Attributes:
        way: one of `WAYS`.
        rows: rows that each stochastic call sees with T = 1.
        largest: bytes of the largest input of a stochastic call with T = 1.
        shape: of the output with T = 1.
        shared: which calls share their input between the replicas.
        checked: numbers of replicas that were folded and agreed with the loop.
        reason: why a way before this one was given up.
        lasting: whether that holds for other values of the input too.
    """

    way: str
    rows: dict[str, int]
    largest: int
    shape: tuple[int, ...]
    shared: dict[str, bool]
    checked: set[int]
    reason: str = ""
    lasting: bool = True


class Folding:
    """The plans of a model for one prediction.

    Args:
        forward: how to run the model.
        modules: all modules of the model.
        first_replica: whose statistics the record uses.
    """

    def __init__(self, forward: Forward, modules: list[nn.Module], first_replica: int):
        self.forward, self.modules, self.first_replica = forward, modules, first_replica
        self.known = forward.known

    def plan(self, inputs) -> Plan:
        """The plan for an input, made at the first sight of its signature."""
        place = self._place(inputs)
        plan = self.known.plans.get(place)
        if plan is None:
            with self.known.planning:
                plan = self.known.plans.get(place)
                if plan is None:
                    plan = self._make(inputs)
                    self._remember(self.known.plans, place, plan, plan.lasting)
        return plan

    def give_up(self, plan: Plan, inputs, reason: Exception) -> Plan:
        """The next way that passes its trial, after a failure at the actual size."""
        with self.known.planning:
            following = self._next(plan, inputs, str(reason))
            self._remember(self.known.plans, self._place(inputs), following, following.lasting)
        return following

    def _place(self, inputs, from_dim: int = 0) -> tuple:
        autocast = [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")]
        how = _identity(self.forward.output_fn), tuple(self.forward.layers), *autocast
        return _signature(inputs, from_dim), *how

    def _remember(self, memory: dict, place, value, lasting: bool) -> None:
        if len(memory) >= _MOST:
            memory.clear()
        if lasting:
            memory[place] = value

    def _make(self, inputs) -> Plan:
        state = State(self.modules)
        with preserved_rng():
            try:
                output, record = self.forward.run(inputs, self.forward.draw(self.first_replica, 1))
                plan = Plan("", record.rows, record.largest, tuple(output.shape), {}, set())
                if self._unchanged():
                    plan = self._next(plan, inputs)
            finally:
                changed = not self._unchanged()
                if changed:
                    state.restore()
        if changed:
            self.known.seen = fingerprint(self.modules)
            return plan._replace(way="loop", reason="its forward changes the model's state")
        return plan

    def _unchanged(self) -> bool:
        return fingerprint(self.modules) == self.known.seen

    def _next(self, plan: Plan, inputs, reason: str = "") -> Plan:
        lasting = True
        for way in WAYS[WAYS.index(plan.way) + 1 if plan.way else 0 :]:
            if way == "loop":
                break
            found, proven_for_all = self._trial(inputs, way)
            if isinstance(found, dict):
                return plan._replace(way=way, shared=found, checked=set(), reason=reason)
            reason, lasting = found, lasting and proven_for_all
        return plan._replace(way="loop", shared={}, reason=reason, lasting=lasting)

    def _trial(self, inputs, way: str) -> tuple[dict[str, bool] | str, bool]:
        """Which calls share their input when two replicas of three rows go this way, or why not; and
        whether that holds for every input of this trailing shape."""
        place = (way, self._place(inputs, 1))
        if place in self.known.trials:
            return self.known.trials[place], True
        lasting = True
        try:
            found = self._prove(inputs, way)
        except DoesNotFold as error:
            found, lasting = str(error), not isinstance(error, Undecided)
        except Exception as error:
            found, lasting = f"{type(error).__name__}: {error}", not is_out_of_memory(error)
        self._remember(self.known.trials, place, found, lasting)
        return found, lasting

    def _prove(self, inputs, way: str) -> dict[str, bool]:
        probe = probe_inputs(inputs)
        *alone, both = probe_draws(self.forward.draw(self.first_replica, 1))
        runs = [self.forward.run(probe, draw) for draw in alone]
        loop, rows = torch.cat([output for output, _ in runs]), runs[0][1].rows
        tolerance = self._tolerance(loop, inputs)
        check_informative(torch.stack([output for output, _ in runs]), tolerance)
        arguments = probe if way == "folded" else expand(probe, 2)
        folded, seen = self.forward.run(arguments, both, rows)
        check_equal(folded, loop, tolerance)
        return seen.shared

    def _tolerance(self, output: Tensor, inputs) -> float:
        parameters = {
            p.dtype for m in self.modules for p in m._parameters.values() if p is not None
        }
        return tolerance_of(output, inputs, parameters)

    def run(self, plan: Plan, inputs, first_replica: int, num_samples: int) -> Tensor:
        """The outputs (T, N, ...) of T replicas, T = 1 for the loop."""
        draw = self.forward.draw(first_replica, num_samples)
        if num_samples == 1:
            return self.forward.run(inputs, draw)[0].unsqueeze(0)
        arguments = inputs if plan.way == "folded" else expand(inputs, num_samples)
        output, _ = self.forward.run(arguments, draw, plan.rows, plan.shared)
        if tuple(output.shape) != (num_samples * plan.shape[0], *plan.shape[1:]):
            raise DoesNotFold(
                f"{num_samples} replicas have outputs {list(output.shape)}, one has {list(plan.shape)}"
            )
        output = output.unflatten(0, (num_samples, plan.shape[0]))
        if num_samples not in plan.checked:
            self._check_last(plan, inputs, output, first_replica)
        return output

    def _check_last(self, plan: Plan, inputs, output: Tensor, first_replica: int) -> None:
        last = first_replica + output.shape[0] - 1
        with self.known.planning, preserved_rng():
            alone, _ = self.forward.run(inputs, self.forward.draw(last, 1))
        check_equal(output[-1], alone, self._tolerance(output, inputs))
        plan.checked.add(output.shape[0])


def proven_plan(
    forward: Forward, modules: list[nn.Module], inputs, first_replica: int, num_samples: int
) -> Plan:
    """The plan for T replicas of a model that the caller runs itself, tried in eval at the actual size."""
    with torch.no_grad(), evaluating(modules):
        known = know(forward.model, modules)
        folding = Folding(forward._replace(known=known), modules, first_replica)
        plan = folding.plan(inputs)
        while plan.way != "loop" and num_samples not in plan.checked:
            try:
                folding.run(plan, inputs, first_replica, num_samples)
            except Exception as error:
                plan = folding.give_up(plan, inputs, error)
    return plan


def _signature(inputs, from_dim: int) -> tuple:
    """Shapes, dtypes and devices of the tensors of an input, and its other values."""
    if isinstance(inputs, Tensor):
        return tuple(inputs.shape[from_dim:]), inputs.dim(), inputs.dtype, inputs.device
    if isinstance(inputs, Mapping):
        return tuple((key, _signature(value, from_dim)) for key, value in inputs.items())
    if isinstance(inputs, (tuple, list)):
        return type(inputs), *(_signature(value, from_dim) for value in inputs)
    # An object() is equal to nothing else: what is unknown is found out each time.
    return (inputs if isinstance(inputs, (int, float, bool, str, type(None))) else object(),)


def _identity(function):
    """What stands for a function in a key, without keeping what it holds alive.

    A function written anew at each call (a lambda) is the same if its code is and it holds nothing.
    """
    code = getattr(function, "__code__", None)
    if code is not None and not (function.__closure__ or function.__defaults__):
        return code
    try:
        return WeakMethod(function) if ismethod(function) else ref(function)
    except TypeError:
        return type(function), repr(function)
