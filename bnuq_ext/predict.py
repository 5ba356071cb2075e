"""`predict`: T replicas of a network with stochastic layers, as one prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .batches import find_loader
from .bayes import bayes_layers
from .chain_folding import ChainFolding, is_stochastic_chain
from .chunks import check_chunk
from .collect import gather
from .forward import Forward
from .inputs import Inputs, device_of, is_one_input, num_rows, split_batch, tensors
from .interrupts import leaving_nothing_behind
from .model_cache import ChainCache, ModelCache, cache_of, chain_cache_of
from .nn import Stochastic, check_model, named_stochastic_layers
from .ops.checks import (
    check_callable,
    check_first_replica,
    check_flags,
    check_has_numbers,
    check_integer,
    check_one_of,
    refuse,
)
from .ops.modes import is_recorded, refuse_functional_derivatives
from .passes import Replicated
from .prediction import Prediction, check_likelihood
from .predictor import STRATEGIES, Predictor, Request
from .proof.folding import Folding
from .query import joining_forward
from .restore import evaluating, unmoved_by_errors
from .samplers import Sampler, check_key, check_sampler, draw_key, make_sampler, snapshots_of
from .state import modules_of
from .untraced import untraced
from .warn import warn
from .wrappers import unwrapped


@untraced
@leaving_nothing_behind
def predict(
    model: nn.Module,
    x: Inputs,
    *,
    likelihood: str,
    num_samples: int = 32,
    sampler: str = "bank",
    seed: int | None = None,
    noise_var: float | Tensor | None = None,
    first_replica: int = 0,
    loader: Iterable[Any] | None = None,
    batch_size: int | None = None,
    query: str = "out",
    strategy: str = "auto",
    chunk: int | str = "auto",
    output_fn: Callable[[Any], Tensor] | None = None,
    keep_samples: bool = False,
    progress: bool = False,
) -> Prediction:
    """The predictive distribution of T replicas of a model,
    each with drawn batch-norm statistics or weights.

    A replica is the model in eval with the statistics of one draw in its stochastic layers, and one
    sample of the weights in its `BayesLinear` layers, the same for all rows. Draws are a function
    of (seed, replica) alone (and of the bank, or of the batches that a loader yields, whose order
    is its own): bit-identical for any chunk and strategy. On another device they are the same: the
    same snapshots, and normals to rounding. Outputs agree to rounding. Memory beyond the result
    does not grow with T beyond that of a chunk (but for a model that goes together only with its
    input T times over: what it makes before its first stochastic layer does); after a prediction on
    a CPU glibc keeps up to 256 MB of what the process frees, unless MALLOC_TRIM_THRESHOLD_ says
    otherwise. Training flags are restored, gradients are off. Other threads may use the model
    meanwhile, but not change it (its weights or hooks): a trial takes what changes for the
    forward's doing, and puts it back.

    Args:
        model: converted by `convert`, with a bank from `collect` or `attach`; or with `BayesLinear`
            layers, which need none; or both.
        x: a tensor, a tuple of arguments or a dict of keyword arguments, on the model's device; or
            a loader, any other iterable of batches: an input, or a tuple (input, targets, ...), or
            a dict with one under "input" or "x" and "target(s)", "y" or "label(s)". Arguments that
            a data set returns in a tuple, beside targets, may have become a list, each with a row
            for each target. A loader's batches are moved to the model's device
            and all get the same draws.
        likelihood: "categorical": outputs are logits (N, K, *), softmax over dim 1; K at least 2.
            "gaussian": outputs (N, ...) are means.
        num_samples: T, at least 1.
        sampler: "bank" (stored snapshots), "joint" (a Gaussian with the bank's covariance over all
            layers), "lognormal", "normal" (independent statistics; these three of two snapshots or
            more), "batch" (fresh batches of `loader`: replica t uses its t-th).
        seed: any integer in [-2^63, 2^63); None draws one from torch's generator.
        noise_var: variance of gaussian observation noise,
            of mean's shape or one that broadcasts to it.
        first_replica: global number of the first replica:
            10 replicas from 10 on are the second half of 20.
        loader: batches for sampler "batch": replica t takes the t-th that it yields. `seed` does
            not choose them: torch's generators, and those that the loader, its samplers and its
            data set have as attributes, are put back, so that with a seed the next call has the
            same batches, unless something draws, or `torch.manual_seed` is called, in between.
        batch_size: M that "joint", "lognormal" and "normal" rescale the bank to; see
            `bnuq_ext.moments.Rescaling`.
        query: whether with sampler "batch" a query's own row counts in the statistics. "out": they
            are the batch's. "in": each query by itself stands before the batch, whose last row
            goes, and the statistics are those of the M rows together, in deeper layers too: exact,
            as in a training step, and slow, since it takes a forward of M rows for each query and
            replica. The model's input is one tensor then. Keeps all T batches in memory.
        strategy: "loop" runs one replica after another, which defines the answer; "folded" runs
            many as one batch or refuses; "auto" folds where the model has proved to give the loop's
            answer (on a CPU, where a proof takes seconds, it loops for about as long before it),
            and where it is a plain `nn.Sequential` of layers that treat rows one by one, with
            no output_fn; in torch.export and torch.jit.trace it is the loop.
        chunk: replicas at a time, or "auto": as many as keep the largest activation within 16 MB on
            a CPU, or 2 GB or a sixteenth of the free memory on a GPU, at least one.
        output_fn: takes the tensor out of the model's output where that is none; in a trial it is
            given outputs of made-up rows.
        keep_samples: keep the raw outputs of all replicas.
        progress: show a bar over replicas on stderr; where that is no terminal, a line a minute.

    Returns:
        a Prediction: mean and variance over the replicas, for "categorical" the entropies too.

    Raises:
        ValueError, TypeError: an argument is refused; no bank; no stochastic layer called, or
            layers more or less often than in `collect`; a model that does not fold, with "folded".
        torch.OutOfMemoryError: not even one replica fits.
        NotImplementedError: inside torch.func.grad or the like, or of an input with a tangent.
    """
    model, modules = take_model("predict", model)
    check_likelihood("predict", likelihood, noise_var)
    num_samples = check_integer("predict", "num_samples", num_samples, 1)
    first_replica = check_first_replica("predict", first_replica, num_samples)
    batch_size = check_sampler("predict", sampler, batch_size)
    _check_options(sampler, seed, loader, strategy, output_fn)
    check_chunk("predict", chunk)
    check_flags("predict", keep_samples=keep_samples, progress=progress)
    _check_query(query, sampler, strategy)
    device = device_of(modules)
    check_x("predict", x, device)

    if is_recorded():
        if strategy == "folded":
            refuse("predict", "strategy", 'be "auto" or "loop" in an export or a trace', strategy)
        strategy = "loop"
    if query == "in":
        strategy = "loop"
    request = Request(first_replica, num_samples, strategy, chunk, keep_samples, progress)
    together = not request.is_loop() and sampler != "batch" and output_fn is None
    with unmoved_by_errors():
        if query == "in":
            replicas = first_replica, num_samples
            forward = joining_forward(model, modules, loader, *replicas, seed, output_fn)
        elif sampler == "batch":
            count = first_replica + num_samples
            forward = _forward_by_loader(model, modules, loader, count, seed, output_fn)
        else:
            options = sampler, batch_size, seed, output_fn
            chain = together and is_stochastic_chain(modules, x)
            forward = forward_by_bank("predict", model, modules, *options, chain)
        batches = together and not is_one_input(x)
        with torch.set_grad_enabled(False), evaluating(modules):
            chains = batches and _is_called_once(forward.layers, modules, forward.cache)
            fold = partial(_fold, chains=chains)
            predictor = Predictor(forward, modules, request, likelihood, device, fold)
            pred = predictor.predict(x, noise_var)
        pred.snapshots = snapshots_of(forward.sampler, forward.key, first_replica, num_samples)
        return pred


def take_model(op: str, model) -> tuple[nn.Module, list[nn.Module]]:
    """The model, `unwrapped`, and all its modules, some of them stochastic."""
    refuse_functional_derivatives(op)  # here: with gradients off, as inside `predict`, no op does
    check_model(op, model)
    model = unwrapped(model)
    modules = modules_of(model)
    require_replicated(op, modules, "model")
    return model, modules


def require_replicated(op: str, modules: list[nn.Module], name: str) -> None:
    """Checks that some of a model's modules are stochastic; `name` of the argument."""
    if not any([isinstance(module, Replicated) for module in modules]):
        got = "none; run bnuq_ext.convert first, or bnuq_ext.to_bayesian for linear layers"
        refuse(op, name, "contain stochastic batch-norm layers", got)


