"""Variational inference: the divergence from the prior and the loss of Bayes by Backprop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .batch_norm_like import averages_rows
from .bayes import DTYPES, BayesLinear, check_whole, require_bayes_layers
from .calls import streams_of
from .chain import Run, is_chain, run_chain
from .forward import Forward
from .inputs import Inputs, as_rows_of, check_one_input, device_of, num_rows
from .interrupts import leaving_nothing_behind
from .model_cache import cache_of, empty_cache
from .ops import new_seed
from .ops.checks import (
    acc_dtype,
    check_callable,
    check_integer,
    check_number,
    check_one_of,
    check_positive_value,
    check_shape,
    check_tensor,
    refuse,
)
from .ops.kl import gaussian_kl_sum, total
from .ops.modes import is_eager
from .ops.philox import new_key
from .pages import keep_freed_pages
from .passes import current_pass
from .prediction import check_likelihood, check_logits
from .restore import unmoved_by_errors
from .samplers import Draw, WeightSampler, check_key
from .state import is_training, modules_of
from .together import run_together
from .wrappers import waits_for_others

SCHEMES = ("uniform", "geometric")
REDUCTIONS = ("mean", "sum")


def kl_weight(i: int, num_batches: int, scheme: str = "uniform") -> float:
    """The share of the divergence that batch i of an epoch carries; the shares sum to 1.

        uniform: 1 / M,   geometric: 2^-(i+1) / (1 - 2^-M)

    The second is Blundell's 2^(M-i) / (2^M - 1) with i counted from 1: the prior counts most at
    first, the data later. Written so, it is finite for every M.

    Args:
        i: number of the batch, from 0, below `num_batches`.
        num_batches: M; at least 1.
        scheme: "uniform" or "geometric".

    Returns:
        The weight, in [0, 1]; a geometric one is exactly 0 from i = 1074 on,
        where 2^-(i+1) underflows.

    Raises:
        ValueError: i outside [0, M), M below 1, or an unknown scheme.
        TypeError: i or M is no integer.

    Source: Blundell et al., Weight Uncertainty in Neural Networks (2015), section 3.4.
    """
    num_batches = check_integer("kl_weight", "num_batches", num_batches, 1)
    i = check_integer("kl_weight", "i", i, -math.inf)
    if not 0 <= i < num_batches:
        refuse("kl_weight", "i", f"lie in [0, {num_batches})", i)
    check_one_of("kl_weight", "scheme", scheme, SCHEMES)
    if scheme == "uniform":
        return 1 / num_batches
    return math.ldexp(1.0, -(i + 1)) / (1 - math.ldexp(1.0, -num_batches))


def kl_divergence(model: nn.Module, num_samples: int = 1, seed: int | None = None) -> Tensor:
    """Divergence of the weights' posterior from their prior: the sum over all weights, in nats.

    Closed for a `GaussianPrior`, which draws nothing. For a `ScaleMixturePrior` a Monte Carlo mean;
    inside `replicas` over the very weights of its forwards (the estimator "local" draws none there,
    and has some of its own here). Weights that are pruned count nothing.

    Args:
        model: holds `BayesLinear` layers.
        num_samples: T of the Monte Carlo mean; inside `replicas` its T.
        seed: key of the noise; None draws it from torch's generator; inside `replicas` its key.

    Returns:
        () in nats, differentiable.

    Raises:
        ValueError, TypeError: no Bayesian layer, or an argument out of range.
    """
    op = "kl_divergence"
    layers = require_bayes_layers(op, model)
    num_samples = check_integer(op, "num_samples", num_samples, 1)
    check_key(op, seed)
    active = current_pass()
    while active is not None and not all(id(m) in active.names for m in layers.values()):
        active = active.outer
    if active is not None:
        streams = {n: active.streams[active.names[id(m)]] for n, m in layers.items()}
        return _divergence(layers, active.draw, streams)[0]
    device = next(iter(layers.values())).weight_mu.device
    if all(layer.has_closed_divergence for layer in layers.values()):
        seed = 0  # needs no noise
    with unmoved_by_errors():
        draw = Draw(num_samples, new_seed(seed, 0, device), None, {})
        return _divergence(layers, draw, streams_of(layers))[0]


def _divergence(
    layers: dict[str, BayesLinear], draw: Draw, streams: dict[str, int], runs: Iterable[Run] = ()
) -> tuple[Tensor, Tensor]:
    """The sum over the layers; and the same for a loss, by the nodes of the layers' runs.

    The first has nodes of its own: nll and divergence can be differentiated one after the other.
    """
    terms, closed = [], []
    in_runs = {id(layer) for run in runs for layer in run.layers}
    others = {name: layer for name, layer in layers.items() if id(layer) not in in_runs}
    check_whole("kl_divergence", others)
    for name, layer in others.items():
        _check_dtype(name, layer)
        if layer.has_closed_divergence:
            closed += layer.gaussian_divergence()
        else:
            terms.append(layer.kl_divergence(draw.seed, streams[name], draw.num_samples))
    if closed:
        terms.append(gaussian_kl_sum(closed))
    if not runs:
        kl = total(terms)
        return kl, kl
    together = total([run.divergence for run in runs])
    # Of the layers: parameters that pruning masks would be masked by nodes that the runs share.
    gaussians = [g for run in runs for layer in run.layers for g in layer.gaussian_divergence()]
    alone = gaussian_kl_sum(gaussians, together.detach())
    return total([*terms, alone]), total([*terms, together])


def _check_dtype(name: str, layer: BayesLinear) -> None:
    mu, rho = layer.weight_mu.dtype, layer.weight_rho.dtype
    if mu not in DTYPES or rho != mu:
        requirement = "have its weights in one dtype, float32 or float64"
        refuse("kl_divergence", f"layer {name!r}", requirement, f"{mu} and {rho}", TypeError)


class Elbo(NamedTuple):
    """The terms of `elbo_loss`, in nats, each () and differentiable.

    Attributes:
        loss: nll + batch_weight * kl; with reduction "mean" divided by the rows.
        nll: -log p of the rows, added up or their mean, and the mean over the samples.
        kl: the whole divergence.
    """

    loss: Tensor
    nll: Tensor
    kl: Tensor


@leaving_nothing_behind
def elbo_loss(
    model: nn.Module,
    x: Inputs,
    y: Tensor,
    *,
    num_samples: int = 1,
    likelihood: str = "categorical",
    batch_weight: float | Tensor | None = None,
    dataset_size: int | None = None,
    noise_std: float | Tensor = 1.0,
    reduction: str = "mean",
    seed: int | None = None,
    output_fn: Callable[[Any], Tensor] | None = None,
) -> Elbo:
    """The negative evidence lower bound of a batch, over T samples of the weights.

        sum: nll = -mean over t of sum over rows of log p(y | x, w_t),
            loss = nll + batch_weight * kl
        mean: nll and loss divided by the number of rows; kl is the whole divergence either way

    The samples go through the model together where that gives the same as one after another: at
    once in a plain `nn.Sequential` of layers that treat rows one by one; in any other model, from
    three samples on, after trials of it, which cost some 40 forwards when its modules, hooks, flags
    or shapes are new, and one sample's forward after a step of an optimiser. They go one after
    another where rows are coupled, where the model changes itself in train() (batch norm), draws
    other random numbers than dropout's, has backward hooks of modules, computes with a tensor that
    it has left in a hook or a global, or waits for other processes (DistributedDataParallel, FSDP).
    In the two ways dropout draws different masks; `torch.use_deterministic_algorithms` keeps the
    way from depending on the steps before. A trial runs forward hooks, and does not see all that
    rare values alone set off (README, "One batch or a loop"), nor a flag outside of the model that
    changes later: there the mean of T calls with one sample is right.

    Backward draws the same weights again, and so does what it computes again
    (`torch.utils.checkpoint`; with use_reentrant=True from the output, or from tensors that the
    modules keep as attributes, in lists, tuples and dicts too). A compiled function breaks its
    graph here, which fullgraph=True does not allow; the layers themselves compile whole.

    Args:
        model: holds `BayesLinear` layers; in train() or eval() as you set it.
        x: a tensor, a tuple of arguments or a dict of keyword arguments.
        y: (N, *) integer labels for "categorical", with logits (N, K, *), K at least 2; -100 for
            what adds nothing to nll; of the outputs' shape for "gaussian", (N,) for (N, 1) too.
        num_samples: T; at least 1.
        likelihood: "categorical", or "gaussian" with means as outputs.
        batch_weight: of the divergence, see `kl_weight`; a number or a tensor of one element, not
            negative; by default rows of y / `dataset_size`.
        dataset_size: rows of the training data; not looked at where `batch_weight` is given.
        noise_std: standard deviation of gaussian noise; positive. Not used for "categorical".
            A tensor of one element is trained along.
        reduction: "mean" or "sum" over the rows.
        seed: key of the weights' noise; None draws it from torch's generator.
        output_fn: takes the tensor out of the model's output where that is none.

    Returns:
        Elbo(loss, nll, kl), in nats.

    Raises:
        ValueError, TypeError: no Bayesian layer, or none that the forward calls, neither
            batch_weight nor dataset_size, or an argument out of range. What shows with the outputs
            only (labels beyond the classes, another shape of y) is refused after a forward, which
            in train() has moved the running statistics of batch norm.

    Source: Blundell et al., Weight Uncertainty in Neural Networks (2015), equations 2 and 8.
    """
    op = "elbo_loss"
    layers = require_bayes_layers(op, model)
    check_one_input(op, x)
    num_rows(op, x)
    num_samples = check_integer(op, "num_samples", num_samples, 1)
    _check_loss(likelihood, noise_std, reduction)
    _check_targets(y, likelihood)
    # Not of x, whose first dimension may be that of a sequence, or of a mask.
    rows = y.shape[0] if y.dim() else 1
    weight = _batch_weight(rows, batch_weight, dataset_size)
    check_key(op, seed)
    check_callable(op, "output_fn", output_fn)
    modules = modules_of(model)
    device = device_of(modules)
    if device != y.device and not any(
        p.device == y.device for m in modules for p in m.parameters(False)
    ):
        refuse(op, "y", f"be on {device}", y.device)
    if device.type == "cpu":
        keep_freed_pages()
    with unmoved_by_errors():
        # Not read back: a step on a GPU waits for nothing, and goes into a CUDA graph.
        key = new_key(device) if seed is None else seed
        sampler = WeightSampler(device)
        draw, runs = sampler.draw(key, 0, num_samples), []
        if output_fn is None and is_eager() and is_chain(modules, x) and x.shape[0]:
            outputs, runs = run_chain(op, modules, x, draw)
        else:
            cache = cache_of(model, modules) if num_samples > 1 else empty_cache()
            forward = Forward(model, layers, sampler, key, output_fn, cache, op)
            outputs = _outputs(forward, modules, x, draw)
        scale = max(rows, 1) if reduction == "mean" else 1
        nll = _nll(outputs, num_samples, y, likelihood, noise_std) / (num_samples * scale)
        kl, in_loss = _divergence(layers, draw, streams_of(layers), runs)
        return Elbo(_weighted_sum(nll, in_loss, weight, scale), nll, kl)


def _outputs(forward: Forward, modules: list[nn.Module], x, draw: Draw) -> Tensor:
    """(T*N, ...), of all samples at once where that is the same."""
    if draw.num_samples == 1:
        return _alone(forward, x, draw)
    output = _together(forward, modules, x, draw)
    if output is not None:
        return output
    outputs = [_alone(forward, x, forward.draw(t, 1)) for t in range(draw.num_samples)]
    return torch.stack(outputs).flatten(0, 1)


def _alone(forward: Forward, x, draw: Draw) -> Tensor:
    """The outputs (N, ...) of one sample."""
    output, _ = forward.run(x, draw)
    if output.dim() == 0:
        refuse(forward.op, "the output", "have rows (N, ...)", [])
    return output


def _together(forward: Forward, modules: list[nn.Module], x, draw: Draw) -> Tensor | None:
    """The outputs (T*N, ...) of samples that go through the model together;
    None for one after another."""
    coupled = any(is_training(module) and averages_rows(module) for module in modules)
    if coupled or num_rows(forward.op, x) == 0:
        return None
    # Of two, the sample that is run alone would cost what going together saves. And processes that
    # wait for each other must make the same forwards,
    # which a proof by each one's own rows would not.
    if draw.num_samples == 2 or waits_for_others(modules) or not is_eager():
        return None
    return run_together(forward, modules, x, draw)


def _nll(outputs: Tensor, num_samples: int, y: Tensor, likelihood: str, noise_std) -> Tensor:
    """-log p(y), summed over the rows and the T samples of outputs (T*N, ...)."""
    outputs = outputs.to(acc_dtype(outputs.dtype))  # a sum over rows soon is infinite in float16
    rows = outputs.shape[0] // num_samples
    if likelihood == "categorical":
        return _categorical_nll(outputs, num_samples, rows, y)
    return _gaussian_nll(outputs.unflatten(0, (num_samples, rows)), y, noise_std)


def _categorical_nll(logits: Tensor, num_samples: int, rows: int, y: Tensor) -> Tensor:
    check_logits("elbo_loss", (rows, *logits.shape[1:]))
    check_shape("elbo_loss", "y", y, (rows, *logits.shape[2:]))
    labels = y.long()
    if num_samples > 1:
        labels = labels.expand(num_samples, *y.shape).flatten(0, 1)
    try:
        return functional.cross_entropy(logits, labels, reduction="sum")
    except IndexError:
        got = f"{labels.min()} to {labels.max()}"
        refuse("elbo_loss", "y", f"hold labels in [0, {logits.shape[1]})", got)


def _gaussian_nll(means: Tensor, y: Tensor, noise_std: float | Tensor) -> Tensor:
    """Of means (T, N, ...)."""
    y = as_rows_of(y, means.shape[1:])
    check_shape("elbo_loss", "y", y, means.shape[1:])
    dtype = torch.promote_types(means.dtype, y.dtype)
    if isinstance(noise_std, Tensor):
        dtype = torch.promote_types(dtype, noise_std.dtype)
        std = noise_std.to(dtype).reshape(())
        log_std = std.log()
    else:
        std, log_std = float(noise_std), math.log(noise_std)
    means, y = means.to(dtype), y.to(dtype)
    squared = functional.mse_loss(means, y.expand_as(means), reduction="sum")
    # Of `Normal.log_prob` in a third of its nodes, which take longer than a small layer.
    return squared / (2 * std * std) + means.numel() * (log_std + 0.5 * math.log(2 * math.pi))


def _weighted_sum(nll: Tensor, kl: Tensor, weight: float | Tensor, scale: int) -> Tensor:
    """nll + weight / scale * kl, in one step where it can be."""
    if isinstance(weight, Tensor):
        return nll + weight.to(torch.promote_types(weight.dtype, kl.dtype)) / scale * kl
    return torch.add(nll, kl, alpha=float(weight) / scale)


def _batch_weight(
    rows: int, batch_weight: float | Tensor | None, dataset_size: int | None
) -> float | Tensor:
    if batch_weight is not None:
        _check_factor("batch_weight", batch_weight)
        if _is_known(batch_weight) and not 0 <= batch_weight < math.inf:
            refuse("elbo_loss", "batch_weight", "be finite and not negative", batch_weight)
        return batch_weight.reshape(()) if isinstance(batch_weight, Tensor) else batch_weight
    if dataset_size is None:
        refuse("elbo_loss", "batch_weight", "be given, or dataset_size", None)
    if check_integer("elbo_loss", "dataset_size", dataset_size, 1) < rows:
        refuse("elbo_loss", "dataset_size", f"be at least the batch's {rows} rows", dataset_size)
    return rows / dataset_size


def _check_loss(likelihood: str, noise_std, reduction: str) -> None:
    check_likelihood("elbo_loss", likelihood, None)
    check_one_of("elbo_loss", "reduction", reduction, REDUCTIONS)
    _check_factor("noise_std", noise_std)
    if _is_known(noise_std):
        check_positive_value("elbo_loss", "noise_std", noise_std)


def _is_known(factor) -> bool:
    """A tensor is not looked at on a GPU, where a step waits for nothing,
    nor where it is traced."""
    return not isinstance(factor, Tensor) or (factor.device.type == "cpu" and is_eager())


def _check_factor(name: str, value) -> None:
    """A number, or a tensor of one element, through which a gradient may flow."""
    if isinstance(value, Tensor) and value.numel() == 1:
        if value.is_complex() or value.dtype == torch.bool:
            refuse("elbo_loss", name, "be real", value.dtype, TypeError)
    elif isinstance(value, Tensor):
        refuse("elbo_loss", name, "be a number or a tensor with one", value, TypeError)
    else:
        check_number("elbo_loss", name, value)


def _check_targets(y, likelihood: str) -> None:
    check_tensor("elbo_loss", "y", y)
    categorical = likelihood == "categorical"
    if y.is_complex() or (y.is_floating_point() if categorical else y.dtype == torch.bool):
        requirement = "hold integer labels" if categorical else "be real"
        refuse("elbo_loss", "y", requirement, y.dtype, TypeError)
