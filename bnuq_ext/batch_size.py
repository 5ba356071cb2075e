"""`fit_batch_size`: the batch size of the statistics as a variational parameter,
chosen by the ELBO."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .attach import attach
from .bank import Bank
from .batch_size_fit import BatchSizeFit
from .batches import as_dataset, fetcher, find_source, is_dataset, parts_of
from .collect import gather
from .inputs import Data, Inputs, as_rows_of, device_of, move, split_batch
from .interrupts import leaving_nothing_behind
from .metrics import mutual_information
from .metrics.arguments import check_fittable, label_log_probs, take_labels
from .nn import require_stochastic_layers
from .ops.checks import check_callable, check_flags, check_integer, refuse
from .predict import predict
from .prediction import check_likelihood
from .progress import progress_bar
from .restore import seed_torch, without_gradients
from .samplers import check_key, key_of_body
from .state import OWN_BANK, generators_in, modules_of
from .statistics_kl import (
    StatisticsGaussian,
    channel_kl,
    check_fit,
    check_statistics_prior,
    observed_statistics,
)
from .untraced import untraced
from .wrappers import check_unwrapped

OP = "fit_batch_size"


@untraced
@leaving_nothing_behind
def fit_batch_size(
    model: nn.Module,
    data: Data,
    candidates: Iterable[int],
    *,
    likelihood: str,
    prior: StatisticsGaussian | Mapping[str, StatisticsGaussian] | None = None,
    validation: Inputs | None = None,
    num_samples: int = 32,
    noise_var: float | None = None,
    num_rows: int | None = None,
    seed: int | None = None,
    rows_at_a_time: int = 256,
    output_fn: Callable[[Any], Tensor] | None = None,
    progress: bool = True,
) -> BatchSizeFit:
    """The evidence lower bound, and the validation NLL,
    as functions of the batch size of the statistics.

        ELBO(M) = sum over n of E_q log p(y_n | x_n, omega) - KL(q_M(omega) || p(omega))

    q_M is the distribution of the statistics of random batches of M rows. For each M the model, as
    it is, goes over `num_samples` fresh batches, drawn without replacement and independently of
    each other; these are the replicas. The divergence is that of `statistics_kl` with the mean and
    the variance over them: it treats units and layers as independent Gaussians, which they are not.
    Small batches cost likelihood, and a divergence grows as -ln s_q, by ln(2) / 2 for each
    statistic when M doubles. At M = N there is one batch, no uncertainty,
    an infinite divergence and an ELBO of -inf.

    One pass over the data has N / M batches, 2 at N / 2, and T of them make the divergence too
    large by (ln((T-1) / 2) - digamma((T-1) / 2)) / 2 for each statistic: 0.64 nats at 2, 0.016 at
    32. As many batches for each M, though they share rows,
    make that a constant that moves no optimum.

    Model, bank, training flags and torch's generators are left as found, whatever happens (without
    a seed, torch's generator gives one number). Meanwhile the model has other banks: no other thread
    may predict with it, or fit its batch size.

    Args:
        model: converted by `convert`; with a bank or without.
        data: training data, (x, y) or a map-style data set of (input, target) or of dicts with
            "input" or "x" and "target(s)", "y" or "label(s)"; a DataLoader stands for its data set.
        candidates: batch sizes, each once, from 2 to N.
        likelihood: "categorical": outputs are logits (N, K, *), targets (N, *). "gaussian": means,
            targets of their shape, (N,) for (N, 1) too.
        prior: over the statistics: for all layers, such as `implied_prior(...)`, or by the layers'
            names in a bank. None takes q_M of the smallest candidate, which is below N and has then no
            divergence.
        validation: a data set like `data`. Where the mutual information
            and the variance are taken too; without it, on `data`.
        num_samples: T, batches and replicas for each M; at least 2.
        noise_var: variance of gaussian noise, one for all outputs;
            needed for "gaussian", only there.
        num_rows: rows of `data`, drawn once, that the likelihood is estimated from, scaled up to N;
            None for all.
        seed: of all draws: the same seed, the same result. None draws it from torch's generator.
        rows_at_a_time: inputs that go through the model together.
        output_fn: see `predict`.
        progress: show a bar on stderr; where that is no terminal, a line a minute.

    Returns:
        BatchSizeFit.

    Raises:
        ValueError, TypeError: an argument is refused, or the model is not converted, or wrapped for
            several devices.

    Source: Mukhoti et al., On Batch Normalisation for Approximate Bayesian Inference, section 3,
        which proposes it; objective and divergence from Teye et al. (2018),
        equation 1 and appendix 1.2.
    """
    layers = require_stochastic_layers(OP, model)
    check_unwrapped(OP, model)
    data = as_dataset(OP, "data", data)
    validation = as_dataset(OP, "validation", validation)
    sizes = _checked_sizes(data, candidates)
    num_samples = check_integer(OP, "num_samples", num_samples, 2)
    rows_at_a_time = check_integer(OP, "rows_at_a_time", rows_at_a_time, 1)
    noise_var = _checked_noise(likelihood, noise_var)
    _check_prior(prior, sizes, len(data))
    if validation is not None:
        _size("validation", validation)
    num_rows = _checked_rows(data, num_rows)
    check_key(OP, seed)
    check_flags(OP, progress=progress)
    check_callable(OP, "output_fn", output_fn)
    device = device_of(model.modules())
    own = generators_in([*modules_of(model), *parts_of(data), *parts_of(validation)])
    with key_of_body(seed, *own) as key, without_gradients(), _bank_put_back(model, layers):
        judge = _Judge(model, device, likelihood, noise_var, key, rows_at_a_time, output_fn)
        _check_targets("data", data)
        if validation is not None:
            _check_targets("validation", validation)
        seed_torch(key)
        rows = torch.randperm(len(data), device="cpu")[:num_rows].sort().values
        with progress_bar(desc=OP, total=2 * len(sizes), shown=progress) as bar:
            banks = []
            for M in sizes:
                banks.append(_bank(model, data, M, num_samples, key, device))
                bar.update()
            kl, left_out = _divergences(banks, prior)
            scores = []
            for bank in banks:
                attach(model, bank)
                scores.append(judge.both(data, rows.tolist(), validation, len(bank)))
                bar.update()
    return _fit(sizes, kl, left_out, scores)


def _checked_sizes(data, candidates) -> list[int]:
    N = _size("data", data)
    if not isinstance(candidates, Iterable):
        got = type(candidates).__name__
        refuse(OP, "candidates", "be a list of batch sizes", got, TypeError)
    sizes = [check_integer(OP, "candidates", M, 2) for M in candidates]
    if not sizes or len({*sizes}) < len(sizes):
        refuse(OP, "candidates", "be at least 1 batch size, each once", sizes)
    if max(sizes) > N:
        refuse(OP, "candidates", f"be at most the data's {N} rows", max(sizes))
    return sorted(sizes)


def _check_prior(prior, sizes: list[int], N: int) -> None:
    if prior is None and sizes[0] == N:
        refuse(OP, "prior", f"be given without a batch size below N = {N}", None)
    if prior is not None:
        for each in prior.values() if isinstance(prior, Mapping) else [prior]:
            check_statistics_prior(OP, each)


def _size(name: str, dataset) -> int:
    if not is_dataset(dataset):
        refuse(OP, name, "be a map-style data set", type(dataset).__name__, TypeError)
    if len(dataset) == 0:
        refuse(OP, name, "have rows", 0)
    return len(dataset)


def _check_targets(name: str, dataset) -> None:
    """Whether the first row has a target, asked before the banks are collected."""
    _, y = split_batch(OP, fetcher(dataset)([0]))
    if y is None:
        refuse(OP, name, "be (x, y) or a data set with targets", "inputs alone")


def _checked_rows(data, num_rows) -> int:
    if num_rows is None:
        return len(data)
    if check_integer(OP, "num_rows", num_rows, 1) > len(data):
        refuse(OP, "num_rows", f"be at most the data's {len(data)} rows", num_rows)
    return num_rows


def _checked_noise(likelihood, noise_var) -> float | None:
    if isinstance(noise_var, Tensor) and noise_var.numel() == 1:
        noise_var = noise_var.item()
    check_likelihood(OP, likelihood, noise_var)
    if likelihood == "gaussian" and not (isinstance(noise_var, Real) and noise_var > 0):
        refuse(OP, "noise_var", "be a positive number for a gaussian likelihood", noise_var)
    return None if noise_var is None else float(noise_var)


@contextmanager
def _bank_put_back(model: nn.Module, layers: dict[str, nn.Module]):
    """The bank of each layer and of the model, or none, is put back after the body, however it
    ends."""
    names, changed = ("bank", "bank_name", OWN_BANK), (model, *layers.values())
    before = [(m, {n: vars(m)[n] for n in names if n in vars(m)}) for m in changed]
    try:
        yield
    finally:
        for module, found in before:
            for name in names:
                vars(module).pop(name, None)
            vars(module).update(found)


def _bank(model, data, M: int, num_samples: int, key: int, device) -> Bank:
    seed_torch(key)
    count = 1 if M == len(data) else num_samples
    bank, _ = gather(OP, model, find_source(OP, data, M), count, device=device)
    return bank


def _divergences(banks: list[Bank], prior) -> tuple[list[float], int]:
    """The divergence of each bank, over the channels that vary in all of them,
    and how many do not."""
    alive = {
        name: torch.stack([(b.var[name] > 0).any(0) for b in banks]).all(0)
        for name in banks[0].names
    }
    prior = observed_statistics(banks[0]) if prior is None else prior
    priors = prior if isinstance(prior, Mapping) else dict.fromkeys(alive, prior)
    if priors.keys() != alive.keys():
        refuse(OP, "prior", f"have the names of the layers' calls {list(alive)}", list(priors))
    for name, own in observed_statistics(banks[0]).items():
        check_fit(OP, own, priors[name])
    totals = []
    for bank in banks:
        q = observed_statistics(bank)
        totals.append(sum(channel_kl(q[n], priors[n])[alive[n]].sum().item() for n in alive))
    return totals, sum(int((~a).sum()) for a in alive.values())


class _Scores(NamedTuple):
    log_likelihood: float  # sum over rows
    nll: float  # the rest: means
    information: float | None
    variance: float


class _Judge:
    """Scores the replicas of a model's bank on rows of a data set."""

    def __init__(
        self, model, device, likelihood: str, noise_var, key: int, rows_at_a_time: int, output_fn
    ):
        self.model, self.device, self.likelihood = model, device, likelihood
        self.output_fn = output_fn
        self.noise_var, self.key, self.rows_at_a_time = noise_var, key, rows_at_a_time

    def both(self, data, rows: list[int], validation, num_samples: int) -> tuple:
        """Scores on the training rows, scaled up to all, and on the validation data or None."""
        train = self.scores(data, rows, num_samples)
        train = train._replace(log_likelihood=train.log_likelihood * len(data) / len(rows))
        if validation is None:
            return train, None
        return train, self.scores(validation, list(range(len(validation))), num_samples)

    def scores(self, dataset, rows: list[int], num_samples: int) -> _Scores:
        fetch, step = fetcher(dataset), self.rows_at_a_time
        totals: Counter[str] = Counter()
        for start in range(0, len(rows), step):
            inputs, y = split_batch(OP, fetch(rows[start : start + step]))
            pred = predict(
                self.model, move(inputs, self.device), likelihood=self.likelihood, num_samples=num_samples,
                seed=self.key, output_fn=self.output_fn, keep_samples=True,
            )  # fmt: skip
            totals.update(self._sums(pred.samples.double(), y))
        categorical = self.likelihood == "categorical"
        return _Scores(
            log_likelihood=totals["log_likelihood"],
            nll=totals["nll"] / totals["count"],
            information=totals["information"] / totals["count"] if categorical else None,
            variance=totals["variance"] / totals["values"],
        )

    def _sums(self, samples: Tensor, y) -> dict[str, float]:
        log_p = log_likelihood(samples, y, self.likelihood, self.noise_var)
        mixed = log_p.logsumexp(0) - math.log(len(log_p))
        information = 0.0
        if self.likelihood == "categorical":
            samples = samples.softmax(2)
            information = mutual_information(samples, reduction="none").sum()
        variance = samples.var(0, correction=0)
        return {
            "log_likelihood": float(log_p.mean(0).sum()),
            "nll": float(-mixed.sum()),
            "count": mixed.numel(),
            "information": float(information),
            "variance": float(variance.sum()),
            "values": variance.numel(),
        }


