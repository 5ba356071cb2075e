"""The report of the demo from invented units, all of whose numbers differ;
and the units from the network by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import roc_auc_score
from torch.nn.functional import cross_entropy

from bnuq_ext import data, metrics
from bnuq_ext.experiments import digits, digits_report

pytestmark = pytest.mark.usefixtures("on_one_thread")

SETTINGS = replace(digits.QUICK, num_seeds=4, noise_stds=(0.0, 0.35), curve_batch_sizes=(8, 300))
BETTER = {"accuracy": 1, "nll": -1, "ece": -1, "auroc_entropy": 1}
UNSEEN = "accuracy nll entropy_seen entropy_unseen auroc_entropy auroc_information".split()


def invented() -> dict:
    rng = np.random.default_rng(0)
    scores = lambda names: {row: {k: rng.normal() for k in names} for row in digits.ROWS}  # noqa: E731
    units = {}
    for s in range(4):
        noisy = {std: scores(("accuracy", "nll", "ece")) for std in ("0.0", "0.35")}
        noisy["0.0"]["joint"] = {"accuracy": 9 + s, "nll": 9.5 + s, "ece": -9 - s}
        units[f"noisy-{s}"] = noisy | {"temperature": rng.normal()}
        units[f"unseen-{s}"] = scores(UNSEEN)
        units[f"unseen-{s}"]["joint"] = {k: 8.0 + i + s for i, k in enumerate(UNSEEN)}
    curve = lambda: rng.uniform(1, 2, 2).tolist()  # noqa: E731
    units["curve"] = {
        name: {"mutual_information": curve(), "nll": curve(), "plug_in_nll": rng.normal()}
        for name in ("clean", "noisy")
    }
    units["verdict"] = {"clean": np.eye(8).tolist(), "image": np.ones((8, 8)).tolist(), "truth": 3}
    units["verdict"] |= {"plug_in": [0.2, 0.8], "replicas": [[0.7, 0.3], [0.6, 0.4]]}
    units["entropies"] = {
        name: {row: rng.uniform(0, 1, 5).tolist() for row in digits.ROWS}
        for name in ("seen", "unseen")
    }
    return units


UNITS = invented()
SUMMARY = digits_report.summarise(UNITS, SETTINGS)


def noisy(std, row, score):
    return np.array([UNITS[f"noisy-{s}"][std][row][score] for s in range(4)])


def unseen(row, score):
    return np.array([UNITS[f"unseen-{s}"][row][score] for s in range(4)])


def check(found, values):
    assert found["mean"] == pytest.approx(values.mean())
    assert found["error"] == pytest.approx(values.std(ddof=1) / 2)


def word(ours, theirs, score):
    gap = BETTER[score] * (ours - theirs)
    if abs(gap.mean()) <= 2 * gap.std(ddof=1) / 2:
        return "level"
    return "better" if gap.mean() > 0 else "worse"


def test_means_over_the_seeds():
    for row in digits.ROWS:
        for std in ("0.0", "0.35"):
            for score in ("accuracy", "nll", "ece"):
                check(SUMMARY["noisy"][std][row][score], noisy(std, row, score))
        for score in UNSEEN:
            check(SUMMARY["unseen"][row][score], unseen(row, score))
    check(SUMMARY["temperature"], np.array([UNITS[f"noisy-{s}"]["temperature"] for s in range(4)]))


def test_words():
    for baseline in (digits.PLUG_IN, digits.TEMPERATURE):
        for row in digits.SAMPLERS:
            for score, found in SUMMARY["compared"][baseline][row].items():
                for std, said in found.items():
                    assert said == word(noisy(std, row, score), noisy(std, baseline, score), score)
    joint = SUMMARY["compared"][digits.PLUG_IN]["joint"]
    assert [joint[k]["0.0"] for k in ("accuracy", "nll", "ece")] == ["better", "worse", "better"]
    for baseline in (digits.PLUG_IN, digits.TEMPERATURE):
        for row in digits.SAMPLERS:
            found = SUMMARY["unseen_compared"][baseline][row]
            assert list(found) == ["accuracy", "nll", "auroc_entropy"]
            for score, said in found.items():
                assert said == word(unseen(row, score), unseen(baseline, score), score)
    joint = SUMMARY["unseen_compared"][digits.PLUG_IN]["joint"]
    assert [*joint.values()] == ["better", "worse", "better"]


def test_text_has_each_row():
    lines = digits_report.text(SUMMARY, SETTINGS).splitlines()
    start = lines.index("Pixel noise 0.35")
    for row, line in zip(digits.ROWS, lines[start + 2 :], strict=False):
        values = [noisy("0.35", row, k) for k in ("accuracy", "nll", "ece")]
        cells = [f"{v.mean():.3f} ± {v.std(ddof=1) / 2:.3f}" for v in values]
        assert line.startswith(row) and " ".join(line[len(row) :].split()) == " ".join(cells)


def test_where_sampling_does_not_win():
    scores = {
        "accuracy": {"0.0": "level", "0.35": "worse"},
        "nll": {"0.0": "level", "0.35": "better"},
        "ece": {"0.0": "worse", "0.35": "worse"},
    }
    unseen = {"accuracy": "level", "nll": "level", "auroc_entropy": "worse"}
    summary = {"compared": {"a": {"joint": scores}}, "unseen_compared": {"a": {"joint": unseen}}}
    assert digits_report.losses(summary) == [
        "joint against a, accuracy: worse at noise 0.35.",
        "joint against a, NLL: level at noise 0.0.",
        "joint against a, ECE: worse at noise 0.0, 0.35.",
        "joint against a, unseen classes: NLL level, AUROC H worse.",
    ]


def test_signs_of_the_comparisons():
    head, stds, *lines = digits_report.comparisons(SUMMARY)
    assert head.split(maxsplit=1)[1].replace("  ", "").startswith(digits.PLUG_IN)
    assert head.split() == f"against {digits.PLUG_IN} {digits.TEMPERATURE}".split()
    assert stds.split() == ["noise", *["0.0", "0.35"] * 2]
    signs = {"better": "+", "worse": "-", "level": "="}
    pairs = [(row, score) for row in digits.SAMPLERS for score in ("accuracy", "nll", "ece")]
    for line, (row, score) in zip(lines, pairs, strict=True):
        found = [
            word(noisy(s, row, score), noisy(s, b, score), score)
            for b in (digits.PLUG_IN, digits.TEMPERATURE)
            for s in ("0.0", "0.35")
        ]
        assert line.startswith(row) and line.split()[-4:] == [signs[said] for said in found]


def test_one_seed_compares_nothing():
    settings = replace(SETTINGS, num_seeds=1)
    summary = digits_report.summarise(UNITS, settings)
    assert summary["compared"][digits.PLUG_IN]["joint"]["nll"] == {"0.0": None, "0.35": None}
    assert {*summary["unseen_compared"][digits.PLUG_IN]["joint"].values()} == {None}
    text = digits_report.text(summary, settings)
    assert text.endswith("\n\nOne seed: nothing to compare.")
    assert "Paired" not in text and "level" not in text and "does not win" not in text


def test_curves():
    left, right = digits_report.curve_figure(UNITS["curve"], SETTINGS).axes
    for name, label in (("clean", "clean images"), ("noisy", "noise 0.35")):
        for ax, key in ((left, "mutual_information"), (right, "nll")):
            (line,) = (x for x in ax.get_lines() if x.get_label() == label)
            np.testing.assert_allclose(line.get_data(), [[8, 300], UNITS["curve"][name][key]])
        (level,) = (x for x in right.get_lines() if x.get_label() == f"{label}, plug-in BN")
        np.testing.assert_allclose(level.get_ydata(), UNITS["curve"][name]["plug_in_nll"])


def test_entropies_and_verdict():
    ax = digits_report.entropy_figure(UNITS["entropies"], SETTINGS).axes[0]
    lines = {line.get_label(): line for line in ax.get_lines()}
    titles = {"seen": "classes 0–4, trained on", "unseen": "classes 5–9, never seen"}
    for name, title in titles.items():
        for row in (digits.PLUG_IN, "MCBN (bank)"):
            values = lines[f"{title}: {row}"].get_xdata()[1:]
            np.testing.assert_allclose(values, np.sort(UNITS["entropies"][name][row]))
    axes = {ax.get_label(): ax for ax in digits_report.verdict_figure(UNITS["verdict"]).axes}
    for name in ("clean", "image"):
        shown = axes[name].images[0].get_array()
        np.testing.assert_array_equal(shown, UNITS["verdict"][name])
    assert axes["plug-in"].get_xlabel() == "“1”, 80%"


TINY = replace(digits.QUICK, epochs=1, widths=(16, 16, 16), num_batches=4, num_samples=4)


def fitted(seed, classes=10, split=None):
    """The unit's network, from the generator that it starts with."""
    split = TINY.split(seed) if split is None else split
    torch.manual_seed(seed)
    return split, digits.fit(split, classes, TINY)


