"""The UCI protocol on tiny tables: end to end, and its parts against independent computations."""

import copy
import json
import math
import os
import re
from dataclasses import replace

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from estimates import shown
from torch import nn

from bnuq_ext import data, metrics
from bnuq_ext.protocols import runner, uci, uci_search
from bnuq_ext.protocols.stacked import Network, Stack, Training

TINY = replace(
    uci.QUICK,
    num_splits=2,
    num_seeds=2,
    num_folds=4,
    folds_used=2,
    batch_sizes=(8, 16, 512),
    weight_decays=(1e-1, 1e-4),
    dropout_rates=(0.1,),
    dropout_batch_size=8,
    max_epochs=6,
    check_every=2,
    num_samples=6,
    hidden=8,
)


def table(num_rows=60, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_rows, 3)) * [1, 5, 0.1] + [0, 3, -1]
    return x, 2 * x[:, 0] + x[:, 1] + rng.normal(size=num_rows) * (1 + x[:, 0] ** 2)


def part(num_rows=60, seed=0):
    return data.Part(*map(torch.from_numpy, table(num_rows, seed)))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, run_protocol):
    root = tmp_path_factory.mktemp("data")
    x, y = table()
    np.savez(root / "boston.npz", X=x, y=y)
    np.savetxt(root / "mine.csv", np.column_stack(table(50, 1)), delimiter=",")
    return run_protocol(uci, "uci", TINY, root)


def runs_of(folder, name, method, score):
    units = [
        json.loads(path.read_text())
        for path in sorted(folder.glob(f"units/{name}-{method}-*.json"))
    ]
    return np.array([run[score] for unit in units for run in unit["result"]["runs"]])


def test_tables_are_those_of_the_runs(finished):
    folder, results = finished
    rows = results["tables"]["normalised"]["rows"]
    assert [row[:3] for row in rows][:2] == [["boston", "CRPS", "MCBN"], ["boston", "CRPS", "MCDO"]]
    assert len(rows) == 8
    for name, score, method, ours, p, *_ in rows:
        values = runs_of(folder, name, method, f"normalised_{score.lower()}")
        assert len(values) == 4
        mean, error = values.mean(), values.std(ddof=1) / 2
        assert ours == shown(mean, error)
        assert p == pytest.approx(scipy.stats.ttest_1samp(values, 0).pvalue, rel=1e-6)
    assert rows[0][6:] == ["8.50 ± 0.86", 6.39e-10, rows[0][8]] and rows[-1][6:] == [None] * 3
    raw = results["tables"]["raw"]["rows"]
    assert raw[1][5] == "1.41 ± 0.02" and raw[1][:3] == ["boston", "CRPS", "MCDO"]
    errors = {tuple(r[:3]): r for r in results["tables"]["rmse"]["rows"]}
    assert errors["boston", "RMSE", "DO"][4] == "2.69 ± 0.05"
    values = runs_of(folder, "mine", "MCBN", "plain_rmse")
    assert errors["mine", "RMSE", "BN"][3].startswith(f"{values.mean():.2f} ±")
    assert len(results["tables"]["choices"]["rows"]) == 8


