"""The report of the batch-size protocol from invented units, all of whose numbers differ."""

from dataclasses import replace

import estimates
import numpy as np
import pytest

from bnuq_ext.protocols import batch_size, batch_size_report

SETTINGS = replace(batch_size.QUICK, batch_sizes=(8, 32, 64), num_seeds=2, fit_trained_with=16)
DIGITS = {"plug_in_accuracy": 4, "accuracy": 4, "plug_in_nll": 3, "nll": 3}
DIGITS |= {"information_in": 4, "information_out": 4, "auroc_information": 3, "auroc_entropy": 3}
CURVES = ("log_likelihood", "kl", "elbo", "nll", "information_in", "information_out")


def invented() -> dict:
    rng = np.random.default_rng(0)
    results = {}
    for seed, best in ((0, (16, 4)), (1, (64, 16))):
        curves = {name: rng.uniform(1, 2, 4).tolist() for name in CURVES}
        curves["log_likelihood"] = [-900.0 - seed, -700.0, -600.0, -590.0]
        curves["kl"][-1] = curves["elbo"][-1] = None
        curves["elbo"][:3] = [-1000.0 + seed, -800.0, -850.0]
        curves["information_in"][-1] = curves["information_out"][-1] = 0.0
        share = {"train_rows": 50, "batch_sizes": [4, 16, 50]}
        results[f"fit-{seed}"] = {
            **curves, "batch_sizes": [4, 16, 64, 200], "train_rows": 200, "plug_in_nll": 3.0 + seed,
            "best_by_elbo": best[0], "best_by_nll": best[1],
            "shares": [share | {"information_in": rng.uniform(0.1, 0.2, 3).tolist()}],
        }  # fmt: skip
        for M in (64, 32, 8):
            results[f"M{M}-{seed}"] = {name: rng.uniform(0.1, 0.9) for name in DIGITS}
            results[f"M{M}-{seed}"]["information_in"] = 10 / M + seed
            results[f"M{M}-{seed}"]["information_out"] = 100 / M + seed
    return results


def shown(values, digits):
    return estimates.shown(np.mean(values), np.std(values, ddof=1) / 2**0.5, digits)


def curve(ax, label):
    (line,) = (line for line in ax.get_lines() if line.get_label() == label)
    return np.array(line.get_data(), float).tolist()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    results = invented()
    figures, patch = [], pytest.MonkeyPatch()
    new_figure = batch_size_report.new_figure
    patch.setattr(
        batch_size_report, "new_figure", lambda *s: figures.append(new_figure(*s)) or figures[-1]
    )
    report = batch_size.report(results, SETTINGS, tmp_path_factory.mktemp("report"))
    patch.undo()
    return results, report, figures


def test_scores(made):
    results, report, _ = made
    rows = {row[0]: row[1:9] for row in report.tables[0].rows}
    assert list(rows) == [8, 32, 64]
    for M, cells in rows.items():
        runs = [results[f"M{M}-{seed}"] for seed in (0, 1)]
        assert cells == [shown([r[name] for r in runs], d) for name, d in DIGITS.items()]


def test_curves(made):
    results, report, _ = made
    fits = [results["fit-0"], results["fit-1"]]
    for i, (M, *cells) in enumerate(report.tables[1].rows):
        assert M == fits[0]["batch_sizes"][i]
        for name, cell in zip(CURVES, cells, strict=True):
            infinite = {"kl": "inf", "elbo": "-inf"}.get(name) if i == 3 else None
            expected = infinite or np.mean([fit[name][i] for fit in fits])
            assert cell == expected if infinite else cell == pytest.approx(expected)
    shares = {row[0]: row[1:] for row in report.tables[2].rows}
    for i, M in enumerate((4, 16, 50)):
        expected = np.mean([fit["shares"][0]["information_in"][i] for fit in fits])
        assert shares[M][0] == pytest.approx(expected)
    whole = [np.mean([fit["information_in"][i] for fit in fits]) for i in range(4)]
    assert [shares[M][1] for M in (4, 16, 64, 200)] == pytest.approx(whole)
    assert shares[50][1] is shares[64][0] is None


def test_figure_of_networks_trained_with_each_size(made):
    results, _, figures = made
    left, right = figures[0].axes
    lines = {"known": (left, "information_in"), "foreign": (left, "information_out")}
    lines |= {"MCBN": (right, "accuracy"), "plug-in BN": (right, "plug_in_accuracy")}
    for label, (ax, name) in lines.items():
        means = [np.mean([results[f"M{M}-{s}"][name] for s in (0, 1)]) for M in (8, 32, 64)]
        x, y = curve(ax, label)
        assert x == [8, 32, 64] and y == pytest.approx(means)


def test_figure_of_the_choice(made):
    results, _, figures = made
    fit, (bounds, nll, information) = results["fit-0"], figures[1].axes
    assert figures[1].get_suptitle() == "the first seed's network alone"
    lines = [
        (bounds, "ELBO", fit["elbo"]),
        (bounds, "-KL", [-1 * (v or np.nan) for v in fit["kl"]]),
    ]
    lines += [(bounds, "E log p(training data)", fit["log_likelihood"])]
    lines += [(nll, "validation", fit["nll"]), (information, "known", fit["information_in"])]
    lines += [(information, "foreign", fit["information_out"])]
    for ax, label, values in lines:
        x, y = curve(ax, label)
        assert x == [4, 16, 64, 200]
        np.testing.assert_allclose(y, np.array(values, float))
    assert curve(bounds, "best: M = 16")[0] == [16, 16] and curve(nll, "best: M = 4")[0] == [4, 4]
    assert curve(nll, "plug-in BN")[1] == [3.0, 3.0]
    for ax in (bounds, nll, information):
        assert ax.get_xticks().tolist() == [4, 16, 64, 200]
        assert [t.get_text() for t in ax.get_xticklabels()] == ["4", "16", "64", "200\n= N"]
    low, high = bounds.get_ylim()
    assert low < -850 and high > 0 and information.get_ylim()[0] == 0


def test_remarks(made):
    results, report, _ = made
    known, foreign, rank, accuracy, paper, choice, whole = report.remarks
    # Means over the seeds of 10 / M + seed and of 100 / M + seed.
    assert known.startswith(
        "Mutual information on known images: 1.7500 nats at M = 8, 0.6562 at M = 64, 3 times"
    )
    assert foreign.startswith(
        "Mutual information on foreign images: 13.0000 nats at M = 8, 2.0625 at M = 64, 6 times"
    )
    aurocs = [
        shown([results[f"M{M}-{s}"]["auroc_information"] for s in (0, 1)], 3) for M in (8, 64)
    ]
    assert rank.endswith(f"is {aurocs[0]} at M = 8 and {aurocs[1]} at M = 64.")
    means = [np.mean([results[f"M{M}-{s}"]["accuracy"] for s in (0, 1)]) for M in (8, 32, 64)]
    assert accuracy == f"The accuracy of MCBN lies between {min(means):.4f} and {max(means):.4f}."
    assert "with another network than here" in paper
    assert choice.startswith(
        "The ELBO is greatest at M = 16 and 64 and the validation NLL least at M = 4 and 16,"
    )
    assert "trained with M = 16" in choice and whole.startswith(
        "At M = N = 200 the mutual information is 0.0,"
    )
