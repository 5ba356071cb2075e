"""Derivatives that the kernels have no rule for, through layers and losses."""

import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian, jacobian

import bnuq_ext as bnuq

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own: it imports what it has deprecated


def leaves(tensors):
    return [t.clone().requires_grad_() for t in tensors]


def network(convert, *layers):
    torch.manual_seed(0)
    return convert(nn.Sequential(*layers)).double()


def stochastic():
    layers = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)
    model = network(bnuq.convert, *layers).eval()
    bnuq.collect(model, [torch.randn(16, 3).double() for _ in range(5)], progress=False)
    return model


def bayesian(*between):
    layers = nn.Linear(3, 8), *between, nn.Tanh(), nn.Linear(8, 1)
    return network(lambda model: bnuq.to_bayesian(model, rho_init=-2.0), *layers)


X = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("make_model", [stochastic, bayesian])
def test_derivatives_inside_replicas(make_model):
    model = make_model()

    def loss(x):
        return model(x).sin().sum()

    def in_replicas(derivative):
        with bnuq.replicas(model, 4, seed=1):
            return derivative(loss)(X)

    def by_autograd(loss):
        return lambda x: jacobian(loss, x)

    expected = in_replicas(by_autograd)
    for derivative in (torch.func.grad, torch.func.jacfwd):
        torch.testing.assert_close(in_replicas(derivative), expected)
    twice = in_replicas(lambda loss: lambda x: hessian(loss, x))
    torch.testing.assert_close(in_replicas(torch.func.hessian), twice)
    assert twice.abs().max() > 0.01
    nudge = 1e-6 * torch.ones_like(X)
    with bnuq.replicas(model, 4, seed=1):
        numeric = (jacobian(loss, X + nudge) - jacobian(loss, X - nudge)) / 2e-6
    torch.testing.assert_close(twice.flatten(2).sum(2), numeric, rtol=1e-6, atol=1e-8)


class Skipping(nn.Module):
    """A model that is no chain."""

    def __init__(self):
        super().__init__()
        self.layers = stochastic()

    def forward(self, x):
        return x[:, :2] + self.layers(x)


@pytest.mark.parametrize("make_model", [stochastic, bayesian, lambda: bnuq.convert(Skipping())])
def test_jacobians_of_rows_in_vmap(make_model):
    """A model that is no chain is to be called before, for its trial."""
    model = make_model()
    by_row = torch.func.vmap(torch.func.jacrev(lambda row: model(row[None])))
    with bnuq.replicas(model, 3, seed=1):
        if isinstance(model, Skipping):
            with pytest.raises(ValueError, match="before a transform of torch.func call it once"):
                by_row(X)
            model(X[:1])
        found = by_row(X)
        expected = torch.stack([jacobian(model, row[None])[:, :, 0] for row in X])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("num_samples", [1, 2, 4])
@pytest.mark.parametrize("between", [(), (nn.Softplus(),), (nn.LayerNorm(8),)], ids=str)
def test_derivatives_of_the_loss(num_samples, between):
    model = bayesian(*between).train()
    values = {name: p.detach() for name, p in model.named_parameters()}
    options = dict(likelihood="gaussian", noise_std=0.3, batch_weight=0.1, seed=5)

    def loss(*values_now):
        given = dict(zip(values, values_now, strict=True))
        with nn.utils.stateless._reparametrize_module(model, given):
            found = bnuq.elbo_loss(model, X, X[:, :1].sin(), num_samples=num_samples, **options)
        return found.loss

    given = leaves(values.values())
    expected = torch.autograd.grad(loss(*given), given, create_graph=True)
    places = tuple(range(len(given)))
    plain = [grad.detach() for grad in expected]
    torch.testing.assert_close(torch.autograd.grad(loss(*given), given), tuple(plain))
    for derivative in (torch.func.grad, torch.func.jacfwd):
        torch.testing.assert_close(list(derivative(loss, places)(*values.values())), plain)
    # A product with the Hessian, by differences.
    along = [torch.randn_like(v) for v in given]
    product = torch.autograd.grad(expected, given, along)
    ahead, behind = (
        torch.autograd.grad(loss(*moved), moved)
        for step in (1e-6, -1e-6)
        for moved in [leaves([v + step * a for v, a in zip(values.values(), along, strict=True)])]
    )
    for found, one, other in zip(product, ahead, behind, strict=True):
        torch.testing.assert_close(found, (one - other) / 2e-6, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("estimator", ["exact", "local"])
def test_a_network_that_solves_a_differential_equation(estimator):
    """u'' = -u on a grid, u by a Bayesian network: the loss holds second derivatives by x, its
    gradient third ones."""
    model = bayesian()
    for layer in model:
        if isinstance(layer, bnuq.BayesLinear):
            layer.estimator = estimator
    x = X.clone().requires_grad_()

    def residual():
        with bnuq.replicas(model, 3, seed=2):
            u = model(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
        return (second[:, 0] + u.view(3, -1).sum(0)).square().mean()

    weight = model[0].weight_mu
    (grad,) = torch.autograd.grad(residual(), weight)
    with torch.no_grad():
        weight[2, 1] += 1e-6
    above = residual().item()
    with torch.no_grad():
        weight[2, 1] -= 2e-6
    numeric = (above - residual().item()) / 2e-6
    assert grad[2, 1].item() == pytest.approx(numeric, rel=1e-5) and abs(numeric) > 1e-3


def test_divergences_of_a_model_by_torch_func():
    model = bayesian()
    values = {name: p.detach() for name, p in model.named_parameters()}

    def divergence(values):
        with nn.utils.stateless._reparametrize_module(model, values):
            return bnuq.kl_divergence(model)

    given = {name: v.clone().requires_grad_() for name, v in values.items()}
    expected = torch.autograd.grad(divergence(given), list(given.values()))
    torch.testing.assert_close(list(torch.func.grad(divergence)(values).values()), list(expected))
    _, tangent = torch.func.jvp(divergence, (values,), (values,))
    along = sum((g * v).sum() for g, v in zip(expected, values.values(), strict=True))
    torch.testing.assert_close(tangent, along)
    batched = {name: torch.stack([v, 2 * v]) for name, v in values.items()}
    one_by_one = torch.stack([divergence({n: v[i] for n, v in batched.items()}) for i in range(2)])
    torch.testing.assert_close(torch.func.vmap(divergence)(batched), one_by_one.detach())


class Curvature(nn.Module):
    """d^2 e / dx_0^2 of a network's output e."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(8)
        self.layers = nn.Sequential(nn.Linear(3, 8), self.norm, nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (first,) = torch.autograd.grad(self.layers(x).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first[:, 0].sum(), x)
        return second[:, :1]


@pytest.mark.parametrize("strategy", ["loop", "auto", "folded"])
def test_predict_of_a_model_that_differentiates_twice(strategy):
    """Each replica is the original with its snapshot's statistics."""
    plain = Curvature().double().eval()
    model = bnuq.convert(plain)
    bank = bnuq.collect(model, [torch.randn(16, 3).double() for _ in range(5)], progress=False)
    options = dict(likelihood="gaussian", num_samples=5, seed=0, keep_samples=True)
    pred = bnuq.predict(model, X, strategy=strategy, **options)
    (name,) = bank.mean
    for snapshot, found in zip(pred.snapshots, pred.samples, strict=True):
        plain.norm.running_mean.copy_(bank.mean[name][snapshot])
        plain.norm.running_var.copy_(bank.var[name][snapshot])
        torch.testing.assert_close(found, plain(X), rtol=1e-6, atol=1e-8)
    assert pred.samples.abs().max() > 0.01
