"""Models with Bayesian layers, and steps of training by `elbo_loss`, together and by the loop."""

import copy

import pytest
import torch
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext import model_cache, vi
from bnuq_ext.proof import folding

D, K, N, T = 6, 4, 8, 3


class Net(nn.Module):
    """Two Bayesian layers with `mix` between them."""

    def __init__(self, mix=lambda h: h, rho_init=-2.0, middle=None):
        super().__init__()
        torch.manual_seed(0)
        options = dict(rho_init=rho_init, dtype=torch.float64)
        self.first, self.last = bnuq.BayesLinear(D, 9, **options), bnuq.BayesLinear(9, K, **options)
        self.middle = nn.Identity() if middle is None else middle
        self.mix = mix

    def forward(self, x):
        return self.last(self.mix(self.middle(self.first(x).tanh())))


def gate(value, size=()):
    return nn.Parameter(torch.full(size, value, dtype=torch.float64))


class Attention(nn.Module):
    """ReZero: attention over the rows of the batch, behind a gate at zero."""

    def __init__(self, value=0.0, size=()):
        super().__init__()
        self.gate = gate(value, size)

    def weight(self):
        return self.gate

    def forward(self, h):
        return h + self.weight() * ((h @ h.T).softmax(1) @ h)


def data(rows=N):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, D, generator=generator, dtype=torch.float64)
    return x, torch.randint(K, (rows,), generator=generator)


def gradients(model, seed, num_samples=T, rows=N):
    """The loss and its gradients, which are left in the model."""
    x, y = data(rows)
    model.zero_grad()
    options = dict(num_samples=num_samples, batch_weight=0.1, seed=seed)
    loss = bnuq.elbo_loss(model, x, y, **options).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def loop(model, *args, **options):
    """`gradients`, one sample after another."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(vi, "_together", lambda *args: None)
        return gradients(model, *args, **options)


def of_the_loop(model, *args, **options):
    """`loop` of a copy."""
    return loop(copy.deepcopy(model), *args, **options)


def step(model, size=0.1):
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= size * p.grad


def proofs(monkeypatch):
    """What is appended to at each full proof."""
    made, make = [], folding.Folding._make
    monkeypatch.setattr(folding.Folding, "_make", lambda *args: made.append(1) or make(*args))
    return made


def ways(model):
    return {plan.way for plan in model_cache._CACHES[model].earlier_plans.values()}


def ways_after(model, seed):
    assert_right(model, seed)
    step(model)
    return ways(model)


def assert_right(model, seed=9, num_samples=T):
    expected = of_the_loop(model, seed, num_samples)
    for a, e in zip(gradients(model, seed, num_samples), expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-12)


def narrow(model):
    with torch.no_grad():
        for layer in (model.first, model.last):
            layer.weight_rho.fill_(-30)
            layer.bias_rho.fill_(-30)


class Residual(nn.Module):
    """Treats rows one by one, but is no chain."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(9, 9, dtype=torch.float64)

    def forward(self, h):
        return h + self.inner(h).relu()


def counted(model):
    """Rows of each forward."""
    rows = []
    model.register_forward_hook(lambda module, args, output: rows.append(len(output)))
    return rows
