"""The CUDA source of bayes_linear's direct way, run on the CPU."""

import pytest
import torch
from hostrun import build
from hostrun.bayes import STREAM, Direct
from test_hostrun_linear import make

from bnuq_ext import ops, reference

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"host run: {build.missing()}")

TOLERANCE = {torch.float32: 3e-6, torch.float64: 1e-12}  # of the largest number of a result


@pytest.fixture
def direct():
    return Direct(order=2)


# Each form: one row and more, one replica and more; edges inside and outside of tiles and of groups
# of rows and replicas; warps that share a tile, and so many tiles that none does; nothing to sum.
CASES = [
    (1, 1, 1, 1, True), (1, 129, 17, 7, False), (8, 20, 17, 5, False), (2, 784, 17, 1, True),
    (9, 34, 7, 2, True), (32, 65, 33, 4, False), (16, 40, 129, 1, True), (1, 64, 40, 20, True),
    (140, 17, 20, 2, False), (1, 17, 250, 1056, False), (9, 16, 250, 300, True),
    (3, 16, 5, 3, False), (5, 0, 4, 2, True),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("N,I,O,T,shared", CASES)
def test_matches_the_reference(direct, N, I, O, T, shared, dtype):  # noqa: E741
    inputs = [v.to(dtype) for v in make(N, I, O, T, shared, torch.float32)]
    x, mu, rho, bias_mu, bias_rho = inputs
    seed = ops.new_seed(5, 2**33 + 3)
    inputs64 = [v.double().requires_grad_() for v in inputs]
    expected = reference.bayes_linear(*inputs64, *direct.noise64(seed, T, O, I))

    def check(actual, wanted):
        assert actual.dtype == dtype and actual.shape == wanted.shape
        if wanted.numel():
            error = (actual.double() - wanted).abs().max()
            assert error <= TOLERANCE[dtype] * wanted.abs().max()

    check(direct.forward(*inputs, seed, STREAM, T), expected.detach())
    grad_y = torch.randn(T, N, O, generator=torch.Generator().manual_seed(1)).to(dtype)
    given = (grad_y, x, mu, rho, bias_rho, seed, STREAM, T)
    wanted = torch.autograd.grad(expected, inputs64, grad_y.double())
    for actual, expected in zip(direct.backward(*given), wanted, strict=True):
        check(actual, expected)


def test_without_a_bias_and_with_pruned_weights(direct):
    """A spread of -inf is a weight without noise; an output without a bias is the product alone."""
    x, mu, rho, *_ = make(3, 20, 9, 2, True, torch.float32)
    rho[::2] = -torch.inf
    seed = ops.new_seed(1)
    y = direct.forward(x, mu, rho, None, None, seed, STREAM, 2)
    torch.testing.assert_close(y[0, :, ::2], x @ mu[::2].t())
    assert torch.equal(y[0, :, ::2], y[1, :, ::2])
    given = (torch.ones_like(y), x, mu, rho, None, seed, STREAM, 2)
    _, _, grad_rho, *_ = direct.backward(*given)
    assert not grad_rho[::2].any() and grad_rho[1::2].all()
