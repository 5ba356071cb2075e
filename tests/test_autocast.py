"""Autocast reaches into ops, but changes no number of theirs: neither forward nor,
in its region, backward.

A layer rounds what goes in and out, as torch's own do, and nothing in between."""

import copy
from itertools import pairwise

import batch_norm_cases
import pytest
import torch

import bnuq_ext as bnuq
from bnuq_ext import BayesLinear, elbo_loss, ops, predict, replicas, to_bayesian
from bnuq_ext.ops.modes import autocast_dtypes

T, N, C = 5, 9, 16


def batch_norm(op, device):
    dtype = torch.float32
    tensors = batch_norm_cases.make(op, (N, C, 3, 3), T, shared=True, dtype=dtype, device=device)
    names = list(tensors)
    options = {"shared": True, "activation": "relu"}

    def run(*values):
        return batch_norm_cases.call(op, dict(zip(names, values, strict=True)), T, **options)

    return run, list(tensors.values())


def drawn(*shapes, device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def linear(rows, dtype, device):
    (x,) = drawn((rows, 40), device=device, dtype=dtype)
    weights = drawn((C, 40), (C, 40), (C,), (C,), device=device)
    options = {"seed": ops.new_seed(3, 1, device), "stream": 1, "num_samples": T}
    return lambda *values: ops.bayes_linear(*values, **options), [x, *weights]


def divergence(op, device):
    seed = ops.new_seed(3, 1, device)
    run = {"gaussian": ops.gaussian_kl, "mixture": lambda *v: ops.mixture_kl(*v, seed, 1, T)}[op]
    return run, drawn((C, 40), (C, 40), device=device)


def statistics(device):
    return lambda x: torch.cat([s.flatten() for s in ops.predictive_statistics(x)]), drawn(
        (T, N, C), device=device
    )


CASES = {
    **{op: lambda device, op=op: batch_norm(op, device) for op in batch_norm_cases.OPS},
    # Above 512 rows a GPU samples the weights into memory.
    "linear": lambda device: linear(N, torch.float32, device),
    "linear bfloat16": lambda device: linear(N, torch.bfloat16, device),
    "linear many rows": lambda device: linear(520, torch.float32, device),
    "gaussian_kl": lambda device: divergence("gaussian", device),
    "mixture_kl": lambda device: divergence("mixture", device),
    "predictive_statistics": statistics,
}


@pytest.mark.parametrize("case", CASES)
def test_no_number_changes(case, device):
    run, inputs = CASES[case](device)

    def once():
        leaves = [value.clone().requires_grad_() for value in inputs]
        y = run(*leaves)
        return y, *torch.autograd.grad(y, leaves, torch.ones_like(y))

    expected = once()
    with torch.autocast(inputs[0].device.type, torch.bfloat16):
        actual = once()
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype and torch.equal(a, e)


@pytest.mark.parametrize("case", ["linear", "linear bfloat16"])
def test_no_gradient_changes_that_is_to_be_differentiated_again(case, device):
    run, inputs = CASES[case](device)

    def once():
        leaves = [value.clone().requires_grad_() for value in inputs]
        y = run(*leaves)
        return torch.autograd.grad(y, leaves, torch.ones_like(y), create_graph=True)

    expected = once()
    with torch.autocast(inputs[0].device.type, torch.bfloat16):
        actual = once()
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


def test_a_chain_rounds_between_its_layers_as_another_model_does():
    torch.manual_seed(0)
    model = torch.nn.Sequential(BayesLinear(40, C), torch.nn.ReLU(), BayesLinear(C, 3))
    (x,), y = drawn((N, 40), device="cpu"), torch.arange(N) % 3
    losses = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(elbo_loss(model, x, y, batch_weight=0.1, seed=0).nll)
        model[1].register_forward_hook(lambda *_: None)  # which is no chain then
    assert losses[0] == losses[1]


def test_autocast_of_each_kind_of_device():
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_dtypes() == (torch.bfloat16, None)


def test_a_training_step_of_mixed_layers(device):
    """A Bayesian layer behind an ordinary one, which gives bfloat16."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(40, C), torch.nn.ReLU(), BayesLinear(C, 3, rho_init=-3.0)]
    model = torch.nn.Sequential(*layers).to(device)
    (x,), y = drawn((N, 40), device=device), torch.arange(N, device=device) % 3

    def step():
        model.zero_grad()
        loss = elbo_loss(model, x, y, batch_weight=0.1, num_samples=T, seed=0).loss
        loss.backward()
        return [loss, *(p.grad for p in model.parameters())]

    expected = step()
    with torch.autocast(x.device.type, torch.bfloat16):
        assert layers[0](x).dtype == torch.bfloat16
        actual = step()
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype and (a - e).abs().max() < 0.1 * e.abs().max()


@pytest.mark.parametrize("estimator", ["exact", "local"])
def test_a_bayesian_layer_gives_what_a_linear_one_gives(estimator, device):
    """In train(), in eval(), in replicas: the dtype of autocast, and the numbers of the op."""
    layer = BayesLinear(40, C, rho_init=-3.0, estimator=estimator, device=device)
    (x,) = drawn((N, 40), device=device)
    expected = {}
    with replicas(layer, T, seed=0):
        expected["replicas"] = layer(x.bfloat16())
    torch.manual_seed(1)
    expected["train"] = layer(x.bfloat16())
    with torch.autocast(x.device.type, torch.bfloat16):
        torch.manual_seed(1)
        assert torch.equal(layer(x), expected["train"])
        with replicas(layer, T, seed=0):
            assert torch.equal(layer(x), expected["replicas"])
        kept = predict(layer, x, likelihood="gaussian", num_samples=T, seed=0, keep_samples=True)
        assert torch.equal(kept.samples.flatten(0, 1), expected["replicas"])
        assert layer.eval()(x).dtype == torch.bfloat16
        assert layer.double().train()(x.double()).dtype == torch.float64


def test_a_bayesian_layer_around_a_linear_one_is_that_in_eval(device):
    linear = torch.nn.Linear(40, C, device=device).eval()
    (x,) = drawn((N, 40), device=device)
    with torch.autocast(x.device.type, torch.bfloat16):
        expected = linear(x)
        assert torch.equal(to_bayesian(linear)(x), expected)
        drawn_once = to_bayesian(linear, rho_init=-40.0).train()(x)  # of no spread
    assert drawn_once.dtype == expected.dtype
    assert (drawn_once - expected).abs().max() <= 0.02 * expected.abs().max()


EVENTS = []


class Watched(torch.nn.Module):
    """No chain; tells whether its forwards take gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30)
        self.last = BayesLinear(30, 3, rho_init=-1.0)

    def forward(self, x):
        EVENTS.append(torch.is_grad_enabled())
        return self.last(self.norm(self.first(x)).relu())


