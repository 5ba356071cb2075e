"""The factors of the loss: the noise of a gaussian likelihood, and the weight of the divergence."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

import bnuq_ext as bnuq


def network():
    torch.manual_seed(0)
    return nn.Sequential(bnuq.BayesLinear(5, 8), nn.ReLU(), bnuq.BayesLinear(8, 3))


def test_the_noise_can_be_learned():
    """noise_std and batch_weight as tensors: d loss / d noise_std = (rows - sum r^2 / std^2)
    / std per row."""
    model, x, y = network().double(), torch.randn(4, 5).double(), torch.randn(4, 3).double()
    std = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor(0.0, dtype=torch.float64)
    options = dict(likelihood="gaussian", noise_std=std, batch_weight=weight, seed=0)
    bnuq.elbo_loss(model, x, y, reduction="sum", **options).loss.backward()
    with bnuq.replicas(model, 1, seed=0), torch.no_grad():
        residuals = model(x) - y
    expected = 12 / 0.7 - residuals.square().sum() / 0.7**3
    torch.testing.assert_close(std.grad, expected, rtol=1e-6, atol=1e-6)


def test_rows_are_those_of_the_targets():
    """Of inputs whose first dimension is that of a sequence."""

    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = bnuq.BayesLinear(4, 3)

        def forward(self, x):
            return self.layer(x.mean(0))

    x, y = torch.randn(7, 5, 4), torch.arange(5) % 3
    model, options = Steps(), {"dataset_size": 50, "seed": 0}
    found = bnuq.elbo_loss(model, x, y, reduction="sum", **options)
    torch.testing.assert_close(found.loss, found.nll + 5 / 50 * found.kl)
    torch.testing.assert_close(bnuq.elbo_loss(model, x, y, **options).nll, found.nll / 5)


@pytest.mark.parametrize("std", [np.float32(0.5), np.int64(1), Fraction(1, 2)])
def test_the_noise_may_be_any_number(std):
    model, x, y = network(), torch.randn(4, 5), torch.randn(4, 3)
    options = dict(likelihood="gaussian", batch_weight=0.1, seed=0)
    losses = [bnuq.elbo_loss(model, x, y, noise_std=s, **options).loss for s in (std, float(std))]
    assert torch.equal(*losses)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize(
    "std", [0.3, torch.tensor([[0.3]]), torch.tensor(0.3, dtype=torch.float64), torch.tensor(2)]
)
def test_targets_and_noise_of_any_dtype(std, dtype):
    model, x = network(), torch.randn(4, 5)
    y = (3 * torch.randn(4, 3)).to(dtype)
    options = dict(likelihood="gaussian", noise_std=std, batch_weight=0.0, seed=0)
    nll = bnuq.elbo_loss(model, x, y, num_samples=3, reduction="sum", **options).nll
    with bnuq.replicas(model, 3, seed=0):
        noise = torch.distributions.Normal(model(x).double().unflatten(0, (3, 4)), float(std))
    expected = -noise.log_prob(y.double()).sum() / 3
    wide = torch.float64 in (dtype, getattr(std, "dtype", None))
    assert nll.shape == () and nll.dtype == (torch.float64 if wide else torch.float32)
    torch.testing.assert_close(nll.double(), expected, rtol=1e-6, atol=0)
    grads, wanted = (torch.autograd.grad(a, list(model.parameters())) for a in (nll, expected))
    torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [1e-4, 1e-3, 0.3, 300.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_noise_of_16_bits_is_computed_with_in_32(dtype, value):
    """The square of 1e-4 is 0 in float16."""
    model, x, y = network(), torch.randn(64, 5), torch.randn(64, 3)
    std = torch.tensor(value, dtype=dtype, requires_grad=True)
    options = dict(likelihood="gaussian", batch_weight=0.1, seed=0)
    actual = bnuq.elbo_loss(model, x, y, noise_std=std, **options)
    expected = bnuq.elbo_loss(model, x, y, noise_std=std.item(), **options)
    torch.testing.assert_close(actual.nll, expected.nll, rtol=1e-5, atol=0)
    assert actual.loss.dtype == torch.float32
    actual.loss.backward()
    assert std.grad.dtype == dtype and std.grad != 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_weight_has_the_precision_of_the_divergence(dtype):
    """1e-6 over 60 rows is 0 in float16."""
    model, x, y = network().double(), torch.randn(60, 5).double(), torch.randn(60, 3).double()
    for weight in (torch.tensor(1e-6, dtype=dtype), np.float32(1e-6)):
        terms = bnuq.elbo_loss(model, x, y, likelihood="gaussian", batch_weight=weight, seed=0)
        expected = terms.nll + float(weight) / 60 * terms.kl
        torch.testing.assert_close(terms.loss, expected, rtol=1e-14, atol=0)


def test_an_input_without_rows_is_refused_before_the_forward():
    with pytest.raises(ValueError, match="^elbo_loss: an input must hold a tensor with rows"):
        bnuq.elbo_loss(network(), (3,), torch.zeros(1).long(), batch_weight=0.1)
