"""Predictions of chains, which fold without a trial, against the loop."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from zoo import Wrapped

import bnuq_ext as bnuq
from bnuq_ext import chain
from bnuq_ext.chain_folding import is_stochastic_chain
from bnuq_ext.state import modules_of

N, D, T = 7, 6, 5


def mlp(*between, width=9):
    return nn.Sequential(
        nn.Linear(D, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        *between,
        nn.Linear(width, 4),
    )


def convolutional(dim):
    kind = {n: getattr(nn, f"{n}{dim}d") for n in ("Conv", "BatchNorm", "MaxPool", "AvgPool")}
    return nn.Sequential(
        kind["Conv"](2, 4, 3, padding=1),
        kind["BatchNorm"](4),
        nn.ReLU(inplace=True),
        kind["MaxPool"](2),
        kind["Conv"](4, 5, 1),
        kind["AvgPool"](2),
        kind["BatchNorm"](5),
        nn.Flatten(),
        nn.Linear(5, 4),
    )


class Stack(nn.Sequential):
    pass


MODELS = {
    "MLP": lambda: mlp(),
    "deep": lambda: mlp(nn.Linear(9, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Dropout(0.5)),
    "another activation": lambda: mlp(nn.Linear(9, 9), nn.BatchNorm1d(9), nn.Tanh()),
    "at the end": lambda: nn.Sequential(mlp(), nn.BatchNorm1d(4)),
    "ReLU twice": lambda: mlp(nn.ReLU()),
    "first": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm1d(D), nn.ReLU(), mlp()),
    "nested": lambda: Stack(
        Stack(nn.Linear(D, D), nn.BatchNorm1d(D)), nn.ReLU(), nn.Identity(), mlp()
    ),
    "no parameters": lambda: nn.Sequential(
        nn.BatchNorm1d(D, affine=False), nn.ReLU(), nn.Linear(D, 3)
    ),
    "Bayesian": lambda: mlp(bnuq.BayesLinear(9, 9), nn.BatchNorm1d(9), nn.LayerNorm(9), nn.ReLU()),
    "weights first": lambda: nn.Sequential(bnuq.BayesLinear(D, D), nn.ReLU(), mlp()),
    "1d": lambda: convolutional(1),
    "2d": lambda: convolutional(2),
    "3d": lambda: convolutional(3),
}
ELEMENTWISE = chain._BY_ROW - {bnuq.BayesLinear, nn.Linear, nn.Dropout, nn.Identity}
SAMPLERS = ("bank", "joint", "lognormal", "normal")


def prepared(name):
    """A converted model with a bank, and an input."""
    torch.manual_seed(1)
    dim = int(name[0]) if name[0].isdigit() else None
    shape = (2, *[4] * dim) if dim else (D,)
    if dim:
        shape = (2, *[4] * dim)
    model = bnuq.convert(MODELS[name]())
    bnuq.collect(model, [torch.randn(8, *shape) for _ in range(6)], num_batches=6, progress=False)
    return model, torch.randn(N, *shape)


def predicted(model, x, **options):
    options = {
        "likelihood": "categorical",
        "num_samples": T,
        "seed": 3,
        "keep_samples": True,
    } | options
    return bnuq.predict(model, x, **options)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("name", MODELS)
def test_gives_what_the_loop_gives(name, sampler, no_trials):
    model, x = prepared(name)
    given, state = x.clone(), {n: v.clone() for n, v in model.state_dict().items()}
    flags = [m.training for m in model.modules()]
    loop = predicted(model, x, sampler=sampler, strategy="loop")
    for options in ({}, {"strategy": "folded"}, {"chunk": 2}, {"chunk": 4, "progress": True}):
        pred = predicted(model, x, sampler=sampler, **options)
        torch.testing.assert_close(pred.samples, loop.samples, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(pred.mean, loop.mean, rtol=1e-5, atol=1e-6)
        assert sampler != "bank" or torch.equal(pred.snapshots, loop.snapshots)
    assert loop.variance.max() > 0
    assert torch.equal(x, given) and flags == [m.training for m in model.modules()]
    assert all(torch.equal(v, state[n]) for n, v in model.state_dict().items())


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE, key=lambda kind: kind.__name__))
def test_elementwise_layers(kind, no_trials):
    """And so does a row of the input by itself."""
    layer = kind(0.1, -0.2) if kind is nn.Threshold else kind()
    model = bnuq.convert(mlp(layer))
    bnuq.collect(model, [torch.randn(8, D) for _ in range(6)], num_batches=6, progress=False)
    x = torch.randn(N, D)
    pred, loop = predicted(model, x), predicted(model, x, strategy="loop")
    torch.testing.assert_close(pred.samples, loop.samples, rtol=1e-5, atol=1e-5)
    alone = predicted(model, x[2:3], strategy="loop")
    torch.testing.assert_close(alone.samples, loop.samples[:, 2:3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("name", MODELS)
def test_batches_of_a_loader(name, sampler, no_trials):
    model, x = prepared(name)
    batches = [(x[:4], 0), (x[4:5], 1), {"x": x[5:]}]
    loop = predicted(model, x, sampler=sampler, strategy="loop")
    for options in ({}, {"strategy": "folded"}, {"chunk": 2}):
        pred = predicted(model, batches, sampler=sampler, **options)
        torch.testing.assert_close(pred.samples, loop.samples, rtol=1e-5, atol=1e-5)
        assert sampler != "bank" or torch.equal(pred.snapshots, loop.snapshots)
    torch.manual_seed(5)
    drawn = predicted(model, batches, sampler=sampler, seed=None)
    torch.manual_seed(5)
    again = predicted(model, x, sampler=sampler, seed=None)
    torch.testing.assert_close(drawn.samples, again.samples, rtol=1e-5, atol=1e-5)


def test_batches_of_a_model_that_mixes_rows():
    model = bnuq.convert(mlp(nn.Softmax(0)))
    data = [torch.randn(8, D) for _ in range(6)]
    bnuq.collect(model, data, num_batches=6, progress=False)
    pred, loop = (predicted(model, data, strategy=s) for s in ("auto", "loop"))
    torch.testing.assert_close(pred.samples, loop.samples)


def test_second_half():
    model, x = prepared("deep")
    whole = predicted(model, x, num_samples=6)
    half = predicted(model, x, num_samples=3, first_replica=3)
    torch.testing.assert_close(half.samples, whole.samples[3:])
    assert torch.equal(half.snapshots, whole.snapshots[3:])


def test_sixteen_bits_and_autocast():
    model, x = prepared("deep")
    for options in (dict(dtype=torch.bfloat16), dict(dtype=torch.float16)):
        with torch.autocast("cpu", **options):
            pred, loop = predicted(model, x), predicted(model, x, strategy="loop")
        torch.testing.assert_close(pred.samples, loop.samples, rtol=2e-2, atol=2e-2)
    model, x = model.double(), x.double()
    pred, loop = predicted(model, x), predicted(model, x, strategy="loop")
    torch.testing.assert_close(pred.samples, loop.samples, rtol=1e-12, atol=1e-12)


class Own(nn.Sequential):
    def forward(self, x):
        return super().forward(x - x.mean(0))


class Backwards(nn.Sequential):
    def __iter__(self):
        return reversed(list(super().__iter__()))


def hooked(model):
    model[0].register_forward_hook(lambda module, args, y: y - y.mean(0))
    return model


def overridden(model):
    model[2].forward = lambda x: x - x.mean(0)
    return model


def shared(model):
    return nn.Sequential(model, model[2])


def parent(kind):
    """A layer with a module that it does not call, beside one that is called twice."""
    twice, layer = nn.ReLU(), kind(9, 9)
    layer.extra = nn.Identity()
    return mlp(twice, layer, twice)


class Called(nn.Sequential):
    def _call_impl(self, x):
        return super()._call_impl(x - x.mean(0))


OTHERS = {
    "a layer with a module": lambda: parent(nn.Linear),
    "a Bayesian layer with one": lambda: parent(bnuq.BayesLinear),
    "its own call": lambda: Called(nn.Linear(D, 9), mlp()),
    "its own forward": lambda: Own(nn.Linear(D, 9), mlp(), nn.Identity()),
    "its own order": lambda: Backwards(nn.Linear(D, 9), nn.BatchNorm1d(D)),
    "a hook": lambda: hooked(mlp()),
    "a forward of its own": lambda: overridden(mlp()),
    "a layer in two places": lambda: shared(mlp()),
    "a softmax over rows": lambda: mlp(nn.Softmax(0)),
    "flattened otherwise": lambda: mlp(nn.Flatten(0)),
    "a convolution of a row": lambda: nn.Sequential(nn.Conv1d(N, N, 1), mlp()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_no_chains(name):
    model = bnuq.convert(OTHERS[name]())
    assert not is_stochastic_chain(modules_of(model), torch.randn(N, D))


@pytest.mark.parametrize("indices", [True, False])
def test_indices_are_no_rows(indices):
    pool = nn.MaxPool1d(2, return_indices=indices)
    model = bnuq.convert(nn.Sequential(nn.BatchNorm1d(3), pool))
    x = torch.randn(N, 3, 4)
    assert is_stochastic_chain(modules_of(model), x) != indices
    assert not is_stochastic_chain(modules_of(model), x[..., 0])


class Scaled(torch.Tensor):
    """Weights whose product rounds all rows by one scale, as quantised ones may."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is not nn.functional.linear:
            return super().__torch_function__(func, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            x, scale = args[0], args[0].abs().max() / 7
            return func((x / scale).round() * scale, args[1].as_subclass(torch.Tensor), *args[2:])


def assert_goes_as_the_loop(model, x):
    pred, loop = predicted(model, x), predicted(model, x, strategy="loop")
    torch.testing.assert_close(pred.samples, loop.samples, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="for a model that does not fold"):
        predicted(model, x, strategy="folded")


def test_weights_that_are_tensors_of_their_own_kind():
    model, x = prepared("MLP")
    for layer in (model[0], model[3]):
        weight = layer.weight.detach().as_subclass(Scaled)
        layer.weight = nn.Parameter(weight, requires_grad=False)
    assert_goes_as_the_loop(model, x)
    assert is_stochastic_chain(modules_of(prepared("MLP")[0]), x)
    assert not is_stochastic_chain(modules_of(prepared("MLP")[0]), x.as_subclass(Scaled))
    model, _ = prepared("MLP")
    model[1].running_mean = model[1].running_mean.as_subclass(Scaled)
    assert not is_stochastic_chain(modules_of(model), x)
    with FakeTensorMode():
        assert is_stochastic_chain(modules_of(bnuq.convert(mlp(), inplace=True)), torch.empty(N, D))


def test_a_forward_that_all_sequences_are_given(monkeypatch):
    forward = nn.Sequential.forward
    monkeypatch.setattr(nn.Sequential, "forward", lambda self, x: forward(self, x - x.mean(0)))
    for name in ("MLP", "nested"):
        assert not is_stochastic_chain(modules_of(prepared(name)[0]), torch.randn(N, D))


def test_a_forward_that_a_class_is_given(monkeypatch):
    model, x = prepared("MLP")
    forward = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: forward(self, x - x.mean(0)))
    assert_goes_as_the_loop(model, x)


