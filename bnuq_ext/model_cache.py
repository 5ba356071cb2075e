"""What is remembered of a model, for as long as it stays as it is."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager, nullcontext
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .attach import find_bank, remarks_on_gone_layers
from .bank import Bank
from .calls import call_key
from .fingerprint import Fingerprint, fingerprint
from .forks import free_in_children, renew
from .nn import Stochastic, named_stochastic_layers
from .norm_calls import count_uncovered
from .ops.checks import refuse
from .ops.modes import is_captured, is_within_transform
from .passes import Pass
from .restore import without_gradients
from .samplers import Sampler, WeightSampler, make_sampler, warn_of_rescaling
from .untraced import unrecorded, untraced
from .warn import warn

_LOCK = free_in_children(threading.Lock())
_CACHES: WeakKeyDictionary[nn.Module, ModelCache] = WeakKeyDictionary()
_CHAIN_CACHES: WeakKeyDictionary[nn.Module, ChainCache] = WeakKeyDictionary()

# What outlives a change of a model that has the same modules, and one of its parameters' values alone.
_OF_MODULES = ("coverage_checked", "state_changes", "missed_warned", "outputs_seen")
_OF_STRUCTURE = (
    *("earlier_plans", "checked_in_train", "samplers"),
    *("immediate_proofs", "looped_forwards", "fixed_versions"),
)


def _renew_planning() -> None:
    for cache in _CACHES.values():
        renew(cache.planning)


os.register_at_fork(after_in_child=_renew_planning)


class ModelCache:
    """What has been found out about a model in one state of it. Holds no module, so that the model
    can be freed.

    Attributes:
        fingerprint: of the model in this state.
        modules: identity and class of each.
        plans: by `Folding.plan_key`, how replicas go through the model.
        trials: by `Folding.trial_key`, what a trial has shown.
        undecided: by trial key, how many trials could not tell.
        looped_forwards: by plan key, the forwards made one replica after another, to be weighed
            against the cost of a trial.
        looped_rows: by trial key, their rows.
        earlier_plans: by plan key, the plans of training, which outlive updates of the parameters;
            see `TrainingFolding`.
        generation: how many such updates there were.
        times_replaced: how often in a row more than parameters had changed before a plan could be
            kept, or serve a second prediction: a training loop counts something in the model, or
            anneals a rate of it.
        predictions: how many asked for a plan.
        immediate_proofs: how many were made at first sight of inputs; see `run_together`.
        checked_in_train: where plans have been compared with the training flags as they are;
            see `TrainingFolding`.
        state_changes: how often a trial has found that a forward changes the model.
        fixed_versions: by plan key, versions of what is not trained when a forward was last seen to
            change nothing.
        planning: a lock, held while plans are made.
        coverage_checked: whether a forward was searched for batch norm that is not covered.
        missed_warned: whether layers that another thread called have been warned of.
        outputs_seen: which outputs were looked at, those of the model (False) or of an output_fn
            (True); see `warn_of_probabilities`.
        samplers: of its bank.
    """

    def __init__(self, seen: Fingerprint, modules: list[nn.Module]):
        self.fingerprint = seen
        self.modules = [(id(module), type(module)) for module in modules]
        self.plans: dict = {}
        self.trials: dict = {}
        self.undecided: dict = {}
        self.looped_forwards: dict = {}
        self.looped_rows: dict = {}
        self.earlier_plans: dict = {}
        self.generation = 0
        self.times_replaced = self.immediate_proofs = self.predictions = 0
        self.checked_in_train: dict = {}
        self.state_changes = 0
        self.fixed_versions: dict = {}
        self.planning = threading.RLock()
        self.coverage_checked = self.missed_warned = False
        self.outputs_seen: set[bool] = set()
        self.samplers = BankSamplers()

    def renew(self, seen: Fingerprint) -> None:
        """After a trial has put the model back: its state has this fingerprint, and maybe a bank that
        another thread has attached."""
        self.samplers = BankSamplers()
        self.fingerprint = seen

    def restart(self, seen: Fingerprint) -> None:
        """The model is in another state, of this fingerprint, of which nothing has been found out."""
        self.plans, self.trials, self.undecided = {}, {}, {}
        self.earlier_plans, self.checked_in_train = {}, {}
        self.renew(seen)

    def inherit(self, old: ModelCache, names: tuple[str, ...]) -> None:
        """Takes these attributes over from the cache of an earlier state."""
        for name in names:
            setattr(self, name, getattr(old, name))

    def warn_of_missed(self, op: str, active: Pass) -> None:
        """Warns, once, of layers that a forward has called in another thread."""
        if active.missed and not self.missed_warned:
            for remark in active.remarks():
                warn(f"{op}: {remark}")
                self.missed_warned = True

    def checking_coverage(self, op: str, model: nn.Module, layers: dict[str, nn.Module]):
        """Around a forward; around the first one that draws statistics for `layers`,
        it warns of batch norm that is not covered.

        Yields what counts there, or None.
        """
        if self.coverage_checked or not any(layer.needs_bank for layer in layers.values()):
            return nullcontext()
        if torch.jit.is_tracing():  # which compares what two forwards record
            return nullcontext()
        return self._checking_coverage(op, model)

    @contextmanager
    def _checking_coverage(self, op: str, model: nn.Module):
        with count_uncovered(model) as counter:
            yield counter
        if counter.uncovered:
            warn(
                f"{op}: {counter.uncovered} batch-norm calls of the forward belong to no stochastic layer "
                "and are the same in all replicas; see bnuq_ext.doctor"
            )
        for remark in counter.remarks():
            warn(f"{op}: {remark}")
        # Not where the warning is an error, and somebody has caught it.
        self.coverage_checked = True


class ChainCache:
    """What is remembered of a chain (`is_chain`), of which all else can be seen at once.

    Attributes:
        fingerprint: which modules it has, with which bank.
        samplers: of its bank.
        largest: by the shape of an input, see `Plan`.
        predictions: as of any model.
    """

    outputs_seen = frozenset({False, True})  # no chain ends in a softmax

    def __init__(self, seen: list):
        self.fingerprint, self.samplers = seen, BankSamplers()
        self.largest: dict[torch.Size, int] = {}
        self.predictions = 0


class BankSamplers:
    """The samplers of a model's bank, each made when it is first asked for,
    and again after a change of the bank."""

    def __init__(self):
        self._looked, self._bank = False, None
        self._made: dict[tuple, Sampler] = {}
        self._stamp: tuple | None = None  # of the bank that they are made from

    def get(
        self, op: str, model: nn.Module, name: str, batch_size: int | None, device: torch.device
    ) -> Sampler:
        """See `make_sampler`; a model without stochastic batch norm has a `WeightSampler`."""
        bank = self._bank_of(op, model)
        if bank is None and name != "bank":
            refuse(op, "model", f'contain stochastic batch norm for sampler "{name}"', "none")
        stamp = None if bank is None else bank.stamp()
        if self._stamp != stamp:
            self._made, self._stamp = {}, stamp
        # Another thread may begin anew; and what a mode makes of tensors is not for later, nor is
        # what a CUDA graph will have computed once it is replayed.
        made = {} if is_within_transform() or is_captured(device) else self._made
        place = (name, batch_size, device, _stream(device))
        if place not in made:
            with without_gradients(), unrecorded():
                made[place] = (
                    WeightSampler(device)
                    if bank is None
                    else make_sampler(op, name, bank, batch_size, device)
                )
        if batch_size is not None:
            warn_of_rescaling(op, bank, batch_size)
        return made[place]

    def calls_once(self, names: list[str]) -> bool:
        """Whether layers of these names were called once each when the bank was collected."""
        means = {} if self._bank is None else self._bank.mean
        return all([name in means and call_key(name, 1) not in means for name in names])

    def _bank_of(self, op: str, model: nn.Module) -> Bank | None:
        """The bank of the model; None where it has no stochastic batch norm."""
        if not self._looked:
            if named_stochastic_layers(model):
                self._bank = find_bank(model, op)
                for remark in remarks_on_gone_layers(model, self._bank):
                    warn(f"{op}: {remark}")
            self._looked = True
        return self._bank


def _stream(device: torch.device) -> int:
    """The current stream of a GPU, which alone waits for what a sampler makes and keeps;
    0 on the CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@untraced