@untraced
def forward_by_bank(
    op: str,
    model: nn.Module,
    modules: list[nn.Module],
    sampler: str,
    batch_size,
    seed,
    output_fn,
    chain: bool = False,
) -> Forward:
    """How to run a model with replicas from its bank; a `chain` as any model where its layers do not
    have a name and a call each in the bank."""
    cache = chain_cache_of(model, modules) if chain else cache_of(model, modules)
    device = device_of(modules)
    drawn = cache.samplers.get(op, model, sampler, batch_size, device)
    layers = _layers_by_name(model, modules)
    if chain and not _is_called_once(layers, modules, cache):
        return forward_by_bank(op, model, modules, sampler, batch_size, seed, output_fn)
    return Forward(model, layers, drawn, draw_key(seed, device), output_fn, cache, op)


def _fold(
    forward: Forward, modules: list[nn.Module], first_replica: int, inputs, *, chains: bool
) -> Folding:
    """The folding of an input; with `chains` the model may be a chain for some."""
    if chains and is_stochastic_chain(modules, inputs):
        forward = forward._replace(cache=chain_cache_of(forward.model, modules))
    kind = ChainFolding if isinstance(forward.cache, ChainCache) else Folding
    return kind(forward, modules, first_replica, inputs)


def _is_called_once(
    layers: dict[str, nn.Module], modules: list[nn.Module], cache: ModelCache | ChainCache
) -> bool:
    """Whether the layers have a name and, when the bank was collected, a call each."""
    names = [name for name, layer in layers.items() if layer.needs_bank]
    unique = len(layers) == sum([isinstance(module, Replicated) for module in modules])
    return unique and cache.samplers.calls_once(names)


