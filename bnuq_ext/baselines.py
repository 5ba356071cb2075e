"""What sampled statistics are compared with, and combined with: plug-in, MC dropout, ensembles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .chunks import check_chunk
from .dropout import Dropping
from .forward import Forward
from .inputs import Inputs, copied, device_of
from .interrupts import leaving_nothing_behind
from .model_cache import cache_of
from .nn import check_model
from .ops import new_seed, snapshot_indices
from .ops.checks import (
    check_callable,
    check_first_replica,
    check_flags,
    check_integer,
    check_one_of,
    refuse,
)
from .passes import Pass, running
from .predict import check_bank_sampler, check_x, forward_by_bank, require_replicated
from .prediction import Prediction, check_likelihood, entropies
from .predictor import STRATEGIES, Predictor, Request
from .restore import evaluating, unmoved_by_errors
from .samplers import check_key, draw_key, snapshots_of
from .state import modules_of
from .untraced import uncompiled, untraced
from .wrappers import unwrapped

_SEEDS = 2**31 - 1


@untraced
@leaving_nothing_behind
def plug_in(
    model: nn.Module,
    x: Inputs,
    *,
    likelihood: str,
    noise_var: float | Tensor | None = None,
    output_fn: Callable[[Any], Tensor] | None = None,
    keep_samples: bool = False,
    progress: bool = False,
) -> Prediction:
    """The ordinary prediction of a model in eval, as one replica: running statistics, no variance.

    With the statistics of a whole training set instead of the running ones:
    `collect(model, dataset, 1, batch_size=len(dataset))`, which warns of so large a batch, and
    `predict(..., num_samples=1)`.

    Args:
        model: any nn.Module, converted or not; a bank is not used.
            Of a `BayesLinear` the mean weights.
        x, likelihood, noise_var, output_fn, keep_samples, progress: see `predict`.

    Returns:
        a Prediction with `num_samples` 1 and `variance` 0.

    Raises:
        ValueError, TypeError: an argument is refused.
    """
    task = _Task("plug_in", x, likelihood, noise_var, output_fn, keep_samples, progress)
    predictor = task.predictor(task.forward(model, None, None, 0), 0, 1)
    with unmoved_by_errors():
        return task.run([model], predictor)


@untraced
@leaving_nothing_behind
def mc_dropout(
    model: nn.Module,
    x: Inputs,
    *,
    likelihood: str,
    num_samples: int = 32,
    seed: int | None = None,
    sampler: str | None = None,
    noise_var: float | Tensor | None = None,
    first_replica: int = 0,
    batch_size: int | None = None,
    output_fn: Callable[[Any], Tensor] | None = None,
    keep_samples: bool = False,
    progress: bool = False,
) -> Prediction:
    """MC dropout (Gal and Ghahramani 2016): T passes with dropout on and everything else in eval.

    With a sampler each pass draws batch-norm statistics too (Atanov et al. 2019: dropout + SBN).
    Masks are drawn for every row by itself, by a generator that (seed, replica) alone determines:
    torch's own generator stays as it is, any split into calls gives the same numbers, and all
    batches of a loader have the same masks. CPU and CUDA have different masks.
    Passes run one after another.

    Args:
        model: calls dropout layers, or `torch.nn.functional`'s dropout functions, with p above 0;
            the dropout inside attention and recurrent layers stays off. With a sampler converted,
            with a bank.
        sampler: None (running statistics), or any of `predict`'s but "batch".
        x, likelihood, num_samples, seed, noise_var, first_replica, batch_size, output_fn,
            keep_samples, progress: see `predict`.

    Returns:
        a Prediction over the passes.

    Raises:
        ValueError, TypeError: an argument is refused; a model without dropout.
    """
    task = _Task("mc_dropout", x, likelihood, noise_var, output_fn, keep_samples, progress)
    first_replica, num_samples = task.replicas(first_replica, num_samples, seed)
    with unmoved_by_errors():
        forward = task.forward(model, sampler, batch_size, seed)
        predictor = task.predictor(DroppingForward(forward), first_replica, num_samples)
        pred = task.run([model], predictor)
    pred.snapshots = snapshots_of(forward.sampler, forward.key, first_replica, num_samples)
    return pred


@untraced
@leaving_nothing_behind
def ensemble(
    models: Sequence[nn.Module],
    x: Inputs,
    *,
    likelihood: str,
    num_samples: int | None = None,
    seed: int | None = None,
    sampler: str | None = None,
    noise_var: float | Tensor | None = None,
    first_replica: int = 0,
    batch_size: int | None = None,
    strategy: str = "auto",
    chunk: int | str = "auto",
    output_fn: Callable[[Any], Tensor] | None = None,
    keep_samples: bool = False,
    progress: bool = False,
) -> Prediction:
    """A deep ensemble (Lakshminarayanan et al. 2017): networks trained apart, with equal weights.

    Without a sampler a member is one replica, the `plug_in` of it. With one it is `num_samples`
    replicas with drawn statistics (ensemble + SBN), those of `predict` with seed + its place.

    Args:
        models: at least one; on one device. With a sampler each converted, with its bank.
        num_samples: replicas of each member, 32 by default; None without a sampler.
        sampler: None, or any of `predict`'s but "batch".
        x, likelihood, seed, noise_var, first_replica, batch_size, strategy, chunk, output_fn,
            keep_samples, progress: see `predict`. Kept samples stand member by member.

    Returns:
        a Prediction of all replicas of all members: `variance` and `mutual_information` are within
        and between the members together.

    Raises:
        ValueError, TypeError: an argument is refused; members with outputs of different shapes.
    """
    op = "ensemble"
    task = _Task(op, x, likelihood, noise_var, output_fn, keep_samples, progress)
    models = _checked_members(op, models)
    if sampler is None and num_samples is not None:
        refuse(op, "num_samples", "be None without a sampler", num_samples)
    if num_samples is None:
        num_samples = 1 if sampler is None else 32
    first_replica, num_samples = task.replicas(first_replica, num_samples, seed)
    check_one_of(op, "strategy", strategy, STRATEGIES)
    check_chunk(op, chunk)
    seed = 0 if sampler is None else seed  # nothing is drawn
    with unmoved_by_errors():
        key = draw_key(seed, device_of(models[0].modules()))
        predictors = []
        for place, model in enumerate(models):
            own_seed, name = _wrapped(key + place), f"models[{place}]"
            forward = task.forward(model, sampler, batch_size, own_seed, name)
            predictors.append(task.predictor(forward, first_replica, num_samples, strategy, chunk))
        return task.run(models, Members(predictors))


class PlainForward(Forward):
    """The model as it is in eval: nothing is drawn, and it is run one replica at a time."""

    def draw(self, first_replica: int, num_samples: int) -> None:
        return None

    def run(self, inputs, draw) -> tuple[Tensor, None]:
        with running(Pass({})):
            output = self.call(self.model, copied(inputs))
        return self.tensor_of(output), None


class DroppingForward:
    """Runs another forward with dropout on, one replica at a time."""

    def __init__(self, inner: Forward):
        self.inner, self.op, self.cache, self.model = inner, inner.op, inner.cache, inner.model
        self.output_fn = inner.output_fn
        self.generator = torch.Generator(device_of(inner.model.modules()))

    def draw(self, first_replica: int, num_samples: int) -> tuple:
        # A permutation of 31 bits, which is what torch's generator on the CPU takes of a seed.
        seed = snapshot_indices(new_seed(self.inner.key, first_replica), _SEEDS, 1)
        return int(seed), self.inner.draw(first_replica, num_samples)

    def run(self, inputs, draw) -> tuple:
        seed, own = draw
        self.generator.manual_seed(seed)
        with uncompiled(), Dropping(self.generator) as dropping:  # compiled code takes no generator
            result = self.inner.run(inputs, own)
        if dropping.calls == 0:
            refuse(self.op, "model", "call dropout with p above 0", "no call")
        return result


class Members(Predictor):
    """The predictors of several models as one: each takes a batch,
    and what they say is put together."""

    def __init__(self, predictors: list[Predictor]):
        first = predictors[0]
        request = first.request._replace(count=sum(p.request.count for p in predictors))
        super().__init__(first.forward, [], request, first.likelihood, first.device)
        self.predictors = predictors
        for predictor in predictors[1:]:
            predictor.last_key = ()  # those before may share modules with it

    def run_one(self, inputs, bar) -> dict[str, Tensor]:
        parts = [predictor.run_one(inputs, bar) for predictor in self.predictors]
        shapes = [list(part["mean"].shape) for part in parts]
        if any(shape != shapes[0] for shape in shapes):
            refuse(self.forward.op, "models", "have outputs of one shape", shapes)
        samples = torch.cat([p["samples"] for p in parts]) if self.request.keep else None
        return pooled(parts) | {"samples": samples}


def pooled(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The moments of equally many replicas each, put together.

        mean = E_m[mean_m],   variance = E_m[variance_m] + E_m[(mean_m - mean)^2],
        mutual information = H[mean] - E_m[H[mean_m] - information_m]

    Args:
        parts: summaries of `make_moments`.
    """
    means = torch.stack([part["mean"] for part in parts])
    mean = means.mean(0)
    variance = torch.stack([part["variance"] for part in parts]).mean(0)
    variance = variance + (means - mean).square().mean(0)
    joined = {"mean": mean, "variance": variance}
    if "entropy" not in parts[0]:
        return joined
    expected = torch.stack([p["entropy"] - p["mutual_information"] for p in parts]).mean(0)
    return joined | entropies(mean, variance, expected)


