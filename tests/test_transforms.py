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


@pytest.mark.filterwarnings("ignore:.torch.jit.script:FutureWarning")  # torch's own
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("bayesian", [False, True])
def test_derivatives_of_functions_are_refused_whether_a_plan_is_there_or_not(
    model, bayesian, known
):
    if bayesian:
        model = bnuq.to_bayesian(Bare().eval())
    options = {"likelihood": "gaussian", "num_samples": 4, "seed": 3}

    def drawn(x):
        with bnuq.replicas(model, 4, seed=3):
            return model(x).sum()

    def predicted(x):
        return bnuq.predict(model, x, **options).mean.sum()

    for function, op in ((drawn, "replicas"), (predicted, "predict")):
        before = torch.get_rng_state()
        if known:
            expected = function(X)
        with pytest.raises(NotImplementedError, match=f"^{op}: derivatives by torch.func are not"):
            torch.func.grad(function)(X)
        if op == "predict":
            with pytest.raises(NotImplementedError, match="^predict: forward-mode .* `replicas`$"):
                torch.func.jvp(function, (X,), (X,))
        assert torch.equal(torch.get_rng_state(), before)
        if known:
            assert torch.equal(function(X), expected)
    _, tangent = torch.func.jvp(drawn, (X,), (X,))
    with bnuq.replicas(model, 4, seed=3):
        gradient = torch.func.grad(lambda x: model(x).sum())(X)
    x = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(drawn(x), x)
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(tangent, (expected * X).sum())
    # A constant for the caller, who says so.
    assert torch.func.grad(lambda x: x.sum() * torch.no_grad()(predicted)(X))(X).all()


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch's own
@pytest.mark.parametrize("options", [{}, {"strategy": "loop"}, {"chunk": 3}], ids=str)
@pytest.mark.parametrize("batches", [(2, 3), (1, 1), (1, 2)], ids=str)
def test_predictions_in_vmap(model, options, batches):
    x = torch.randn(*batches, *X.shape, generator=torch.Generator().manual_seed(0))

    def predicted(x):
        pred = bnuq.predict(model, x, likelihood="categorical", num_samples=8, seed=3, **options)
        return pred.mean, pred.variance, pred.entropy, pred.mutual_information

    for _ in range(2):
        expected = [predicted(one) for one in x.flatten(0, 1)]
        found = torch.vmap(torch.vmap(predicted))(x)
        for index, value in enumerate(found):
            one_by_one = torch.stack([one[index] for one in expected])
            torch.testing.assert_close(value.flatten(0, 1), one_by_one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dim", [0, 1, 3])
def test_statistics_taken_in_by_vmap(dim):
    logits = torch.randn(5, 4, 3, 2, generator=torch.Generator().manual_seed(0))

    def taken_in(logits, *states):
        mean, m2, entropy = states or (
            *logits.new_zeros(2, *logits.shape[1:]),
            logits.new_zeros(logits.shape[1]),
        )
        for count in range(len(logits)):
            bnuq.ops.predictive_accumulate_(mean, m2, entropy, logits[count : count + 1], count)
        return mean, m2, entropy

    found = torch.vmap(taken_in, in_dims=dim)(logits)
    each = [taken_in(one.contiguous()) for one in logits.unbind(dim)]
    for value, expected in zip(found, map(torch.stack, zip(*each, strict=True)), strict=True):
        assert torch.equal(value, expected)
    states = torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3)
    with pytest.raises(
        NotImplementedError, match="^predictive_accumulate_: mean, m2 and .* inside vmap"
    ):
        torch.vmap(lambda one: taken_in(one, *states), in_dims=1)(torch.randn(5, 4, 3, 2))


def test_equal_logits_taken_in_by_vmap():
    logits = torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(0))

    def taken_in(scale):
        mean, m2, entropy = scale.new_zeros(3, 2), scale.new_zeros(3, 2), scale.new_zeros(3)
        bnuq.ops.predictive_accumulate_(mean, m2, entropy, logits, 0)
        return mean * scale, m2, entropy

    mean, m2, entropy = torch.vmap(taken_in)(torch.ones(4))
    expected = bnuq.ops.predictive_statistics(logits)
    torch.testing.assert_close(mean, expected.mean.expand(4, 3, 2))
    torch.testing.assert_close(m2 / 5, expected.variance.expand(4, 3, 2))
    torch.testing.assert_close(entropy, expected.expected_entropy.expand(4, 3))