def _layers_by_name(model: nn.Module, modules: list[nn.Module]) -> dict[str, nn.Module]:
    """The layers that a pass draws for; of a part of a model, whose batch norm has the names of the
    whole, a Bayesian layer may have the name of another."""
    by_bank = {m.bank_name: m for m in modules if isinstance(m, Stochastic)}
    bayesian = bayes_layers(model, modules).items()
    return {f"{n} (weights)" if n in by_bank else n: m for n, m in bayesian} | by_bank


def check_bank_sampler(op: str, sampler: str, batch_size) -> int | None:
    """`check_sampler` where no loader is at hand."""
    batch_size = check_sampler(op, sampler, batch_size)
    if sampler == "batch":
        refuse(op, "sampler", "draw from the bank", '"batch"; predict takes a loader')
    return batch_size


def _forward_by_loader(
    model: nn.Module, modules: list[nn.Module], loader, count: int, seed, output_fn
) -> Forward:
    """How to run a model with the statistics of a loader's batches."""
    cache, device = cache_of(model, modules), device_of(modules)
    drawn = _batch_sampler(model, loader, count, device)
    layers = bayes_layers(model, modules) | named_stochastic_layers(model)
    return Forward(model, layers, drawn, draw_key(seed, device), output_fn, cache)


def _check_options(sampler, seed, loader, strategy, output_fn) -> None:
    op = "predict"
    check_one_of(op, "strategy", strategy, STRATEGIES)
    if (sampler == "batch") != (loader is not None):
        got = "none" if loader is None else f'one with sampler "{sampler}"'
        refuse(op, "loader", 'be given with sampler "batch" and no other', got)
    check_callable(op, "output_fn", output_fn)
    check_key(op, seed)


def _check_query(query, sampler: str, strategy: str) -> None:
    check_one_of("predict", "query", query, ("out", "in"))
    if query == "in" and sampler != "batch":
        refuse("predict", "query", f'be "out" with sampler "{sampler}"', '"in"')
    if query == "in" and strategy == "folded":
        refuse("predict", "strategy", 'be "auto" or "loop" with query "in"', '"folded"')


def check_x(op: str, x, device: torch.device) -> None:
    """Checks an input, or else that it is an iterable of batches."""
    check_has_numbers(op, "model", device)
    single = is_one_input(x)
    if isinstance(x, np.ndarray) or not (single or isinstance(x, Iterable)):
        requirement = "be a tensor, a tuple, a dict or an iterable of batches"
        refuse(op, "x", requirement, type(x).__name__, TypeError)
    if single:
        num_rows(op, x)
        for tensor in tensors(x):
            if tensor.device != device:
                refuse(op, "x", f"be on the model's device {device}", tensor.device)


def _batch_sampler(model: nn.Module, loader, num_batches: int, device: torch.device) -> Sampler:
    source = find_loader("predict", loader)
    options = {
        "device": device,
        # A loader's last batch may be too small to be used, once a pass.
        "max_batches": 2 * num_batches + 1,
        "input_fn": lambda batch: split_batch("predict", batch)[0],
    }
    bank, remarks = gather("predict", model, source, num_batches, **options)
    if len(bank) < num_batches:
        refuse("predict", "loader", f"have {num_batches} batches of use", len(bank))
    for remark in remarks:
        warn(remark)
    return make_sampler("predict", "batch", bank, None, device)
