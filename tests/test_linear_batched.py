"""The parts of bayes_linear on CUDA that are plain PyTorch, on the CPU."""

import pytest
import torch

from bnuq_ext import reference
from bnuq_ext.ops import linear_batched
from bnuq_ext.ops.linear_parts import spread


def test_a_chunk_is_all_that_is_held():
    like, sizes = torch.empty(0, dtype=torch.float16), []
    for replicas, room in linear_batched.chunks(100, like, 1 << 20):
        assert room.shape == (replicas.stop - replicas.start, 1 << 20)
        sizes.append(room.untyped_storage().nbytes())
    assert set(sizes) == {linear_batched.CHUNK_BYTES} and len(sizes) == 7


@pytest.mark.parametrize("spread_dtype", [torch.float32, torch.float64])
def test_spread_is_the_softplus(spread_dtype, assert_close):
    rho = torch.linspace(-60, 60, 1201, dtype=spread_dtype, requires_grad=True)
    expected = reference.softplus(rho.detach().double())
    assert_close(spread(rho) / expected, torch.ones_like(expected), dtype=spread_dtype)
    (grad,) = torch.autograd.grad(spread(rho).sum(), rho)
    assert_close(grad, torch.sigmoid(rho.detach().double()), dtype=spread_dtype)
