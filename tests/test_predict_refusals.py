"""What predict refuses and what it warns of."""

import copy
import math
import pickle
import warnings
from collections import OrderedDict

import pytest
import torch
from coupled import BatchAttention, D, FarNeighbours, Norms
from predicting import DATA, X, equal, network, predict
from torch import nn

import bnuq_ext as bnuq


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"likelihood": "poisson"}, ValueError, "likelihood must be one of categorical, gaussian, got 'poisson'"),
        ({"num_samples": 0}, ValueError, "num_samples must be at least 1, got 0"),
        ({"num_samples": 2.0}, TypeError, "num_samples must be an integer, got 2.0"),
        ({"first_replica": -1}, ValueError, "first_replica must be at least 0, got -1"),
        ({"num_samples": 2**63 + 1}, ValueError, r"num_samples must be at most 2\^63, got 9223372036854775809"),
        ({"first_replica": 2**63}, ValueError, "first_replica must be at most 2.63 - "),
        ({"sampler": "mc"}, ValueError, "sampler must be one of bank, batch, joint, lognormal, normal, got 'mc'"),
        ({"seed": 2**63}, ValueError, r"seed must lie in \[-2\^63, 2\^63\), got 9223372036854775808"),
        ({"seed": -(2**63) - 1}, ValueError, r"seed must lie in \[-2\^63, 2\^63\), got -9223372036854775809"),
        ({"seed": 0.5}, TypeError, "seed must be an integer, got 0.5"),
        ({"noise_var": 0.1}, ValueError, 'noise_var must be None with likelihood "categorical", got 0.1'),
        ({"noise_var": -0.1, "likelihood": "gaussian"}, ValueError, "noise_var must be finite and not negative"),
        ({"noise_var": "a", "likelihood": "gaussian"}, TypeError, "noise_var must be a number or a tensor, got 'a'"),
        ({"noise_var": True, "likelihood": "gaussian"}, TypeError, "noise_var must be a number or a tensor, got True"),
        ({"sampler": "joint", "batch_size": [8]}, TypeError, r"batch_size must be an integer, got \[8\]"),
        ({"noise_var": torch.tensor([-0.1]), "likelihood": "gaussian"}, ValueError, "noise_var must be finite and not"),
        ({"noise_var": torch.tensor([math.inf]), "likelihood": "gaussian"}, ValueError, "noise_var must be finite and not"),
        ({"noise_var": torch.tensor([math.nan]), "likelihood": "gaussian"}, ValueError, "noise_var must be finite and not"),
        (
            {"noise_var": torch.ones(4), "likelihood": "gaussian"},
            ValueError,
            r"noise_var must broadcast to the shape \[9, 5\] of the mean, got \[4\]",
        ),
        (
            {"noise_var": torch.ones(2, 9, 5), "likelihood": "gaussian"},
            ValueError,
            r"noise_var must broadcast to the shape \[9, 5\] of the mean, got \[2, 9, 5\]",
        ),
        ({"loader": [X]}, ValueError, 'loader must be given with sampler "batch" and no other, got one'),
        ({"sampler": "batch"}, ValueError, 'loader must be given with sampler "batch" and no other, got none'),
        ({"sampler": "batch", "loader": X}, TypeError, "loader must be a DataLoader or an iterable of batches, got Tensor"),
        (
            {"sampler": "batch", "query": "in", "loader": torch.utils.data.TensorDataset(X)},
            TypeError,
            "loader must be a DataLoader or an iterable of batches, got TensorDataset",
        ),
        ({"sampler": "batch", "loader": "abc"}, TypeError, "loader must be a DataLoader or an iterable of batches, got str"),
        ({"sampler": "batch", "loader": []}, ValueError, "loader must hold a batch with two finite values a channel, got 0"),
        ({"batch_size": 16}, ValueError, 'batch_size must be None with sampler "bank", got 16'),
        ({"strategy": "fast"}, ValueError, "strategy must be one of auto, folded, loop, got 'fast'"),
        ({"chunk": 0}, ValueError, "chunk must be at least 1, got 0"),
        ({"chunk": "Auto"}, ValueError, "chunk must be \"auto\" or at least 1, got 'Auto'"),
        ({"chunk": 2.0}, TypeError, "chunk must be an integer, got 2.0"),
        ({"output_fn": 3}, TypeError, "output_fn must be callable, got int"),
        ({"x": 3}, TypeError, "x must be a tensor, a tuple, a dict or an iterable of batches, got int"),
        ({"x": X.numpy()}, TypeError, "x must be a tensor, .* or an iterable of batches, got ndarray"),
        ({"seed": torch.tensor(3)}, TypeError, r"seed must be an integer, not a tensor, got 3"),
        ({"x": []}, ValueError, "x must yield at least 1 batch, got none"),
        ({"x": X.to("meta")}, ValueError, "x must be on the model's device cpu, got meta"),
        ({"x": (1,)}, ValueError, r"an input must hold a tensor with rows \(wrap .*\), got none in tuple of int"),
        ({"x": torch.tensor(3.0), "strategy": "loop"}, ValueError, r"an input must hold a tensor with rows"),
        ({"x": [{"pixels": X}]}, TypeError, r"a batch must be .*\(a generator or a data set of your own makes it of others\), got dict with keys \['pixels'\]"),
        ({"x": [3]}, TypeError, r"a batch must be .*\(a generator or a data set of your own makes it of others\), got int"),
        ({"output_fn": lambda o: [o]}, TypeError, "output_fn's result must be a tensor, got list"),
        ({"output_fn": lambda o: o.argmax(1)}, TypeError, "output_fn's result must be a floating-point tensor"),
        ({"output_fn": lambda o: o[:, 0]}, ValueError, r"the output must be logits \(N, K, \*\) .* got \[9\]"),
        ({"output_fn": lambda o: o[:, :1]}, ValueError, r"the output must have at least 2 classes .* got \[9, 1\]"),
        ({"output_fn": lambda o: o.mean(), "likelihood": "gaussian"}, ValueError, r"the output must have rows"),
    ],
)  # fmt: skip
def test_rejects(model, options, error, message):
    x = options.pop("x", X)
    with pytest.raises(error, match=f"predict: {message}"):
        predict(model, x, **options)


