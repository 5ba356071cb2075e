"""Dropout that drops in eval, by masks of a generator of its own, or that drops nothing,
while a context is open."""

from inspect import signature

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_ALPHA = 1.7580993408473766  # minus SELU's limit towards -infinity

# How many leading dimensions an entry of the mask has: all, or rows and channels.
_LEADING = {
    F.dropout: Tensor.dim,
    F.dropout1d: lambda x: x.dim() - 1,
    F.dropout2d: lambda x: 2,
    F.dropout3d: lambda x: x.dim() - 3,
    F.alpha_dropout: Tensor.dim,
    F.feature_alpha_dropout: lambda x: 2,
}
DROPOUTS = tuple(_LEADING)
_BY_HEADS = signature(F.multi_head_attention_forward)


class Dropping(TorchFunctionMode):
    """Inside, torch.nn.functional's dropout functions drop whatever their `training` says.

    All layers of `torch.nn` with dropout in their name call them; attention and recurrent layers do
    not for the dropout that is part of them. Held by this thread alone, and no generator but the
    given one is drawn from. A mask is `empty_like(x).bernoulli_(1 - p)`, as torch's own on the CPU.

    Args:
        generator: on the device of the activations.

    Attributes:
        calls: how many with p above 0 there were.
    """

    def __init__(self, generator: torch.Generator):
        super().__init__()
        self.generator, self.calls = generator, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        return self._drop(func, *args, **kwargs) if func in _LEADING else func(*args, **kwargs)

    def _drop(
        self, func, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
    ) -> Tensor:
        if p == 0:
            return input
        self.calls += 1
        leading = input.shape[: _LEADING[func](input)]
        mask = torch.empty_like(input) if len(leading) == input.dim() else input.new_empty(leading)
        mask = mask.bernoulli_(1 - p, generator=self.generator)
        mask = mask.view(*leading, *[1] * (input.dim() - len(leading)))
        alpha = func in (F.alpha_dropout, F.feature_alpha_dropout)
        output = _alpha_dropped(input, mask, p) if alpha else _dropped(input, mask, p)
        return input.copy_(output) if inplace else output


class Undropped(TorchFunctionMode):
    """Inside, torch.nn.functional's dropout functions and the dropout
    of its attention drop nothing.

    Recurrent layers and TorchScript still do. Held by this thread alone.

    Attributes:
        sizes: how many values each call would have been about.
    """

    def __init__(self):
        super().__init__()
        self.sizes: list[int] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _LEADING:
            return self._keep_all(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:  # as a whole: inside, no mode is active
            return self._attend_by_heads(*args, **kwargs)
        return func(*args, **kwargs)

    def _keep_all(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0:
            return input
        self.sizes.append(input.numel())
        return input if inplace else input.clone()  # which a forward may write into

    def _attend(self, query, key, value, attn_mask=None, dropout_p=0.0, *args, **kwargs) -> Tensor:
        if dropout_p > 0:
            self.sizes.append(query.numel())
        return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, *args, **kwargs)

    def _attend_by_heads(self, *args, **kwargs) -> tuple[Tensor, Tensor | None]:
        given = _BY_HEADS.bind(*args, **kwargs)
        given.apply_defaults()
        if given.arguments["training"] and given.arguments["dropout_p"] > 0:
            self.sizes.append(given.arguments["query"].numel())
        given.arguments["dropout_p"] = 0.0
        return F.multi_head_attention_forward(*given.args, **given.kwargs)


def _dropped(x: Tensor, mask: Tensor, p: float) -> Tensor:
    return x * (mask.div_(1 - p) if p < 1 else mask)


def _alpha_dropped(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """a (x mask - alpha (1 - mask)) + a alpha p with the a that keeps mean 0 and variance 1;
    0 for p = 1."""
    if p == 1:
        return x * mask
    a = ((_ALPHA**2 * p + 1) * (1 - p)) ** -0.5
    return x * (a * mask) + a * _ALPHA * (mask - 1 + p)