def log_likelihood(samples: Tensor, y, likelihood: str, noise_var) -> Tensor:
    """log p(y | replica): (T, N, *) for logits (T, N, K, *); (T, N) for means (T, N, ...),
    summed over outputs."""
    categorical = likelihood == "categorical"
    expected = (samples.shape[1], *samples.shape[3:]) if categorical else tuple(samples.shape[1:])
    if isinstance(y, Tensor) and not categorical:
        y = as_rows_of(y, expected)
    if not isinstance(y, Tensor) or tuple(y.shape) != expected:
        got = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
        refuse(OP, "targets", f"be a tensor of shape {list(expected)}", got)
    if categorical:
        return label_log_probs(samples, take_labels(OP, y, samples[0]))
    check_fittable(OP, "targets", y)
    y = y.to(samples.device).expand(len(samples), *expected)
    noise = torch.distributions.Normal(samples, noise_var**0.5, validate_args=False)
    return noise.log_prob(y.to(samples.dtype)).reshape(*samples.shape[:2], -1).sum(2)


def _fit(sizes: list[int], kl: list[float], left_out: int, scores: list[tuple]) -> BatchSizeFit:
    train = [pair[0] for pair in scores]
    judged = [pair[1] or pair[0] for pair in scores]

    def curve(values) -> Tensor | None:
        values = list(values)
        return None if None in values else torch.tensor(values, dtype=torch.float64, device="cpu")

    return BatchSizeFit(
        batch_sizes=torch.tensor(sizes, device="cpu"),
        log_likelihood=curve(s.log_likelihood for s in train),
        kl=curve(kl),
        nll=curve(None if pair[1] is None else pair[1].nll for pair in scores),
        mutual_information=curve(s.information for s in judged),
        epistemic_variance=curve(s.variance for s in judged),
        left_out=left_out,
    )