def test_rejects_a_model_without_numbers(model):
    with pytest.raises(ValueError, match="^predict: model must hold numbers, got meta tensors$"):
        predict(model.to("meta"), X.to("meta"), likelihood="gaussian")


def interrupted(out):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "options, error",
    [
        ({"noise_var": torch.ones(4), "likelihood": "gaussian"}, ValueError),
        ({"x": torch.ones(9, 4)}, RuntimeError),  # torch's: features
        ({"output_fn": lambda o: o.argmax(1)}, TypeError),
        ({"output_fn": interrupted}, KeyboardInterrupt),
    ],
)
def test_an_error_leaves_the_generator_where_it_was(model, options, error):
    state = torch.get_rng_state()
    arguments = {"x": X, "likelihood": "categorical"} | options
    with pytest.raises(error):
        bnuq.predict(model, arguments.pop("x"), **arguments)
    assert torch.equal(torch.get_rng_state(), state)


class Detector(nn.Module):
    """Returns as many rows as its statistics make large."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        h = self.norm(x)
        return h[: int(h.abs().sum() * 100) % 7 + 1]


@pytest.mark.parametrize("keep_samples", [False, True])
def test_outputs_of_different_shapes_are_refused_even_where_they_broadcast(keep_samples):
    model, batches = bnuq.convert(Detector()), torch.randn(8, 9, 4)
    bnuq.collect(model, list(batches), 8, progress=False)
    options = dict(likelihood="gaussian", num_samples=8, seed=0, keep_samples=keep_samples)
    message = r"predict: the output must have the same shape in all replicas .*, got \[\d, 4\] after \[\d, 4\]"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            bnuq.predict(model, batches[0], **options)


def test_a_coupled_model_is_refused_with_how_far_it_is_off():
    torch.manual_seed(0)  # of some weights no row shows
    model, batches = bnuq.convert(BatchAttention()), torch.randn(4, 6, D)
    bnuq.collect(model, list(batches), 4, progress=False)
    options = dict(likelihood="gaussian", num_samples=4, seed=0, strategy="folded")
    message = (
        "that does not fold: the output differs from that of one replica after another, "
        r"by 0\.\d+ of the largest value where 0.0001 may be rounding$"
    )
    with pytest.raises(ValueError, match=message):
        bnuq.predict(model, batches[0], **options)


def test_a_model_that_couples_rows_of_other_replicas_is_refused():
    model, batches = bnuq.convert(FarNeighbours()), torch.randn(4, 6, D)
    bnuq.collect(model, list(batches), 4, progress=False)
    options = dict(likelihood="gaussian", num_samples=4, seed=0, strategy="folded")
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match="that does not fold: where a row lies far out, the output differs",
        ):
            bnuq.predict(model, batches[0], **options)


class Edges(Norms):
    def forward(self, nodes, edges):
        return self.head(self.second(self.first(nodes)[edges]))


def test_an_error_of_the_trial_is_told_as_such():
    model, edges = bnuq.convert(Edges()), torch.tensor([0, 5, 3, 2])
    batches = [(torch.randn(6, D), edges) for _ in range(4)]
    bnuq.collect(model, batches, 4, input_fn=lambda b: b, progress=False)
    options = dict(likelihood="gaussian", num_samples=4, seed=0, strategy="folded")
    with pytest.raises(ValueError, match="does not fold: IndexError in a trial on 3 rows: index 5"):
        bnuq.predict(model, batches[0], **options)


def test_rejects_models(model, flexible):
    with pytest.raises(TypeError, match="predict: model must be a torch.nn.Module, got function"):
        predict(lambda x: x)
    with pytest.raises(
        ValueError, match="got none; run bnuq_ext.convert first, or bnuq_ext.to_bayesian for linear"
    ):
        predict(nn.Linear(3, 3))
    with pytest.raises(
        ValueError, match="predict: model must have a bank, got none; run bnuq_ext.collect"
    ):
        predict(bnuq.convert(network()))
    with pytest.raises(
        TypeError, match="predict: the model's output must be a tensor, got dict; output_fn"
    ):
        predict(flexible, torch.randn(3, 4))


class Calling(nn.Module):
    """Calls its norm as often as it is told."""

    def __init__(self, calls):
        super().__init__()
        self.norm, self.calls = nn.BatchNorm1d(4), calls

    def forward(self, x):
        for _ in range(self.calls):
            x = self.norm(x) * 2 + 1
        return x


@pytest.mark.parametrize("strategy", ["auto", "loop"])
def test_several_calls_have_statistics_each_and_another_number_is_refused(strategy):
    torch.manual_seed(0)
    model = bnuq.convert(Calling(2)).eval()
    bank = bnuq.collect(model, list(torch.randn(30, 16, 4)), 30, progress=False)
    pred = predict(
        model, torch.randn(3, 4), keep_samples=True, strategy=strategy, likelihood="gaussian"
    )
    assert bank.names == ("norm", "norm#1") and pred.mean.isfinite().all()
    for calls, got in ((3, "an additional call"), (1, "1 calls"), (0, "no call")):
        model.calls = calls
        with pytest.raises(ValueError, match=f"predict: .* got {got}"):
            predict(model, torch.randn(3, 4), strategy=strategy, likelihood="gaussian")


class Shortened(nn.Sequential):
    def forward(self, x):
        return super().forward(x) if self.whole else self[0](x)


@pytest.mark.parametrize("strategy", ["auto", "loop"])
@pytest.mark.parametrize("name", ["1", "norm", "norm#a"])
def test_a_layer_that_is_left_out_is_refused_whatever_its_name(name, strategy):
    torch.manual_seed(0)
    model = Shortened()
    model.add_module("0", nn.BatchNorm1d(4))
    model.add_module(name, nn.BatchNorm1d(4))
    model = bnuq.convert(model).eval()
    model.whole = True
    bnuq.collect(model, list(torch.randn(6, 16, 4)), 6, progress=False)
    predict(model, torch.randn(3, 4), strategy=strategy)
    model.whole = False
    with pytest.raises(ValueError, match=f"predict: layer '{name}' must be .* got 0 calls"):
        predict(model, torch.randn(3, 4), strategy=strategy)


class Mixed(nn.Module):
    """Besides its norm it calls Bayesian layers."""

    def __init__(self):
        super().__init__()
        self.norm, self.calls = nn.BatchNorm1d(4), 2
        self.layers = nn.Sequential(bnuq.BayesLinear(4, 4), bnuq.BayesLinear(4, 3))

    def forward(self, x):
        for _ in range(self.calls):
            x = self.norm(x)
        return self.layers(x)


@pytest.mark.parametrize("strategy", ["auto", "loop"])
def test_calls_of_other_layers_make_up_for_none(strategy):
    torch.manual_seed(0)
    model = bnuq.convert(Mixed()).eval()
    bnuq.collect(model, list(torch.randn(6, 16, 4)), 6, progress=False)
    predict(model, torch.randn(3, 4), strategy=strategy)
    model.calls = 1
    with pytest.raises(ValueError, match="predict: layer 'norm' must be .* got 1 calls"):
        predict(model, torch.randn(3, 4), strategy=strategy)


class Functional(nn.Module):
    """Half of its batch norm is a function."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        mean, var = torch.zeros(4), torch.ones(4)
        return nn.functional.batch_norm(self.norm(x), mean, var)


