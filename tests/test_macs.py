"""How many multiply-accumulates an operation takes: as its definition says."""

import pytest
import torch
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext.macs import macs_of
from bnuq_ext.reads import Reads

N = 2
TOKENS, IMAGES = (3, 8), (4, 9, 9)
CASES = {
    "linear": (nn.Linear(8, 5), TOKENS, N * 3 * 8 * 5),
    "linear without bias": (nn.Linear(8, 5, bias=False), TOKENS, N * 3 * 8 * 5),
    "products by batch": (lambda x: x @ x.mT, TOKENS, N * 3 * 8 * 3),
    "products by batch, added": (
        lambda x: torch.baddbmm(torch.ones(N, 3, 3), x, x.mT),
        TOKENS,
        N * 3 * 8 * 3,
    ),
    "convolution": (nn.Conv2d(4, 6, 3, stride=2, groups=2), IMAGES, N * 6 * 4 * 4 * 2 * 9),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, groups=2), IMAGES, N * 4 * 9 * 9 * 3 * 9),
    "attention": (
        nn.MultiheadAttention(8, 2, batch_first=True).eval(),
        TOKENS,
        N * 3 * 8 * 4 * 8 + 2 * N * 3 * 3 * 8,
    ),
    "attention by itself": (
        lambda x: nn.functional.scaled_dot_product_attention(*[x.unsqueeze(1)] * 3),
        TOKENS,
        2 * N * 3 * 3 * 8,
    ),
    "LSTM": (nn.LSTM(8, 5, batch_first=True).eval(), TOKENS, N * 3 * 4 * 5 * (8 + 5)),
    "GRU": (nn.GRU(8, 5, batch_first=True).eval(), TOKENS, N * 3 * 3 * 5 * (8 + 5)),
    "elementwise": (torch.relu, TOKENS, 0),
}


def counted(run, x):
    reads = Reads([], x, N)
    with torch.no_grad(), reads:
        run(*[x] * (3 if isinstance(run, nn.MultiheadAttention) else 1))
    return reads.macs


@pytest.mark.parametrize("case", CASES)
def test_products_of_an_operation(case):
    run, shape, expected = CASES[case]
    assert counted(run, torch.randn(N, *shape)) == expected


def test_products_of_sampled_weights():
    layer = bnuq.BayesLinear(8, 5)
    assert counted(layer, torch.randn(N, 8)) == N * 8 * 5


def test_a_tensor_without_sizes_counts_nothing():
    class Sizeless:
        def numel(self):
            raise RuntimeError("no sizes")

    assert macs_of(torch.ops.aten.mm.default, (Sizeless(), Sizeless()), Sizeless()) == 0
