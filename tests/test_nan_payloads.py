"""NaN whose bits are all set, which is what a GPU makes: arithmetic on them carries."""

import pytest
import torch
from conftest import NANS

from bnuq_ext import ops
from bnuq_ext.ops.kl import gaussian_kl_sum


@pytest.mark.parametrize("others", [-1.0, 1.0])
def test_nan_stays_in_the_divergence(others, device):
    """The sum of a slice without a positive rho goes another way."""
    for nan in NANS:
        rho = torch.full((40, 7), others, device=device)
        rho[3, 2] = nan.to(device)
        mu = torch.zeros_like(rho)
        assert ops.gaussian_kl(mu, rho).isnan()
        assert ops.mixture_kl(mu, rho, ops.new_seed(0, device=device), 0).isnan()
        assert gaussian_kl_sum([(mu, rho, 1.0)]).isnan()


@pytest.mark.parametrize("N", [1, 20])
def test_nan_stays_in_its_output(N, device):
    seed, mu = ops.new_seed(8, 0, device), torch.zeros(6, 8, device=device)
    for nan in NANS:
        rho = torch.full_like(mu, -1.0)
        rho[2, 3] = nan.to(device)
        x = torch.ones(N, 8, device=device)
        y = ops.bayes_linear(x, mu, rho, seed=seed, stream=7, num_samples=3)
        assert y[..., 2].isnan().all() and y[..., [0, 1, 3, 4, 5]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nan_stays_in_a_gradient_of_16_bits(dtype, device):
    logits = torch.zeros(2, 3, 4, dtype=dtype, device=device, requires_grad=True)
    mean = ops.predictive_statistics(logits).mean
    for nan in NANS:
        (grad,) = torch.autograd.grad(mean, logits, nan.to(device).expand(3, 4), retain_graph=True)
        assert grad.isnan().all()
