"""`replicas`: a model that returns T replicas, for users who write their own loops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .batch_norm_like import averages_rows
from .chain import drops_first, is_chain
from .chain_folding import STOCHASTIC
from .checkpoints import reentrant_checkpoints
from .forward import Forward
from .history import made_since, next_node
from .inputs import expand, num_rows, tensors
from .interrupts import leaving_nothing_behind
from .model_cache import cache_of
from .nn import Stochastic
from .ops.checks import check_first_replica, check_integer, refuse
from .ops.modes import is_eager
from .passes import DoesNotFold, Pass, ReplicaPass, current_pass, leave_pass, replayed_pass, running
from .predict import check_bank_sampler, forward_by_bank, take_model
from .proof.folding import Plan
from .proof.training import TrainingFolding
from .samplers import check_key
from .state import is_training, modules_of
from .structure import OURS
from .untraced import untraced


@contextmanager
def replicas(
    model: nn.Module,
    num_samples: int,
    seed: int | None = None,
    *,
    sampler: str = "bank",
    first_replica: int = 0,
    batch_size: int | None = None,
) -> Iterator[None]:
    """Inside, `model(x)` with N rows returns T*N rows, replica-major: row t*N + n is replica t at
    row n. Rows are the first dimension of each input and of the output
    (`batch_first=True` of a sequence model).

    The replicas are those of `predict` with the same seed. Training flags are the user's and
    gradients flow. The model must be one that `predict` can fold, which is known of a plain
    `nn.Sequential` of stochastic and other layers; of others it is found out in eval at the
    first call with a shape, once with the training flags as they are and nothing dropped, and
    again in eval, by T replicas and one alone, when parameters have changed. Such a trial does
    not see all that rare values alone set off (README, "One batch or a loop"), nor a flag
    outside of the model that changes later: there, `predict(..., strategy="loop")`. Dropout in
    train() draws for each of the T*N rows. What a backward computes again
    (`torch.utils.checkpoint`) is the same as in the forward; a checkpoint around the model
    itself needs use_reentrant=False and a call of it in the body, and ends in an error where
    the model lets its input past the first stochastic layer or drops before it. A compiled
    function breaks its graph at a call of the model, which fullgraph=True does not allow. The
    state is this thread's (or task's): other threads may use the model with other replicas, or
    none, at the same time. Bodies for several models may lie in each other; for one model the
    innermost counts.

    Args:
        model: converted by `convert`, with a bank, or with `BayesLinear` layers, or both; not
            compiled itself, by torch.compile or its own compile(); its parts may be.
            Call it itself, not its parts.
        num_samples: T, at least 1.
        seed, sampler, first_replica, batch_size: see `predict`; any sampler but "batch".

    Yields:
        nothing; the model itself is called in the body.

    Raises:
        ValueError: an argument is refused; inside, a model that does not fold, or batch norm in
            train() that is not stochastic and would take the replicas together.
        TypeError: model is none, or compiled; another argument has a wrong type.
        NotImplementedError: entered inside torch.func.grad or the like.
    """
    op = "replicas"
    if "_orig_mod" in getattr(model, "_modules", ()) or getattr(model, "_compiled_call_impl", None):
        refuse(op, "model", "not be compiled (its parts may be)", type(model).__name__, TypeError)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        requirement = "be the .module of the wrapper, which may be called inside"
        refuse(op, "model", requirement, "a DistributedDataParallel")
    _, modules = take_model(op, model)
    num_samples = check_integer(op, "num_samples", num_samples, 1)
    first_replica = check_first_replica(op, first_replica, num_samples)
    check_key(op, seed)
    batch_size = check_bank_sampler(op, sampler, batch_size)
    _check_outer_bodies(model)
    forward = forward_by_bank(op, model, modules, sampler, batch_size, seed, _flat)
    session = _Session(forward._replace(call=_call), first_replica, num_samples)
    before, after, handles = _Before(session), _After(session), []
    try:
        handles.append(model.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        handles.append(model.register_forward_hook(after, always_call=True))
        with running(session):
            yield
    finally:
        for handle in handles:
            handle.remove()
        leave_pass(session)  # where an interrupt came before its end


class _Session(Pass):
    """The pass of a body: each call of the model is a ReplicaPass of its own,
    other models are the outer one's."""

    def __init__(self, forward: Forward, first_replica: int, num_samples: int):
        super().__init__(forward.layers)
        self.forward, self.first, self.num_samples = forward, first_replica, num_samples
        self.draw = forward.draw(first_replica, num_samples)
        self.active: ReplicaPass | None = None
        self.token = object()  # for passes, which graphs keep, and with the body the model
        self.checkpoints = reentrant_checkpoints()
        self.start = 0  # of the call: number of a node of autograd

    def visit(self, layer: nn.Module, x: Tensor) -> Tensor:
        if id(layer) not in self.names:
            return self.outer.visit(layer, x) if self.outer else layer.plain_forward(x)
        active = self.active or replayed_pass()
        if active is None:
            refuse("replicas", "model", "be called itself", "a call of one of its parts")
        return _or_refuse(active.visit, layer, x)

    def statistic(self, layer: nn.Module, kind: str, own: Tensor) -> Tensor:
        if id(layer) not in self.names:
            return self.outer.statistic(layer, kind, own) if self.outer else own
        active = self.active or replayed_pass()
        return own if active is None else _or_refuse(active.statistic, layer, kind, own)

    @leaving_nothing_behind
    def begin(self, inputs: dict) -> dict:
        """Prepares a call of the model; its inputs, expanded if need be."""
        self.active = None
        inputs = self._prepared(inputs)
        self.active.body = self.token
        self.start = next_node()
        return inputs

    def _prepared(self, inputs: dict) -> dict:
        if torch.compiler.is_exporting() or torch.jit.is_tracing():
            refuse("replicas", "model", "be exported outside the body", "a call that is traced")
        if not torch.is_grad_enabled() and reentrant_checkpoints() > self.checkpoints:
            refuse("replicas", "a checkpoint around the model", "have use_reentrant=False", True)
        if num_rows("replicas", inputs) == 0 or self.num_samples == 1:
            draw = self.forward.draw(self.first, 1)
            self.active = ReplicaPass(self.forward.layers, draw, op="replicas")
            return inputs
        for name, module in self.forward.model.named_modules():
            if is_training(module) and averages_rows(module) and not isinstance(module, Stochastic):
                got = f"{name} in train()"
                refuse("replicas", "batch norm that is not stochastic", "be in eval()", got)
        rows, shared, expands = self._way(inputs)
        self.active = ReplicaPass(self.forward.layers, self.draw, rows, shared, op="replicas")
        return expand("replicas", inputs, self.num_samples) if expands else inputs

    def _way(self, inputs: dict) -> tuple[dict[str, int], dict[str, bool], bool]:
        """Rows of each stochastic call of one replica, which calls share them,
        and whether the input is expanded."""
        modules = modules_of(self.forward.model)
        x = inputs["args"][0] if len(inputs["args"]) == 1 and not inputs["kwargs"] else None
        if is_chain(modules, x, STOCHASTIC):
            return dict.fromkeys(self.forward.layers, len(x)), {}, drops_first(modules)
        plan = self._plan(inputs)
        return plan.rows, plan.shared, plan.way != "folded"

    def _plan(self, inputs: dict) -> Plan:
        folding = self._folding(inputs)
        folding.forget_refusal()
        if folding.prepare():
            folding = self._folding(inputs)
        plan = folding.prove_in_train()
        if plan.way == "loop":
            requirement = "give the same folded as one by one"
            if not is_eager():
                requirement += " (before a transform of torch.func call it once, with as many rows)"
            refuse("replicas", "model", requirement, plan.reason)
        return plan

    def _folding(self, inputs: dict) -> TrainingFolding:
        modules = modules_of(self.forward.model)
        forward = self.forward._replace(cache=cache_of(self.forward.model, modules))
        return TrainingFolding(forward, modules, self.first, inputs, self.num_samples)

    def end(self, output) -> None:
        """Checks that the call of the model was a whole one, and follows its output;
        None if it raised."""
        active, self.active = self.active, None
        if active is not None and output is not None:
            active.missed = self.missed
            _or_refuse(active.check_calls)
            self.forward.cache.warn_of_missed("replicas", active)
            made = made_since(self.start, self.forward.model, tensors(output))
            active.follow(made, self.start)


