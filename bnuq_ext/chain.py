"""Chains of layers that treat rows one by one: their replicas go together without a trial."""

from __future__ import annotations

import math
from collections.abc import Collection
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from .bayes import DTYPES, BayesLinear
from .calls import stream_of
from .fingerprint import has_hooks
from .inputs import expand
from .ops.linear_chain import Link, bayes_linear_chain
from .ops.modes import other_modes
from .passes import Replicated
from .samplers import Draw

# Layers that treat every row of an input with two dimensions or more by itself,
# by their definition.
_BY_ROW = {
    *(BayesLinear, nn.Linear, nn.Dropout, nn.Identity),
    *(nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh),
    *(nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.PReLU, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU),
    *(nn.Sigmoid, nn.Softplus, nn.Softshrink, nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Threshold),
}
# Those that do where the input has so many dimensions: with one less it is a single row.
_OF_DIMENSIONS = {
    kind: dim
    for dim, kinds in {
        3: (nn.Conv1d, nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d),
        4: (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d),
        5: (nn.Conv3d, nn.MaxPool3d, nn.AvgPool3d, nn.AdaptiveAvgPool3d),
    }.items()
    for kind in kinds
}
_KINDS = (*_BY_ROW, *_OF_DIMENSIONS, nn.LayerNorm, nn.Flatten, nn.Sequential)
# As torch has them: a library may replace one in its class.
_FORWARDS = {kind: kind.forward for kind in _KINDS}
_CALLS = ("forward", "__iter__", "__call__", "_call_impl", "_wrapped_call_impl")
_SEQUENCE = {name: getattr(nn.Sequential, name) for name in _CALLS}
_TENSORS = {Tensor, nn.Parameter, FakeTensor}  # others may do what they like
_PLAIN = {*_TENSORS, type(None)}


def is_chain(modules: list[nn.Module], x, others: Collection[type] = ()) -> bool:
    """Whether a model of these modules, its own first, calls layers that treat the rows of x one by
    one, one after another, each once, and does nothing else than torch's classes; `others` are more
    classes of such layers."""
    if type(x) not in _TENSORS or x.dim() < 2 or other_modes():
        return False
    links, dim = 1, x.dim()
    for module in modules:
        kind = type(module)
        if kind in _FORWARDS and kind.forward is not _FORWARDS[kind]:
            return False
        if "forward" in module.__dict__ or (module._modules and not _is_sequence(kind)):
            return False
        if module._modules:
            links += len(module._modules)
        elif kind in _BY_ROW or kind in others or kind is nn.Sequential:
            continue
        elif kind is nn.Flatten and module.start_dim == 1:
            dim = 2  # or more: what convolves or pools behind it is tried
        elif not _is_by_row(module, dim):
            return False
    return links == len(modules) and _are_plain(modules) and not has_hooks(modules)


def _are_plain(modules: list[nn.Module]) -> bool:
    """Whether their tensors are torch's own: quantised weights may scale all rows alike."""
    held = [t for m in modules for own in (m._parameters, m._buffers) for t in own.values()]
    return {type(t) for t in held} <= _PLAIN


def _is_sequence(kind: type) -> bool:
    """Whether modules of a class call theirs in turn."""
    return issubclass(kind, nn.Sequential) and all(
        [getattr(kind, name) is own for name, own in _SEQUENCE.items()]
    )


def layers_of(modules: list[nn.Module]) -> list[nn.Module]:
    """The layers of a chain in the order in which they are called."""
    return [module for module in modules if not isinstance(module, nn.Sequential)]


def writes_in_place(layers: list[nn.Module]) -> bool:
    """Whether some may write into the input of a chain."""
    return any([layer.__dict__.get("inplace") for layer in layers])


def _is_by_row(module: nn.Module, dim: int) -> bool:
    """Of layers that treat rows one by one for some of their arguments."""
    if type(module) is nn.LayerNorm:
        return len(module.normalized_shape) == 1
    return _OF_DIMENSIONS.get(type(module)) == dim and not getattr(module, "return_indices", False)