def test_hooks_of_all_modules_and_odd_inputs():
    modules, x = modules_of(bnuq.convert(mlp())), torch.randn(N, D)
    assert is_stochastic_chain(modules, x)
    for other in (x[0], x[:0], (x,), {"input": x}, [x]):
        assert not is_stochastic_chain(modules, other)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, y: y)
    assert not is_stochastic_chain(modules, x)
    handle.remove()
    assert is_stochastic_chain(modules, x)


def test_a_new_bank_is_used():
    model, x = prepared("MLP")
    first = predicted(model, x)
    bnuq.collect(model, [torch.randn(8, D) * 3 for _ in range(6)], num_batches=6, progress=False)
    second = predicted(model, x)
    torch.testing.assert_close(second.samples, predicted(model, x, strategy="loop").samples)
    assert not torch.allclose(first.samples, second.samples)
    model[1].bank.mean["1"][:] += 1
    torch.testing.assert_close(
        predicted(model, x).samples, predicted(model, x, strategy="loop").samples
    )
    model[3].weight.data = model[3].weight.data * 2  # and weights, however they change
    torch.testing.assert_close(
        predicted(model, x).samples, predicted(model, x, strategy="loop").samples
    )


def test_calls_of_the_bank_are_asked_for():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(D)

        def forward(self, x):
            return self.norm(self.norm(x) + 1)

    twice = bnuq.convert(Twice())
    bank = bnuq.collect(twice, [torch.randn(8, D) for _ in range(4)], num_batches=4, progress=False)
    model = nn.Sequential()
    model.add_module("norm", twice.norm)
    bnuq.attach(model, bank)
    with pytest.raises(ValueError, match="be called as often as when the bank was collected"):
        predicted(model, torch.randn(N, D))


