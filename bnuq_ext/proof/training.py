"""Plans of training steps, which outlive updates of the parameters.

To prove a plan anew in every step would cost more than it saves. One that has been proven with
gradients, and with the parameters moved, stays: in each step one replica is run alone and must
equal its rows among the others, else all is found out again. What a model does in train() alone is
compared with the training flags as they are and with nothing dropped, for no two dropout masks are
the same.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from ..dropout import Undropped
from ..fingerprint import has_hooks
from ..forward import Forward
from ..interrupts import raise_interrupt
from ..passes import DoesNotFold, refutes
from ..restore import (
    drawn_since,
    evaluating,
    preserved_rng,
    random_states,
    uncached,
    unhooked_saving,
)
from ..state import State, is_training
from ..untraced import uncompiled
from .agreement import check_replica, tolerance_of
from .folding import Folding, Plan
from .lazy_setup import keep_lazy_setup
from .probe import probe_draws
from .watch import Watch


class DrawsNumbers(DoesNotFold):
    """A forward draws other random numbers than dropout's,
    so that no two of them can be compared."""


class SharesDropout(DoesNotFold):
    """A dropout in a forward would be the same for all replicas."""


class TrainingFolding(Folding):
    """`Folding` where gradients may be taken, of T replicas that the caller runs itself.

    Attributes:
        training: flags of the modules, whether gradients are taken or not.
    """

    may_draw = True  # in train() dropout does; see `DrawsNumbers`
    keeps_lazy_setup = False  # plans are made in eval; see `prepare`

    def __init__(
        self,
        forward: Forward,
        modules: list[nn.Module],
        first_replica: int,
        inputs,
        num_samples: int,
    ):
        super().__init__(forward, modules, first_replica, inputs)
        self.num_samples = num_samples
        self.training = tuple(map(is_training, modules))
        self.flags = self.training if torch.is_grad_enabled() else None

    def cached_plan(self) -> Plan | None:
        """The plan, if it has been proven in this very state."""
        plan = self.cache.plans.get(self.plan_key)
        return plan if plan is not None and self._is_checked(plan) else None

    def _is_checked(self, plan: Plan) -> bool:
        return (self.num_samples, self.reals) in plan.checked

    def earlier_plan(self) -> Plan | None:
        """The plan of an earlier state of the parameters."""
        return self.cache.earlier_plans.get(self.plan_key)

    def revalidated_plan(self) -> Plan | None:
        """The plan of an earlier state of the parameters, if it holds in this one too."""
        now = self.cache.plans.get(self.plan_key)
        decided = now is not None and (now.way == "loop" or self._is_checked(now))
        plan = None if decided else self.earlier_plan()
        if plan is None or plan.way == "loop":
            return plan
        plan = self.renewed(plan)
        # With flags that it has been examined with.
        flags = evaluating(self.modules, warns=False) if plan.repeatable is None else nullcontext()
        state = State(self.modules, followed=False)
        with self.cache.planning, preserved_rng(), flags:
            failure = self.failure_without_dropout(plan)
            if self.undo(state) or failure is not None:
                self.cache.earlier_plans.pop(self.plan_key, None)
                return None
        return plan

    def renewed(self, plan: Plan) -> Plan:
        """An earlier plan, with the number of samples of this one alone."""
        plan = plan._replace(checked=set())
        self.note_agreement(plan, self.num_samples)
        return plan

    def _accept_without_dropout(self, plan: Plan, state: State | None) -> None:
        """Takes a plan as proven in this state if T replicas
        with nothing dropped are those run alone.

        Args:
            state: put back between the two, for a model that changes itself; with it, the two are
                watched.

        Raises:
            DoesNotFold: they are not.
            SharesDropout, DrawsNumbers: see there.
        """
        draws = probe_draws(self.forward.draw(self.first_replica, 1), self.num_samples)
        watch = state and Watch(self.modules, self.following(state), self.num_samples)
        watched = (lambda draw: draw) if watch is None else watch.draw
        with uncompiled():
            before = random_states()
            with watch or nullcontext(), Undropped() as of_one:
                alone, _ = self.forward.run(self.inputs, watched(draws[self.chosen()]))
            if state is not None:
                self.undo(state)
            with watch or nullcontext(), Undropped() as of_all:
                outputs = self.together(plan, watched(draws[-1]))
            drawn = drawn_since(before)
        if of_all.sizes != [self.num_samples * size for size in of_one.sizes]:
            raise SharesDropout("a dropout in its forward would be the same for all replicas")
        if watch is not None:
            watch.check(plan.rows, outputs)
        if drawn:
            raise DrawsNumbers("its forward draws random numbers, and not for dropout")
        self.accept(plan, outputs, alone)

    def failure_without_dropout(self, plan: Plan, state: State | None = None) -> Exception | None:
        """What `_accept_without_dropout` raises, or a forward of the model in it."""
        try:
            self._accept_without_dropout(plan, state)
        except Exception as error:
            raise_interrupt(error)
            return error
        return None

    def accept(self, plan: Plan, outputs: Tensor, alone: Tensor) -> None:
        """Takes a plan as proven in this state, if `alone` is the replica of the outputs
        (T, N, ...) that it should be."""
        tolerance = tolerance_of(alone, self.inputs, self.modules)
        check_replica(outputs, self.chosen(), alone, tolerance)
        self.remember(self.cache.plans, self.plan_key, plan)

    def keep(self, plan: Plan) -> None:
        """Lets a proven plan stand for other values of the parameters, if it may."""
        if self.flags is not None and plan.lasting and plan.steady:
            checked = {n for n in tuple(plan.checked) if isinstance(n, int)}
            repeatable, before = None, self.earlier_plan()
            if before is not None and before.way == plan.way:
                checked, repeatable = before.checked | checked, before.repeatable
            plan = plan._replace(checked=checked, repeatable=repeatable)
            self.remember(self.cache.earlier_plans, self.plan_key, plan)

    def forget_refusal(self) -> None:
        """Where only one by one will not do, lets other values of the parameters be tried again."""
        plan = self.earlier_plan()
        if plan is not None and plan.way == "loop" and self.plan_key not in self.cache.plans:
            self.cache.earlier_plans.pop(self.plan_key, None)

    def mark(self, repeatable: bool) -> None:
        """Says of the plan that stands whether outputs of a training step can be compared."""
        plan = self.earlier_plan()
        if plan is not None:
            self.cache.earlier_plans[self.plan_key] = plan._replace(repeatable=repeatable)

    def refute(self, plan: Plan, reason: str) -> None:
        """Sends the replicas one after another, now and with other values of the parameters."""
        loop = plan._replace(way="loop", shared={}, reason=reason)
        self.remember(self.cache.plans, self.plan_key, loop)
        self.remember(self.cache.earlier_plans, self.plan_key, loop)

    @unhooked_saving()
    @uncached()
    def prepare(self) -> bool:
        """Makes a first forward with the flags as they are, for `keep_lazy_setup`, before a proof;
        returns whether the model has other modules since. One that fails, as a forward that needs
        gradients does, leaves nothing."""
        with self.cache.planning, self.gradients_for_hooks(), uncompiled():
            if self.plan_key in self.cache.plans or self.earlier_plan() is not None:
                return False
            state, kept = State(self.modules), False
            try:
                with preserved_rng() as generators:
                    try:
                        self.record(state)
                        kept = self._changed(state) and keep_lazy_setup(self, state, generators)
                    finally:
                        if not kept:
                            self.undo(state)
            except Exception as error:
                raise_interrupt(error)
        return not self.is_whole()

    def prove(self) -> Plan:
        """The plan, tried in eval at the actual size."""
        with self.gradients_for_hooks():
            plan = self.revalidated_plan()
            if plan is None:
                with evaluating(self.modules, warns=False):
                    plan = self._tried(self.plan())
        self.keep(plan)
        return plan

    @unhooked_saving()
    @uncached()
    def prove_in_train(self) -> Plan:
        """`prove`, held once to the training flags as they are. What needs gradients or draws
        random numbers besides those of dropout of its rows cannot be; of the last each replica has
        rows of its own from the start."""
        plan, checked = self.prove(), self.cache.checked_in_train
        while plan.way != "loop" and any(self.training):
            key = (plan.way, self.plan_key, self.reals, self.num_samples, self.training)
            if key in checked:
                break
            state = State(self.modules)
            with self.gradients_for_hooks(), preserved_rng():
                failure = self.failure_without_dropout(plan, state)
                self.undo(state)
            if not _refutes(failure, plan):
                self.remember(checked, key, True)
                break
            plan = self.next_way(plan, failure)
        return plan

    def _tried(self, plan: Plan) -> Plan:
        """The first of the plan's way and those after it that passes at the actual size."""
        while plan.way != "loop" and not self._is_checked(plan):
            try:
                with preserved_rng():
                    self.run(plan, self.first_replica, self.num_samples)
            except Exception as error:
                raise_interrupt(error)
                plan = self.give_up(plan, error)
        return plan

    def next_way(self, plan: Plan, reason: Exception) -> Plan:
        """The plan for the next way that passes in eval,
        after one that has failed with the flags as they are."""
        self.cache.earlier_plans.pop(self.plan_key, None)
        with self.gradients_for_hooks(), evaluating(self.modules, warns=False):
            plan = self._tried(self.give_up(plan, reason))
        self.keep(plan)
        return plan

    def gradients_for_hooks(self) -> torch.set_grad_enabled:
        """Around forwards of a trial, which take none but where a hook may hook an activation's."""
        hooked = has_hooks(self.modules, ("_forward_hooks",))
        return torch.set_grad_enabled(self.flags is not None and hooked)

    def chosen(self) -> int:
        """Which of the replicas is run alone: another one in each state of the parameters, and not
        the first, whose rows lie where they lie alone."""
        return self.num_samples - 1 - self.cache.generation % max(self.num_samples - 1, 1)

    def alone(self) -> Tensor:
        """The output of the chosen replica."""
        draw = self.forward.draw(self.first_replica + self.chosen(), 1)
        return self.forward.run(self.inputs, draw)[0]


def _refutes(failure: Exception | None, plan: Plan) -> bool:
    """Whether a comparison with the flags as they are speaks against a plan."""
    if isinstance(failure, (DrawsNumbers, SharesDropout)):
        return plan.way == "folded"
    # Not what cannot tell, nor the model's own, of gradients that are not taken for one.
    return refutes(failure)
