"""Small numbers that stay, and sums that do not round away,
in the gradients of batch norm on the CPU."""

import pytest
import torch

from bnuq_ext import ops


@pytest.fixture
def flushed():
    """Subnormal float32 numbers count as 0, as users set it for speed;
    those of float16 are none."""
    if not torch.set_flush_denormal(True):
        pytest.skip("the processor does not flush")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("shape", [(64, 5), (8, 5, 9)], ids=["rows", "planes"])
def test_small_gradients_in_float16_are_not_flushed(flushed, shape, shared):
    x = torch.randn(shape).half().requires_grad_()
    weight = torch.ones(5, requires_grad=True)
    bias = torch.zeros(5, requires_grad=True)
    statistics = torch.zeros(1, 5), torch.ones(1, 5)
    options = dict(weight=weight, bias=bias, shared=shared, num_samples=1)
    y = ops.batch_norm_bank(x, *statistics, ops.new_seed(0), **options)
    grad = torch.full(shape, 3e-5).half()
    y.backward(grad)
    torch.testing.assert_close(x.grad, grad, rtol=2e-3, atol=0)
    torch.testing.assert_close(
        bias.grad, torch.full((5,), grad[0].flatten()[0].item() * x.numel() / 5)
    )
    assert weight.grad.abs().min() > 0


def test_every_half_is_read_as_it_is(flushed):
    """By way of the gradient of a shared x, which adds up single numbers; NaN to NaN."""
    halves = torch.arange(-(2**15), 2**15).short().view(torch.half)[:, None]
    x = torch.zeros_like(halves).requires_grad_()
    statistics = torch.zeros(1, 1), torch.ones(1, 1)
    y = ops.batch_norm_bank(x, *statistics, ops.new_seed(0), num_samples=1, shared=True, eps=0.0)
    y.backward(halves)
    torch.testing.assert_close(x.grad, halves, rtol=0, atol=0, equal_nan=True)


def test_sums_over_large_planes_round_as_those_over_rows():
    """2^20 equal gradients: one float32 for all would be off by 1e-3."""
    x = torch.zeros(1, 1, 1024, 1024)
    weight, bias = torch.ones(1), torch.zeros(1, requires_grad=True)
    statistics = torch.zeros(1, 1), torch.ones(1, 1)
    options = dict(weight=weight, bias=bias, num_samples=1)
    y = ops.batch_norm_bank(x, *statistics, ops.new_seed(0), **options)
    y.backward(torch.full_like(x, 0.1))
    expected = torch.tensor(0.1).double().item() * 2**20
    assert abs(bias.grad.item() / expected - 1) < 1e-5
