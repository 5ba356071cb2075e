"""Samplers: their numbers against the formulas, and against banks really collected.

Statistical tests give alpha, n and the effect that they would find; seeds are fixed.
"""

import math

import pytest
import torch
from drawn import random_bank, sampler, statistics
from scipy import stats

import bnuq_ext as bnuq
from bnuq_ext import model_cache, ops
from bnuq_ext.samplers import make_sampler

# ---- number by number ------------------------------------------------------------------------


def test_bank_draws_the_snapshots_of_snapshot_indices():
    bank = random_bank()
    draw = sampler("bank", bank).draw(7, 5, 30)
    expected = ops.snapshot_indices(ops.new_seed(7, 5), len(bank), 30)
    assert torch.equal(draw.snapshot, expected)
    for key in bank.mean:
        assert torch.equal(draw.tables[key].mean, bank.mean[key])
        assert torch.equal(draw.tables[key].var, bank.var[key])


def test_what_a_sampler_keeps_stays_on_its_stream(monkeypatch):
    """On a GPU another stream would neither wait for it nor be waited
    for before its memory is used again."""
    streams = iter([0, 7, 0, 7])
    monkeypatch.setattr(model_cache, "_stream", lambda device: next(streams))
    model = bnuq.convert(torch.nn.Sequential(torch.nn.BatchNorm1d(3)).eval())
    bnuq.collect(model, torch.randn(8, 6, 3).unbind(), num_batches=8, progress=False)
    samplers = model_cache.BankSamplers()
    call = "predict", model, "bank", None, torch.device("cpu")
    first, second, *again = (samplers.get(*call) for _ in range(4))
    assert first is not second and again == [first, second]


def test_what_a_cuda_graph_makes_stays_in_it(monkeypatch):
    """Nobody else has the numbers before it is replayed."""
    model = bnuq.convert(torch.nn.Sequential(torch.nn.BatchNorm1d(3)).eval())
    bnuq.collect(model, torch.randn(8, 6, 3).unbind(), num_batches=8, progress=False)
    samplers, made = model_cache.BankSamplers(), []
    for captured in (True, False, True, False):
        monkeypatch.setattr(model_cache, "is_captured", lambda device, captured=captured: captured)
        made.append(samplers.get("predict", model, "normal", None, torch.device("cpu")))
    assert made[3] is made[1] and len({*map(id, made)}) == 3


@pytest.mark.parametrize("name", ["bank", "joint"])
def test_a_cuda_graph_is_given_draws_of_its_own(name, monkeypatch):
    """Of its memory nothing may be kept, nor may it read what is kept and will be freed."""
    made = sampler(name, random_bank())
    draws = []
    for captured in (False, True, True, False):  # before, two graphs, after
        monkeypatch.setattr(
            "bnuq_ext.samplers.is_captured", lambda device, captured=captured: captured
        )
        draws.append(made.draw(7, 0, 3))
    tables = [next(iter(draw.tables.values())).mean for draw in draws]
    assert all(torch.equal(table, tables[0]) for table in tables)
    what = [draw.snapshot for draw in draws] if name == "bank" else tables
    assert what[3] is what[0] and len({id(t) for t in what}) == 3


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


@pytest.mark.parametrize("name", ["bank", "batch", "joint", "lognormal", "normal"])
def test_a_sampler_remembers_no_other_draw(name):
    """What it keeps of its last draw serves the same key, first replica and number alone."""
    bank = random_bank(24)
    kept = sampler(name, bank)
    for asked in ((7, 0, 4), (7, 2, 4), (8, 2, 4), (8, 2, 3), (8, 16, 3), (7, 16, 3), (7, 0, 4)):
        draw, fresh = kept.draw(*asked), sampler(name, bank).draw(*asked)
        assert draw.num_samples == fresh.num_samples == asked[2]
        assert draw.seed.tolist() == list(asked[:2])
        assert (draw.snapshot is None) == (fresh.snapshot is None)
        for key, table in draw.tables.items():
            for value, expected in zip(table[:2], fresh.tables[key][:2], strict=True):
                if draw.snapshot is not None:
                    value, expected = value[draw.snapshot], expected[fresh.snapshot]
                assert value is expected or torch.equal(value, expected)


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
    assert (drawn_var[:, 1] <= (0 if name == "joint" else 1e-30)).all()
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
    """n = 40,000; alpha = 1e-6 over 136 entries: |z| < 5.8,
    so a correlation off by 0.03 is found."""
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


# ---- refusals
# --------------------------------------------------------------------------------------


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


def test_which_snapshots_are_of_last_batches():
    """A first batch that could not be used leaves one of them in front."""
    table, (first, whole) = (
        {k: torch.ones(3, 2) for k in "ab"},
        torch.tensor([[4, 8, 4], [8, 8, 8]]),
    )
    for count, expected in (
        ({"a": first, "b": first}, [True, False, True]),
        ({"a": first, "b": whole}, [False] * 3),
    ):
        bank = bnuq.Bank(table, table, count, batch_size=8, dataset_size=12)
        assert bank.of_last_batches().tolist() == expected


@pytest.mark.parametrize("name", ["joint", "lognormal", "normal"])
def test_a_single_whole_batch_is_not_rescaled_by_itself(name):
    mean, var = torch.randn(2, 3), torch.rand(2, 3) + 1
    count = {"a": torch.tensor([8, 4])}
    bank = bnuq.Bank({"a": mean}, {"a": var}, count, batch_size=8, dataset_size=12)
    draw = make_sampler("op", name, bank, 4, torch.device("cpu")).draw(0, 0, 5)
    assert all(t.isfinite().all() for t in draw.statistics("a", 0))
