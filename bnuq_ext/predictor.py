"""Runs the replicas, chunk by chunk and batch by batch, and takes their outputs in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from .chunks import chunk_of, free_memory, is_out_of_memory, no_memory_to_keep, out_of_memory
from .forward import Forward
from .inputs import copied, is_one_input, move, num_rows, split_batch
from .interrupts import raise_interrupt
from .model_cache import ModelCache, cache_of
from .ops.checks import refuse
from .ops.modes import is_recorded, refuse_forward_derivatives
from .pages import keep_freed_pages
from .prediction import (
    Prediction,
    check_noise_shape,
    make_moments,
    summarise,
    warn_of_probabilities,
)
from .progress import progress_bar
from .proof.folding import AT_ONCE, LOOP, WAYS, Folding, Plan
from .wrappers import waits_for_others

STRATEGIES = ("auto", "folded", "loop")
_TRIALS = 16  # that could not tell, two in a prediction: then one more will not
_COST = 40  # of a trial, in forwards
_ROWS = 160  # that cost the loop what a trial costs: in a ResNet-50 18 s, at 0.11 s each
_DEAR = 10**11  # multiply-accumulates: some two seconds of two cores


class Request(NamedTuple):
    """Which replicas to run, and how; as in `predict`."""

    first: int
    count: int
    strategy: str
    chunk: int | str
    keep: bool
    progress: bool

    def is_loop(self) -> bool:
        """Whether the replicas go one after another, whatever the model."""
        return self.strategy == "loop" or self.count == 1 or self.chunk == 1


class Predictor:
    """Makes one prediction of the replicas that are asked for.

    Args:
        forward: how to run the model.
        modules: all modules of the model.
        request: which replicas, and how.
        likelihood: of the outputs.
        device: the model's.
        fold: makes the folding of an input.
    """

    def __init__(
        self,
        forward: Forward,
        modules: list[nn.Module],
        request: Request,
        likelihood: str,
        device: torch.device,
        fold: Callable[..., Folding] = Folding,
    ):
        self.forward, self.modules, self.request = forward, modules, request
        self.likelihood, self.device, self.fold = likelihood, device, fold
        self.max_chunk = request.count  # fewer once memory did not suffice
        self.last_key: tuple | None = None  # of the plan for the input before
        self.shape: list[int] = []  # of a replica's output for the current input
        if device.type == "cpu":
            keep_freed_pages()

    def predict(self, x, noise_var: float | Tensor | None) -> Prediction:
        """The prediction for one input, or for the batches of a loader together."""
        single = is_one_input(x)
        with self._bar(self.request.count if single else None) as bar:
            result = self.run_one(x, bar) if single else self._run_all(x, bar)
        check_noise_shape(self.forward.op, noise_var, result["mean"])
        return Prediction(self.likelihood, self.request.count, noise_var=noise_var, **result)

    def _run_all(self, loader: Iterable, bar: tqdm | None) -> dict[str, Tensor | list | None]:
        results, targets = [], []
        for batch in loader:
            inputs, target = split_batch(self.forward.op, batch)
            results.append(self.run_one(move(inputs, self.device), bar))
            targets.append(copied(target))  # a loader may fill the same memory for each batch
            self._check_shapes(results[0]["mean"], results[-1]["mean"])
        if not results:
            refuse(self.forward.op, "x", "yield at least 1 batch", "none")
        joined = {
            name: torch.cat([r[name] for r in results], 1 if name == "samples" else 0)
            for name, value in results[0].items()
            if value is not None
        }
        return joined | {"targets": _join(targets)}

    def _check_shapes(self, first: Tensor, mean: Tensor) -> None:
        """Raises unless the outputs of two batches can be put together."""
        if mean.shape[1:] != first.shape[1:]:
            requirement = f"yield batches with outputs of one shape, [N, *{list(first.shape[1:])}]"
            refuse(self.forward.op, "x", requirement, list(mean.shape))

    def _bar(self, total: int | None):
        if not self.request.progress:
            return nullcontext()
        return progress_bar(desc=self.forward.op, unit="replica", total=total, shown=True)

    def run_one(self, inputs, bar: tqdm | None) -> dict[str, Tensor]:
        """The prediction of one input, under a bar that is there already, or none."""
        moments = samples = summary = None
        folding = self._folding(inputs)
        done, plan = 0, self._plan(folding)
        while done < self.request.count:
            size = self._size(plan, self.request.count - done)
            outputs = None
            try:
                outputs = self._outputs(folding, plan, done, size)
                samples = self._keep(samples, outputs, done)
                if size == self.request.count:
                    summary = summarise(self.forward.op, self.likelihood, outputs)
                else:
                    moments = moments or make_moments(self.forward.op, self.likelihood)
                    moments.add(outputs)
            except Exception as error:
                raise_interrupt(error)
                if is_out_of_memory(error):
                    if size == 1:
                        raise self._out_of_memory(inputs, outputs, samples, error) from error
                    self.max_chunk = size // 2
                elif outputs is None and size > 1:
                    plan = self._checked(folding.give_up(plan, error))
                else:
                    raise
            else:
                done += size
                if bar is not None:
                    bar.update(size)
            if self.max_chunk < size:
                # The exception is gone here, and with it the tensors of the frames that it held.
                free_memory(self.device)
        return (summary or moments.summary()) | {"samples": samples}

    def _folding(self, inputs) -> Folding:
        folding = self.fold(self.forward, self.modules, self.request.first, inputs)
        if not isinstance(folding.cache, ModelCache) or self.request.is_loop():
            return folding
        last_key, self.last_key = self.last_key, folding.plan_key
        plan = folding.cache.plans.get(folding.plan_key)
        went_together = last_key == folding.plan_key and plan is not None and plan.way in WAYS
        if last_key is None or went_together:
            return folding
        # An input that went one after another may have made another model of it.
        self.forward = self.forward._replace(cache=cache_of(self.forward.model, self.modules))
        return self.fold(self.forward, self.modules, self.request.first, inputs)

    def _out_of_memory(self, inputs, outputs, samples, error: Exception) -> Exception:
        """What to raise where there is no memory for a single replica,
        or none to keep its outputs in."""
        op = self.forward.op
        if self.request.keep and outputs is not None and samples is None:
            return no_memory_to_keep(op, outputs, self.request.count)
        return out_of_memory(op, num_rows(op, inputs), error)

    def _size(self, plan: Plan, remaining: int) -> int:
        """Replicas in the next chunk."""
        if plan.way not in WAYS:
            return 1
        size = chunk_of(plan.largest, self.request.chunk, remaining, self.device)
        return min(size, self.max_chunk)

    def _outputs(self, folding: Folding, plan: Plan, done: int, size: int) -> Tensor:
        outputs = folding.run(plan, self.request.first + done, size)
        shape = list(outputs.shape[1:])
        if done == 0:
            self.shape = shape
            refuse_forward_derivatives(self.forward.op, outputs)
            self._warn_of_probabilities(outputs)
        if shape != self.shape:  # boxes of a detector; they might broadcast
            requirement = "have the same shape in all replicas (output_fn can pad it)"
            refuse(self.forward.op, "the output", requirement, f"{shape} after {self.shape}")
        return outputs

    def _warn_of_probabilities(self, outputs: Tensor) -> None:
        seen, other = self.forward.cache.outputs_seen, self.forward.output_fn is not None
        if self.likelihood == "gaussian" or other in seen or is_recorded():
            return
        # Not yet where the warning is an error, and somebody has caught it.
        if outputs.dim() > 2 and warn_of_probabilities(self.forward.op, "the outputs", outputs[0]):
            seen.add(other)

    def _plan(self, folding: Folding) -> Plan:
        if self.request.is_loop():
            return LOOP
        strategy = self.request.strategy
        if strategy == "auto" and waits_for_others(self.modules):
            return LOOP
        rows = num_rows(self.forward.op, folding.inputs)
        if rows == 0:
            return LOOP
        folding.cache.predictions += 1
        if strategy == "auto" and not folding.is_planned():
            folding.count_forwards(self.request.count)
            if _waits(folding):
                return LOOP
        try:
            plan = folding.plan(lambda plan: self._trial_pays(folding, plan))
        except Exception as error:
            if is_out_of_memory(error):
                raise out_of_memory(self.forward.op, rows, error) from error
            raise
        return self._checked(plan)

    def _trial_pays(self, folding: Folding, plan: Plan) -> bool:
        """Whether more than one replica would go into a chunk, not all trials of late were undecided,
        and a trial that is dear does not come too early."""
        request = self.request
        if request.strategy == "folded":
            return True
        together = chunk_of(plan.largest, request.chunk, request.count, self.device)
        if together == 1 or folding.undecided() >= _TRIALS:
            return False
        return self.device.type != "cpu" or not _is_early(folding, plan)

    def _checked(self, plan: Plan) -> Plan:
        if self.request.strategy == "folded" and plan.way == "loop":
            got = f'"folded" for a model that does not fold: {plan.reason}'
            refuse(self.forward.op, "strategy", 'be "auto" or "loop"', got)
        return plan

    def _keep(self, samples: Tensor | None, outputs: Tensor, done: int) -> Tensor | None:
        if not self.request.keep:
            return None
        if samples is None:
            samples = outputs.new_empty((self.request.count, *outputs.shape[1:]))
        samples[done : done + len(outputs)] = outputs
        return samples


def _waits(folding: Folding) -> bool:
    """Whether a trial is to come later: inputs of a third trailing shape and more, and of a model that
    changes in each prediction, first go one after another for as many forwards as it costs."""
    cache = folding.cache
    tried = max(len(cache.trials) + len(cache.undecided), cache.times_replaced)
    return tried >= AT_ONCE and not folding.has_tried() and folding.looped_forwards() <= _COST


def _is_early(folding: Folding, plan: Plan) -> bool:
    """Whether a trial takes seconds, and the loop has not yet taken as long, and as long again for
    each that could not tell: so predictions, however many, take at most some twice what they could."""
    early = folding.looped_rows() <= _ROWS * (1 + folding.undecided())
    return early and plan.macs * _ROWS > _DEAR and not folding.has_tried()


def _join(targets: list) -> Tensor | list | None:
    if all(target is None for target in targets):
        return None
    if all(isinstance(target, Tensor) and target.dim() > 0 for target in targets):
        if len({(target.shape[1:], target.dtype, target.device) for target in targets}) == 1:
            return torch.cat(targets)
    return targets
