"""Activation checkpointing around the model itself, called in a body of `replicas`."""

import gc
import re
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bnuq_ext as bnuq


@pytest.fixture
def model():
    torch.manual_seed(0)
    layers = bnuq.BayesLinear(5, 6, rho_init=-1.0), nn.Tanh(), bnuq.BayesLinear(6, 3, rho_init=-1.0)
    return nn.Sequential(*layers)


X = torch.randn(9, 5, generator=torch.Generator().manual_seed(1))


def loss(model, num_samples, seed, again):
    with bnuq.replicas(model, num_samples, seed=seed):
        y = checkpoint(model, X, use_reentrant=False) if again else model(X)
        return y.square().sum()


def gradients(model, value):
    return torch.autograd.grad(value, list(model.parameters()))


@pytest.mark.parametrize("num_samples", [1, 3])
def test_a_backward_behind_the_body(model, num_samples):
    kept, again = (gradients(model, loss(model, num_samples, 1, way)) for way in (False, True))
    torch.testing.assert_close(again, kept)


@pytest.mark.parametrize("num_samples", [1, 3])
def test_a_backward_in_another_body_has_the_weights_of_its_forward(model, num_samples):
    kept = gradients(model, loss(model, num_samples, 1, False) + loss(model, 3, 2, False))
    first = loss(model, num_samples, 1, True)
    with bnuq.replicas(model, 3, seed=2):
        second = checkpoint(model, X, use_reentrant=False).square().sum()
        again = gradients(model, first + second)
        torch.testing.assert_close(again, kept)
        # The body goes on as before.
        ordinary = model(X).square().sum()
    torch.testing.assert_close(ordinary, second)


@pytest.mark.parametrize("num_samples", [1, 3])
def test_a_reentrant_checkpoint_is_refused(model, num_samples):
    message = "replicas: a checkpoint around the model must have use_reentrant=False, got True"
    x = X.clone().requires_grad_()
    with bnuq.replicas(model, num_samples, seed=1):
        with pytest.raises(ValueError, match=re.escape(message)):
            checkpoint(model, x, use_reentrant=True)
        with torch.no_grad():  # which is no checkpoint
            assert model(x).shape == (9 * num_samples, 3)


def test_a_body_inside_a_reentrant_checkpoint(model):
    def inside(x):
        with bnuq.replicas(model, 3, seed=1):
            return model(x)

    gradients_of = []
    for call in (inside, lambda x: checkpoint(inside, x, use_reentrant=True)):
        x = X.clone().requires_grad_()
        model.zero_grad()
        call(x).square().sum().backward()
        gradients_of.append([x.grad, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*gradients_of)


def test_a_reentrant_checkpoint_without_gradients(model):
    with bnuq.replicas(model, 2, seed=1), torch.no_grad():
        with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
            y = checkpoint(model, X, use_reentrant=True)
        assert torch.equal(y, model(X))


class Inside(nn.Module):
    """A model whose first layers are computed again."""

    def __init__(self, layers, again):
        super().__init__()
        self.layers, self.again = layers, again

    def forward(self, x):
        first, last = self.layers[:-1], self.layers[-1]
        return last(checkpoint(first, x, use_reentrant=False) if self.again else first(x))


@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("of_gradients_alone", [False, True])
def test_a_gradient_that_is_differentiated_again(model, num_samples, of_gradients_alone):
    """What it computes again is known by the output, which the loss is to hold."""

    def penalised(again):
        whole, x = Inside(model, again), X.clone().requires_grad_()
        with bnuq.replicas(whole, num_samples, seed=1):
            y = whole(x)
        value = y.sum() if of_gradients_alone else y.square().sum()
        (grad,) = torch.autograd.grad(value, x, create_graph=True)
        loss = grad.square().sum() + (0 * y.sum() if of_gradients_alone else 0)
        return torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)

    torch.testing.assert_close(penalised(True), penalised(False))


def test_a_graph_that_the_model_keeps_does_not_keep_the_model():
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = bnuq.BayesLinear(5, 3)

        def forward(self, x):
            self.kept = self.layer(x)
            return self.kept

    model = Keeping()
    with bnuq.replicas(model, 1, seed=1):
        model(X)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6))
        self.inner = nn.Sequential(nn.Tanh(), nn.Linear(6, 6), nn.BatchNorm1d(6))

    def forward(self, x):
        h = self.first(x)
        return h + self.inner(h)


@pytest.mark.parametrize("training", [False, True])
def test_the_first_call_of_all(training):
    """Whose trial is no part of what the backward computes again."""
    torch.manual_seed(0)
    model = bnuq.convert(Residual())
    bnuq.collect(model, list(torch.randn(40, 5).split(8)), progress=False)
    model.train(training)
    again = gradients(model, loss(model, 3, 1, True))
    torch.testing.assert_close(again, gradients(model, loss(model, 3, 1, False)))


def test_a_trial_with_hooks_keeps_nothing():
    torch.manual_seed(0)
    model, kept = bnuq.convert(Residual()), []
    bnuq.collect(model, list(torch.randn(40, 5).split(8)), progress=False)
    model.inner[0].register_forward_hook(lambda module, x, y: kept.append(weakref.ref(y)))
    with bnuq.replicas(model, 3, seed=1):
        model(X).sum().backward()
    gc.collect()
    assert len(kept) > 2 and not any(ref() is not None for ref in kept)


class Nested(nn.Module):
    """Reentrant checkpoints in each other."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (bnuq.BayesLinear(5, 5, rho_init=-1.0) for _ in range(3))

    def inner(self, h):
        return self.b(h).tanh()

    def outer(self, h):
        return self.c(self.run(self.inner, h)).tanh()

    def run(self, function, h):
        again = self.training and h.requires_grad
        return checkpoint(function, h, use_reentrant=True) if again else function(h)

    def forward(self, x):
        return self.run(self.outer, self.a(x))


def test_a_backward_of_another_thread_goes_through_nested_checkpoints():
    """Whose nodes are numbered anew."""
    torch.manual_seed(0)
    model, found = Nested(), []
    for training in (False, True):
        model.train(training).zero_grad()
        value = loss(model, 3, 1, False)
        thread = threading.Thread(target=value.backward)
        thread.start()
        thread.join()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*found)