def test_noisy_inputs_by_hand():
    found = digits.alone(1, lambda: digits.noisy_inputs(TINY, 1))
    split, (model, temperature) = fitted(1)
    with torch.no_grad():
        logits = model(split.validation.x)
        assert temperature == metrics.fit_temperature(logits, split.validation.y)
        x = split.test.x + 0.35 * torch.randn(
            split.test.x.shape, generator=torch.Generator().manual_seed(1)
        )
        logits, y = model(x), split.test.y
    assert found["temperature"] == pytest.approx(temperature, rel=1e-5)
    for row, scale in ((digits.PLUG_IN, 1.0), (digits.TEMPERATURE, temperature)):
        nll = cross_entropy(logits / scale, y).item()
        assert found["0.35"][row]["nll"] == pytest.approx(nll, rel=1e-4)
    for row, sampler in digits.SAMPLERS.items():
        pred = digits.sampled(model, x, TINY, sampler=sampler, seed=1)
        nll = -pred.mean[torch.arange(len(y)), y].log().mean().item()
        assert found["0.35"][row]["nll"] == pytest.approx(nll, rel=1e-4)
    with torch.no_grad():
        nll = cross_entropy(model(split.test.x), y).item()
    assert found["0.0"][digits.PLUG_IN]["nll"] == pytest.approx(nll, rel=1e-4)


