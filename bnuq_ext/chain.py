"""Chains of layers that treat rows one by one: their replicas go together without a trial."""

from __future__ import annotations

from itertools import takewhile

from torch import Tensor, nn

from .bayes import BayesLinear
from .fingerprint import has_hooks

# Layers that treat every row of an input with two dimensions or more by itself,
# by their definition.
_BY_ROW = {BayesLinear, nn.Linear, nn.Dropout, nn.Identity, nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.GELU,
           nn.SiLU, nn.ELU, nn.Softplus}  # fmt: skip


def is_plain(modules: list[nn.Module]) -> bool:
    """Whether these layers treat rows one by one, and do nothing else than torch's."""
    if not all([type(m) in _BY_ROW or _is_by_row(m) for m in modules]):
        return False
    return not has_hooks(modules) and not any(["forward" in vars(m) for m in modules])


def _is_by_row(module: nn.Module) -> bool:
    """Of layers that treat rows one by one for some of their arguments."""
    kind = type(module)
    if kind is nn.Flatten:
        return module.start_dim == 1
    if kind is nn.LayerNorm:
        return len(module.normalized_shape) == 1
    return kind is nn.Sequential


def is_chain(model: nn.Module, modules: list[nn.Module], x) -> bool:
    """Whether plain layers are called one after another, each once: no trial is needed."""
    once = len(modules) == sum(1 for _ in model.named_modules(remove_duplicate=False))
    return once and isinstance(x, Tensor) and x.dim() >= 2


def drops_first(modules: list[nn.Module]) -> bool:
    """Whether dropout comes before the first Bayesian layer of a plain chain:
    each sample has masks of its own."""
    before = takewhile(lambda m: not isinstance(m, BayesLinear), modules)
    return any(isinstance(m, nn.Dropout) and m.training and m.p > 0 for m in before)