def _check_outer_bodies(model: nn.Module) -> None:
    """Raises where a body for the model cannot lie in those that this thread is in."""
    outer = current_pass()
    if outer is not None and not isinstance(outer, _Session):
        refuse("replicas", "the body of another pass", "be left first", "a call inside it")
    for session in _sessions():
        other = session.forward.model
        if other is not model and not session.names.keys().isdisjoint(map(id, model.modules())):
            requirement = "share no stochastic layer with the model of an outer body"
            refuse("replicas", "model", requirement, f"one within {type(other).__name__}")


def _sessions():
    """Those of this thread (or task), the innermost first."""
    session = current_pass()
    while isinstance(session, _Session):
        yield session
        session = session.outer


def _replays_another(session: _Session) -> bool:
    """Whether a backward computes a call of the session's model again that was made elsewhere."""
    replay = replayed_pass()
    if replay is None or replay.done.body is session.token:
        return False
    return not session.names.keys().isdisjoint(replay.names)


class _Hook:
    """A hook of the model: does nothing outside the session's own thread and body, inside a further
    body for the model, for what a backward computes again of another, and in a copy of the model."""

    def __init__(self, session: _Session | None = None):
        self.session = session
        setattr(self, OURS, True)

    def __reduce__(self):
        return type(self), ()

    def applies(self, model: nn.Module) -> bool:
        found = next((s for s in _sessions() if s.forward.model is model), None)
        return found is not None and found is self.session and not _replays_another(found)


class _Before(_Hook):
    """Forward pre-hook."""

    @untraced
    def __call__(self, model, args, kwargs=None):
        # Another thread may call in the middle of the registration,
        # which is when kwargs are missing.
        if not self.applies(model):
            return None
        inputs = self.session.begin({"args": args, "kwargs": kwargs})
        return inputs["args"], inputs["kwargs"]


class _After(_Hook):
    """Forward hook."""

    @untraced
    def __call__(self, model, args, output):
        if self.applies(model):
            self.session.end(output)


def _call(model: nn.Module, inputs: dict):
    return model(*inputs["args"], **inputs["kwargs"])


def _flat(output) -> Tensor:
    """All floating-point tensors of an output, side by side: (rows, values)."""
    parts = [t for t in tensors(output) if t.is_floating_point()]
    if not parts or any(t.dim() == 0 for t in parts):
        refuse(
            "replicas", "the model's output", "consist of tensors with rows", type(output).__name__
        )
    return torch.cat([t.flatten(1) if t.dim() > 1 else t.unsqueeze(1) for t in parts], 1)


def _or_refuse(function, *args):
    try:
        return function(*args)
    except DoesNotFold as error:
        refuse("replicas", "model", "do in this call what it does in eval", error)
