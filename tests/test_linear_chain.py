"""Chains of Bayesian layers, in a training step one node of autograd with their divergence."""

import weakref

import pytest
import torch
from one_link import bayes_linear_kl
from torch import nn
from zoo import Wrapped

import bnuq_ext as bnuq
from bnuq_ext.ops.linear_chain import Link, bayes_linear_chain

pytestmark = pytest.mark.usefixtures("divergence_op")
SEED = torch.tensor([5, 2])


def posterior(outputs, inputs, dtype, bias=True):
    """Means and spreads, some of them positive."""
    shapes = [(outputs, inputs), (outputs,)] if bias else [(outputs, inputs)]
    pairs = [(torch.randn(s, dtype=dtype), torch.randn(s, dtype=dtype) - 1) for s in shapes]
    return tuple(p.requires_grad_() for pair in pairs for p in pair)


def one_by_one(x, links, T):
    """The same in a node for each layer and each ReLU."""
    total = 0
    for link in links:
        given = {"stream": link.stream, "prior_std": link.prior_std}
        y, kl = bayes_linear_kl(x, *link.posterior, seed=SEED, num_samples=T, **given)
        y = y.relu() if link.rectified else y
        x, total = y.view(T, -1, y.shape[1]), total + kl
    return y, total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("T, N, shared", [(1, 9, True), (1, 9, False), (3, 9, True), (3, 2, False)])
def test_is_its_layers_one_after_another(T, N, shared, last, dtype):
    torch.manual_seed(T + N)
    x = torch.randn((N, 7) if shared else (T, N, 7), dtype=dtype, requires_grad=True)
    sizes = [(7, 20, True), (20, 17, False), (17, 5, True)]
    links = [
        Link(posterior(o, i, dtype, bias), 0.5 + k, 2 * k, (True, False, last)[k])
        for k, (i, o, bias) in enumerate(sizes)
    ]
    inputs = [x, *(p for link in links for p in link.posterior)]
    found, expected = (
        bayes_linear_chain(x, links, seed=SEED, num_samples=T),
        one_by_one(x, links, T),
    )
    torch.testing.assert_close(found, expected)
    weights = torch.randn(found[0].shape, dtype=dtype)
    for terms in ([0], [1], [0, 1]):
        grads = [
            torch.autograd.grad(
                sum((both[0] * weights).sum() if k == 0 else 0.3 * both[1] for k in terms),
                inputs,
                retain_graph=True,
                allow_unused=True,
            )
            for both in (found, expected)
        ]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("needed", [(0,), (1, 4), (5,), (8, 9), (0, 7)])
def test_gradients_that_are_asked_for(needed):
    torch.manual_seed(0)
    links = [Link(posterior(6, 6, torch.float32), 1.0, k, True) for k in range(3)]
    inputs = [torch.randn(8, 6), *(p for link in links for p in link.posterior)]
    for number, t in enumerate(inputs):
        t.requires_grad_(number in needed)
    asked = [inputs[number] for number in needed]
    found, expected = (
        bayes_linear_chain(inputs[0], links, seed=SEED, num_samples=1),
        one_by_one(inputs[0], links, 1),
    )
    grads = [
        torch.autograd.grad(y.square().sum() + kl, asked, allow_unused=True)
        for y, kl in (found, expected)
    ]
    torch.testing.assert_close(*grads)


def test_layers_that_do_not_fit_each_other():
    links = [
        Link(posterior(6, 4, torch.float32), 1.0, 0),
        Link(posterior(3, 5, torch.float32), 1.0, 1),
    ]
    with pytest.raises(ValueError, match="bayes_linear: x must have 5 features, got 6"):
        bayes_linear_chain(torch.randn(8, 4), links, seed=SEED, num_samples=1)
    model = nn.Sequential(bnuq.BayesLinear(4, 6), nn.ReLU(), bnuq.BayesLinear(5, 3))
    message = r"BayesLinear: x must have shape \(N, \*, 5\), got \[8, 6\]"
    with pytest.raises(ValueError, match=message):
        bnuq.elbo_loss(model, torch.randn(8, 4), torch.zeros(8).long(), batch_weight=1.0)


