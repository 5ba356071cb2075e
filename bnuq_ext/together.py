"""T replicas as one batch in a training step, held to one of them that is run alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .contents import version_of
from .forward import Forward
from .interrupts import raise_interrupt
from .ops.modes import is_captured
from .passes import DoesNotFold, Undecided
from .proof.folding import AT_ONCE, CHANGES, LOOP, Plan
from .proof.training import DrawsNumbers, TrainingFolding
from .reads import Reads
from .restore import drawn_since, preserved_rng, random_states, uncached
from .samplers import Draw
from .state import State
from .untraced import untraced

_COST = 20  # of a proof, some 33 forwards of a few rows, in forwards of a step


def run_together(forward: Forward, modules: list[nn.Module], inputs, draw: Draw) -> Tensor | None:
    """The outputs (T*N, ...) of a draw's replicas; None where they go one after another.

    New shapes, modules, hooks and flags need a full proof: the first two of a model are made at
    once, further ones when as many forwards as a proof costs have gone one after another. When only
    values of parameters have changed since, one replica is run alone, with the flags as they are and
    without gradients, and must equal its rows among the others. Where train() has dropout, or the
    samples hardly differ, that is done with nothing dropped and a wider posterior; in a model that
    draws other random numbers replicas go one after another.
    """
    if is_captured(draw.seed.device):  # nothing can be compared
        return None
    folding = TrainingFolding(forward, modules, 0, inputs, draw.num_samples)
    if _skips_proof(folding):
        return None
    try:
        plan, alone = _decide(folding)
        if folding.flags is not None and not plan.steady and _must_be_reproducible():
            folding.refute(plan, "its proof does not hold for other values of the parameters")
            return None
    except Exception as error:  # in eval(), or without gradients, which the model need not bear
        raise_interrupt(error)
        folding.refute(LOOP, _reason(error))
        return None
    if plan.way == "loop":
        return None
    try:
        outputs = folding.together(plan, draw)
        if alone is not None:
            folding.accept(plan, outputs.detach(), alone)
    except Undecided:
        # The samples are nearly the same. Their posterior can be widened.
        folding.mark(repeatable=False)
        if folding.cached_plan() is None:
            return None
    except Exception as error:  # the model's own too, of more rows than it is made for
        raise_interrupt(error)
        folding.refute(plan, _reason(error))
        return None
    return outputs.flatten(0, 1)


@untraced
def _skips_proof(folding: TrainingFolding) -> bool:
    """Whether such inputs, with no plan yet, are to go one after another: until as many forwards as a
    proof costs have been made, once the proofs that are made at first sight are used up."""
    if folding.plan_key in folding.cache.plans or folding.earlier_plan() is not None:
        return False
    if _claims_proof(folding):
        return False
    folding.count_forwards(folding.num_samples)
    if folding.looped_forwards() <= _COST:
        return True
    folding.cache.looped_forwards.pop(folding.plan_key, None)
    return False


def _claims_proof(folding: TrainingFolding) -> bool:
    """Uses up one of the proofs that are made at first sight: two of a model, and where steps have to
    be reproducible one of each shape, and of each change. False where none is left."""
    if _must_be_reproducible() and not folding.looped_forwards():
        folding.count_forwards(1)
        return True
    cache = folding.cache
    if cache.times_replaced >= AT_ONCE or cache.immediate_proofs >= AT_ONCE:
        return False
    cache.immediate_proofs += 1
    return True


def _must_be_reproducible() -> bool:
    """Whether the way must not depend on the steps before: in another, dropout draws other masks."""
    return torch.are_deterministic_algorithms_enabled()


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, DoesNotFold) else f"{type(error).__name__}: {error}"


@untraced
@uncached()
def _decide(folding: TrainingFolding) -> tuple[Plan, Tensor | None]:
    """The plan, and the chosen replica run alone where it has still to be compared."""
    plan = folding.cached_plan()
    # Without gradients train() and eval() have the same key.
    if plan is not None and (folding.flags or not any(folding.training)):
        return plan, None
    plan = folding.earlier_plan()
    if plan is not None and plan.repeatable and folding.num_samples in plan.checked:
        return _compared(folding, plan)
    if folding.prepare():
        return LOOP, None
    plan, earlier = folding.prove(), folding.earlier_plan()
    if plan.way == "loop" or (earlier is not None and earlier.repeatable is not None):
        return plan, None
    return _examined(folding, plan)


def _compared(folding: TrainingFolding, plan: Plan) -> tuple[Plan, Tensor | None]:
    """An earlier plan and the chosen replica run alone. Where what is not trained (a buffer) has been
    written since, it may tell forwards to keep state: then that is undone, if the forward does."""
    held = [t for m in folding.modules for t in (*m._buffers.values(), *m._parameters.values())]
    fixed = [version_of(t) for t in held if t is not None and not t.requires_grad]
    unchanged = fixed == folding.cache.fixed_versions.get(folding.plan_key) and -1 not in fixed
    state = None if unchanged else State(folding.modules, followed=False)
    with folding.gradients_for_hooks():
        alone = folding.alone()
    if state is not None and folding.undo(state):
        folding.refute(plan, CHANGES)
        return LOOP, None
    folding.remember(folding.cache.fixed_versions, folding.plan_key, fixed)
    return folding.renewed(plan), alone


def _examined(folding: TrainingFolding, plan: Plan) -> tuple[Plan, Tensor | None]:
    """The plan after a replica has been run alone with the flags as they are, which is undone."""
    state = State(folding.modules)
    reads = folding.following(state)
    with folding.gradients_for_hooks(), preserved_rng():
        before = random_states()
        changed = False
        try:
            with reads:
                alone = folding.alone()
            repeatable = not drawn_since(before)
            changed = folding.undo(state)
            failure = folding.failure_without_dropout(plan, state)
            if repeatable and isinstance(failure, Undecided):
                failure = None  # `run_together` compares the step's own outputs
        finally:
            changed = folding.undo(state) or changed
    if changed and not folding.changes_again():
        # Both: no version tells of a change by way of `.data`, and the plan would count as proven.
        for plans in (folding.cache.earlier_plans, folding.cache.plans):
            plans.pop(folding.plan_key, None)
        return LOOP, None
    found = CHANGES if changed else _found(reads, plan, failure)
    if found:
        folding.refute(plan, found)
        return LOOP, None
    if failure is not None:
        plan = folding.next_way(plan, failure)
        if plan.way == "loop":
            folding.refute(plan, _reason(failure))
            return plan, None
        return _examined(folding, plan)
    folding.mark(repeatable)
    return plan, alone if repeatable else None


def _found(reads: Reads, plan: Plan, failure: Exception | None) -> str:
    """Why the samples of a model go one after another, whatever the way; empty if they need not."""
    try:
        reads.check(plan.rows)
    except DoesNotFold as error:
        return str(error)
    return str(failure) if isinstance(failure, DrawsNumbers) else ""