def test_unseen_classes_by_hand():
    found = digits.alone(1, lambda: digits.unseen_classes(TINY, 1))
    split, (model, _) = fitted(1, 5, TINY.split(1, range(5)))
    whole = data.digits(num_train=10, num_validation=10, classes=range(5, 10))
    others = torch.cat([part.x for part in whole])
    for row, sampler in digits.SAMPLERS.items():
        seen, unseen = (
            digits.sampled(model, x, TINY, sampler=sampler, seed=1) for x in (split.test.x, others)
        )
        entropies = [stats.entropy(p.mean.numpy(), axis=1) for p in (seen, unseen)]
        informations = [p.mutual_information.numpy() for p in (seen, unseen)]
        truth = np.repeat([0, 1], [len(split.test.x), len(others)])
        expected = {
            "entropy_seen": entropies[0].mean(),
            "entropy_unseen": entropies[1].mean(),
            "auroc_entropy": roc_auc_score(truth, np.concatenate(entropies)),
            "auroc_information": roc_auc_score(truth, np.concatenate(informations)),
        }
        for name, value in expected.items():
            assert found[row][name] == pytest.approx(value, abs=2e-3), name
    kept = digits.alone(0, lambda: digits.entropies(TINY))
    assert [len(kept[name][digits.PLUG_IN]) for name in ("seen", "unseen")] == [301, 896]


def test_curve_and_verdict_by_hand():
    split, (model, _) = fitted(0)
    noise = torch.randn(split.test.x.shape, generator=torch.Generator().manual_seed(0))
    inputs = {"clean": split.test.x, "noisy": split.test.x + 0.35 * noise}
    found = digits.alone(0, lambda: digits.batch_size_curve(TINY))
    with torch.no_grad():
        for name, x in inputs.items():
            nll = cross_entropy(model(x), split.test.y).item()
            assert found[name]["plug_in_nll"] == pytest.approx(nll, rel=1e-4)
            # The replicas are not the plug-in, and at M = N no more than about its running
            # statistics.
            assert min(abs(v - nll) for v in found[name]["nll"][:-1]) > 1e-4
    settings = replace(TINY, epochs=20)
    unit = digits.alone(0, lambda: digits.confident_error(settings))
    torch.manual_seed(0)
    model = digits.fit(split, 10, settings).model
    with torch.no_grad():
        probs = model(inputs["noisy"]).softmax(1)
    pred = digits.sampled(model, inputs["noisy"], settings, keep_samples=True)
    confidence, guess = probs.max(1)
    rows = ((guess != split.test.y) & (confidence > 0.9)).nonzero().squeeze(1)
    assert unit["confident_errors"] == len(rows) > 1 and unit["test_images"] == len(probs)
    row = rows[pred.mutual_information[rows].argmax()]
    assert confidence[rows].argmax() != pred.mutual_information[rows].argmax()
    torch.testing.assert_close(torch.tensor(unit["plug_in"]), probs[row], rtol=1e-4, atol=1e-5)
    assert (
        unit["truth"] == split.test.y[row]
        and unit["clean"] == split.test.x[row].view(8, 8).tolist()
    )
