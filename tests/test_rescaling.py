"""Banks rescaled to another batch size, against the formula and against batches of that size.

Statistical tests give alpha, n and the effect that they would find; seeds are fixed.
"""

import math

import numpy as np
import pytest
import torch
from drawn import random_bank, sampler, statistics
from predicting import X, equal, make_model, predict
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext import model_cache
from bnuq_ext.moments import Rescaling, fit
from bnuq_ext.ops import new_seed, philox_normal
from bnuq_ext.passes import Pass, running


def test_rescaling_is_the_formula():
    M0, M, N = 32, 64, 1000
    independent = Rescaling.between(M0, M, N, disjoint=0.0)
    assert independent.bank_factor == 1
    assert math.isclose(independent.factor, (M0 / M) * (1 - M / N) / (1 - M0 / N))
    one_pass = Rescaling.between(M0, M, N, disjoint=1.0)
    assert math.isclose(one_pass.factor, (M0 / M) * (1 - M / N))
    assert math.isclose(one_pass.bank_factor, 1 - M0 / N)
    half = Rescaling.between(M0, M, N, disjoint=0.5)
    assert math.isclose(half.factor, (M0 / M) * (1 - M / N) / ((1 - M0 / N) + 0.5 * M0 / N))
    assert Rescaling.between(M0, M0, N, 0.0) == (1.0, 1.0)
    assert Rescaling.between(N, N, N, 0.0) == (0.0, 0.0)