def test_figures_and_remarks(finished):
    folder, results = finished
    assert results["figures"] == ["uncertainty-boston.png", "uncertainty-mine.png"]
    for name in results["figures"]:
        assert (folder / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    text = (folder / "report.md").read_text()
    assert "| data set | score | method | ours [%] | p |" in text
    assert any(re.match(r"\d of 4 normalised scores agree with", r) for r in results["remarks"])
    assert any(r.startswith("CRPS: MCBN is better than") for r in results["remarks"])
    # Six epochs, looked at after each.
    last = sum(row[6] == 6 for row in results["tables"]["choices"]["rows"])
    text = f"The best epoch was the last one allowed in {last} of 8 searches"
    assert results["remarks"][-2].startswith(text) and last > 0


def test_split_is_that_of_the_code():
    given = part(53)
    train, test = uci_search.split_of(given, 3)
    rows = np.arange(53)
    np.random.RandomState(3).shuffle(rows)
    assert torch.equal(test.x, given.x[rows[:11]]) and torch.equal(train.y, given.y[rows[11:]])


def test_folds_share_no_row_with_their_validation():
    train = data.Part(torch.arange(47.0, dtype=torch.float64)[:, None], torch.arange(47.0).double())
    settings = replace(TINY, num_folds=5, folds_used=5)
    folds = uci_search.folds_of(train, settings)
    held_out = torch.cat([fold.test_y for fold in folds])
    assert len(held_out) == len(set(held_out.tolist())) == 45
    for fold in folds:
        trained = (fold.y.double() * fold.y_std + fold.y_mean).round()
        assert len(trained) == 38
        assert set(trained.tolist()) == set(range(47)) - set(fold.test_y.tolist())
        torch.testing.assert_close(fold.x.mean(), torch.tensor(0.0), rtol=0, atol=1e-6)
        torch.testing.assert_close(fold.x.std(correction=0), torch.tensor(1.0))
        back = fold.test_x.squeeze(1).double() * fold.y_std + fold.y_mean
        torch.testing.assert_close(back, fold.test_y, rtol=1e-6, atol=1e-5)


def test_nothing_is_chosen_on_the_test_part(monkeypatch):
    """Other test rows change the scores and nothing else."""
    unit = uci.make_units(TINY, None)[0]
    given = part()
    rows = np.arange(60)
    np.random.RandomState(1).shuffle(rows)
    other = data.Part(given.x.clone(), given.y.clone())
    other.x[rows[:12]] += 2
    other.y[rows[:12]] -= 50
    found = []
    for case in (given, other):
        monkeypatch.setattr(uci, "load", lambda *_, case=case: case)
        found.append(uci.compute(unit, TINY, None))
    for name in ("choice", "noise_var", "constant_var", "held_out_pll", "unbounded_pll"):
        assert found[0][name] == found[1][name]
    assert found[1]["runs"][0]["rmse"] > 5 * found[0]["runs"][0]["rmse"]


@pytest.mark.parametrize("method", uci_search.METHODS)
def test_search_finds_the_least_error_of_the_grid(method):
    train, settings = part(48), replace(TINY, patience=100)
    found = uci_search.search(train, method, settings, 8, 5)
    folds = uci_search.folds_of(train, settings)
    tried = {}
    for rate in (0.1,) if method == "MCDO" else (None,):
        for M in (8,) if method == "MCDO" else (8, 16):
            for decay in settings.weight_decays:
                nets = []
                for f, fold in enumerate(folds):
                    stack = Stack([Network(5 + f, decay, rate)], 3, 8)
                    nets.append((stack, Training(stack, fold.x[None], fold.y[None], M)))
                for epoch in (1, 2, 3, 4, 5, 6):
                    for _, training in nets:
                        training.run(1)
                    tried[M, decay, rate, epoch] = np.mean(
                        [
                            (uci_search.plain_mean(stack.network(0, fold.x), fold) - fold.test_y)
                            .square()
                            .mean()
                            .sqrt()
                            .item()
                            for (stack, _), fold in zip(nets, folds, strict=True)
                        ]
                    )
    best = min(tried, key=tried.get)
    assert settings.checks(36) == 1 and settings.fold_rows(60) == 36
    assert found.choice[:4] == best
    assert found.choice.rmse == pytest.approx(tried[best], rel=1e-4)
    # The networks are those of the best epoch.
    errors = [
        (uci_search.plain_mean(net, fold) - fold.test_y).square().mean().sqrt().item()
        for net, fold in zip(found.networks, found.folds, strict=True)
    ]
    assert np.mean(errors) == pytest.approx(tried[best], rel=1e-4)


def test_patience_ends_a_choice():
    train = part(48)
    settings = replace(TINY, max_epochs=600, check_every=1, patience=2)
    folds = uci_search.folds_of(train, settings)
    choice = uci_search.Choice(8, 0.0, None)
    (found,), _ = uci_search.cross_validate([choice], folds, settings, 8, 0)
    curve = []
    stack = Stack([Network(0 + f, 0.0) for f in range(2)], 3, 8)
    x, y = (torch.stack([f[i] for f in folds]) for i in (0, 1))
    training = Training(stack, x, y, 8)
    while len(curve) - int(np.argmin(curve or [0])) <= 2:
        training.run(1)
        outputs = stack.predict(torch.stack([f.test_x for f in folds]), x)
        curve.append(uci_search._rmse(outputs[None], folds).item())
    assert found.epochs == 1 + int(np.argmin(curve)) < 500
    assert found.rmse == pytest.approx(min(curve), rel=1e-6)


def test_a_choice_that_was_given_up_does_not_come_back(monkeypatch):
    """The first choice is not better at two looks, and is at the fifth; the second goes on."""
    curves = torch.tensor([[5.0, 4.0, 6.0, 6.0, 3.0, 2.0], [9.0, 8.0, 7.0, 6.0, 5.0, 5.0]]).double()
    columns = iter(curves.T)
    monkeypatch.setattr(uci_search, "_rmse", lambda *_: next(columns))
    settings = replace(TINY, max_epochs=6, check_every=1, patience=2)
    folds = uci_search.folds_of(part(48), settings)
    choices = [uci_search.Choice(8, decay, None) for decay in (0.0, 1e-4)]
    found, _ = uci_search.cross_validate(choices, folds, settings, 8, 0)
    assert [(c.epochs, c.rmse) for c in found] == [(2, 4.0), (5, 5.0)]


def test_a_column_that_does_not_vary_is_zero():
    train, test = part(20), part(7, 1)
    train.x[:, 1], test.x[:, 1] = 3.0, 5.0
    scaled = uci_search.scale(train, test)
    assert (scaled.x[:, 1] == 0).all() and (scaled.test_x[:, 1] == 2).all()
    mean, std = train.x.mean(0), train.x.std(0, correction=0)
    expected = ((test.x - mean) / std)[:, ::2].float()
    torch.testing.assert_close(scaled.test_x[:, ::2], expected)


@pytest.mark.parametrize("method", uci_search.METHODS)
@pytest.mark.parametrize("split", [1, 2])
def test_a_unit_is_its_search_its_noise_and_its_networks(method, split, monkeypatch):
    """Every seed's network alone, the noise by the folds' own replicas,
    the scores on this split's test part."""
    given = part(50)
    monkeypatch.setattr(uci, "load", lambda *_: given)
    arguments = {"data": "mine", "method": method, "split": split}
    found = uci.compute(uci.Unit("u", arguments), TINY, None)
    train, test = uci_search.split_of(given, split)
    best = uci_search.search(train, method, TINY, 8, 1000 * split)
    choice, scaled = best.choice, uci_search.scale(train, test)
    assert found["choice"] == choice._asdict() and (found["rows"], found["features"]) == (50, 3)
    outputs = [
        uci_search.replicas(net, fold, choice, 6, k)
        for k, (net, fold) in enumerate(zip(best.networks, best.folds, strict=True))
    ]
    samples, y = torch.cat(outputs, 1), torch.cat([fold.test_y for fold in best.folds])
    constant = metrics.fit_constant_variance(samples.mean(0), y)
    least = TINY.least_noise * train.y.var(correction=0).item()
    noise = max(metrics.fit_noise_variance(samples, y), least)
    assert found["noise_var"] == pytest.approx(noise) and found["constant_var"] == pytest.approx(
        constant
    )
    assert ("points" in found) == (split == 1) and len(found["runs"]) == 2
    for run, seed in zip(found["runs"], (1000 * split + 500, 1000 * split + 501), strict=True):
        stack = Stack([Network(seed, choice.weight_decay, choice.dropout)], 3, 8)
        Training(stack, scaled.x[None], scaled.y[None], choice.batch_size).run(choice.epochs)
        net = stack.network(0, scaled.x)
        samples = uci_search.replicas(net, scaled, choice, 6, seed)
        expected = uci.run_scores(samples, test.y, noise, constant)
        plain = net(scaled.test_x).squeeze(1).detach().double() * scaled.y_std + scaled.y_mean
        expected["plain_rmse"] = (plain - test.y).square().mean().sqrt().item()
        assert run == pytest.approx(expected, rel=1e-3, abs=1e-3)
        if seed == 1500:
            std = (samples.var(0, correction=0) + noise).sqrt()
            for key, values in (("mean", samples.mean(0)), ("std", std), ("y", test.y)):
                np.testing.assert_allclose(found["points"][key], values, rtol=1e-3, atol=1e-3)


def test_replicas_take_the_statistics_of_training_batches():
    """The package's prediction is that of the trained stack with each batch's own statistics."""
    scaled = uci_search.scale(part(60), part(9, 2))
    choice = uci_search.Choice(16, 1e-4, None, 4)
    (net,) = uci_search.train_final(scaled, choice, 8, range(7, 8))
    actual = uci_search.replicas(net, scaled, choice, 5, seed=3)
    rng, expected = np.random.default_rng(3), []
    for _ in range(5):
        batch = scaled.x[rng.choice(60, 16, replace=False, shuffle=False)].double()
        h, query = batch, scaled.test_x.double()
        for module in copy.deepcopy(net).double():
            if isinstance(module, nn.BatchNorm1d):
                mean, std = h.mean(0), (h.var(0, correction=0) + 1e-10).sqrt()
                h, query = ((v - mean) / std * module.weight + module.bias for v in (h, query))
            else:
                h, query = module(h), module(query)
        expected.append(query.squeeze(1).detach() * scaled.y_std + scaled.y_mean)
    # A replica's place is the bank's; the sets are equal.
    expected = torch.stack(expected)
    order = [(expected - row).abs().sum(1).argmin().item() for row in actual]
    assert sorted(order) == [0, 1, 2, 3, 4]
    torch.testing.assert_close(actual, expected[order], rtol=1e-4, atol=1e-4)


def test_dropout_replicas_have_the_moments_of_train_mode():
    """1,000 replicas against 20,000 passes: means at five standard errors, deviations at 20 %,
    which is four standard errors for a kurtosis of up to 11."""
    scaled = uci_search.scale(part(60), part(9, 2))
    choice = uci_search.Choice(16, 1e-4, 0.3, 40)
    (net,) = uci_search.train_final(scaled, choice, 8, range(7, 8))
    samples = uci_search.replicas(net, scaled, choice, 1000, seed=3)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        passes = copy.deepcopy(net).train()(scaled.test_x.repeat(20_000, 1)).view(20_000, 9)
    passes = passes.double() * scaled.y_std + scaled.y_mean
    off = (samples.mean(0) - passes.mean(0)).abs() / (
        passes.std(0) * (1 / 1000 + 1 / 20_000) ** 0.5
    )
    assert off.max() < 5
    assert (samples.std(0) / passes.std(0) - 1).abs().max() < 0.2


def test_noise_has_a_bound():
    scaled = uci_search.scale(part(60), part(9, 2))
    found = uci_search.search(part(60), "MCBN", TINY, 8, 1)
    settings = replace(TINY, least_noise=5.0)
    free, held = (uci.scores(found, {}, scaled, s) for s in (TINY, settings))
    assert held["noise_var"] == pytest.approx(5 * table()[1].var())
    samples = np.concatenate(
        [
            uci_search.replicas(net, fold, found.choice, TINY.num_samples, k).numpy()
            for k, (net, fold) in enumerate(zip(found.networks, found.folds, strict=True))
        ],
        1,
    )
    y = torch.cat([fold.test_y for fold in found.folds]).numpy()
    for result in (free, held):
        density = scipy.stats.norm.logpdf(y, samples, result["noise_var"] ** 0.5)
        pll = np.mean(scipy.special.logsumexp(density, 0) - math.log(TINY.num_samples))
        assert result["held_out_pll"] == pytest.approx(pll)
    assert held["unbounded_pll"] == free["unbounded_pll"] == free["held_out_pll"]
    assert held["held_out_pll"] != held["unbounded_pll"]


def test_data_sets(tmp_path):
    assert uci.tables_at(None) == {"diabetes": None}
    assert [u.name for u in uci.make_units(TINY, None)][:2] == [
        "diabetes-MCBN-1",
        "diabetes-MCBN-2",
    ]
    with pytest.raises(
        ValueError, match=r"^uci: data_root must hold npz files .*UCI_Datasets, got"
    ):
        uci.tables_at(tmp_path)
    (tmp_path / "uci").mkdir()
    for name, rows in (("small", 30), ("large", 40)):
        np.savez(tmp_path / "uci" / f"{name}.npz", X=np.ones((rows, 2)), y=np.arange(rows))
    rows = {name: len(part.y) for name, part in uci.by_size(tmp_path).items()}
    assert list(rows.items()) == [("large", 40), ("small", 30)]
    ((name, part),) = uci.by_size(tmp_path / "uci" / "small.npz").items()
    assert (name, len(part.y)) == ("small", 30)
    (tmp_path / "uci" / "small.csv").write_text("1,2\n")
    with pytest.raises(ValueError, match=r"hold one table small, got \['small.csv', 'small.npz'\]"):
        uci.tables_at(tmp_path)
    (tmp_path / "uci" / "small.csv").rename(tmp_path / "uci" / "large.2.npz.xz")
    (tmp_path / "uci" / os.fsdecode(b"\xff.csv")).write_text("1,2\n")
    assert {*uci.tables_at(tmp_path)} == {"large", "large.2", "small", "\\udcff"}


def test_a_table_of_too_few_rows_is_named(tmp_path):
    for name, rows in (("few", 4), ("many", 5)):
        np.savez(tmp_path / f"{name}.npz", X=np.ones((rows, 2)), y=np.arange(rows))
    path = tmp_path / "few.npz"
    with pytest.raises(ValueError) as caught:
        uci.make_units(TINY, tmp_path)
    requirement = "have at least 4 training rows, 80 % of all"
    assert str(caught.value) == f"uci: {path} must {requirement}, got 3"
    path.unlink()
    assert len(uci.make_units(TINY, tmp_path)) == 4


def test_a_table_smaller_than_every_batch_size(tmp_path):
    np.savez(tmp_path / "few.npz", X=table(12)[0], y=table(12)[1])
    few = replace(TINY, num_splits=1, batch_sizes=(32, 64), dropout_batch_size=32)
    results = runner.run(uci, "uci", tmp_path / "out", few, tmp_path / "few.npz", 1, False)
    found = {row[1]: row[3] for row in results["tables"]["choices"]["rows"]}
    assert found == {"MCBN": 4, "MCDO": 8}  # of the 8 rows that a fold trains on
    for method in uci.METHODS:
        values = runs_of(tmp_path / "out", "few", method, "normalised_crps")
        assert np.isfinite(values).all()


def test_settings_of_the_paper():
    assert uci.FULL.width(45730) == uci.FULL.width(20_000) == 100
    assert uci.FULL.width(9568) == uci.FULL.width(19_999) == 50
    assert uci.FULL.epochs(29267) == 2000 and uci.FULL.checks(29267) == 20
    assert uci.QUICK.epochs(29267) == 27 and uci.QUICK.checks(29267) == 2
    assert len(uci.FULL.weight_decays) == 15 and uci.FULL.weight_decays[-1] == 1e-15
    sizes = [(p[0].batch_size, len(p)) for p in uci_search.grid("MCBN", uci.FULL, 500)]
    assert sizes == [(32, 15), (64, 15), (128, 15), (256, 15)]
    assert [p[0].batch_size for p in uci_search.grid("MCBN", uci.FULL, 64)] == [32, 64]
    (dropout,) = uci_search.grid("MCDO", uci.FULL, 500)
    assert len(dropout) == 90 and {c.batch_size for c in dropout} == {32}
    parts = uci_search.stacks("MCDO", uci.FULL, 500, 50)
    assert [c for p in parts for c in p] == dropout and max(map(len, parts)) == 16


def test_a_file_is_called_without_its_endings(tmp_path):
    for name in ("energy.npz.xz", "energy.csv"):
        (tmp_path / name).touch()
        assert uci.tables_at(tmp_path / name) == {"energy": tmp_path / name}
