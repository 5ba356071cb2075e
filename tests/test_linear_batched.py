"""bayes_linear by batched products, on the CPU: what CUDA does with float64."""

import pytest
import torch

from bnuq_ext import ops, reference
from bnuq_ext.ops import linear_batched, linear_cuda
from bnuq_ext.ops.linear_parts import Noise, spread

STREAM = 2**31 + 4  # needs its 32 bits


@pytest.mark.parametrize("replicas", [1, 2, 100])  # of a chunk
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("N,I,O,T", [(1, 1, 1, 1), (7, 20, 17, 5), (3, 33, 9, 4)])
def test_matches_the_reference(monkeypatch, N, I, O, T, shared, replicas):  # noqa: E741
    monkeypatch.setattr(linear_batched, "CHUNK_BYTES", replicas * O * I * 8)
    generator = torch.Generator().manual_seed(O)
    sizes = [(1 if shared else T, N, I), (O, I), (O, I), (T, O), (T, N, O)]
    xs, mu, rho, bias, grad_y = (torch.randn(s, generator=generator).double() for s in sizes)
    noise = Noise(ops.new_seed(-3, 2**33 + 7), STREAM, T)
    inputs = [v.requires_grad_() for v in (xs, mu, rho)]
    sigma, eps = reference.softplus(rho), ops.philox_normal(noise.seed, STREAM, (T, O, I))
    weight = mu + sigma * eps.double()
    expected = torch.einsum("tni,toi->tno", xs.expand(T, N, I), weight)
    given = (xs.detach(), mu.detach(), sigma.detach())
    torch.testing.assert_close(linear_batched.forward(*given, None, noise), expected.detach())
    y = linear_batched.forward(*given, bias, noise)
    torch.testing.assert_close(y, (expected + bias[:, None]).detach())

    grad_x, grad_mu, grad_sigma = linear_batched.backward(grad_y, *given, noise, True, True)
    wanted = torch.autograd.grad(expected, inputs, grad_y)
    actual = (grad_x, grad_mu, grad_sigma * torch.sigmoid(rho.detach()))
    for a, e in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, e)
    for needed in ((True, False), (False, True)):
        few = linear_batched.backward(grad_y, *given, noise, *needed)
        assert [g is not None for g in few] == [needed[0], needed[1], needed[1]]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_float64_on_cuda_is_the_op(bias, T, shared):
    """What is registered for CUDA, on the CPU."""
    N, I, O = 7, 20, 17  # noqa: E741
    generator = torch.Generator().manual_seed(T)
    sizes = [(N, I) if shared else (T, N, I), (O, I), (O, I), (O,), (O,), (T, N, O)]
    x, mu, rho, *given, grad_y = (torch.randn(s, generator=generator).double() for s in sizes)
    bias_mu, bias_rho = given if bias else (None, None)
    noise = (ops.new_seed(-3, 2**33 + 7), STREAM, T)
    op = torch.ops.bnuq
    expected = op.bayes_linear(x, mu, rho, bias_mu, bias_rho, *noise)
    y = linear_cuda._forward(x, mu, rho, bias_mu, bias_rho, *noise)
    torch.testing.assert_close(y, expected)
    for needs in ((True, True, bias), (True, False, False), (False, True, bias)):
        args = (grad_y, x, mu, rho, bias_rho, *noise, *needs)
        actual, wanted = linear_cuda._backward(*args), op.bayes_linear_backward(*args)
        for a, e in zip(actual, wanted, strict=True):
            torch.testing.assert_close(a, e)


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