@pytest.mark.parametrize("disjoint", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("M", [8, 64])
def test_samplers_rescale_by_the_bank_s_own_sizes(M, disjoint):
    """Rows, data set and disjoint share of the bank: each gives other variances."""
    bank = random_bank(disjoint=disjoint, batch_size=32, dataset_size=100)
    rescaling = Rescaling.between(32, M, 100, disjoint)
    for family in ("lognormal", "normal"):
        for key, table in sampler(family, bank, M).draw(0, 0, 1).tables.items():
            expected = fit(bank.mean[key], bank.var[key], rescaling).params(family)
            torch.testing.assert_close(table.params, expected.float())
    z = philox_normal(new_seed(3), 0, (5, 12), tag="joint").double()
    for key, (mean, var) in statistics("joint", bank, 5, batch_size=M).items():
        moments = fit(bank.mean[key], bank.var[key], rescaling)
        root = math.sqrt(rescaling.factor / 11)
        expected = moments.mean + root * z @ moments.mean_deviations
        torch.testing.assert_close(mean, expected.float())
        log_spread = moments.log_spread + root * z @ moments.log_deviations
        torch.testing.assert_close(var, (2 * log_spread).exp().float())


@pytest.mark.parametrize("make", [np.array, np.int16, torch.tensor])
def test_batch_sizes_of_any_kind_have_one_sampler(make, monkeypatch):
    model, made = make_model(), []
    original = model_cache.make_sampler
    monkeypatch.setattr(model_cache, "make_sampler", lambda *a: made.append(a) or original(*a))
    sizes = 64, make(64), make(64)
    results = [predict(model, sampler="joint", batch_size=M).mean for M in sizes]
    assert len(made) == 1 and torch.equal(results[0], results[1])
    for M in sizes:
        with bnuq.replicas(model, 3, seed=0, sampler="joint", batch_size=M):
            model(X)
    assert len(made) == 2


@pytest.mark.parametrize("alive", [1, 3, 12])
@pytest.mark.parametrize("disjoint", [0.0, 1.0])
@pytest.mark.parametrize("M0, M", [(16, 8), (16, 64), (200, 100), (200, 300)])
@pytest.mark.parametrize("name", ["joint", "lognormal", "normal"])
def test_a_channel_far_from_the_formulas_stays_in_its_range(name, M0, M, disjoint, alive):
    """Of one alive in few snapshots E[var] is all variance of the std; and where the means spread
    by more than a batch of random rows can, smaller batches had no variance left."""
    bank = random_bank()
    var = {key: value.clone() for key, value in bank.var.items()}
    var["l0"][alive:, 1] = 0
    options = dict(batch_size=M0, dataset_size=400, disjoint=disjoint)
    bank = bnuq.Bank(bank.mean, var, 16, **options)
    drawn = statistics(name, bank, 200, batch_size=M)["l0"][1][:, 1].double()
    expected = var["l0"][:, 1].double().sqrt().mean()
    assert drawn.isfinite().all()
    assert expected / 100 < drawn.sqrt().mean() < expected * 100


@pytest.mark.parametrize(
    "M0, M, share", [(16, 8, 0.05), (16, 10, 0.05), (16, 64, 0.05), (32, 16, 0.02)]
)
def test_stds_of_rare_values_are_those_of_batches_of_that_size(M0, M, share):
    """Ones among zeros, of which many batches have none: 100 features, 64 batches against 2,000.
    The mean of the medians over the features is known to some 2 %; stds as small as a fifth, or
    three times as large, would show."""
    generator = torch.Generator().manual_seed(0)
    data = (torch.rand(2000, 100, generator=generator) < share).double()

    def batches(M, count):
        rows = [torch.randperm(2000, generator=generator)[:M] for _ in range(count)]
        picked = torch.stack([data[row] for row in rows])
        return picked.mean(1), picked.var(1, correction=0)

    moments = fit(*batches(M0, 64), Rescaling.between(M0, M, 2000, 0.0))
    true = batches(M, 2000)[1].sqrt().mean(0)
    by_logarithm = (moments.log_spread + moments.log_spread_std**2 / 2).exp()
    assert 0.85 < (moments.spread / true).median() < 1.2
    # At M0 itself a log-normal's mean is 1.3 to 1.4 times too large.
    assert 1.1 < (by_logarithm / true).median() < 1.6


@pytest.mark.parametrize("disjoint", [0.0, 1.0])
@pytest.mark.parametrize("name", ["joint", "lognormal", "normal"])
def test_no_spread_at_all_with_the_whole_data_set(name, disjoint):
    bank = random_bank(disjoint=disjoint, batch_size=32, dataset_size=400)
    for mean, var in statistics(name, bank, 20, batch_size=400).values():
        assert (mean == mean[0]).all() and (var == var[0]).all()


@pytest.mark.parametrize("name", ["joint", "lognormal", "normal"])
def test_the_banks_own_batch_size_gives_the_banks_own_moments(name):
    bank = random_bank(disjoint=0.0)
    expected, actual = statistics(name, bank, 20), statistics(name, bank, 20, batch_size=16)
    for key in bank.mean:
        for a, e in zip(actual[key], expected[key], strict=True):
            torch.testing.assert_close(a, e)


@pytest.mark.parametrize("disjoint", [0.0, 0.5, 1.0])
def test_at_the_banks_own_batch_size_the_centres_are_the_banks(disjoint):
    bank = random_bank()
    for key in bank.mean:
        mean, std = bank.mean[key].double(), bank.var[key].double().sqrt()
        moments = fit(bank.mean[key], bank.var[key], Rescaling.between(16, 16, 64, disjoint))
        torch.testing.assert_close(moments.mean, mean.mean(0))
        torch.testing.assert_close(moments.spread, std.mean(0))
        torch.testing.assert_close(moments.log_spread, std.log().mean(0))


class Collecting(Pass):
    """Notes the batch statistics of every layer."""

    def __init__(self, layers):
        super().__init__(layers)
        self.found = {}

    def normalise(self, layer, x, key, stream):
        mean, var, _ = layer.batch_statistics(x)
        self.found[key] = mean, var
        scale = layer.weight / (var + layer.eps).sqrt()
        shape = (1, -1, *[1] * (x.dim() - 2))
        return (x - mean.view(shape)) * scale.view(shape) + layer.bias.view(shape)


def true_moments(model, data, M, batches, seed):
    """Mean and std over random batches of (mean, std, ln std), per layer (6, C)."""
    g = torch.Generator().manual_seed(seed)
    layers = bnuq.nn.named_stochastic_layers(model)
    seen = {name: [] for name in layers}
    with torch.no_grad():
        for _ in range(batches):
            rows = torch.randperm(len(data), generator=g)[:M]
            with running(Collecting(layers)) as active:
                model(data[rows])
            for name, (mean, var) in active.found.items():
                seen[name].append(torch.stack([mean, var.sqrt(), var.sqrt().log()]))
    seen = {name: torch.stack(s).double() for name, s in seen.items()}
    return {name: torch.cat([s.mean(0), s.std(0)]) for name, s in seen.items()}


def skewed_net(kind):
    torch.manual_seed(5)
    if kind == "mlp":
        layers = [
            nn.Linear(6, 24),
            nn.BatchNorm1d(24),
            nn.ReLU(),
            nn.Linear(24, 24),
            nn.BatchNorm1d(24),
        ]
        layers += [nn.ReLU(), nn.Linear(24, 24), nn.BatchNorm1d(24)]
        return nn.Sequential(*layers), torch.rand(600, 6).square()
    layers = [
        nn.Conv2d(2, 12, 3),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 12, 3),
        nn.BatchNorm2d(12),
    ]
    return nn.Sequential(*layers), torch.randn(600, 2, 7, 7) * torch.rand(600, 1, 1, 1)