# ---- in a training step --------------------------------------------------------------------------


def chain(*extra, **options):
    torch.manual_seed(0)
    return nn.Sequential(
        bnuq.BayesLinear(6, 9, rho_init=(-4.0, 1.0), prior=bnuq.GaussianPrior(0.7)),
        *extra,
        bnuq.BayesLinear(9, 3, rho_init=-3.0, **options),
    )


CHAINS = {
    "plain": lambda: chain(nn.ReLU()),
    "in place": lambda: chain(nn.ReLU(inplace=True)),
    "twice": lambda: twice(bnuq.BayesLinear(9, 9, rho_init=-3.0)),
    "mixture": lambda: chain(nn.ReLU(), prior=bnuq.ScaleMixturePrior(0.5, 1.0, 0.1)),
    "local": lambda: chain(nn.ReLU(), estimator="local"),
    "no bias": lambda: chain(nn.ReLU(), bias=False),
    "pruned": lambda: pruned(chain(nn.ReLU())),
    "another activation": lambda: chain(nn.Tanh()),
    "PReLU": lambda: chain(nn.PReLU(9)),
    "ReLU6 in place": lambda: chain(nn.ReLU6(inplace=True)),
    "between others": lambda: nn.Sequential(nn.Softplus(), chain(nn.ReLU(), nn.Dropout(0.0))),
    "ReLU twice": lambda: chain(nn.ReLU(), nn.ReLU()),
    "at the end": lambda: nn.Sequential(chain(nn.ReLU()), nn.ReLU(), nn.Linear(3, 3)),
}
JOINED = {  # Bayesian layers in each node
    "twice": [],
    "mixture": [1],
    "local": [1],
    "another activation": [1, 1],
    "PReLU": [1, 1],
    "ReLU6 in place": [1, 1],
    "between others": [1, 1],
    "ReLU twice": [1, 1],
}


def twice(layer):
    return chain(layer, nn.Tanh(), layer)


def pruned(model):
    bnuq.prune(model, 0.4)
    return model


@pytest.mark.parametrize("T, N", [(1, 16), (1, 3), (3, 16)])
@pytest.mark.parametrize("name", CHAINS)
def test_a_plain_chain_has_the_loss_and_the_gradients_of_any_other_model(name, T, N, monkeypatch):
    model = CHAINS[name]()
    parameters, noted = list(model.parameters()), []
    monkeypatch.setattr(
        "bnuq_ext.chain.bayes_linear_chain",
        lambda x, links, **k: noted.append(len(links)) or bayes_linear_chain(x, links, **k),
    )
    x, y = torch.randn(N, 6), torch.randint(0, 3, (N,))
    results = []
    for given in (model, Wrapped(model)):
        out = bnuq.elbo_loss(given, x, y, num_samples=T, batch_weight=0.2, seed=1)
        grads = [
            torch.autograd.grad(term, parameters, retain_graph=True, allow_unused=True)
            for term in out
        ]
        results.append([*out, *(torch.zeros(()) if g is None else g for gs in grads for g in gs)])
        assert noted == JOINED.get(name, [2])  # none of the other model's
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_writing_into_what_a_backward_needs_is_an_error():
    """As of torch's ReLU: the layer after it may not write into its output."""
    model = chain(nn.ReLU(), nn.Dropout(0.5, inplace=True))
    for shape in ((8, 6), (2, 4, 6)):
        y = torch.zeros(*shape[:-1], 3)
        out = bnuq.elbo_loss(model, torch.randn(shape), y, likelihood="gaussian", batch_weight=0.1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.loss.backward()


@pytest.mark.parametrize("T", [1, 3])
def test_rows_with_inner_dimensions(T):
    model, x = chain(nn.ReLU()), torch.randn(4, 5, 6)
    results = []
    for given in (model, Wrapped(model)):
        with bnuq.replicas(given, T, 1):
            outputs = given(x).unflatten(0, (T, 4))
        y = outputs.detach().mean(0) + 1
        out = bnuq.elbo_loss(
            given, x, y, num_samples=T, likelihood="gaussian", batch_weight=0.2, seed=1
        )
        expected = -torch.distributions.Normal(outputs, 1).log_prob(y).sum() / (4 * T)
        torch.testing.assert_close(out.nll, expected)
        results.append([*out, *torch.autograd.grad(out.loss, list(model.parameters()))])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "mixture", "twice", "pruned"])
