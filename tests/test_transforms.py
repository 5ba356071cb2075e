"""Predictions inside transforms of torch.func and of torch.fx, and after them."""

from contextlib import suppress

import pytest
import torch
from test_interrupts import BATCHES, Bare, X
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import bnuq_ext as bnuq


@pytest.fixture
def model():
    model = bnuq.convert(Bare()).eval()
    bnuq.collect(model, BATCHES, progress=False)
    return model


def predicted(model, **options):
    arguments = dict(likelihood="categorical", num_samples=4, seed=3) | options
    return bnuq.predict(model, X, **arguments).mean


@pytest.mark.parametrize("sampler", ["bank", "joint", "lognormal", "normal"])
def test_what_functionalize_makes_is_not_kept(model, sampler):
    options = dict(strategy="loop", sampler=sampler)
    with suppress(RuntimeError):  # torch's own
        torch.func.functionalize(lambda w: predicted(model, **options) * w)(torch.ones(()))
    after = predicted(model, **options)
    other = bnuq.convert(Bare()).eval()
    bnuq.attach(other, model.norm.bank)
    assert after.equal(predicted(other, **options))


@pytest.mark.parametrize("sampler", ["bank", "joint"])
def test_what_a_fake_mode_makes_is_not_kept(model, sampler):
    with bnuq.replicas(model, 3, 0, sampler=sampler):
        with suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True) as mode:  # torch's own
            model(mode.from_tensor(X))
        rows = model(X).view(3, len(X), 3)
    options = dict(likelihood="gaussian", num_samples=3, seed=0, sampler=sampler)
    expected = bnuq.predict(model, X, strategy="loop", keep_samples=True, **options).samples
    torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-6)


def test_a_trial_that_a_tracer_ends_is_made_again(model):
    with suppress(RuntimeError):  # torch's own
        make_fx(lambda w: predicted(model) * w)(torch.ones(()))
    torch.testing.assert_close(
        predicted(model, strategy="folded"), predicted(model, strategy="loop"), rtol=1e-5, atol=1e-6
    )
