"""The report of unseen classes from invented probabilities, which differ for all networks,
statistics and images."""

from dataclasses import replace
from itertools import product

import estimates
import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch

from bnuq_ext import metrics
from bnuq_ext.protocols import ood, ood_report

SETTINGS = replace(ood.QUICK, cases=(("digits", "lenet-5", 20),))
IMAGES = ("known", "noise 0.5", "blur 1")
METHODS, STATISTICS = ("one network", "dropout", "deep ensemble"), ("running", "SBN", "MCBN")
DIGITS = {"error": 2, "nll": 3, "ece": 3, "auroc": 3, "entropy_known": 3, "entropy_unknown": 3}
Y = np.arange(40) % 5


def invented() -> dict:
    """Two runs of two members and one with dropout;
    drawn statistics are surer of the known images."""
    generator = torch.Generator().manual_seed(0)
    units = {}
    for run, member in product(range(2), range(3)):
        probs = {}
        for k, name in enumerate(STATISTICS):
            probs[name] = {}
            for images in (*IMAGES, "unknown"):
                logits = torch.randn(40, 5, generator=generator)
                if images != "unknown":
                    logits[torch.arange(40), torch.arange(40) % 5] += 1 + k
                probs[name][images] = ood_report.encode(logits.softmax(1))
        about = {"dataset": "digits", "network": "lenet-5", "run": run, "member": member}
        units[f"{run}-{member}"] = about | {"dropout": member == 2, "y": Y.tolist(), "probs": probs}
    return units


def repetitions(units, method, name, images):
    """(R, 40, 5) by numpy."""
    found = {k: ood_report.decode(u["probs"][name][images]).numpy() for k, u in units.items()}
    if method == "one network":
        return np.stack([found[k] for k in ("0-0", "0-1", "1-0", "1-1")])
    if method == "dropout":
        return np.stack([found["0-2"], found["1-2"]])
    return np.stack([(found[f"{run}-0"] + found[f"{run}-1"]) / 2 for run in (0, 1)])


def scores_of(units, method, name, images="known"):
    """score -> (R,) by scikit-learn and scipy."""
    found = {score: [] for score in DIGITS}
    unknown = repetitions(units, method, name, "unknown")
    for p, q in zip(repetitions(units, method, name, images), unknown, strict=True):
        found["error"].append(100 * np.mean(p.argmax(1) != Y))
        found["nll"].append(-np.log(p[range(40), Y]).mean())
        found["ece"].append(metrics.ece(torch.from_numpy(p), torch.from_numpy(Y)).item())
        entropies = [scipy.stats.entropy(v, axis=1) for v in (p, q)]
        truth = [0] * 40 + [1] * 40
        found["auroc"].append(sklearn.metrics.roc_auc_score(truth, np.concatenate(entropies)))
        found["entropy_known"].append(entropies[0].mean())
        found["entropy_unknown"].append(entropies[1].mean())
    return {score: np.array(values) for score, values in found.items()}


def error_of(values):
    return values.std(ddof=1) / len(values) ** 0.5


def shown(values, digits):
    return estimates.shown(values.mean(), error_of(values), digits)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    units = invented()
    report = ood.report(units, SETTINGS, tmp_path_factory.mktemp("ood"))
    return units, {table.name: table.rows for table in report.tables}, report


def test_scores(made):
    units, tables, _ = made
    assert [tuple(row[2:4]) for row in tables["ood"]] == [*product(METHODS, STATISTICS)]
    for _, _, method, name, count, *cells in tables["ood"]:
        found = scores_of(units, method, name)
        assert count == (4 if method == "one network" else 2)
        assert cells[:6] == [shown(found[score], digits) for score, digits in DIGITS.items()]


def test_corrupted_images_have_their_own_scores(made):
    units, tables, _ = made
    assert len(tables["corrupted"]) == 18
    for _, _, method, name, images, *cells in tables["corrupted"]:
        found = scores_of(units, method, name, images)
        assert cells == [shown(found[score], DIGITS[score]) for score in ("error", "nll", "ece")]


