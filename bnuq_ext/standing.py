"""Plans that stand while training changes the values of parameters, and nothing else.

A plan that has been proven for gradients, and with the parameters moved, is not found out anew in every step:
one replica run alone must agree with the folded ones, else all is found out again.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .folding import Folding, Plan
from .forward import Forward
from .known import know
from .probe import check_replica, probe_draws, tolerance_of
from .restore import evaluating, preserved_rng


class StandingFolding(Folding):
    """The plans of a model where gradients may be taken; see `Folding`."""

    def proven(self, inputs, num_samples: int) -> Plan | None:
        """The plan, if it has been proven for T replicas in this very state."""
        plan = self.known.plans.get(self.place(inputs))
        return plan if plan is not None and num_samples in plan.checked else None

    def standing(self, inputs, num_samples: int) -> Plan | None:
        """The plan of an earlier state of the parameters, if it holds in this one too."""
        place = self.place(inputs)
        plan = None if place in self.known.plans else self.known.standing.get(place)
        if plan is None or plan.way == "loop":
            return plan
        plan = plan._replace(checked={num_samples})
        with self.known.planning, preserved_rng():
            try:
                draws = probe_draws(self.forward.draw(self.first_replica, 1), num_samples)
                outputs = self._together(plan, inputs, draws[-1])
                alone, _ = self.forward.run(inputs, draws[self.chosen(num_samples)])
                self.hold(plan, inputs, outputs, alone)
            except Exception:
                self.known.standing.pop(place, None)
                return None
        return plan

    def hold(self, plan: Plan, inputs, outputs: Tensor, alone: Tensor) -> None:
        """Takes a plan as proven in this state, if `alone` is the replica of the outputs (T, N, ...) that it
        should be."""
        tolerance = tolerance_of(alone, inputs, self.modules)
        check_replica(outputs, self.chosen(len(outputs)), alone, tolerance)
        self._remember(self.known.plans, self.place(inputs), plan, True)

    def stand(self, plan: Plan, inputs) -> None:
        """Lets a proven plan stand for other values of the parameters, if it may."""
        if self.flags is not None and plan.lasting and plan.steady:
            place, checked, repeatable = self.place(inputs), set(plan.checked), None
            before = self.known.standing.get(place)
            if before is not None and before.way == plan.way:
                checked, repeatable = before.checked | checked, before.repeatable
            plan = plan._replace(checked=checked, repeatable=repeatable)
            self._remember(self.known.standing, place, plan, True)

    def mark(self, inputs, repeatable: bool) -> None:
        """Says of the plan that stands whether outputs of a training step can be compared."""
        place = self.place(inputs)
        plan = self.known.standing.get(place)
        if plan is not None:
            self.known.standing[place] = plan._replace(repeatable=repeatable)

    def refute(self, plan: Plan, inputs, reason: str) -> None:
        """Sends the replicas one after another, now and with other values of the parameters."""
        place, loop = self.place(inputs), plan._replace(way="loop", shared={}, reason=reason)
        self._remember(self.known.plans, place, loop, True)
        self._remember(self.known.standing, place, loop, True)

    def chosen(self, num_samples: int) -> int:
        """Which of T replicas is run alone: another one in each state of the parameters."""
        return (num_samples - 1 - self.known.turn) % num_samples

    def alone(self, inputs, num_samples: int) -> Tensor:
        """The output of the chosen one of T replicas."""
        draw = self.forward.draw(self.first_replica + self.chosen(num_samples), 1)
        return self.forward.run(inputs, draw)[0]


def proven_plan(
    forward: Forward, modules: list[nn.Module], inputs, first_replica: int, num_samples: int
) -> Plan:
    """The plan for T replicas of a model that the caller runs itself, tried in eval at the actual size."""
    flags = flags_of(modules)
    with torch.no_grad(), evaluating(modules, warns=False):
        known = know(forward.model, modules)
        folding = StandingFolding(forward._replace(known=known), modules, first_replica, flags)
        plan = folding.standing(inputs, num_samples) or folding.plan(inputs)
        while plan.way != "loop" and num_samples not in plan.checked:
            try:
                with preserved_rng():
                    folding.run(plan, inputs, first_replica, num_samples)
            except Exception as error:
                plan = folding.give_up(plan, inputs, error)
    folding.stand(plan, inputs)
    return plan


def flags_of(modules: list[nn.Module]) -> tuple[bool, ...] | None:
    """The training flags of modules; None where no gradients are taken."""
    return tuple(m.training for m in modules) if torch.is_grad_enabled() else None
