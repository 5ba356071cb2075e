"""The demo end to end on a tiny run: its numbers, its resumption, its report."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bnuq_ext import data
from bnuq_ext.experiments import digits, digits_report

TINY = replace(digits.QUICK, epochs=1, widths=(16, 16, 16), num_batches=4, num_samples=4)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    return folder, digits.run(folder, TINY, progress=False)


def test_scores_are_scores(finished):
    _, units = finished
    for seed in range(2):
        for std in ("0.0", "0.35"):
            assert units[f"noisy-{seed}"][std].keys() == set(digits.ROWS)
            for row in digits.ROWS:
                found = units[f"noisy-{seed}"][std][row]
                assert 0 < found["accuracy"] < 1 and 0 < found["ece"] < 1 and 0 < found["nll"] < 10
        for row in digits.ROWS:
            found = units[f"unseen-{seed}"][row]
            assert 0 < found["entropy_seen"] < math.log(5) + 1e-6
            assert 0 < found["auroc_entropy"] < 1
        assert units[f"unseen-{seed}"][digits.PLUG_IN]["auroc_information"] == 0.5


def test_temperature_leaves_the_accuracy(finished):
    found = finished[1]["noisy-0"]["0.35"]
    assert found[digits.PLUG_IN]["accuracy"] == found[digits.TEMPERATURE]["accuracy"]
    assert found[digits.PLUG_IN]["nll"] != found[digits.TEMPERATURE]["nll"]


def test_information_vanishes_exactly_at_the_size_of_the_data(finished):
    for name in ("clean", "noisy"):
        information = finished[1]["curve"][name]["mutual_information"]
        assert information[-1] == 0.0
        assert min(information[:-1]) > 1e-4
        assert information[0] > information[1]


def test_plug_in_row_is_the_trained_network():
    split = TINY.split(0)
    torch.manual_seed(0)
    network = digits.train(split.train, 10, TINY)
    torch.manual_seed(0)
    fitted = digits.fit(split, 10, TINY)
    outcome = digits.outcomes(fitted, split.test.x, TINY, 0)[digits.PLUG_IN]
    torch.testing.assert_close(outcome.probs, network(split.test.x).softmax(1).detach())
    assert len(network) == 10 and network[1].num_features == 16


def test_unseen_images_are_all_the_others():
    *_, others = digits.known_and_unseen(TINY, 0)
    assert len(others) == 1797 - 901


def test_a_killed_run_goes_on(finished, tmp_path, monkeypatch):
    _, expected = finished
    calls = []

    def dies(settings, seed):
        calls.append(seed)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return digits_noisy(settings, seed)

    digits_noisy = digits.noisy_inputs
    monkeypatch.setattr(digits, "noisy_inputs", dies)
    before = torch.random.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        digits.run(tmp_path, TINY, progress=False)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (tmp_path / "units" / "noisy-0.json").exists()
    assert digits.run(tmp_path, TINY, progress=False) == expected
    assert calls == [0, 1, 1]
    with pytest.raises(ValueError, match="must hold no run but one of the same settings"):
        digits.run(tmp_path, replace(TINY, epochs=2), progress=False)


def test_more_seeds_continue_a_run(finished):
    folder, units = finished
    more = digits.run(folder, digits.with_seeds(TINY, 3), progress=False)
    assert {k: more[k] for k in units} == units and "noisy-2" in more
    with pytest.raises(ValueError, match=r"^demo: seeds must lie in \[1, 2\^24\), got 0$"):
        digits.with_seeds(TINY, 0)


def test_the_digit_of_the_figure(finished):
    verdict = finished[1]["verdict"]
    image = data.add_noise(TINY.split(0).test.x, 0.35, seed=0)
    assert (image.view(-1, 8, 8) == torch.tensor(verdict["image"])).all(2).all(1).sum() == 1
    assert torch.tensor(verdict["replicas"]).shape == (4, 10)
    torch.testing.assert_close(torch.tensor(verdict["replicas"]).sum(1), torch.ones(4))
    # None is wrong with over 90 % after one epoch; this one is wrong all the same.
    assert verdict["confident_errors"] == 0
    assert torch.tensor(verdict["plug_in"]).argmax() != verdict["truth"]


def test_the_sure_error_that_replicas_dispute_most_is_shown(monkeypatch):
    test = TINY.split(0).test
    logits = 9.0 * torch.eye(10)[test.y]
    for row, sureness in ((3, 9.0), (5, 4.0), (7, 9.0)):  # a label 1 too large, less sure in row 5
        logits[row] = sureness * torch.eye(10)[(test.y[row] + 1) % 10]
    information = torch.zeros(len(test.y))
    information[[3, 5, 7, 9]] = torch.tensor([0.1, 0.9, 0.3, 0.9])
    pred = SimpleNamespace(mutual_information=information, samples=logits.expand(4, -1, -1))
    monkeypatch.setattr(digits, "fit", lambda *args: digits.Fitted(lambda x: logits, 1.0))
    monkeypatch.setattr(digits, "sampled", lambda *args, **options: pred)
    found = digits.confident_error(TINY)
    assert found["clean"] == test.x[7].view(8, 8).tolist() and found["truth"] == test.y[7]
    assert found["confident_errors"] == 2
    logits[[3, 7]] *= 0.4  # then the wrong one that is surest
    found = digits.confident_error(TINY)
    assert found["clean"] == test.x[5].view(8, 8).tolist() and found["confident_errors"] == 0


def test_report(finished, tmp_path):
    _, units = finished
    results = digits_report.write(tmp_path, units, TINY)
    assert json.loads((tmp_path / "results.json").read_text())["noisy"].keys() == {"0.0", "0.35"}
    for name in results["figures"]:
        assert (tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    text = digits_report.text(results, TINY)
    cell = results["noisy"]["0.35"]["joint"]["nll"]
    assert f"{cell['mean']:.3f} ± {cell['error']:.3f}" in text
    assert "trained on 0 to 4, shown 5 to 9" in text
    assert len(results["figures"]) == 3


def test_estimate_by_hand():
    found = digits_report.estimate([1.0, 2.0, 6.0])
    assert found == {"mean": pytest.approx(3.0), "error": pytest.approx(math.sqrt(7 / 3))}
    assert digits_report.estimate([1.0]) == {"mean": 1.0, "error": None}


def test_compare():
    high, low = [1.0, 1.1, 1.0], [0.5, 0.5, 0.6]
    assert digits_report.compare(high, low, True) == "better"
    assert digits_report.compare(high, low, False) == "worse"
    assert digits_report.compare([0.0, 1.0, 0.0], [0.5, 0.5, 0.0], True) == "level"
    assert digits_report.compare(high, high, True) == "level"
    assert digits_report.compare([1.0], [0.0], True) is None


def test_comparisons_and_losses_come_from_the_numbers():
    words = {"0.0": "worse", "0.25": "level", "0.35": "better"}
    better, level = dict.fromkeys(words, "better"), dict.fromkeys(words, "level")
    scores = {"accuracy": level, "nll": words, "ece": better}
    unseen = {"accuracy": "level", "nll": "worse", "auroc_entropy": "level"}
    summary = {
        "noisy": words,
        "compared": {"base": dict.fromkeys(digits.SAMPLERS, scores)},
        "unseen_compared": {"base": {"joint": unseen, "lognormal": {"accuracy": "level"}}},
    }
    lines = digits_report.comparisons(summary)
    assert lines[1].split() == ["noise", "0.0", "0.25", "0.35"]
    assert lines[5:8] == [
        "joint       accuracy       =     =     =",
        "joint       NLL            -     =     +",
        "joint       ECE            +     +     +",
    ]
    said = digits_report.losses(summary)
    assert said[1] == "joint against base, NLL: worse at noise 0.0; level at noise 0.25."
    assert said[3:] == ["joint against base, unseen classes: NLL worse, AUROC H level."]
