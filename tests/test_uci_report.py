"""The scores of `uci` against quadrature; its report from invented runs,
whose numbers all differ."""

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from estimates import shown
from quadrature import crps_scores

from bnuq_ext.protocols import uci, uci_report

SETTINGS = replace(uci.QUICK, num_splits=2, num_seeds=3)
SCORES = "crps constant_crps best_crps pll constant_pll best_pll".split()
SCORES += "normalised_crps normalised_pll rmse plain_rmse".split()
# The paper's for boston, CRPS and PLL of MCBN and MCDO: 8.50 ± 0.86, 10.49 ± 1.35; 3.06 ± 0.33,
# 5.51 ± 1.05.
CENTERS = {
    ("boston", "MCBN"): {"normalised_crps": 8.6, "normalised_pll": -10.49},
    ("boston", "MCDO"): {"normalised_crps": 0.0, "normalised_pll": 5.0},
    ("mine", "MCBN"): {"normalised_crps": -5.0, "normalised_pll": 4.0},
    ("mine", "MCDO"): {"normalised_crps": 7.0, "normalised_pll": 6.0},
}


def test_scores_against_quadrature():
    rng = np.random.default_rng(0)
    samples, y = rng.normal(size=(7, 5)) * 0.4, rng.normal(size=5)
    found = uci.run_scores(torch.from_numpy(samples), torch.from_numpy(y), 0.3, 0.7)
    mean, std = samples.mean(0), np.sqrt(samples.var(0) + 0.3)
    crps, constant, normalised = crps_scores(mean, std, y, 0.7**0.5)
    assert found["crps"] == pytest.approx(crps, rel=1e-6)
    assert found["constant_crps"] == pytest.approx(constant, rel=1e-6)
    assert found["normalised_crps"] == pytest.approx(normalised, rel=1e-4)
    density = scipy.stats.norm.logpdf(y, samples, 0.3**0.5)
    pll = np.mean(scipy.special.logsumexp(density, 0) - math.log(7))
    constant = scipy.stats.norm.logpdf(y, mean, 0.7**0.5).mean()
    best = scipy.stats.norm.logpdf(y, mean, np.abs(y - mean)).mean()
    assert found["pll"] == pytest.approx(pll)
    assert found["normalised_pll"] == pytest.approx(100 * (pll - constant) / (best - constant))
    assert found["rmse"] == pytest.approx(np.sqrt(np.mean((y - mean) ** 2)))


def invented() -> dict:
    """Runs of two splits and three seeds about the centres,
    -1.2 to 1.2 about those of CRPS of boston's MCDO."""
    rng, results = np.random.default_rng(0), {}
    for (name, method), centers in CENTERS.items():
        for split in (1, 2):
            runs = [{s: 10 + rng.normal() for s in SCORES} for _ in range(3)]
            for seed, run in enumerate(runs):
                run |= {
                    s: c + (0.4 if split == 1 else -0.4) * (seed + 1) for s, c in centers.items()
                }
            choice = {"batch_size": 32 * split, "weight_decay": 10.0**-split, "dropout": None}
            choice |= {"epochs": 40 * split, "rmse": 3.0 + split}
            noise = {k: rng.uniform(1, 9) for k in ("noise_var", "constant_var")}
            plls = {"held_out_pll": -rng.uniform(1, 2), "unbounded_pll": -rng.uniform(3, 4)}
            results[f"{name}-{method}-{split}"] = (
                {"runs": runs, "choice": choice, "rows": 500} | noise | plls
            )
            if split == 1:
                points = {k: rng.uniform(1, 2, 8).tolist() for k in ("mean", "std", "y")}
                results[f"{name}-{method}-1"]["points"] = points
    return results


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    results = invented()
    return results, uci_report.report(results, SETTINGS, tmp_path_factory.mktemp("uci"))


def values_of(results, name, method, score):
    splits = [results[f"{name}-{method}-{split}"] for split in (1, 2)]
    return np.array([run[score] for split in splits for run in split["runs"]])


def cell(values):
    return shown(values.mean(), values.std(ddof=1) / len(values) ** 0.5)


def rows_of(report, name):
    (table,) = (t for t in report.tables if t.name == name)
    return table.rows


def test_normalised_scores_stand_beside_the_paper(made):
    results, report = made
    agree = {("CRPS", "MCBN"): "yes", ("PLL", "MCBN"): "no", ("CRPS", "MCDO"): "no", ("PLL", "MCDO"): "yes"}  # fmt: skip
    for name, score, method, ours, p, stars, paper, _, same in rows_of(report, "normalised"):
        values = values_of(results, name, method, f"normalised_{score.lower()}")
        assert ours == cell(values)
        assert p == pytest.approx(scipy.stats.ttest_1samp(values, 0).pvalue, rel=1e-6)
        assert stars == uci_report.stars(p)
        assert same == (agree[score, method] if name == "boston" else None)
        assert (paper is None) == (name == "mine")
    assert (
        "2 of 4 normalised scores agree with the paper's within two standard errors; not: "
        in (report.remarks[4])
    )
    assert report.remarks[4].endswith("boston CRPS MCDO, boston PLL MCBN.")


