"""`query="in"`: every query joins a mini-batch, and has the statistics of the two together."""

from __future__ import annotations

from contextlib import closing, nullcontext
from typing import NoReturn

import torch
from torch import Tensor, nn

from .batches import find_loader
from .bayes import bayes_layers
from .collect import CollectPass, refuse_nonfinite
from .forward import Forward
from .inputs import device_of, map_tensors, num_rows, split_batch, tensors
from .model_cache import cache_of
from .nn import require_stochastic_layers
from .ops.checks import is_finite, refuse
from .passes import running
from .restore import preserved_rng
from .samplers import Draw, WeightSampler, draw_key
from .warn import warn


class JoiningForward:
    """Runs N queries of a replica one by one, each before all rows but the last
    of the replica's batch.

    The stochastic batch norm layers take the statistics of the joint batch, deeper ones behind the
    ones before; everything else is as in eval.

    Args:
        inner: knows the model and its layers, and draws the weights of Bayesian ones.
        batches: (M, ...) of each replica.
        first_replica: whose batch is the first.
    """

    def __init__(self, inner: Forward, batches: list[Tensor], first_replica: int):
        self.inner, self.op, self.cache, self.model = inner, inner.op, inner.cache, inner.model
        self.output_fn = inner.output_fn
        self.sampler, self.key = inner.sampler, inner.key
        self.batches, self.first_replica = batches, first_replica

    def draw(self, first_replica: int, num_samples: int) -> tuple[Tensor, Draw]:
        batch = self.batches[first_replica - self.first_replica]
        return batch, self.inner.draw(first_replica, num_samples)

    def run(self, inputs, draw) -> tuple[Tensor, None]:
        batch, own = draw
        self._check_rows(inputs, batch)
        rows = num_rows(self.op, inputs)
        if rows == 0:
            return self._output(map_tensors(inputs, lambda x: batch.clone()), own)[:0], None
        return torch.cat([self._joined(inputs, i, batch, own) for i in range(rows)]), None

    def _joined(self, inputs, i: int, batch: Tensor, own: Draw) -> Tensor:
        joint = map_tensors(inputs, lambda x: torch.cat([x[i : i + 1], batch[:-1]]))
        return self._output(joint, own)[:1].clone()

    def _check_rows(self, inputs, batch: Tensor) -> None:
        given = tensors(inputs)
        if len(given) != 1:
            requirement = 'be one tensor with query "in", as a batch of the loader is'
            refuse(self.op, "x", requirement, f"{len(given)} tensors")
        mine, theirs = (f"{list(t.shape[1:])} {t.dtype}" for t in (given[0], batch))
        if mine != theirs:
            refuse(self.op, "loader", f"have rows like those of x, {mine}", theirs)

    def _output(self, joint, own: Draw) -> Tensor:
        active = JointPass(self.op, self.inner.layers, own)
        with (
            running(active),
            self.cache.checking_coverage(self.op, self.model, self.inner.layers) as active.counter,
        ):
            output = self.inner.call(self.model, joint)
        if not active.statistics:
            refuse(self.op, "model", "call a stochastic layer in its forward", "no call")
        output = self.inner.tensor_of(output)
        rows = num_rows(self.op, joint)
        if output.dim() == 0 or len(output) != rows:
            got = list(output.shape)
            refuse(self.op, "the output", f"have the {rows} rows of query and batch", got)
        return output


def joining_forward(
    model: nn.Module,
    modules: list[nn.Module],
    loader,
    first_replica: int,
    num_samples: int,
    seed,
    output_fn,
) -> JoiningForward:
    """How to run a model with queries that join the loader's batches."""
    op, cache, device = "predict", cache_of(model, modules), device_of(modules)
    layers = bayes_layers(model, modules) | require_stochastic_layers(op, model)
    drawn = WeightSampler(device), draw_key(seed, device)
    inner = Forward(model, layers, *drawn, output_fn, cache)
    batches = take_batches(op, loader, first_replica, num_samples, device)
    return JoiningForward(inner, batches, first_replica)


class JointPass(CollectPass):
    """Normalises with the batch's own statistics; other stochastic layers draw as in `predict`.

    `counter`, if any, counts the batch-norm calls of others.
    """

    def __init__(self, op: str, layers: dict[str, nn.Module], draw: Draw):
        super().__init__(op, layers)
        self.draw, self.counter = draw, None

    def normalise(self, layer: nn.Module, x: Tensor, key: str, stream: int) -> Tensor:
        if not layer.needs_bank:
            return layer.replicate(x, self.draw, key, stream, False)
        with self.counter.ignoring() if self.counter else nullcontext():
            return super().normalise(layer, x, key, stream)

    def end_at(self, key: str, x: Tensor) -> NoReturn:
        requirement = f"give {key!r} two values a channel with query and batch together"
        refuse(self.op, "model", requirement, list(x.shape))


def take_batches(op: str, loader, first: int, count: int, device: torch.device) -> list[Tensor]:
    """The batches number `first` to `first + count` - 1 of a loader,
    of those that have two rows."""
    source = find_loader(op, loader)
    kept, found, seen, max_batches = [], 0, 0, 2 * (first + count) + 1
    with preserved_rng(*source.generators), closing(source.batches(max_batches)) as batches:
        for _, given in batches:
            seen += 1
            batch, _ = split_batch(op, given)
            if not isinstance(batch, Tensor):
                got = type(batch).__name__
                refuse(op, "loader", 'yield one tensor a batch with query "in"', got, TypeError)
            if not is_finite(batch):
                refuse_nonfinite(op, seen - 1, "the input")
            if batch.dim() > 0 and len(batch) > 1:
                found += 1
                if found > first:
                    kept.append(batch.to(device, copy=True))  # the loader may use its memory again
            if len(kept) == count:
                break
    if len(kept) < count:
        refuse(op, "loader", f"have {first + count} batches of 2 rows or more", found)
    if found < seen:
        warn(f"{op}: {seen - found} of {seen} batches were left out: they have fewer than two rows")
    return kept