def drops_first(modules: list[nn.Module]) -> bool:
    """Whether dropout comes before the first layer of a chain that differs between replicas:
    each has masks of its own."""
    before = takewhile(lambda m: not isinstance(m, Replicated), modules)
    return any(isinstance(m, nn.Dropout) and m.training and m.p > 0 for m in before)


class Run(NamedTuple):
    """Bayesian layers of a chain that went as one, and their divergence."""

    layers: list[BayesLinear]
    divergence: Tensor


def run_chain(op: str, modules: list[nn.Module], x: Tensor, draw: Draw) -> tuple[Tensor, list[Run]]:
    """The outputs (T*N, ...) of a chain of `is_chain`, for what calling its modules gives in twice
    the time; most of its Bayesian layers go as one."""
    layers = layers_of(modules)
    # Autograd takes no tensors of inference mode.
    if x.is_inference() or writes_in_place(layers):
        x = x.clone()
    shared = draw.num_samples > 1
    if shared and drops_first(layers):
        x, shared = expand(op, x, draw.num_samples), False
    number, runs = 0, []  # of the next Bayesian layer
    while layers:
        links = _links(layers, x, number)
        if links:
            x, divergence = _run_links(links, x, draw, shared)
            taken = len(links) + sum([link.rectified for link in links])
            bayesian = [m for m in layers[:taken] if type(m) is BayesLinear]
            runs.append(Run(bayesian, divergence))
        else:
            layer, taken = layers[0], 1
            bayesian = [layer] if type(layer) is BayesLinear else []
            x = (
                layer.replicate(x, draw, "", stream_of(number), shared)
                if bayesian
                else layer.forward(x)
            )
        layers = layers[taken:]
        number, shared = number + len(bayesian), shared and not bayesian
    return x, runs


def _run_links(links: list[Link], x: Tensor, draw: Draw, shared: bool) -> tuple[Tensor, Tensor]:
    """Their outputs, folded, and their divergence."""
    T, (N, *inner, features) = draw.num_samples, x.shape
    each = N * math.prod(inner) // (1 if shared else T)  # rows of a replica
    rows = x.reshape((each, features) if shared or T == 1 else (T, each, features))
    y, divergence = bayes_linear_chain(rows, links, seed=draw.seed, num_samples=T)
    # A view: what writes into an output that is kept for a backward is found out.
    return y.view(T * N if shared else N, *inner, y.shape[1]), divergence


def _links(layers: list[nn.Module], x: Tensor, number: int) -> list[Link]:
    """The layers from the first on that can go as one; `number` of the first Bayesian one."""
    links: list[Link] = []
    if torch._C._is_any_autocast_enabled():
        return links
    features = x.shape[-1]
    for layer in layers:
        if type(layer) is nn.ReLU and links and not links[-1].rectified:
            links[-1] = links[-1]._replace(rectified=True)
        elif type(layer) is BayesLinear and features == layer.in_features and _joins(layer, x):
            links.append(_link(layer, stream_of(number + len(links))))
            features = layer.out_features
        else:
            break
    return links


def _joins(layer: BayesLinear, x: Tensor) -> bool:
    """Whether it is one of those that go as one; it holds its weights whole then."""
    mu = layer._parameters.get("weight_mu")  # past the look-up of a module's attributes
    if type(mu) is not nn.Parameter or mu.shape != (layer.out_features, layer.in_features):
        return False
    fits = x.dtype is mu.dtype in DTYPES and x.device == mu.device and x.layout is torch.strided
    return fits and layer.estimator == "exact" and layer.has_closed_divergence


def _link(layer: BayesLinear, stream: int) -> Link:
    bias = layer.bias_mu, layer.bias_rho
    posterior = layer.posterior() if bias[0] is None else (*layer.posterior(), *bias)
    return Link(posterior, layer.prior.std, stream)
