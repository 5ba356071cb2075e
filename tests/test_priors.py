"""Priors of the weights: what they may be, and that they stay what they are."""

import math
from dataclasses import FrozenInstanceError, fields

import pytest
import torch

import bnuq_ext as bnuq


@pytest.mark.parametrize("pi", [0.0, 0.3, 1.0])
def test_a_mixture_of_one_width_is_a_gaussian(pi):
    """As a Monte Carlo mean: n = 64 x 300 weights, whose terms have a std of 0.8 at most, so the mean
    of a weight is known to 0.006, and 0.035 is six such (alpha < 1e-8)."""
    mean = {}
    for prior in (bnuq.GaussianPrior(0.7), bnuq.ScaleMixturePrior(pi, 0.7, 0.7)):
        torch.manual_seed(0)
        layer = bnuq.BayesLinear(20, 15, bias=False, prior=prior, rho_init=-1.0)
        mean[type(prior)] = bnuq.kl_divergence(layer, num_samples=64, seed=0).item() / 300
    gaussian, mixture = mean.values()
    assert 0.1 < gaussian and abs(mixture - gaussian) < 0.035


@pytest.mark.parametrize("prior", [bnuq.GaussianPrior(), bnuq.ScaleMixturePrior()], ids=repr)
def test_a_prior_is_a_value(prior):
    assert type(prior)() == prior and hash(type(prior)()) == hash(prior)
    for field in fields(prior):
        with pytest.raises(FrozenInstanceError):
            setattr(prior, field.name, 2.0)


def test_defaults_are_those_of_the_docs():
    assert bnuq.GaussianPrior() == bnuq.GaussianPrior(1.0)
    assert bnuq.ScaleMixturePrior() == bnuq.ScaleMixturePrior(0.5, 1.0, math.exp(-6))


def test_the_first_is_the_broader():
    message = r"ScaleMixturePrior: std1 must be .*std2.*, got 0.5"
    with pytest.raises(ValueError, match=message):
        bnuq.ScaleMixturePrior(0.5, 0.5, math.nextafter(0.5, 1))


@pytest.mark.parametrize("std", [5e-20, 1e-30])
def test_a_gaussian_too_narrow_for_float32(std):
    layer = bnuq.BayesLinear(3, 2, prior=bnuq.GaussianPrior(std))
    message = f"^gaussian_kl: prior_std must be above 5.42e-20 for torch.float32, got {std}$"
    for call in (
        lambda: bnuq.kl_divergence(layer),
        lambda: bnuq.elbo_loss(layer, torch.ones(4, 3), torch.zeros(4).long(), batch_weight=1.0),
    ):
        state = torch.get_rng_state()
        with pytest.raises(ValueError, match=message):
            call()
        assert torch.equal(torch.get_rng_state(), state)
    assert bnuq.kl_divergence(layer.double()).isfinite()


@pytest.mark.parametrize("std", [6e-20, 9e-20, 2e-19])
def test_a_gaussian_that_is_narrow(std):
    layer = bnuq.BayesLinear(3, 2, bias=False, prior=bnuq.GaussianPrior(std), mu_init=0.0)
    kl = bnuq.kl_divergence(layer)
    kl.backward()
    mu, rho = layer.weight_mu.detach().double(), layer.weight_rho.detach().double()
    sigma = torch.nn.functional.softplus(rho)
    expected = ((std / sigma).log() + (sigma**2 + mu**2) / (2 * std**2) - 0.5).sum()
    torch.testing.assert_close(kl.double(), expected, rtol=1e-5, atol=0)
    assert (layer.weight_mu.grad == 0).all() and layer.weight_rho.grad.isfinite().all()


@pytest.mark.parametrize(
    "made,got", [(0.0, "float"), (torch.zeros(1), r"\[1\]"), (torch.zeros(3, 2), r"\[3, 2\]")]
)
def test_a_prior_of_ones_own_gives_one_number(made, got):
    class Own:
        def divergence(self, mu, rho, seed, stream, num_samples):
            return made

    model = torch.nn.Sequential(bnuq.BayesLinear(2, 3, prior=Own()))
    text = rf"^BayesLinear: prior.divergence must return a tensor of shape \[\], got {got}$"
    with pytest.raises(TypeError, match=text):
        bnuq.kl_divergence(model)
    with pytest.raises(TypeError, match=text):
        bnuq.elbo_loss(model, torch.ones(4, 2), torch.zeros(4).long(), batch_weight=0.1)