def test_no_forward_with_gradients_finds_what_autocast_has_cast_without(monkeypatch, device):
    """Older torch would give it, or a trial's comparison of gradients, the casts of a trial, and no
    gradients to the weights."""
    clear, model = torch.clear_autocast_cache, bnuq.convert(Watched()).to(device)
    bnuq.freeze(model)
    (x,), y = drawn((N, 40), device=device), torch.arange(N, device=device) % 3
    bnuq.collect(model, [x, x + 1, x - 1], progress=False)
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: (EVENTS.append("clear"), clear()))
    options = {"likelihood": "categorical", "num_samples": 4, "seed": 0}

    def in_replicas():
        with replicas(model, 4, seed=0):
            return model(x).float().sum()

    def after_predict():
        predict(model, x, **options)
        return model(x).float().sum()

    def after_errors():
        with pytest.raises(TypeError, match="output_fn"):
            predict(model, x, output_fn=lambda z: [], **options)
        return model(x).float().sum()

    def step():
        return elbo_loss(model, x, y, batch_weight=0.1, num_samples=4).loss

    for loss in (in_replicas, after_predict, after_errors, step, step, in_replicas):
        model.zero_grad()
        EVENTS.clear()
        with torch.autocast(x.device.type, torch.bfloat16):
            loss().backward()
        without = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
        assert not without, loss
        assert {True, False} <= {*EVENTS} and (False, True) not in pairwise(EVENTS)
        with torch.no_grad():
            model.first.weight.mul_(1.01)


class Recurrent(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.layer = torch.nn.BatchNorm1d(8), kind(8, 5, batch_first=True)
        self.last = torch.nn.Linear(5, 3)

    def forward(self, x):
        h = self.norm(x.view(-1, 8)).view(-1, 5, 8)
        return self.last(self.layer(h)[0][:, -1])


@pytest.mark.parametrize("kind", [torch.nn.GRU, torch.nn.LSTM, torch.nn.RNN])
def test_recurrent_layers_in_inference_mode(kind):
    """A dispatch mode of torch's has autocast pass them by there."""
    (x,) = drawn((N, 40), device="cpu")
    model = bnuq.convert(Recurrent(kind)).eval()
    bnuq.collect(model, [x, x + 1, x - 1], progress=False)
    options = {"likelihood": "gaussian", "num_samples": 3, "seed": 0, "keep_samples": True}
    with torch.autocast("cpu", torch.bfloat16):
        expected = predict(copy.deepcopy(model), x, strategy="loop", **options)
        with torch.inference_mode():
            found = predict(model, x, strategy="loop", **options)
            assert bnuq.doctor(model, x).covered == 1
    torch.testing.assert_close(found.samples, expected.samples)


class Caching(torch.nn.Module):
    """Writes into what a forward in inference mode has made."""

    def __init__(self):
        super().__init__()
        self.norm, self.cache = torch.nn.BatchNorm1d(40), None

    def forward(self, x):
        if self.cache is None:
            self.cache = torch.zeros(40)
        return self.norm(x) + self.cache.zero_().add_(1)


def test_what_inference_mode_has_made_is_written_in_it():
    (x,) = drawn((N, 40), device="cpu")
    model = bnuq.convert(Caching()).eval()
    bnuq.collect(model, [x, x + 1, x - 1], progress=False)
    model.cache = None
    with torch.inference_mode():
        model(x)
        pred = predict(model, x, likelihood="gaussian", num_samples=3, seed=0)
    assert pred.mean.shape == x.shape
