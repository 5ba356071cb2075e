"""How many multiply-accumulates (MACs) an operation takes, by the sizes of what it is given."""

from __future__ import annotations

from contextlib import suppress

import torch

from . import ops  # noqa: F401 - it brings bayes_linear

_aten = torch.ops.aten


def _matrices(args: tuple, result) -> int:
    return result.numel() * args[-2].shape[-1]


def _convolution(args: tuple, result) -> int:
    transposed = args[6]
    return (args[0] if transposed else result).numel() * args[1][0].numel()


def _attention(args: tuple, result) -> int:
    queries, keys = args[:2]
    return 2 * queries.numel() * keys.shape[-2]


def _recurrent_layer(args: tuple, result) -> int:
    x, of_inputs, of_states = args[:3]
    return x.shape[0] * x.shape[1] * (of_inputs.numel() + of_states.numel())


def _sampled_matrices(args: tuple, result) -> int:
    return result.numel() * args[0].shape[-1]


# torch's own table of them, of FlopCounterMode, imports Triton and knows no attention of the CPU.
_TAKEN = {
    **dict.fromkeys((_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm), _matrices),
    _aten.convolution: _convolution,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten.mkldnn_rnn_layer: _recurrent_layer,
    torch.ops.bnuq.bayes_linear: _sampled_matrices,
}


def macs_of(func, args: tuple, result) -> int:
    """Those of a matrix product, a convolution, attention or an LSTM; 0 for other operations, and
    where tensors do not tell their sizes."""
    taken = _TAKEN.get(func.overloadpacket)
    if taken is None:
        return 0
    with suppress(Exception):
        return taken(args, result)
    return 0
