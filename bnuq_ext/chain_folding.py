"""Predictions of chains: known to fold, run without the machinery of other models, and with each ReLU
behind a batch norm in its kernel."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from .bayes import BayesLinear
from .calls import streams_of
from .chain import is_chain, layers_of, writes_in_place
from .chunks import OTHERS
from .model_cache import ChainCache
from .nn import StochasticBatchNorm1d, StochasticBatchNorm2d, StochasticBatchNorm3d
from .ops.linear import linear
from .ops.modes import is_eager
from .proof.folding import Folding, Plan
from .samplers import Draw

STOCHASTIC = {StochasticBatchNorm1d, StochasticBatchNorm2d, StochasticBatchNorm3d}
_LARGE = 2**18  # numbers: from there on it pays to choose a library, and to write in place
_TENSORS = {Tensor, nn.Parameter}
_PRODUCTS = {BayesLinear, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d}  # in memory of their own


def is_stochastic_chain(modules: list[nn.Module], x) -> bool:
    """Whether a model of these modules treats the rows of x one by one in a pass, by its definition
    and whatever its training flags."""
    return is_eager() and is_chain(modules, x, STOCHASTIC) and x.shape[0] > 0


class ChainFolding(Folding):
    """`Folding` of a chain, of which nothing need be found out but how large its activations are."""

    cache: ChainCache

    def is_planned(self) -> bool:
        return True

    def plan(self, trial_pays=None) -> Plan:
        shape, largest = self.inputs.shape, self.cache.largest
        size = largest.get(shape)
        if size is None:
            sizes: list[int] = []
            _run(self, self.forward.draw(self.first_replica, 1), sizes)
            size = max(sizes)
            self.remember(largest, shape, size)
        return Plan("folded", {}, size, 0, (), {}, set())

    def give_up(self, plan: Plan, reason: Exception) -> Plan:
        raise reason  # the model's own

    def run(self, plan: Plan, first_replica: int, num_samples: int) -> Tensor:
        output = _run(self, self.forward.draw(first_replica, num_samples))
        return output.view(num_samples, self.inputs.shape[0], *output.shape[1:])


def _run(folding: ChainFolding, draw: Draw, sizes: list[int] | None = None) -> Tensor:
    """The outputs (T*N, ...) of a draw's replicas; of one, it notes `sizes` for `Plan.largest`."""
    layers = layers_of(folding.modules)
    x = folding.inputs.clone() if writes_in_place(layers) else folding.inputs
    by_name = folding.forward.layers
    stream = {id(by_name[name]): n for name, n in streams_of(by_name, draw.tables).items()}
    shared, drawn, rectified, own = draw.num_samples > 1, False, False, False
    for layer, following in pairwise([*layers, None]):
        kind = type(layer)
        if rectified:  # by the layer before
            rectified = False
            continue
        stochastic = kind is BayesLinear or kind in STOCHASTIC
        if sizes is not None and (stochastic or drawn):
            sizes.append(x.numel() * x.element_size() // (1 if stochastic else OTHERS))
        if kind is BayesLinear:
            x = layer.replicate(x, draw, "", stream[id(layer)], shared)
        elif stochastic:
            layer.check_input(x)
            rectified = type(following) is nn.ReLU
            options = {"activation": "relu"} if rectified else {}
            if own and not shared and x.numel() >= _LARGE and x.is_contiguous():
                options["out"] = x
            x = layer.normalised(x, draw, layer.bank_name, stream[id(layer)], shared, **options)
        else:
            x = _ordinary(layer, x)
        drawn, shared, own = drawn or stochastic, shared and not stochastic, kind in _PRODUCTS
    return x


def _ordinary(layer: nn.Module, x: Tensor) -> Tensor:
    """What a layer gives that is not stochastic."""
    if type(layer) is nn.Linear and x.numel() >= _LARGE and _is_plain(layer, x):
        return linear(x, layer.weight, layer.bias)
    return layer.forward(x)  # it has no hooks


def _is_plain(layer: nn.Linear, x: Tensor) -> bool:
    """Whether the layer and x are what `ops.linear.linear` takes."""
    tensors = [t for t in (x, layer.weight, layer.bias) if t is not None]
    return (
        all([type(t) in _TENSORS and t.dtype is torch.float32 for t in tensors])
        and all([t.device.type == "cpu" and t.layout is torch.strided for t in tensors])
        and x.dim() == 2
        and layer.weight.shape == (layer.out_features, x.shape[1])
        and (layer.bias is None or layer.bias.shape == (layer.out_features,))
        and not torch._C._is_any_autocast_enabled()
    )
