"""Whether T replicas of a model can go through it as T*N rows, found out by trial and remembered.

One replica after another is the definition of the answer. Folding must prove itself:

1.  A run with T = 1 at the actual size records the rows that each stochastic call sees.
2.  On three rows, two replicas folded must equal the two one after another, also where flags are set
    that none of the rows sets, where masks that are the same for all of them are inverted, or one
    replica is scaled; infinities in one must not reach the
    other. Among nine replicas a row that lies far out, and rows that are nearly alike, must be
    treated as in one. No output may be made of what an operation makes of both replicas. This is
    tried once per model and trailing shape. If it fails, the input is expanded T-fold and that is
    tried.
3.  The first folded chunk of every size must agree with four of its replicas run alone, and be made
    by the operations of one.
4.  Every folded run must show each stochastic call the rows of the record, or T times as many, as in
    the trial, and return T times the rows of the record.

Anything else, any exception too, leads to the next way; the last is the loop.

All this holds for the parameters as they are. Where gradients will be taken the trial compares
these too, and must hold with the parameters moved, since a coupling of rows behind a gate at zero
shows in no output, but in the gate's gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..chunks import OTHERS, is_out_of_memory, is_shortage
from ..fingerprint import fingerprint
from ..forward import Forward
from ..inputs import expand, num_rows, tensors
from ..interrupts import raise_interrupt
from ..ops.modes import autocast_dtypes, is_within_transform, other_modes
from ..passes import DoesNotFold, ReplicaPass, Undecided
from ..reads import READS, Reads
from ..restore import drawn_since, preserved_rng, random_states
from ..samplers import Draw
from ..state import State, modules_of
from ..untraced import uncompiled
from .agreement import check_equal, tolerance_of
from .lazy_setup import keep_lazy_setup
from .mixed import Mixed
from .probe import ROWS
from .signature import key_of, reals_of, signature
from .trial import Proof, Trial

WAYS = ("folded", "expanded")  # before the loop
CHANGES = "its forward changes the model's state"
NEW_MODULES = "its first forward has made modules; the next prediction can tell"
DRAWS = "its forward draws random numbers, which replicas that go together would share"
AT_ONCE = 2  # proofs of a model that are made at first sight of a shape
_MOST = 256  # plans of one model; after so many input shapes it starts over


class Plan(NamedTuple):
    """How replicas go through a model for inputs of one signature.

    Attributes:
        way: one of `WAYS`, or "loop"; "" where none has been tried.
        rows: rows that each stochastic call sees with T = 1.
        largest: bytes of the largest input of a stochastic call with T = 1, or 1 / `OTHERS` of
            those of the largest activation behind the first, whichever is more; of any activation
            once the input is expanded.
        largest_before: 1 / `OTHERS` of the bytes of the largest activation before the first.
        shape: of the output with T = 1.
        shared: which calls share their input between the replicas.
        checked: numbers of replicas that were folded and agreed with the loop, each alone and with
            the input's real numbers without rows.
        reason: why a way before this one was given up.
        lasting: whether that holds for other values of the input too.
        steady: whether it may stand for other values of the parameters.
        repeatable: whether forwards with the training flags as they are can be compared: they draw
            no random numbers, and replicas differ; None until it has been found out.
        macs: that the model takes for a row; see `macs_of`.
    """

    way: str
    rows: dict[str, int]
    largest: int
    largest_before: int
    shape: tuple[int, ...]
    shared: dict[str, bool]
    checked: set[int | tuple[int, tuple]]
    reason: str = ""
    lasting: bool = True
    steady: bool = True
    repeatable: bool | None = None
    macs: int = 0


LOOP = Plan("loop", {}, 0, 0, (), {}, set())  # of which nothing has been tried


class Folding:
    """The plans of a model for one input.

    Args:
        forward: how to run the model.
        modules: all modules of the model.
        first_replica: whose statistics the record uses.
        inputs: what the model is given.

    Attributes:
        flags: training flags of the modules, if gradients will be taken.
    """

    flags: tuple[bool, ...] | None = None
    may_draw = False  # random numbers of torch's generators in a forward
    keeps_lazy_setup = True  # of the forward that a plan begins with

    def __init__(self, forward: Forward, modules: list[nn.Module], first_replica: int, inputs):
        self.forward, self.modules, self.first_replica = forward, modules, first_replica
        self.inputs, self.cache = inputs, forward.cache

    def plan(self, trial_pays: Callable[[Plan], bool] = lambda plan: True) -> Plan:
        """The plan, made at the first sight of the input's signature;
        without a trial while `trial_pays` denies it."""
        plan = self.cache.plans.get(self.plan_key)
        if plan is None or (not plan.way and trial_pays(plan)):
            with self.cache.planning:
                plan = self.cache.plans.get(self.plan_key)
                if plan is None or not plan.way:
                    plan = self._make(trial_pays)
                    self.remember(self.cache.plans, self.plan_key, plan, plan.lasting)
        return plan

    def count_forwards(self, forwards: int) -> None:
        """Counts forwards of such inputs, one replica each, that are about to be made."""
        rows = self.looped_rows() + forwards * self._num_rows()
        self.remember(self.cache.looped_forwards, self.plan_key, self.looped_forwards() + forwards)
        self.remember(self.cache.looped_rows, self.trial_key, rows)

    def looped_forwards(self) -> int:
        """How many have been counted."""
        return self.cache.looped_forwards.get(self.plan_key, 0)

    def looped_rows(self) -> int:
        """Their rows, whatever the number of rows in an input."""
        return self.cache.looped_rows.get(self.trial_key, 0)

    def is_planned(self) -> bool:
        """Whether it has been decided how such inputs go."""
        plan = self.cache.plans.get(self.plan_key)
        return plan is not None and bool(plan.way)

    def has_tried(self) -> bool:
        """Whether there has been a trial on inputs of this trailing shape."""
        return any((way, self.trial_key) in self.cache.trials for way in WAYS)

    def undecided(self) -> int:
        """How many trials on such inputs could not tell."""
        return self.cache.undecided.get(self.trial_key, 0)

    def give_up(self, plan: Plan, reason: Exception) -> Plan:
        """The next way that passes its trial, after a failure at the actual size."""
        with self.cache.planning, uncompiled():
            following = self._next(plan, str(reason))
            if is_out_of_memory(reason):
                following = following._replace(steady=False)
            self.remember(self.cache.plans, self.plan_key, following, following.lasting)
        return following

    @cached_property
    def plan_key(self) -> tuple:
        """What the plan is remembered by."""
        return self._key(0)

    @cached_property
    def trial_key(self) -> tuple:
        """What a trial is remembered by: the same whatever the number of rows."""
        return self._key(1)

    @cached_property
    def reals(self) -> tuple:
        """The real numbers of what has no rows in the input, a rate or the weights of edges: new
        ones need no new trial, but a comparison."""
        return reals_of(self.inputs, self._num_rows())

    def _num_rows(self) -> int:
        return num_rows(self.forward.op, self.inputs)

    def _key(self, from_dim: int) -> tuple:
        return (
            signature(self.inputs, from_dim, self._num_rows()),
            len({id(t) for t in tensors(self.inputs)}),  # a model may ask whether two are one
            key_of(self.forward.output_fn, self.modules),
            tuple(self.forward.layers),
            self.flags,
            autocast_dtypes(),
            other_modes(),
        )

    def remember(self, memory: dict, key, value, lasting: bool = True) -> None:
        if len(memory) >= _MOST:
            memory.clear()
        if lasting:
            memory[key] = value

    def _make(self, trial_pays: Callable[[Plan], bool]) -> Plan:
        # A loader's batches before may have changed the state, and this one may change it back.
        if (seen := fingerprint(self.modules)) != self.cache.fingerprint:
            self.cache.restart(seen)
        state, kept = State(self.modules), False
        with uncompiled(), preserved_rng() as generators:
            try:
                before = random_states()
                output, record, reads = self.record(state)
                largest = max(record.largest, reads.largest // OTHERS)
                before_first, shape = reads.largest_before // OTHERS, tuple(output.shape)
                plan = Plan("", record.rows, largest, before_first, shape, {}, set())
                plan = plan._replace(macs=reads.macs // reads.num_rows)
                if self._changed(state):
                    kept = self.keeps_lazy_setup and keep_lazy_setup(self, state, generators)
                elif not self.may_draw and drawn_since(before):
                    # Or another thread has, meanwhile: the next time it may not.
                    plan = plan._replace(way="loop", reason=DRAWS, lasting=reads.draws)
                else:
                    plan = self._first(plan, reads, trial_pays)
            finally:
                changed = not kept and self.undo(state)
        if kept:
            self.keeps_lazy_setup = False  # once
            if self.is_whole():
                return self._make(trial_pays)
            return plan._replace(way="loop", reason=NEW_MODULES, lasting=False)
        if changed:
            return plan._replace(way="loop", reason=CHANGES, lasting=self.changes_again())
        return plan

    def is_whole(self) -> bool:
        """Whether the model still has the modules that it had."""
        return modules_of(self.forward.model) == self.modules

    def changes_again(self) -> bool:
        """Counts a forward that has changed the model; true from the second on: the first may have
        filled a table that stays."""
        self.cache.state_changes += 1
        return self.cache.state_changes > 1

    def undo(self, state: State) -> bool:
        """Whether forwards have changed the model's state since; if so it is put back."""
        if not self._changed(state):
            return False
        state.restore()
        self.cache.renew(fingerprint(self.modules))
        return True

    def record(self, state: State) -> tuple[Tensor, ReplicaPass, Reads]:
        """A forward of the first replica: its output, what its stochastic calls and what operations
        saw; `state` learns of the parameters that are written into."""
        reads, draw = self.following(state), self.forward.draw(self.first_replica, 1)
        try:
            with reads:
                return *self.forward.run(self.inputs, draw), reads
        except Exception as error:  # of torch.cond, which cannot be watched; or the model's own
            raise_interrupt(error)
            reads.found, reads.lasting = READS, not is_shortage(error)
        return *self.forward.run(self.inputs, draw), reads

    def following(self, state: State) -> Reads:
        """For forwards whose writes into parameters and large tensors `state` learns of."""
        reads = self._reads()
        reads.guard(state.others)
        state.follow(reads.overwritten)
        return reads

    def _reads(self) -> Reads:
        return Reads(self.modules, self.inputs, self._num_rows())

    def _first(self, plan: Plan, reads: Reads, trial_pays: Callable[[Plan], bool]) -> Plan:
        try:
            reads.check(plan.rows)
        except DoesNotFold as error:
            return plan._replace(way="loop", reason=str(error), lasting=reads.lasting)
        return self._next(plan) if trial_pays(plan) else plan

    def _changed(self, state: State) -> bool:
        return fingerprint(self.modules) != self.cache.fingerprint or state.written()

    def _next(self, plan: Plan, reason: str = "") -> Plan:
        lasting = True
        for way in WAYS[("", *WAYS).index(plan.way) :]:
            found, proven_for_all = self._trial(way)
            if isinstance(found, Proof):
                if way != "folded":
                    plan = plan._replace(largest=max(plan.largest, plan.largest_before))
                return plan._replace(way=way, reason=reason, checked=set(), **found._asdict())
            reason, lasting = found, lasting and proven_for_all
        return plan._replace(way="loop", shared={}, reason=reason, lasting=lasting)

    def _trial(self, way: str) -> tuple[Proof | str, bool]:
        """What two replicas of three rows have shown, or why not;
        whether for all inputs of the trailing shape."""
        key = (way, self.trial_key)
        if key in self.cache.trials:
            return self.cache.trials[key], True
        lasting = True
        try:
            trial = Trial(self.forward, self.modules, self.first_replica, self.flags, way)
            found = trial.prove(self.inputs)
        except Undecided as error:
            found, lasting = str(error), False
            self.remember(self.cache.undecided, self.trial_key, self.undecided() + 1)
        except DoesNotFold as error:
            found = str(error)
        except Exception as error:
            raise_interrupt(error)
            found = f"{type(error).__name__} in a trial on {ROWS} rows: {error}"
            lasting = not (is_shortage(error) or is_within_transform())
        self.remember(self.cache.trials, key, found, lasting)
        return found, lasting

    def run(self, plan: Plan, first_replica: int, num_samples: int) -> Tensor:
        """The outputs (T, N, ...) of T replicas, T = 1 for the loop."""
        draw = self.forward.draw(first_replica, num_samples)
        if num_samples == 1:
            return self.forward.run(self.inputs, draw)[0].unsqueeze(0)
        if (num_samples, self.reals) in plan.checked:
            return self.together(plan, draw)
        return self._first_run(plan, draw, first_replica)

    def _first_run(self, plan: Plan, draw: Draw, first_replica: int) -> Tensor:
        """The same, held to replicas run alone and to the operations of the first."""
        reads = self._reads()
        mixed = Mixed(reads.is_constant, draw.num_samples, in_step=True)
        # In the order in which plans are made: `reads` takes a lock too, which one thread would hold
        # while another holds this.
        with self.cache.planning, preserved_rng(), reads, mixed:
            one = mixed.watched(self.forward.draw(first_replica, 1))
            first, _ = self.forward.run(self.inputs, one)
        with reads, mixed:
            output = self.together(plan, mixed.watched(draw))
        reads.check(plan.rows)
        mixed.check(output)
        self._check(output, 0, first)
        self._check_some(plan, output, first_replica)
        return output

    def together(self, plan: Plan, draw: Draw) -> Tensor:
        """The outputs (T, N, ...) of a draw's replicas as one batch."""
        num_samples, arguments = draw.num_samples, self.inputs
        if plan.way != "folded":
            arguments = expand(self.forward.op, arguments, num_samples)
        output, _ = self.forward.run(arguments, draw, plan.rows, plan.shared)
        with torch._C.DisableTorchFunction():  # `Reads` would take it for the model's question
            shape = [*output.shape]
        if shape != [num_samples * plan.shape[0], *plan.shape[1:]]:
            raise DoesNotFold(
                f"{num_samples} replicas have outputs {shape}, one has {list(plan.shape)}"
            )
        return output.view(num_samples, *plan.shape)

    def _check_some(self, plan: Plan, output: Tensor, first_replica: int) -> None:
        """Compares three replicas more: every other one lies before or behind the first or the last,
        and what parts values by all rows parts those between them too."""
        last = len(output) - 1
        for replica in sorted({last // 3, 2 * last // 3, last} - {0}):
            with self.cache.planning, preserved_rng():
                draw = self.forward.draw(first_replica + replica, 1)
                alone, _ = self.forward.run(self.inputs, draw)
            self._check(output, replica, alone)
        self.note_agreement(plan, len(output))

    def _check(self, output: Tensor, replica: int, alone: Tensor) -> None:
        check_equal(output[replica], alone, tolerance_of(output, self.inputs, self.modules))

    def note_agreement(self, plan: Plan, num_samples: int) -> None:
        """That so many replicas together give what the loop gives."""
        if len(plan.checked) >= _MOST:
            plan.checked.clear()
        plan.checked.update({num_samples, (num_samples, self.reals)})