def test_likelihood_and_divergence_by_themselves(name):
    """One after the other and in either order; and the sum of both,
    which a user may weigh as he likes."""
    model, x, y = CHAINS[name](), torch.randn(16, 6), torch.randint(0, 3, (16,))
    parameters = list(model.parameters())

    def grads(*terms):
        found = [torch.autograd.grad(t, parameters, allow_unused=True) for t in terms]
        return [sum(g for g in gs if g is not None) for gs in zip(*found, strict=True)]

    def loss():
        return bnuq.elbo_loss(model, x, y, batch_weight=1.0, reduction="sum", seed=1)

    expected = grads(loss().loss)
    for terms in ((loss().nll, loss().kl), loss()[1:], loss()[:0:-1], [sum(loss()[1:])]):
        for actual, e in zip(grads(*terms), expected, strict=True):
            torch.testing.assert_close(actual, e, rtol=1e-5, atol=1e-5)


def test_a_divergence_keeps_no_activations():
    model, x = chain(nn.ReLU()), torch.randn(16, 6)
    activation = weakref.ref(x)
    kl = bnuq.elbo_loss(model, x, torch.randint(0, 3, (16,)), batch_weight=0.1).kl
    del x
    assert activation() is None and kl.requires_grad


def test_without_gradients():
    model, x, y = chain(nn.ReLU()), torch.randn(16, 6), torch.randint(0, 3, (16,))
    expected = bnuq.elbo_loss(model, x, y, batch_weight=0.2, seed=1)
    with torch.no_grad():
        out = bnuq.elbo_loss(model, x, y, batch_weight=0.2, seed=1)
    torch.testing.assert_close(list(out), [t.detach() for t in expected])


def test_a_weight_of_the_divergence_may_have_a_gradient():
    model, x, y = chain(nn.ReLU()), torch.randn(16, 6), torch.randint(0, 3, (16,))
    weight = torch.tensor(0.3, requires_grad=True)
    out = bnuq.elbo_loss(model, x, y, batch_weight=weight, seed=1, reduction="sum")
    (grad,) = torch.autograd.grad(out.loss, weight)
    torch.testing.assert_close(grad, out.kl.detach())
    torch.testing.assert_close(out.loss, out.nll + 0.3 * out.kl)


def test_the_divergence_may_be_written_into():
    model, x = nn.Sequential(bnuq.BayesLinear(6, 4)), torch.randn(8, 6)
    elbo = bnuq.elbo_loss(model, x, torch.zeros(8).long(), batch_weight=0.1, seed=0)
    kl = elbo.kl.item()
    elbo.kl.mul_(0.5)
    (elbo.nll + elbo.kl).backward()
    assert elbo.kl.item() == kl / 2 and model[0].weight_mu.grad.isfinite().all()


def test_strided_weights_and_a_strided_seed():
    weights, biases = torch.randn(2, 7, 5).transpose(1, 2), torch.randn(5, 2).t()
    link, x = Link((*weights, *biases), 1.0, 0), torch.randn(4, 7)
    plain = link._replace(posterior=tuple(p.contiguous() for p in link.posterior))
    strided = torch.stack([SEED, SEED + 1], 1)[:, 0]
    found = bayes_linear_chain(x, [link], seed=strided, num_samples=3)
    torch.testing.assert_close(found, bayes_linear_chain(x, [plain], seed=SEED, num_samples=3))
