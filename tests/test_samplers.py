"""Samplers: their numbers against the formulas, and against banks really collected.

Statistical tests give alpha, n and the effect that they would find; seeds are fixed.
"""

import math

import pytest
import torch
from scipy import stats
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext import ops
from bnuq_ext.moments import Rescaling, fit
from bnuq_ext.replicas import Pass, running
from bnuq_ext.samplers import Fitted, make_sampler

CPU = torch.device("cpu")


def random_bank(snapshots=12, channels=(5, 3), **options):
    g = torch.Generator().manual_seed(0)
    mean = {f"l{i}": torch.randn(snapshots, c, generator=g) for i, c in enumerate(channels)}
    var = {f"l{i}": torch.rand(snapshots, c, generator=g) + 0.5 for i, c in enumerate(channels)}
    options = {"batch_size": 16, "dataset_size": 400, **options}
    return bnuq.Bank(mean, var, 16, **options)


def sampler(name, bank, batch_size=None):
    return make_sampler("test", name, bank, batch_size, CPU)


def statistics(name, bank, num_samples, batch_size=None, seed=3, first=0):
    """{key: (mean (T, C), var (T, C))} of the replicas, whatever the form of the draw."""
    draw = sampler(name, bank, batch_size).draw(seed, first, num_samples)
    found = {}
    for stream, (key, table) in enumerate(draw.tables.items()):
        if isinstance(table, Fitted):
            shape, params = (num_samples, table.params.shape[1]), table.params.double()
            z = [
                ops.philox_normal(draw.seed, stream << 16, shape, tag=t).double()
                for t in ("mean", "spread")
            ]
            spread = params[2] + params[3] * z[1]
            low = params[2] / 8
            spread = spread.exp() if table.family == "lognormal" else torch.maximum(spread, low)
            found[key] = params[0] + params[1] * z[0], spread.square()
        else:
            found[key] = table.mean[draw.snapshot], table.var[draw.snapshot]
    return found


# ---- number by number ------------------------------------------------------------------------


def test_bank_draws_the_snapshots_of_snapshot_indices():
    bank = random_bank()
    draw = sampler("bank", bank).draw(7, 5, 30)
    expected = ops.snapshot_indices(ops.new_seed(7, 5), len(bank), 30)
    assert torch.equal(draw.snapshot, expected)
    for key in bank.mean:
        assert torch.equal(draw.tables[key].mean, bank.mean[key])
        assert torch.equal(draw.tables[key].var, bank.var[key])


def test_batch_draws_one_batch_a_replica():
    assert sampler("batch", random_bank()).draw(7, 5, 3).snapshot.tolist() == [5, 6, 7]


@pytest.mark.parametrize("first, num_samples", [(0, 20), (0, 16), (5, 3), (13, 40), (31, 1)])
def test_joint_is_the_formula(first, num_samples):
    bank = random_bank()
    z = ops.philox_normal(ops.new_seed(3, first), 0, (num_samples, 12), tag="joint").double()
    actual = statistics("joint", bank, num_samples, first=first)
    for key in bank.mean:
        mean, log_std = bank.mean[key].double(), bank.var[key].double().sqrt().log()
        for value, table in ((actual[key][0], mean), (actual[key][1].sqrt().log(), log_std)):
            expected = table.mean(0) + z @ (table - table.mean(0)) / math.sqrt(11)
            torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["normal", "lognormal"])
def test_fitted_are_the_banks_moments(family):
    bank = random_bank()
    for key, fitted in sampler(family, bank).draw(0, 0, 4).tables.items():
        spread = bank.var[key].double().sqrt()
        spread = spread.log() if family == "lognormal" else spread
        mean = bank.mean[key].double()
        expected = torch.stack([mean.mean(0), mean.std(0), spread.mean(0), spread.std(0)])
        torch.testing.assert_close(fitted.params.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["bank", "joint", "lognormal", "normal"])