@pytest.mark.parametrize("M", [16, 128])
@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_rescaled_moments_are_those_of_batches_of_that_size(kind, M):
    """A bank at M0 = 32 against 800 or more real batches of M rows, in every layer,
    deeper ones too.

    Stds are compared in their mean over channels (error of a mean of 12 or more: about 1 %), to 12
    %; without rescaling they would be off by 40 % (M = 16) or 100 % and more (128). The centre of
    the std is compared with the shift that it makes: what is left is at most 60 % of it. (Inputs
    are bounded: with heavy tails the deeper layers' stds are off by a third and more.)
    """
    net, data = skewed_net(kind)
    model = bnuq.convert(net).eval()
    dataset = torch.utils.data.TensorDataset(data)
    torch.manual_seed(1)
    bank = bnuq.collect(model, dataset, 1500, batch_size=32, progress=False)
    rescaling = Rescaling.between(32, M, 600, bank.disjoint)
    true = true_moments(model, data, M, 1500 if M < 32 else 800, seed=2)
    for name, expected in true.items():
        own = fit(bank.mean[name], bank.var[name], Rescaling(1.0, 1.0))
        m = fit(bank.mean[name], bank.var[name], rescaling)
        for actual, std in ((m.mean_std, 3), (m.spread_std, 4), (m.log_spread_std, 5)):
            ratio = actual.mean() / expected[std].mean()
            assert 0.88 < ratio < 1.12, (name, std, ratio)
        for actual, before, row in ((m.spread, own.spread, 1), (m.log_spread, own.log_spread, 2)):
            shift, left = (expected[row] - before).mean(), (expected[row] - actual).mean()
            assert left.abs() < 0.6 * shift.abs(), (name, row, shift, left)


@pytest.mark.filterwarnings("ignore:collect. the batches have 120 rows")
def test_disjoint_and_independent_banks_rescale_to_the_same():
    """1/(B-1) variances of one pass and of independent draws differ by 1 - M0/N = 0.8;
    rescaled not.

    2,000 snapshots and 400 passes of five: the stds are known to 2 %, and 20 % in variance is 11 %.
    """
    _, data = skewed_net("mlp")
    model = bnuq.convert(nn.Sequential(nn.BatchNorm1d(6)))
    M0, N, found = 120, 600, {}
    torch.manual_seed(0)
    passes = [data[torch.randperm(N)].split(M0) for _ in range(400)]
    bank = bnuq.collect(
        model, torch.utils.data.TensorDataset(data), 2000, batch_size=M0, progress=False
    )
    found["independent"] = fit(bank.mean["0"], bank.var["0"], Rescaling.between(M0, 60, N, 0.0))
    variances = []
    for batches in passes:
        mean = torch.stack([b.mean(0) for b in batches])
        var = torch.stack([b.var(0, correction=0) for b in batches])
        variances.append(fit(mean, var, Rescaling.between(M0, 60, N, 1.0)).mean_std.square())
    one_pass = torch.stack(variances).mean(0).sqrt()
    torch.testing.assert_close(found["independent"].mean_std, one_pass, rtol=0.06, atol=0)