def test_the_first_run_warns_of_batch_norm_that_is_not_covered():
    model = bnuq.convert(Functional()).eval()
    bnuq.collect(model, list(torch.randn(10, 16, 4)), 10, progress=False)
    with pytest.warns(
        UserWarning, match="predict: 1 batch-norm calls of the forward belong to no stochastic"
    ):
        predict(model, torch.randn(3, 4))
    predict(model, torch.randn(5, 4))
    bnuq.collect(model, list(torch.randn(10, 16, 4)), 10, progress=False)
    predict(model, torch.randn(5, 4))
    with warnings.catch_warnings(record=True) as more:
        warnings.simplefilter("always")
        predict(model, torch.randn(7, 4))
    assert not more


def test_batch_norm_that_comes_into_a_model_later_is_warned_of_too():
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)]
    model = bnuq.convert(nn.Sequential(*parts[:2])).eval()
    bnuq.collect(model, list(torch.randn(10, 16, 4)), 10, progress=False)
    predict(model, torch.randn(3, 4))
    model[0] = parts[2].eval()
    with pytest.warns(UserWarning) as caught:
        predict(model, torch.randn(3, 4))
    texts = "no longer has the layers 0.1 of", "1 batch-norm calls of the forward belong to no"
    assert [text in str(w.message) for w, text in zip(caught, texts, strict=True)] == [True] * 2
    predict(model, torch.randn(5, 4))


