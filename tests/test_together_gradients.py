"""Training steps with T samples as one batch: rows whose gradients alone meet,
and chains that are none."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from training import D, K, N, Net, step, ways_after

import bnuq_ext as bnuq
from bnuq_ext.restore import uncached


class Balanced(torch.autograd.Function):
    """The identity, whose gradient is normalised over the rows."""

    @staticmethod
    def forward(ctx, h):
        return h.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / grad.norm()


class Hooked(nn.Module):
    def forward(self, h):
        if h.requires_grad:
            h.register_hook(lambda grad: grad - grad.mean(0))
        return h * 1


class HookedOutput(Net):
    """Whose hook makes nothing of gradients that are the same for all rows."""

    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda grad: grad - grad.mean(0))
        return y * 1


GRADIENTS = {
    "a hook of the output": HookedOutput,
    "a function": lambda: Net(mix=Balanced.apply),
    "a hook": lambda: Net(middle=Hooked()),
    "detached": lambda: Net(mix=lambda h: h + h.mean(0) - h.mean(0).detach()),
}


@pytest.mark.parametrize("make", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_of_rows_that_meet_where_their_values_do_not(make):
    model = make()
    assert ways_after(model, 0) == {"loop"}


def test_another_part_whose_gradients_alone_meet_is_proved():
    """The outputs are those of the plan that stands."""
    model = Net()
    assert ways_after(model, 0) == {"folded"}
    model.mix = Balanced.apply
    assert ways_after(model, 1) == {"loop"}


class CentredChain(nn.Sequential):
    def forward(self, h):
        return super().forward(h - h.mean(0))


def test_a_class_of_one_s_own_chain_is_proved():
    options = dict(dtype=torch.float64, rho_init=-2.0)
    tail = CentredChain(nn.Tanh(), bnuq.BayesLinear(9, 4, **options))
    model = nn.Sequential(bnuq.BayesLinear(6, 9, **options), tail)
    assert ways_after(model, 0) == {"loop"}


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.register_full_backward_hook(lambda m, grads, _: (grads[0] / grads[0].norm(),)),
        lambda m: setattr(m, "forward", lambda h: h - h.mean(0)),
    ],
)
def test_a_chain_that_is_changed_is_proved(change):
    options = dict(dtype=torch.float64, rho_init=-2.0)
    first, last = bnuq.BayesLinear(6, 9, **options), bnuq.BayesLinear(9, 4, **options)
    model = nn.Sequential(first, nn.Tanh(), last)
    change(model[1])
    assert ways_after(model, 0) == {"loop"}


@pytest.mark.parametrize("way", ["elbo_loss", "replicas"])
def test_hooks_of_parameters_see_the_users_gradients_only(way):
    """A running sum of squared gradients, as for a Fisher information."""
    torch.manual_seed(0)
    model, seen = Net(middle=nn.Tanh()), []
    weight = next(p for p in model.parameters() if p.requires_grad)
    handle = weight.register_hook(lambda grad: seen.append(grad.clone()))
    x = torch.randn(N, D, dtype=torch.float64)
    if way == "replicas":
        with bnuq.replicas(model, 3, seed=0):
            loss = model(x).square().sum()
    else:
        y = torch.arange(N) % K
        loss = bnuq.elbo_loss(model, x, y, num_samples=3, batch_weight=0.1, seed=0).loss
    assert not seen
    loss.backward()
    assert len(seen) == 1 and torch.equal(seen[0], weight.grad)
    handle.remove()
    model(x).sum().backward()
    assert len(seen) == 1


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = parametrizations.weight_norm(nn.Linear(D, D))
        self.b = bnuq.BayesLinear(D, K, rho_init=-2.0)

    def forward(self, x):
        return self.b(self.a(x).tanh())


@pytest.mark.parametrize("by", ["elbo_loss", "replicas"])
def test_weights_that_are_cached_have_gradients(by):
    """A trial without gradients leaves nothing in the cache."""
    gradients = []
    for cached in (nullcontext, parametrize.cached):
        torch.manual_seed(0)
        model, x, y = Normed(), torch.randn(N, D), torch.randint(K, (N,))
        for _ in range(3):
            with cached():
                if by == "elbo_loss":
                    elbo = bnuq.elbo_loss(model, x, y, num_samples=3, seed=1, batch_weight=0.1)
                    elbo.loss.backward()
                else:
                    with bnuq.replicas(model, 3, seed=1):
                        model(x).sum().backward()
            step(model, 0.01)
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients)


class Drawn(nn.Module):
    """A parametrisation that draws numbers."""

    def forward(self, weight):
        return weight + torch.randn_like(weight)


@pytest.mark.parametrize("first", [True, False])
def test_a_prediction_leaves_weights_that_are_cached_as_they_are(first):
    """Those of the user's own forward stay; those that have no gradients go."""
    torch.manual_seed(0)
    model, x = Normed(), torch.randn(N, D)
    parametrize.register_parametrization(model.a, "bias", Drawn())
    with parametrize.cached():
        kept = model.a.bias if first else None
        bnuq.predict(model, x, likelihood="gaussian", num_samples=3, seed=0)
        assert (model.a.bias is kept) == first
        model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_predictions_without_gradients_share_weights_that_are_cached():
    torch.manual_seed(0)
    model, x = Normed(), torch.randn(N, D)
    with torch.no_grad(), parametrize.cached():
        predict_once = partial(bnuq.predict, model, x, likelihood="gaussian", num_samples=3, seed=0)
        predict_once(strategy="loop")
        kept = model.a.weight
        predict_once(strategy="loop")
        assert model.a.weight is kept


def test_a_trial_in_another_thread_leaves_the_count_of_those_who_cache():
    """One enters parametrize.cached() inside, and leaves it after."""
    outer, inner = uncached(), parametrize.cached()
    with parametrize.cached():
        outer.__enter__()
        assert not parametrize._cache_enabled
        inner.__enter__()
        outer.__exit__(None, None, None)
        assert parametrize._cache_enabled == 2
        inner.__exit__(None, None, None)
    assert parametrize._cache_enabled == 0 and not parametrize._cache
    outer = uncached()
    outer.__enter__()
    with parametrize.cached():
        outer.__exit__(None, None, None)
        assert parametrize._cache_enabled == 1
    assert parametrize._cache_enabled == 0


def test_a_hook_may_hook_the_gradients_of_an_activation():
    torch.manual_seed(0)
    model, seen, rows = Net().train(), [], []
    layer = next(m for m in model.modules() if isinstance(m, bnuq.BayesLinear))
    layer.register_forward_hook(lambda m, args, out: out.register_hook(seen.append) and None)
    model.register_forward_hook(lambda m, args, out: rows.append(len(out)))
    x, y = torch.randn(N, D, dtype=torch.float64), torch.randint(K, (N,))
    for _ in range(2):
        rows.clear()
        bnuq.elbo_loss(model, x, y, num_samples=4, batch_weight=0.1).loss.backward()
    assert 4 * N in rows and len(rows) < 4 and len(seen[-1]) == 4 * N