@pytest.mark.parametrize("M", [7, 257])
def test_warns_far_from_the_banks_batch_size(M):
    model = bnuq.convert(torch.nn.BatchNorm1d(5))
    bnuq.attach(
        model,
        bnuq.Bank(
            {"": torch.rand(12, 5)}, {"": torch.rand(12, 5)}, 16, batch_size=16, dataset_size=400
        ),
    )
    options = {"likelihood": "gaussian", "num_samples": 2, "sampler": "joint", "seed": 0}
    message = rf"predict: batch_size {M} is outside \[M0/2, 16 M0\] .* M0 = 16"
    for _ in range(2):  # at every call, also where the sampler is known
        with pytest.warns(UserWarning, match=message) as caught:
            bnuq.predict(model, torch.rand(3, 5), batch_size=M, **options)
        assert len(caught) == 1 and caught[0].filename == __file__
    bnuq.predict(model, torch.rand(3, 5), batch_size=8, **options)
    bnuq.predict(model, torch.rand(3, 5), batch_size=256, **options)


@pytest.mark.parametrize("name", ["joint", "lognormal", "normal"])
def test_an_ensemble_and_mc_dropout_have_the_statistics_of_predict(name):
    """The dropout drops nothing."""
    model = make_model()
    model[3].p = 1e-12
    options = {"num_samples": 4, "seed": 5, "likelihood": "categorical", "keep_samples": True}
    options |= {"sampler": name, "batch_size": 20}
    expected = predict(model, **options)
    equal(bnuq.ensemble([model], X, **options), expected)
    equal(bnuq.mc_dropout(model, X, **options), expected)
    others = predict(model, **options | {"batch_size": None})
    assert (expected.samples - others.samples).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["joint", "lognormal", "normal"])
def test_a_loader_s_last_batches_are_of_no_size_to_rescale(name):
    """Their spread is that of fewer rows; without a batch size they are snapshots like the
    others."""
    full = random_bank(batch_size=32, dataset_size=112)
    last = {key: torch.arange(12) % 4 == 3 for key in full.names}
    count = {key: torch.where(rows, 16 * 49, 32 * 49) for key, rows in last.items()}
    sizes = dict(batch_size=32, dataset_size=112, disjoint=0.5)
    ragged = bnuq.Bank(full.mean, full.var, count, **sizes)
    whole = {k: ~rows for k, rows in last.items()}
    mean, var = ({k: t[whole[k]] for k, t in group.items()} for group in (full.mean, full.var))
    expected = statistics(name, bnuq.Bank(mean, var, 32 * 49, **sizes), 5, batch_size=64)
    equal_statistics(statistics(name, ragged, 5, batch_size=64), expected)
    all_rows = bnuq.Bank(full.mean, full.var, 16, **sizes)
    equal_statistics(statistics(name, ragged, 5), statistics(name, all_rows, 5))


@pytest.mark.parametrize("name", ["joint", "lognormal", "normal"])
def test_two_whole_batches_are_enough_to_rescale(name):
    three, count = random_bank(snapshots=3), torch.tensor([32, 32, 16])
    sizes = dict(batch_size=32, dataset_size=80, disjoint=1.0)
    mean, var = ({k: t[:2] for k, t in group.items()} for group in (three.mean, three.var))
    count = dict.fromkeys(three.names, count)
    found = statistics(name, bnuq.Bank(three.mean, three.var, count, **sizes), 5, batch_size=64)
    expected = statistics(name, bnuq.Bank(mean, var, 32, **sizes), 5, batch_size=64)
    equal_statistics(found, expected)