def test_sentences_of_better_worse_and_undecided(made):
    _, report = made
    assert report.remarks[:4] == [
        "CRPS: MCBN is better than a constant variance (p < 0.05) on boston; worse on mine.",
        "CRPS: MCDO is better than a constant variance (p < 0.05) on mine; undecided on boston.",
        "PLL: MCBN is better than a constant variance (p < 0.05) on mine; worse on boston.",
        "PLL: MCDO is better than a constant variance (p < 0.05) on boston, mine.",
    ]
    found = [("a", -1.0, 0.3), ("b", 1.0, 0.3)]
    assert uci_report.verdict("PLL", "MCDO", found).endswith("on none; undecided on a, b.")


def test_raw_scores_and_errors(made):
    results, report = made
    raw, errors = rows_of(report, "raw"), rows_of(report, "rmse")
    assert len(raw) == len(errors) == 8
    for name, score, method, ours, constant, *_ in raw:
        assert ours == cell(values_of(results, name, method, score.lower()))
        assert constant == cell(values_of(results, name, method, f"constant_{score.lower()}"))
    of = {"MCBN": ("MCBN", "rmse"), "BN": ("MCBN", "plain_rmse")}
    of |= {"MCDO": ("MCDO", "rmse"), "DO": ("MCDO", "plain_rmse")}
    for name, _, label, ours, *_ in errors:
        assert ours == cell(values_of(results, name, *of[label]))


def test_choices(made):
    results, report = made
    rows = rows_of(report, "choices")
    assert len(rows) == 8
    for name, method, split, *cells in rows:
        unit = results[f"{name}-{method}-{split}"]
        stds = unit["noise_var"] ** 0.5, unit["constant_var"] ** 0.5
        expected = [*unit["choice"].values(), *stds, unit["held_out_pll"], unit["unbounded_pll"]]
        assert cells[2] is None and cells[:2] + cells[3:] == pytest.approx(
            expected[:2] + expected[3:]
        )


def test_splits_are_in_the_order_of_their_numbers():
    units = [f"{n}-{m}-{s}" for n in ("b", "a-c") for m in ("MCDO", "MCBN") for s in (10, 2, 1, 11)]
    expected = {
        (n, m): [f"{n}-{m}-{s}" for s in (1, 2, 10, 11)]
        for n in ("a-c", "b")
        for m in ("MCBN", "MCDO")
    }
    found = uci_report.grouped({unit: unit for unit in units})
    assert found == expected and [*found] == [*expected]


def test_the_last_epoch_allowed(made):
    results, _ = made
    # Of 500 rows a fold has 320: at most 1,000 epochs with a look at every 20.
    for epochs, found in ((980, "0 of 8"), (981, "1 of 8"), (1000, "1 of 8")):
        results["mine-MCBN-2"]["choice"]["epochs"] = epochs
        text = uci_report.unfinished(uci_report.grouped(results), SETTINGS)
        assert f" in {found} searches" in text and ("mine MCBN (1)" in text) == (found[0] == "1")


def test_figures_show_the_first_split_of_each_method(made):
    results, report = made
    assert report.figures == ["uncertainty-boston.png", "uncertainty-mine.png"]
    groups = uci_report.grouped(results)
    for name in ("boston", "mine"):
        axes = uci_report.draw(name, groups).axes
        for method, ax in zip(("MCBN", "MCDO"), axes, strict=True):
            assert (
                ax.get_title()
                == f"{name}, {method} (dashed: CU{method[2:]}, its constant variance)"
            )
            unit = results[f"{name}-{method}-1"]
            mean, std, y = (np.array(unit["points"][k]) for k in ("mean", "std", "y"))
            error = np.abs(y - mean)[np.argsort(std)]
            np.testing.assert_allclose(ax.lines[0].get_ydata(), error)
            level = scipy.stats.halfnorm.ppf(0.95, scale=unit["constant_var"] ** 0.5)
            np.testing.assert_allclose(ax.lines[-1].get_ydata(), level, rtol=1e-5)
            assert ax.get_ylim()[1] > max(error.max(), level)


def test_report_tells_where_the_bound_held():
    plls = [(-1.0, -1.0), (-2.0, -300.0), (-4.0, -500.0), (-3.0, -100.0)]
    splits = [{"held_out_pll": a, "unbounded_pll": b} for a, b in plls]
    groups = {("energy", "MCDO"): splits[:3], ("wine", "MCBN"): splits[3:]}
    assert uci_report.bounded(groups, SETTINGS) == (
        "The noise variance ended at its bound, 0.0001 of the training targets' variance, in 3 of 4 searches: "
        "energy MCDO (2), wine MCBN (1). Median PLL of the held-out rows of these: -3.00, without the bound -300."
    )
    groups = {("energy", "MCDO"): splits[:1]}
    assert uci_report.bounded(groups, SETTINGS).endswith("variance, in 0 of 1 searches.")


def test_stars():
    assert [uci_report.stars(p) for p in (0.2, 0.04, 9e-3, 9e-4, 9e-5, math.nan)] == [
        "ns", "*", "**", "***", "****", "",
    ]  # fmt: skip


def test_a_star_is_below_its_level():
    levels = [0.05, 0.01, 0.001, 0.0001]
    assert [uci_report.stars(p) for p in levels] == ["ns", "*", "**", "***"]
    assert [uci_report.stars(0.99 * p) for p in levels] == ["*", "**", "***", "****"]
