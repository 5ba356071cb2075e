"""Checkpoints that are not reentrant, and losses that a forward's output has no part in."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_debug_enabled

import bnuq_ext as bnuq

NEVER, ONCE, NESTED = "never", "once", "one in another"
LEFT = []  # by forwards, where nothing looks


class Penalised(nn.Module):
    """A network whose parts are computed again; its last layer is linear, so that a gradient by x does
    not depend on the output."""

    def __init__(self, again: str, estimator="exact"):
        super().__init__()
        torch.manual_seed(0)
        options = dict(rho_init=-1.0, estimator=estimator)
        self.first = bnuq.BayesLinear(3, 6, **options)
        self.norm = nn.BatchNorm1d(6)
        self.second = bnuq.BayesLinear(6, 6, **options)
        self.last = bnuq.BayesLinear(6, 2, **options)
        self.again = again

    def inner(self, x):
        return self.norm(self.first(x.sin())).tanh()

    def hidden(self, x):
        h = (
            checkpoint(self.inner, x, use_reentrant=False)
            if self.again == NESTED
            else self.inner(x)
        )
        h = self.second(h).tanh()
        LEFT.append(h)
        return self.last(h)

    def forward(self, x):
        if self.again == NEVER:
            return self.hidden(x)
        return checkpoint(self.hidden, x, use_reentrant=False)


def made(again, estimator="exact", train=False):
    model = bnuq.convert(Penalised(again, estimator)).double()
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(16, 3, generator=generator).double() for _ in range(4)]
    bnuq.collect(model, batches, progress=False)
    return model.train() if train else model.eval()


def rows():
    return torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3).requires_grad_()


def output(model, x, num_samples):
    with bnuq.replicas(model, num_samples, seed=6):
        return model(x)


def penalty(model, num_samples):
    """|grad_x sum u|^2."""
    x = rows()
    (grad,) = torch.autograd.grad(output(model, x, num_samples).sum(), x, create_graph=True)
    return grad.square().sum()


def agree(loss, **settings):
    """Whether parts are computed again changes no gradient."""
    found = {}
    for again in (NEVER, ONCE, NESTED):
        model = made(again, **settings)
        loss(model).backward()
        found[again] = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert len(found[NEVER]) >= 6
    assert max(grad.abs().max() for grad in found[NEVER].values()) > 0.01
    for again in (ONCE, NESTED):
        torch.testing.assert_close(found[again], found[NEVER])


@pytest.mark.parametrize("estimator", ["exact", "local"])
@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("train", [False, True])
def test_a_loss_of_gradients_alone(num_samples, estimator, train):
    agree(lambda model: penalty(model, num_samples), estimator=estimator, train=train)


@pytest.mark.parametrize("num_samples", [1, 3])
def test_one_beside_a_call_of_no_pass(num_samples):
    """That is computed again with the weights of torch's generator."""

    def loss(model):
        first = penalty(model, num_samples)
        torch.manual_seed(7)
        x = rows()
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return first + grad.square().sum() + output(model, rows(), 2).sum()

    agree(loss, train=True)


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    LEFT.clear()


@pytest.mark.parametrize("num_samples", [1, 3])
def test_what_a_model_leaves_where_nothing_looks(num_samples):
    def loss(model):
        output(model, rows(), num_samples)
        return LEFT[-1].square().sum()

    agree(loss, train=True)


def test_torchs_record_of_what_is_computed_again():
    """Its hooks are others then, and compute once."""

    def loss(model):
        output(model, rows(), 1)
        return LEFT[-1].square().sum()

    with set_checkpoint_debug_enabled(True):
        agree(loss, train=True)