@pytest.mark.parametrize("most, N", [(4, 400), (8, 400), (11, 401)])
def test_batches_of_as_many_rows_and_other_sizes_are_all_used(most, N):
    """Texts of two lengths: no loader's last batches, however many."""
    bank = random_bank(batch_size=32, dataset_size=N)
    counts = torch.where(torch.arange(12) < most, 32 * 20, 32 * 10)
    texts = bnuq.Bank(bank.mean, bank.var, dict.fromkeys(bank.names, counts), batch_size=32, dataset_size=N)  # fmt: skip
    for name in ("joint", "lognormal", "normal"):
        found, expected = (statistics(name, b, 5, batch_size=64) for b in (texts, bank))
        equal_statistics(found, expected)


def equal_statistics(found, expected):
    for key, pair in expected.items():
        for a, b in zip(found[key], pair, strict=True):
            assert torch.equal(a, b)


def test_batches_of_many_sizes_are_rescaled_as_if_of_one_with_a_warning():
    full = random_bank(batch_size=32)
    count = {key: 20 + torch.arange(12) for key in full.names}
    bank = bnuq.Bank(full.mean, full.var, count, batch_size=32, dataset_size=400)
    message = "test: the bank's batches are of many sizes, .* as if all had 32 rows"
    with pytest.warns(UserWarning, match=message):
        found = statistics("joint", bank, 5, batch_size=64)
    equal_statistics(found, statistics("joint", full, 5, batch_size=64))


def test_rows_drawn_with_replacement_are_of_infinitely_many():
    """Var[mean] of M0 rows is sigma^2 / M0 then. n = 400 batches of 200 channels: the mean ratio of
    variances is known to 1 %, and off by a factor of 1 / (1 - M0/N) = 2 without it
    (alpha < 1e-6)."""
    torch.manual_seed(0)
    N, M0, M = 160, 80, 40
    rows = torch.randn(N, 200, dtype=torch.float64)
    model = bnuq.convert(nn.BatchNorm1d(200, affine=False).double())
    samplers = [
        torch.utils.data.RandomSampler(rows, replacement=True),
        torch.utils.data.WeightedRandomSampler([1.0] * N, N),
        torch.utils.data.RandomSampler(rows),
    ]
    expected = (1 / M) * (1 - M / N)
    for drawn in samplers:
        loader = torch.utils.data.DataLoader(rows, M0, sampler=drawn)
        with pytest.warns(UserWarning, match="more than a tenth"):
            bank = bnuq.collect(model, loader, 400, progress=False)
        std = sampler("lognormal", bank, M).draw(0, 0, 1).tables[""].params[1]
        ratio = std.double().square() / rows.var(0, unbiased=True) / expected
        assert abs(ratio.mean() - 1) < 0.05


@pytest.mark.parametrize(
    "field, value", [("dataset_size", 40), ("batch_size", 20), ("disjoint", 1.0)]
)
def test_a_corrected_bank_is_rescaled_anew(field, value):
    model = make_model()
    options = dict(sampler="lognormal", batch_size=20)
    bank = model[1].bank
    before, kept = predict(model, **options), getattr(bank, field)
    assert kept != value
    setattr(bank, field, value)
    after = predict(model, **options)
    assert (after.mean - before.mean).abs().max() > 1e-4
    setattr(bank, field, kept)
    equal(predict(model, **options), before)


@pytest.mark.parametrize("name", ["joint", "lognormal", "normal"])
def test_a_bank_that_was_given_less_data_than_a_batch_is_refused(name):
    model = make_model()
    model[1].bank.dataset_size = 1
    with pytest.raises(ValueError, match="Bank: dataset_size must be at least .*, got 1"):
        predict(model, sampler=name, batch_size=1)


def test_a_variance_is_held_above_a_64th_of_the_banks():
    means = 100 * torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    found = fit(means, torch.ones(9, 4), Rescaling(1.0, 4.0))
    expected = torch.full((4,), 1 / 8, dtype=torch.float64)
    torch.testing.assert_close(found.spread, expected)
    torch.testing.assert_close(found.log_spread, expected.log())