@pytest.mark.parametrize("strategy", ["auto", "folded", "loop"])
def test_that_warning_may_be_an_error(strategy):
    model = bnuq.convert(Functional()).eval()
    bnuq.collect(model, list(torch.randn(10, 16, 4)), 10, progress=False)
    for _ in range(2):
        with pytest.raises(UserWarning, match="belong to no stochastic layer"):
            predict(model, torch.randn(3, 4), strategy=strategy)


def test_it_is_said_once_whatever_the_weights_are():
    model = bnuq.convert(Functional()).eval()
    bnuq.collect(model, list(torch.randn(10, 16, 4)), 10, progress=False)
    with pytest.warns(UserWarning, match="belong to no stochastic layer"):
        predict(model, torch.randn(3, 4))
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    predict(model, torch.randn(3, 4))
    model.other = nn.Identity()  # which makes another model of it
    with pytest.warns(UserWarning, match="belong to no stochastic layer"):
        predict(model, torch.randn(3, 4))


def test_layers_left_out_on_purpose_are_no_reason_to_warn():
    torch.manual_seed(0)
    model = bnuq.convert(network(), filter_fn=lambda name, module: name == "5").eval()
    bnuq.collect(model, torch.utils.data.TensorDataset(DATA), 8, batch_size=16, progress=False)
    pred = predict(model, keep_samples=True)
    assert list(model[5].bank.names) == ["5"]
    equal(predict(model, keep_samples=True, strategy="loop"), pred)


@pytest.mark.parametrize("x", [X, [X, X]], ids=["tensor", "loader"])
def test_progress_shows_a_bar(model, x, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    predict(model, x, progress=True)
    assert "predict" in capsys.readouterr().err
    predict(model, x)
    assert capsys.readouterr().err == ""


def test_the_last_replica_of_all(model):
    predict(model, first_replica=2**63 - 2, num_samples=2)
    with pytest.raises(ValueError, match=r"first_replica must be at most 2\^63 - 3"):
        predict(model, first_replica=2**63 - 2, num_samples=3)


@pytest.mark.parametrize(
    "sampler, name", [("bank", "mean"), ("joint", "mean"), ("normal", "params")]
)
def test_other_channels_than_those_of_the_bank(sampler, name):
    torch.manual_seed(0)
    model = bnuq.convert(nn.Sequential(nn.Identity(), nn.BatchNorm1d(5)))
    bnuq.collect(model, [torch.randn(9, 5) for _ in range(5)], progress=False)
    message = f"x must have the 5 channels of {name}, got 4"
    with pytest.raises(ValueError, match=message):
        predict(model, torch.randn(6, 4), likelihood="gaussian", sampler=sampler)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.second(self.first(x).relu())


@pytest.mark.parametrize(
    "copied", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_layers_that_are_gone_since_the_bank_was_collected_are_told_of(copied):
    model = bnuq.convert(Two())
    bnuq.collect(model, list(torch.randn(4, 10, 4)), 4, progress=False)
    model = copied(model)
    options = {"likelihood": "gaussian", "num_samples": 2, "seed": 0}
    part = nn.Sequential(OrderedDict(first=model.first))
    bnuq.predict(part, torch.randn(3, 4), **options)  # with the bank of the whole
    model.first = nn.Identity()
    text = "^predict: the model no longer has the layers first of its bank as stochastic ones;"
    with pytest.warns(UserWarning, match=text):
        bnuq.predict(model, torch.randn(3, 4), **options)
    (told,) = [t for t in bnuq.doctor(model, torch.randn(3, 4)).warnings if "no longer" in t]
    assert told.startswith("the model no longer has the layers first of its bank")
    assert not [name for m in bnuq.revert(model).modules() for name in vars(m) if "bnuq" in name]