def test_differences_and_what_is_better(made):
    """Less error and less NLL are better, and more AUROC;
    the last is the NLL of the corrupted images."""
    units, tables, report = made
    marks = set()
    for _, _, method, name, *cells in tables["differences"]:
        drawn, running = (scores_of(units, method, n) for n in (name, "running"))
        gaps = {score: drawn[score] - running[score] for score in ("error", "nll", "auroc")}
        parts = [
            scores_of(units, method, name, i)["nll"] - scores_of(units, method, "running", i)["nll"]
            for i in IMAGES[1:]
        ]
        gaps["corrupted"] = np.mean(parts, 0)
        better = {"error": -1, "nll": -1, "auroc": 1, "corrupted": -1}
        for cell, (score, gap) in zip(cells, gaps.items(), strict=True):
            level = abs(gap.mean()) <= 2 * error_of(gap)
            mark = "=" if level else "+" if gap.mean() * better[score] > 0 else "-"
            found, mean, _, error = cell.split()
            last = 10.0 ** -(DIGITS.get(score, 3) + 1)
            assert found == mark and float(mean) == pytest.approx(gap.mean(), abs=0.51 * last)
            assert float(error) == pytest.approx(error_of(gap), abs=0.51 * last)
            marks.add((score, mark))
    assert {("nll", "+"), ("auroc", "+"), ("corrupted", "+")} <= marks
    assert report.remarks[0].startswith("SBN against running statistics")


@pytest.mark.parametrize("errors, marks", [(1.5, "=="), (2.5, "-+")])
def test_a_difference_counts_from_two_standard_errors_on(errors, marks):
    spread = 3**0.5 / errors
    drawn = [1.0, 1.0 + spread, 1.0 - spread]
    for score, mark in zip(("nll", "auroc"), marks, strict=True):
        found = ood_report._difference(drawn, [0.0] * 3, score)
        assert found == f"{mark} 1.0000 ± {1 / errors:.4f}"


def test_what_is_within_the_paper_s_errors_and_what_outside(made):
    case, units = ("mnist", "lenet-5"), made[0]
    ours = scores_of(units, "dropout", "SBN")
    beside = {"error": (ours["error"].mean(), 0.0), "nll": (ours["nll"].mean() + 100, 1.0)}
    paper, cases = (
        {(*case, "dropout", "SBN"): beside},
        {case: ood_report.Outcomes([*units.values()])},
    )
    settings = replace(SETTINGS, cases=((*case, 10),))
    (text,) = ood_report._beside_paper(cases, paper, settings)
    assert (
        "errors: dropout, SBN, error (%): within; dropout, SBN, NLL: outside. The paper's" in text
    )


def test_curves_of_corrupted_images(made):
    units, *_ = made
    outcomes = ood_report.Outcomes(list(units.values()))
    for method, ax in zip(METHODS, ood_report.draw_corrupted(outcomes).axes, strict=True):
        for name, container in zip(STATISTICS, ax.containers, strict=True):
            values = [scores_of(units, method, name, images)["nll"] for images in IMAGES]
            (bars,) = container[2]
            ends = np.array([np.array(s, float)[:, 1] for s in bars.get_segments()])
            expected = [(v.mean() - error_of(v), v.mean() + error_of(v)) for v in values]
            np.testing.assert_allclose(ends, expected, rtol=1e-6)
            assert container.get_label() == name


def test_unseen_classes_are_solid_and_known_ones_dashed(made):
    outcomes = ood_report.Outcomes(list(made[0].values()))
    for ax in ood_report.draw_entropies(outcomes).axes:
        lines = {line.get_label(): line for line in ax.get_lines()}
        for name in STATISTICS:
            solid, dashed = lines[f"{name}, unseen"], lines[f"{name}, known"]
            assert (solid.get_linestyle(), dashed.get_linestyle()) == ("-", "--")
            assert solid.get_color() == dashed.get_color()


def test_the_paper_s_columns():
    paper = ood_report._paper()
    for data in ("mnist", "mnist-all"):
        found = paper[data, "lenet-5", "deep ensemble", "running"]
        assert found == {"error": (0.43, 0.0), "nll": (0.015, 0.001)}
        assert paper[data, "lenet-5", "deep ensemble", "SBN"]["nll"] == (0.014, 0.001)
        assert paper[data, "lenet-5", "dropout", "SBN"]["error"] == (0.49, 0.0)
    assert ("mnist", "lenet-5", "one network", "running") not in paper
