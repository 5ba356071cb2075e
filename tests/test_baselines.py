"""Plug-in batch norm, MC dropout and deep ensembles as predictions,
alone and with drawn statistics."""

import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from predicting import DATA, X, equal, make_flexible, network, predict
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bnuq_ext as bnuq
from bnuq_ext import reference
from bnuq_ext.dropout import Dropping
from bnuq_ext.ops import new_seed, snapshot_indices

OPTIONS = {"likelihood": "categorical", "keep_samples": True}


def plain(model):
    return bnuq.revert(model).eval()


def torch_dropout(model, x, seed, replicas):
    """Passes of torch's own dropout layers in train(), everything else in eval()."""
    model = copy.deepcopy(model).eval()
    for module in model.modules():
        module.training = isinstance(module, nn.modules.dropout._DropoutNd)
    outputs = []
    with torch.random.fork_rng(), torch.no_grad():
        for t in replicas:
            torch.manual_seed(int(snapshot_indices(new_seed(seed, t), 2**31 - 1, 1)))
            outputs.append(model(x))
    return torch.stack(outputs)


def check_statistics(pred):
    """The moments of a prediction are those of its samples."""
    mean, variance, entropy, expected = reference.predictive_statistics(pred.samples.double())
    torch.testing.assert_close(pred.mean.double(), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pred.variance.double(), variance, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(pred.entropy.double(), entropy, rtol=1e-5, atol=1e-6)
    information = (entropy - expected).clamp_min(0)
    torch.testing.assert_close(pred.mutual_information.double(), information, rtol=1e-3, atol=2e-5)


def test_plug_in_is_the_model_in_eval(model):
    for given in (model, plain(model), torch.compile(model, backend="eager")):
        pred = bnuq.plug_in(given, X, **OPTIONS)
        with torch.no_grad():
            expected = plain(model)(X)
        torch.testing.assert_close(pred.samples[0], expected, rtol=1e-6, atol=1e-6)
        check_statistics(pred)
        assert pred.num_samples == 1 and pred.mutual_information.max() == 0


def test_plug_in_draws_nothing_among_replicas_of_the_same_model(model):
    expected = bnuq.plug_in(model, X, **OPTIONS)
    with bnuq.replicas(model, 4, seed=0):
        equal(bnuq.plug_in(model, X, **OPTIONS), expected)
        equal(bnuq.ensemble([model], X, **OPTIONS), expected)


def test_plug_in_of_a_regression(model):
    pred = bnuq.plug_in(model, X, likelihood="gaussian", noise_var=0.5)
    with torch.no_grad():
        torch.testing.assert_close(pred.mean, plain(model)(X), rtol=1e-5, atol=1e-6)
    assert torch.equal(pred.variance, torch.zeros(9, 5)) and pred.samples is None
    torch.testing.assert_close(pred.total_variance, torch.full((9, 5), 0.5))


def test_plug_in_with_the_statistics_of_all_the_data(model):
    with pytest.warns(UserWarning, match="more than a tenth"):
        bnuq.collect(model, TensorDataset(DATA), 1, batch_size=len(DATA), progress=False)
    pred = predict(model, num_samples=1, keep_samples=True)
    whole = plain(model)
    for module in whole.modules():
        module.training = isinstance(module, nn.BatchNorm2d)
        module.momentum = 1.0
    with torch.no_grad():
        whole(DATA)
        for module in whole.modules():
            if isinstance(module, nn.BatchNorm2d):  # torch keeps the unbiased variance
                n = DATA.shape[0] * (16 if module.num_features == 6 else 4)
                module.running_var.mul_((n - 1) / n)
        expected = whole.eval()(X)
    torch.testing.assert_close(pred.samples[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("converted", [False, True])
def test_mc_dropout_is_torchs_dropout_with_the_seeds_of_the_replicas(model, converted):
    given = model if converted else plain(model)
    pred = bnuq.mc_dropout(given, X, num_samples=6, seed=3, first_replica=2, **OPTIONS)
    expected = torch_dropout(plain(model), X, 3, range(2, 8))
    torch.testing.assert_close(pred.samples, expected, rtol=1e-6, atol=1e-6)
    check_statistics(pred)
    assert len(pred.samples.unique(dim=0)) == 6 and pred.snapshots is None


@pytest.mark.parametrize("sampler", ["bank", "joint", "lognormal", "normal"])
def test_mc_dropout_with_drawn_statistics(model, sampler):
    """Each replica has predict's statistics and the masks of mc_dropout."""
    options = {"num_samples": 4, "seed": 5, "sampler": sampler, **OPTIONS}
    pred = bnuq.mc_dropout(model, X, **options)
    check_statistics(pred)
    model[3].p = 0.0
    statistics = bnuq.predict(model, X, **options)
    with pytest.raises(ValueError, match="mc_dropout: model must call dropout with p above 0"):
        bnuq.mc_dropout(model, X, **options)
    model[3].p = 0.2
    assert (pred.samples - statistics.samples).abs().max() > 1e-2
    if sampler != "bank":
        assert pred.snapshots is None
        return
    assert torch.equal(pred.snapshots, statistics.snapshots)
    net, bank = plain(model), model[1].bank
    for t, s in enumerate(pred.snapshots):
        for name in bank.names:
            net.get_submodule(name).running_mean.copy_(bank.mean[name][s])
            net.get_submodule(name).running_var.copy_(bank.var[name][s])
        expected = torch_dropout(net, X, 5, [t])[0]
        torch.testing.assert_close(pred.samples[t], expected, rtol=1e-4, atol=1e-5)


def test_mc_dropout_is_reproducible_in_parts_and_leaves_generators(model):
    options = {"sampler": "bank", "seed": -7, **OPTIONS}
    state = torch.get_rng_state()
    whole = bnuq.mc_dropout(model, X, num_samples=7, **options)
    torch.rand(3)
    first = bnuq.mc_dropout(model, X, num_samples=3, **options)
    rest = bnuq.mc_dropout(model, X, num_samples=4, first_replica=3, **options)
    assert torch.equal(torch.cat([first.samples, rest.samples]), whole.samples)
    assert torch.equal(torch.cat([first.snapshots, rest.snapshots]), whole.snapshots)
    torch.set_rng_state(state)
    bnuq.mc_dropout(model, X, num_samples=2, **options)
    assert torch.equal(torch.get_rng_state(), state)
    one = bnuq.mc_dropout(model, X, num_samples=2, **OPTIONS)  # without a seed
    other = bnuq.mc_dropout(model, X, num_samples=2, **OPTIONS)
    torch.set_rng_state(state)
    again = bnuq.mc_dropout(model, X, num_samples=2, **OPTIONS)
    assert torch.equal(one.samples, again.samples)
    assert not torch.equal(one.samples, other.samples)


def test_flags_and_buffers_stay_and_do_not_matter(model):
    expected = bnuq.mc_dropout(model, X, num_samples=3, seed=0, **OPTIONS)
    model.train()
    model[4].eval()
    flags = {name: m.training for name, m in model.named_modules()}
    state = copy.deepcopy(model.state_dict())
    pred = bnuq.mc_dropout(model, X, num_samples=3, seed=0, **OPTIONS)
    assert torch.equal(pred.samples, expected.samples)
    equal(bnuq.ensemble([model], X, **OPTIONS), bnuq.plug_in(model, X, **OPTIONS))
    calm = copy.deepcopy(model).eval()
    pair = bnuq.ensemble([calm, model], X, **OPTIONS).samples
    assert torch.equal(pair[0], pair[1]) and torch.equal(
        pair[0], bnuq.plug_in(calm, X, **OPTIONS).samples[0]
    )
    assert {name: m.training for name, m in model.named_modules()} == flags
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    with pytest.raises(RuntimeError):
        bnuq.mc_dropout(model, torch.randn(3, 5, 6, 6), seed=0, **OPTIONS)
    assert {name: m.training for name, m in model.named_modules()} == flags


def test_threads_do_not_meet(model):
    expected = [bnuq.mc_dropout(model, X, num_samples=20, seed=s, **OPTIONS) for s in range(3)]
    plug_in = bnuq.plug_in(model, X, **OPTIONS)

    def work(seed):
        dropped = bnuq.mc_dropout(model, X, num_samples=20, seed=seed, **OPTIONS)
        return dropped, bnuq.plug_in(model, X, **OPTIONS)

    with ThreadPoolExecutor(3) as pool:
        for (dropped, plain), wanted in zip(pool.map(work, range(3)), expected, strict=True):
            assert torch.equal(dropped.samples, wanted.samples)
            equal(plain, plug_in)


@pytest.mark.parametrize(
    "layer, shape",
    [
        (nn.Dropout(0.3), (4, 5)),
        (nn.Dropout(0.3, inplace=True), (4, 5)),
        (nn.Dropout(1.0), (4, 5)),
        (nn.Dropout1d(0.4), (4, 5, 6)),
        (nn.Dropout1d(0.4), (4, 5)),
        (nn.Dropout2d(0.4), (4, 5, 3, 3)),
        (nn.Dropout2d(0.4), (4, 5, 3)),
        (nn.Dropout3d(0.4), (4, 5, 3, 3, 2)),
        (nn.Dropout3d(0.4), (5, 3, 3, 2)),
        (nn.AlphaDropout(0.3), (4, 5)),
        (nn.AlphaDropout(1.0), (4, 5)),
        (nn.FeatureAlphaDropout(0.3), (4, 5, 3)),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:dropout2d. Received a 3D input")  # torch's own
def test_every_dropout_layer_drops_as_torchs(layer, shape):
    x = torch.randn(shape)
    torch.manual_seed(11)
    with torch.no_grad():
        expected = layer.train()(x.clone())
        with Dropping(torch.Generator().manual_seed(11)) as dropping:
            given = x.clone()
            actual = layer.eval()(given)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    assert dropping.calls == 1 and (given is actual) == layer.inplace
    assert layer.p == 1 or not torch.equal(actual, x)
    assert torch.equal(layer(x), x)  # outside, eval is eval


def test_dropout_of_no_probability_is_no_call():
    with Dropping(torch.Generator()) as dropping:
        x = torch.randn(3)
        assert nn.Dropout(0.0)(x) is x and dropping.calls == 0


def members():
    made = []
    for seed in range(3):
        torch.manual_seed(seed)
        model = bnuq.convert(network(dropout=0.2)).eval()
        bnuq.collect(model, TensorDataset(DATA), 12, batch_size=16, progress=False)
        made.append(model)
    return made


def test_an_ensemble_is_its_members():
    models = members()
    pred = bnuq.ensemble(models, X, **OPTIONS)
    with torch.no_grad():
        expected = torch.stack([plain(m)(X) for m in models])
    torch.testing.assert_close(pred.samples, expected, rtol=1e-6, atol=1e-6)
    check_statistics(pred)
    assert pred.num_samples == 3 and pred.mutual_information.max() > 1e-3
    equal(bnuq.ensemble([plain(m) for m in models], X, **OPTIONS), pred)
    equal(bnuq.ensemble(torch.nn.ModuleList(models), X, **OPTIONS), pred)


@pytest.mark.parametrize("strategy", ["auto", "folded", "loop"])
def test_an_ensemble_with_drawn_statistics_is_the_replicas_of_its_members(strategy):
    models = members()
    options = {"num_samples": 5, "first_replica": 2, "strategy": strategy, **OPTIONS}
    pred = bnuq.ensemble(models, X, sampler="joint", seed=8, **options)
    parts = [
        bnuq.predict(m, X, sampler="joint", seed=8 + i, **options) for i, m in enumerate(models)
    ]
    samples = torch.cat([part.samples for part in parts])
    torch.testing.assert_close(pred.samples, samples, rtol=1e-5, atol=1e-6)
    check_statistics(pred)
    assert pred.num_samples == 15 and pred.snapshots is None
    default = bnuq.ensemble(models, X, sampler="bank", likelihood="categorical")
    assert default.num_samples == 96 and default.samples is None
    equal(bnuq.ensemble(models, X, sampler="joint", seed=np.int64(8), **options), pred)
    last = bnuq.ensemble(models, X, sampler="joint", seed=2**63 - 1, **options)
    wrapped = bnuq.predict(models[1], X, sampler="joint", seed=-(2**63), **options)
    torch.testing.assert_close(last.samples[5:10], wrapped.samples, rtol=1e-5, atol=1e-6)


def test_an_ensemble_of_regressions():
    models = members()
    options = {"likelihood": "gaussian", "keep_samples": True, "noise_var": 0.1}
    pred = bnuq.ensemble(models, X, sampler="bank", num_samples=4, seed=0, **options)
    samples = pred.samples.double()
    torch.testing.assert_close(pred.mean.double(), samples.mean(0), rtol=1e-5, atol=1e-6)
    variance = samples.var(0, correction=0)
    torch.testing.assert_close(pred.variance.double(), variance, rtol=1e-5, atol=1e-7)
    assert pred.entropy is None and pred.noise_var == 0.1


def calls(model):
    return {
        "plug_in": lambda x, **o: bnuq.plug_in(model, x, **o),
        "mc_dropout": lambda x, **o: bnuq.mc_dropout(model, x, seed=1, num_samples=3, **o),
        "ensemble": lambda x, **o: bnuq.ensemble(
            [model, model], x, seed=1, sampler="bank", num_samples=3, **o
        ),
    }


@pytest.mark.parametrize("name", ["plug_in", "mc_dropout", "ensemble"])
def test_loaders_tuples_and_dicts(model, name, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    call = calls(model)[name]
    dataset = TensorDataset(DATA[:36], torch.arange(36))
    pred = call(iter(DataLoader(dataset, 9)), progress=True, **OPTIONS)
    assert name in capsys.readouterr().err
    parts = [call(x, **OPTIONS) for x in DATA[:36].split(9)]
    torch.testing.assert_close(pred.samples, torch.cat([p.samples for p in parts], 1))
    torch.testing.assert_close(pred.mean, torch.cat([p.mean for p in parts]))
    assert torch.equal(pred.targets, torch.arange(36))
    equal(call({"input": X}, **OPTIONS), call((X,), **OPTIONS))


def test_outputs_and_inputs_of_several_tensors():
    model, x, scale = make_flexible(), torch.randn(6, 4), torch.rand(6, 1)
    options = {"output_fn": lambda out: out["logits"], **OPTIONS}
    pred = bnuq.plug_in(model, {"x": x, "scale": scale, "flip": True}, **options)
    with torch.no_grad():
        expected = model(x, scale, flip=True)["logits"]
    torch.testing.assert_close(pred.samples[0], expected)


def test_bayesian_layers_are_their_means_or_drawn():
    torch.manual_seed(0)
    net = nn.Sequential(bnuq.BayesLinear(4, 8), nn.ReLU(), bnuq.BayesLinear(8, 3, rho_init=-1.0))
    x = torch.randn(5, 4)
    with torch.no_grad():
        torch.testing.assert_close(bnuq.plug_in(net, x, **OPTIONS).samples[0], net.eval()(x))
    drawn = bnuq.ensemble([net], x, sampler="bank", num_samples=6, seed=2, **OPTIONS)
    expected = bnuq.predict(net, x, num_samples=6, seed=2, **OPTIONS)
    torch.testing.assert_close(drawn.samples, expected.samples)