def test_errors_are_the_models_own_and_move_nothing():
    model, x = prepared("MLP")
    before = torch.get_rng_state()
    for strategy in ("auto", "folded"):
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
            predicted(model, x[:, 1:], strategy=strategy, seed=None)
        with pytest.raises(ValueError, match="expected 2D or 3D input"):
            predicted(model, x.view(N, 1, 1, D), strategy=strategy, seed=None)
    assert torch.equal(before, torch.get_rng_state())


def test_sixteen_threads():
    model, x = prepared("deep")
    expected = predicted(model, x).samples
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda _: predicted(model, x).samples, range(64)))
    assert all(torch.equal(samples, expected) for samples in found)


def test_copied_layers_have_one_name():
    block, x = bnuq.convert(mlp()), torch.randn(N, D)
    bnuq.collect(block, [torch.randn(8, D) for _ in range(6)], num_batches=6, progress=False)
    model = nn.Sequential(*block[:3], nn.Linear(9, D), copy.copy(block[0]), copy.copy(block[1]))
    for strategy in ("auto", "folded", "loop"):
        with pytest.raises(ValueError, match="statistics of its own in each layer, got the same"):
            predicted(model, x, strategy=strategy)


@pytest.mark.parametrize("strategy", ["auto", "folded", "loop"])
def test_a_part_whose_layers_have_each_others_names(strategy):
    """Batch norm has the name "1" in the bank of the whole, the Bayesian layer in the part."""
    whole = nn.Sequential(nn.Identity(), nn.BatchNorm1d(D), bnuq.BayesLinear(D, 4, rho_init=-1.0))
    whole = bnuq.convert(whole)
    bnuq.collect(whole, [torch.randn(8, D) for _ in range(6)], num_batches=6, progress=False)
    part, x = nn.Sequential(*list(whole)[1:]), torch.randn(N, D)
    expected = predicted(Wrapped(part), x, strategy="loop")
    found = predicted(part, x, strategy=strategy)
    torch.testing.assert_close(found.samples, expected.samples, rtol=1e-5, atol=1e-5)