def cache_of(model: nn.Module, modules: list[nn.Module]) -> ModelCache:
    """The cache of a model with these modules: a new one where it has changed since, with what
    outlives such a change."""
    with unrecorded():
        seen = fingerprint(modules)
    with _LOCK:
        old = _CACHES.get(model)
        if old is not None and old.fingerprint == seen:
            return old
        cache = _CACHES[model] = ModelCache(seen, modules)
        if old is not None:
            cache.planning = old.planning
            if old.modules == cache.modules:
                cache.inherit(old, _OF_MODULES)
            if old.fingerprint.structure == seen.structure:
                cache.inherit(old, _OF_STRUCTURE)
                cache.generation = old.generation + 1
            elif old.generation == 0 and old.predictions <= 1:
                cache.times_replaced = old.times_replaced + 1
    return cache


def chain_cache_of(model: nn.Module, modules: list[nn.Module]) -> ChainCache:
    """The cache of a chain with these modules."""
    banks = [(m.bank_name, id(m.bank)) for m in modules if isinstance(m, Stochastic)]
    seen = [*map(id, modules), *banks]
    with _LOCK:
        cache = _CHAIN_CACHES.get(model)
        if cache is None or cache.fingerprint != seen:
            cache = _CHAIN_CACHES[model] = ChainCache(seen)
    return cache


@untraced
def empty_cache() -> ModelCache:
    """For a forward of one replica, which needs no proof; forgotten after it."""
    return ModelCache(Fingerprint([], []), [])