@dataclass(frozen=True)
class _Task:
    """The arguments that `plug_in`, `mc_dropout` and `ensemble` share, checked."""

    op: str
    x: object
    likelihood: str
    noise_var: float | Tensor | None
    output_fn: Callable | None
    keep: bool
    progress: bool

    def __post_init__(self):
        check_likelihood(self.op, self.likelihood, self.noise_var)
        check_callable(self.op, "output_fn", self.output_fn)
        check_flags(self.op, keep_samples=self.keep, progress=self.progress)

    def replicas(self, first_replica, num_samples, seed) -> tuple[int, int]:
        """First replica and number of replicas, checked, with the seed."""
        check_key(self.op, seed)
        count = check_integer(self.op, "num_samples", num_samples, 1)
        return check_first_replica(self.op, first_replica, count), count

    def forward(self, model: nn.Module, sampler, batch_size, seed, name="model") -> Forward:
        """How to run the model, of this name in messages, with a sampler, or without one."""
        op = self.op
        check_model(op, model)
        model = unwrapped(model)
        modules = modules_of(model)
        device = device_of(modules)
        check_x(op, self.x, device)
        if sampler is not None:
            require_replicated(op, modules, name)
            batch_size = check_bank_sampler(op, sampler, batch_size)
            return forward_by_bank(op, model, modules, sampler, batch_size, seed, self.output_fn)
        if batch_size is not None:
            refuse(op, "batch_size", "be None without a sampler", batch_size)
        cache, key = cache_of(model, modules), draw_key(seed, device)
        return PlainForward(model, {}, None, key, self.output_fn, cache, op)

    def predictor(
        self, forward, first_replica: int, count: int, strategy="loop", chunk=1
    ) -> Predictor:
        modules = modules_of(forward.model)
        request = Request(first_replica, count, strategy, chunk, self.keep, self.progress)
        return Predictor(forward, modules, request, self.likelihood, device_of(modules))

    def run(self, models, predictor: Predictor) -> Prediction:
        """The prediction of a predictor over these models."""
        with torch.no_grad(), ExitStack() as flags:
            for model in models:
                flags.enter_context(evaluating(modules_of(model)))
            return predictor.predict(self.x, self.noise_var)


def _checked_members(op: str, models) -> list[nn.Module]:
    single = isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList)
    if single or not isinstance(models, Iterable):
        refuse(op, "models", "be a list of modules", type(models).__name__, TypeError)
    models = list(models)
    if not models:
        refuse(op, "models", "hold at least 1 member", "none")
    for model in models:
        check_model(op, model)
    return models


def _wrapped(key: int) -> int:
    """The key as the integer in [-2^63, 2^63) with its lowest 64 bits."""
    return (key + 2**63) % 2**64 - 2**63