def test_draws_do_not_depend_on_the_chunk(name):
    bank = random_bank()
    whole = statistics(name, bank, 50, first=3)
    for sizes in ([1] * 50, [7, 16, 27], [49, 1]):
        parts, first = [], 3
        for size in sizes:
            parts.append(statistics(name, bank, size, first=first))
            first += size
        for key in whole:
            for i in (0, 1):
                assert torch.equal(torch.cat([p[key][i] for p in parts]), whole[key][i])


def test_float64_banks_give_float64_statistics():
    bank = random_bank()
    double = bnuq.Bank(
        {k: v.double() for k, v in bank.mean.items()},
        {k: v.double() for k, v in bank.var.items()},
        16, batch_size=16, dataset_size=400,
    )  # fmt: skip
    for name in ("bank", "joint", "normal"):
        for table in sampler(name, double).draw(0, 0, 4).tables.values():
            assert table[0].dtype == torch.float64


# ---- dead channels -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["joint", "lognormal", "normal"])
def test_a_channel_without_variance_stays_constant(name):
    bank = random_bank()
    mean = {k: v.clone() for k, v in bank.mean.items()}
    var = {k: v.clone() for k, v in bank.var.items()}
    mean["l0"][:, 1], var["l0"][:, 1] = 0.25, 0
    bank = bnuq.Bank(mean, var, 16, batch_size=16, dataset_size=400)
    drawn_mean, drawn_var = statistics(name, bank, 40)["l0"]
    torch.testing.assert_close(drawn_mean[:, 1], torch.full_like(drawn_mean[:, 1], 0.25))
    assert (drawn_var[:, 1] < 1e-30).all()
    assert drawn_mean.isfinite().all() and drawn_var.isfinite().all()
    assert drawn_var[:, 0].std() > 0.01


@pytest.mark.parametrize("name", ["joint", "lognormal"])
def test_a_nearly_dead_channel_does_not_blow_up(name):
    bank = random_bank()
    var = {k: v.clone() for k, v in bank.var.items()}
    var["l0"][::2, 1] = 0
    bank = bnuq.Bank(bank.mean, var, 16, batch_size=16, dataset_size=400)
    drawn = statistics(name, bank, 200)["l0"][1]
    assert drawn[:, 1].max() < 1e3 * var["l0"][:, 1].max()


# ---- joint keeps correlations, the independent ones do not -------------------------------------


def correlated_bank(snapshots=200):
    g = torch.Generator().manual_seed(1)
    common = torch.randn(snapshots, 1, generator=g)
    noise = torch.randn(snapshots, 8, generator=g)
    mean = 0.8 * common + 0.6 * noise
    var = (0.1 * mean + 0.05 * torch.randn(snapshots, 8, generator=g)).exp() * 2
    tables = {"a": slice(0, 4), "b": slice(4, 8)}
    return bnuq.Bank(
        {k: mean[:, s] for k, s in tables.items()}, {k: var[:, s] for k, s in tables.items()}, 32,
        batch_size=32, dataset_size=10**6,
    )  # fmt: skip


def features(found):
    """(T, 16): means and log stds of both layers."""
    columns = [torch.cat([m.double(), v.double().log() / 2], 1) for m, v in found.values()]
    return torch.cat(columns, 1)


def bank_features(bank):
    return features({k: (bank.mean[k], bank.var[k]) for k in bank.mean})


def test_joint_has_the_banks_covariance_over_all_layers():
    """n = 40,000; alpha = 1e-6 over 136 entries: |z| < 5.8, so a correlation off by 0.03 is found."""
    bank, n = correlated_bank(), 40_000
    expected = bank_features(bank).T.cov()
    drawn = features(statistics("joint", bank, n))
    scale = (expected.diag()[:, None] * expected.diag() + expected**2).sqrt() / math.sqrt(n)
    assert ((drawn.T.cov() - expected).abs() < 5.8 * scale).all()
    assert (
        (drawn.mean(0) - bank_features(bank).mean(0)).abs() < 5.8 * (expected.diag() / n).sqrt()
    ).all()
    cross = bank_features(bank).T.corrcoef()[:4, 8:12]
    assert cross.min() > 0.5


