"""A refused call leaves torch's generator as it was, whatever the forward before the refusal has drawn."""

import pytest
import torch
from torch import nn

import bnuq_ext as bnuq

X = torch.randn(9, 6, generator=torch.Generator().manual_seed(0))


class Raises(nn.Module):
    """Draws, and then finds its input wrong."""

    def __init__(self):
        super().__init__()
        self.layer = bnuq.BayesLinear(6, 3)

    def forward(self, x):
        self.layer(x + torch.rand(()))
        raise RuntimeError("of the model")


@pytest.fixture
def model():
    """Draws in train(); in the end torch's generator is where it was."""
    layers = bnuq.BayesLinear(6, 8), nn.Dropout(0.5), bnuq.BayesLinear(8, 3)
    made = nn.Sequential(*layers).train()
    before = torch.get_rng_state()
    yield made
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("num_samples", [1, 2, 4])
def test_elbo_loss_after_dropout(model, num_samples, seed):
    options = dict(batch_weight=0.1, num_samples=num_samples, seed=seed)
    with pytest.raises(ValueError, match="y must"):
        bnuq.elbo_loss(model, X, torch.full((9,), 7), **options)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("num_samples", [1, 2, 4])
def test_a_forward_that_draws_and_raises(num_samples, seed):
    model, before = Raises(), torch.get_rng_state()
    options = dict(num_samples=num_samples, seed=seed)
    with pytest.raises(RuntimeError, match="of the model"):
        bnuq.elbo_loss(model, X, torch.zeros(9, dtype=torch.long), batch_weight=0.1, **options)
    with pytest.raises(RuntimeError, match="of the model"):
        bnuq.predict(model, X, likelihood="gaussian", **options)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_layer_with_weights_of_two_dtypes(model):
    layer = model[0]
    layer.weight_rho = nn.Parameter(layer.weight_rho.detach().double())
    with pytest.raises(TypeError, match="rho must"):
        layer(X)
    text = "kl_divergence: layer '0' must have its weights in one dtype, float32 or float64, got .*torch.float64$"
    with pytest.raises(TypeError, match=text):
        bnuq.kl_divergence(model)