@pytest.mark.parametrize("name", ["lognormal", "normal"])
def test_independent_samplers_have_the_banks_variances_and_no_correlations(name):
    """n = 40,000; alpha = 1e-6 over 120 correlations: |r| < 5.8 / sqrt(n) = 0.029."""
    bank, n = correlated_bank(), 40_000
    found = statistics(name, bank, n)
    drawn = torch.cat([torch.cat([m, v.sqrt()], 1) for m, v in found.values()], 1).double()
    correlations = drawn.T.corrcoef() - torch.eye(16)
    assert correlations.abs().max() < 5.8 / math.sqrt(n)
    expected = torch.cat(
        [torch.cat([bank.mean[k], bank.var[k].sqrt()], 1) for k in bank.mean], 1
    ).double()
    # A variance has relative standard error sqrt(2 / n) = 0.7 %.
    torch.testing.assert_close(drawn.var(0), expected.var(0), rtol=0.05, atol=0)


def test_neighbouring_seeds_and_replicas_of_joint_are_uncorrelated():
    """n = 20,000 pairs; alpha = 1e-6: |r| < 4.9 / sqrt(n) = 0.035."""
    bank, n = correlated_bank(), 20_000
    one, other = (features(statistics("joint", bank, n, seed=s))[:, 0] for s in (3, 4))
    for a, b in ((one, other), (one[1:], one[:-1]), (one[16:], one[:-16])):
        assert abs(torch.stack([a, b]).corrcoef()[0, 1]) < 4.9 / math.sqrt(n)


def test_lognormal_and_normal_have_their_shapes():
    """Kolmogorov-Smirnov, n = 20,000, alpha = 1e-6 for each: finds a CDF off by 0.019."""
    bank = random_bank()
    params = sampler("lognormal", bank).draw(0, 0, 1).tables["l0"].params.double()
    mean, var = statistics("lognormal", bank, 20_000)["l0"]
    z_mean = (mean[:, 0] - params[0, 0]) / params[1, 0]
    z_log = (var[:, 0].log() / 2 - params[2, 0]) / params[3, 0]
    for z in (z_mean, z_log):
        assert stats.kstest(z.numpy(), "norm").pvalue > 1e-6


# ---- another batch size --------------------------------------------------------------------------


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
    """A bank at M0 = 32 against 800 or more real batches of M rows, in every layer, deeper ones too.

    Stds are compared in their mean over channels (error of a mean of 12 or more: about 1 %), to 12 %;
    without rescaling they would be off by 40 % (M = 16) or 100 % and more (128). The centre of the std
    is compared with the shift that it makes: what is left is at most 60 % of it. (Inputs are bounded:
    with heavy tails the deeper layers' stds are off by a third and more.)
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
    """1/(B-1) variances of one pass and of independent draws differ by 1 - M0/N = 0.8; rescaled not.

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


# ---- refusals --------------------------------------------------------------------------------------


def test_rejects():
    bank = random_bank()
    with pytest.raises(
        ValueError,
        match="test: sampler must be one of bank, batch, joint, lognormal, normal, got 'mc'",
    ):
        sampler("mc", bank)
    for name in ("bank", "batch"):
        with pytest.raises(
            ValueError, match=f'batch_size must be None with sampler "{name}", got 16'
        ):
            sampler(name, bank, 16)
    with pytest.raises(
        ValueError, match="batch_size must be at most the size of the data set 400, got 401"
    ):
        sampler("joint", bank, 401)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        sampler("joint", bank, 0)
    with pytest.raises(TypeError, match="batch_size must be an integer, got 16.0"):
        sampler("joint", bank, 16.0)
    for name in ("joint", "lognormal", "normal"):
        with pytest.raises(
            ValueError, match=f'hold at least 2 snapshots for sampler "{name}", got 1'
        ):
            sampler(name, random_bank(1))
    whole = random_bank(batch_size=400)
    with pytest.raises(
        ValueError, match="bank must hold batches smaller than the data set .* got 400"
    ):
        sampler("normal", whole, 200)


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
