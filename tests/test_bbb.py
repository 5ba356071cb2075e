"""Bayes by Backprop as in the report, on tiny runs: a step by hand, resumption after kill -9,
tables, figures."""

import copy
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drawn import layer_noise
from torch.nn.functional import cross_entropy

from bnuq_ext import BayesLinear, cli, data, ops, reference
from bnuq_ext.experiments import bbb, bbb_report
from bnuq_ext.experiments.store import Store

TINY = bbb.Settings(hidden=8, epochs=2, test_samples=3)


def small_split(rows=250, seed=0):
    """Three parts of two easily told classes, 12 pixels."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (rows + 80,), generator=generator)
    x = torch.rand(rows + 80, 12, generator=generator) * 0.3
    x[torch.arange(len(y)), y * 6] += 2
    cuts = (0, rows, rows + 40, rows + 80)
    return data.Split(*(data.Part(x[a:b], y[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)))


def without_times(log):
    return [{k: v for k, v in entry.items() if "seconds" not in k} for entry in log]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bbb")
    split, states = bbb.run(folder, ["gaussian", "mixture"], TINY, progress=False)
    results = bbb_report.write(folder, split, states, TINY)
    return folder, split, states, results


def test_network_is_the_report_s():
    one, other = (bbb.make_network(TINY, 784, bbb.PRIORS[k]) for k in ("gaussian", "mixture"))
    layers = [m for m in one if isinstance(m, BayesLinear)]
    assert [(m.in_features, m.out_features) for m in layers] == [(784, 8), (8, 8), (8, 10)]
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    mu, rho = layers[0].weight_mu, layers[0].weight_rho
    assert -0.2 <= mu.min() < -0.19 and 0.19 < mu.max() <= 0.2
    assert -5 <= rho.min() < -4.95 and -4.05 < rho.max() <= -4
    assert bbb.PRIORS["mixture-narrow"].std2 == math.exp(-8)
    assert bbb.PRIORS["mixture-quarter"].pi == 0.25
    report = (1e-3, 100, 2, 10, 600)
    s = bbb.Settings()
    assert (s.learning_rate, s.batch_size, s.num_samples, s.test_samples, s.epochs) == report


def loss_by_hand(network, x, y, prior, weight, seed, T):
    """nll summed over the rows + weight * the divergence of all three layers, in plain torch."""
    key, outputs, kl = ops.new_seed(seed), x.expand(T, *x.shape), 0
    layers = [m for m in network if isinstance(m, BayesLinear)]
    for k, layer in enumerate(layers):
        eps, bias_eps = layer_noise(key, k << 16, T, *layer.weight_mu.shape)
        parameters = (layer.weight_mu, layer.weight_rho, layer.bias_mu, layer.bias_rho)
        outputs = reference.bayes_linear(outputs, *parameters, eps, bias_eps)
        outputs = outputs.relu() if k < 2 else outputs
        for mu, rho, noise in ((*parameters[:2], eps), (*parameters[2:], bias_eps)):
            kl = kl + reference.mixture_kl(mu, rho, noise, prior.pi, prior.std1, prior.std2)
    nll = sum(cross_entropy(z, y, reduction="sum") for z in outputs) / T
    return nll, kl, nll + weight * kl


@pytest.mark.parametrize("scheme", ["uniform", "geometric"])
def test_an_epoch_is_plain_sgd_on_the_whole_loss(scheme):
    settings = replace(TINY, scheme=scheme, seed=3)
    part = data.Part(*(t for t in small_split().train))
    part = data.Part(part.x.double(), part.y)
    prior = bbb.PRIORS["mixture"]
    ours, hand = (bbb.make_network(settings, 12, prior).double() for _ in range(2))
    steps = []
    entry = bbb.train_epoch(ours, part, settings, 1, lambda: steps.append(1))
    assert len(steps) == 3
    generator = torch.Generator().manual_seed(settings.key(bbb.ORDER, 1))
    batches = torch.randperm(250, generator=generator).split(100)
    shares = {"uniform": [1 / 3] * 3, "geometric": [4 / 7, 2 / 7, 1 / 7]}[scheme]
    sums = torch.zeros(3, dtype=torch.float64)
    for i, (rows, share) in enumerate(zip(batches, shares, strict=True)):
        seed = settings.key(bbb.STEP, 3 + i)
        terms = loss_by_hand(hand, part.x[rows], part.y[rows], prior, share, seed, 2)
        gradients = torch.autograd.grad(terms[2], list(hand.parameters()))
        with torch.no_grad():
            for p, g in zip(hand.parameters(), gradients, strict=True):
                p -= 1e-3 * g
        sums += torch.stack(terms).detach()
    for a, e in zip(ours.parameters(), hand.parameters(), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-7)
    nll, kl, loss = sums.tolist()
    assert entry["nll"] == pytest.approx(nll / 250) and entry["kl"] == pytest.approx(kl / 3)
    assert entry["loss"] == pytest.approx(loss / 250)


def test_error_is_that_of_samples_and_mean():
    x = 4 * torch.randn(400, 12, generator=torch.Generator().manual_seed(0))
    network = bbb.make_network(TINY, 12, bbb.PRIORS["gaussian"])
    with torch.no_grad():
        for layer in (m for m in network if isinstance(m, BayesLinear)):
            layer.weight_rho.fill_(-0.5)
            layer.bias_rho.fill_(-0.5)
    settings = replace(TINY, test_samples=2)
    key, outputs = ops.new_seed(TINY.key(bbb.TEST, 5)), x.double().expand(2, *x.shape)
    for k, layer in enumerate(m for m in network if isinstance(m, BayesLinear)):
        parameters = (layer.weight_mu, layer.weight_rho, layer.bias_mu, layer.bias_rho)
        parameters = [p.double() for p in parameters]
        noise = layer_noise(key, k << 16, 2, *layer.weight_mu.shape)
        outputs = reference.bayes_linear(outputs, *parameters, *noise)
        outputs = outputs.relu() if k < 2 else outputs
    with torch.no_grad():
        mean = network.eval()(x).softmax(1)
        guess = (2 * outputs.softmax(2).mean(0) + mean).argmax(1)
        assert (guess != mean.argmax(1)).any()
        assert (guess != outputs.softmax(2).mean(0).argmax(1)).any()
    y = torch.cat([guess[:250], (guess[250:] + 1) % 10])
    assert bbb.error(network, data.Part(x, y), settings, 5) == 150 / 400


def test_it_learns(finished):
    _, _, states, results = finished
    split, settings = small_split(1000), replace(TINY, learning_rate=5e-3)
    state = bbb.State(bbb.make_network(TINY, 12, bbb.PRIORS["gaussian"]), {}, [])
    for _ in range(6):
        bbb.run_epoch(state, split, settings, lambda: None)
    assert state.log[-1]["test_error"] < 0.1 < state.log[0]["nll"] and state.log[-1]["nll"] < 0.3
    assert results["runs"]["gaussian"]["log"] == states["gaussian"].log


def test_best_is_the_first_of_the_least_validation_error(monkeypatch):
    split, state = small_split(), None
    errors = iter([0.5, 0.5, 0.2, 0.4, 0.2, 0.1])  # validation and test in turn
    monkeypatch.setattr(bbb, "error", lambda *_: next(errors))
    state = bbb.State(bbb.make_network(TINY, 12, bbb.PRIORS["gaussian"]), {}, [])
    kept = []
    for _ in range(3):
        bbb.run_epoch(state, split, TINY, lambda: None)
        kept.append({k: v.clone() for k, v in state.network.state_dict().items()})
    assert state.best_epoch == 2
    for k, v in state.load_best().state_dict().items():
        assert torch.equal(v, kept[1][k])


def test_more_epochs_continue_to_the_same_numbers(finished, tmp_path):
    _, _, states, _ = finished
    bbb.run(tmp_path, ["mixture"], replace(TINY, epochs=1), progress=False)
    _, again = bbb.run(tmp_path, ["mixture"], TINY, progress=False)
    assert without_times(again["mixture"].log) == without_times(states["mixture"].log)
    for k, v in states["mixture"].best.items():
        assert torch.equal(v, again["mixture"].best[k])


def test_killed_and_run_again(tmp_path, capsys, on_one_thread):
    root = Path(bbb.__file__).parent.parent.parent
    place = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    options = "--prior mixture --hidden 16 --epochs 20 --json".split()

    def start():
        command = [sys.executable, "-m", "bnuq_ext", "bbb", *options, "--output", str(tmp_path)]
        return subprocess.Popen(command, env=place, stdout=subprocess.PIPE)

    killed, run = start(), tmp_path / "mixture"
    while not (run / "checkpoint.safetensors").exists():
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    assert killed.communicate()[0] == b"" and killed.returncode == -signal.SIGKILL
    assert 0 < len(json.loads((run / "log.json").read_text())) < 20
    again = start()
    assert cli.main(["bbb", *options, "--output", str(tmp_path / "whole")]) == 0
    outputs = again.communicate()[0], capsys.readouterr().out
    found = [json.loads(output)["runs"]["mixture"] for output in outputs]
    assert len(found[0]["log"]) == 20 and found[0]["pruned"] == found[1]["pruned"]
    assert without_times(found[0]["log"]) == without_times(found[1]["log"])


@pytest.mark.parametrize("name", ["write_json", "save"])
@pytest.mark.parametrize("first", [True, False])
def test_the_log_is_whole_wherever_the_last_epoch_is_killed(tmp_path, monkeypatch, name, first):
    write, calls = getattr(bbb, name), []

    def killed(*args):
        calls.append(args)
        if len(calls) == TINY.epochs and first:
            raise KeyboardInterrupt
        write(*args)
        if len(calls) == TINY.epochs:
            raise KeyboardInterrupt

    split, part, whole = small_split(), Store(tmp_path / "part", {}), Store(tmp_path / "whole", {})
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(bbb, name, killed)
        trained(part, split)
    state, again = trained(part, split), trained(whole, split)
    assert json.loads((tmp_path / "part/gaussian/log.json").read_text()) == state.log
    assert without_times(state.log) == without_times(again.log)


def trained(store, split):
    state = bbb.resumed(store, "gaussian", split, TINY)
    bbb.train(store, "gaussian", state, split, TINY, progress=False)
    return state


def test_other_settings_or_data_are_refused(finished, tmp_path):
    folder, *_ = finished
    with pytest.raises(ValueError, match="got one with scheme 'geometric', not 'uniform'$"):
        bbb.run(folder, ["gaussian"], replace(TINY, scheme="uniform"), progress=False)
    with pytest.raises(ValueError, match="got one with data .*; scaling .*, not .*$"):
        bbb.run(folder, ["gaussian"], replace(TINY, scaling="126"), progress=False)


def test_fewer_epochs_than_there_are_are_refused(finished):
    folder, *_ = finished
    with pytest.raises(ValueError) as caught:
        bbb.run(folder, ["gaussian"], replace(TINY, epochs=1), progress=False)
    place = folder / "gaussian"
    assert str(caught.value) == (
        f"bbb: epochs must be at least the {TINY.epochs} that {place} holds, got 1"
    )


def test_keys_are_all_different_and_in_range():
    settings = [replace(TINY, seed=seed) for seed in (0, 1, 2**20 - 1)]
    keys = [s.key(p, n) for s in settings for p in range(3) for n in (0, 1, 2**39)]
    assert len(set(keys)) == 27 and 0 <= min(keys) and max(keys) < 2**63


def test_pruning_leaves_the_network_as_it_was(finished):
    _, split, states, results = finished
    for name, state in states.items():
        run = results["runs"][name]
        bbb_report.pruned_errors(state.network, split.test, TINY, 0)
        assert run["pruned"]["snr"]["0.0"] == run["pruned"]["magnitude"]["0.0"] == run["test_error"]
        layers = (m for m in state.network if isinstance(m, BayesLinear))
        assert all(layer.weight_mask is None for layer in layers)
        assert bbb.error(state.network, split.test, TINY, state.best_epoch - 1) == run["test_error"]


@pytest.mark.parametrize("by", ["snr", "magnitude"])
def test_pruned_errors_are_those_of_weights_set_to_zero(finished, by):
    _, split, states, results = finished
    state = states["mixture"]
    network = copy.deepcopy(state.load_best())
    layers = [m for m in network if isinstance(m, BayesLinear)]
    mu, rho = (
        torch.cat([getattr(m, k).flatten() for m in layers]) for k in ("weight_mu", "weight_rho")
    )
    scores = mu.abs() / (reference.softplus(rho) if by == "snr" else 1)
    threshold = scores.sort().values[round(0.75 * len(scores))]
    with torch.no_grad():
        for m in layers:
            sigma = reference.softplus(m.weight_rho) if by == "snr" else 1
            least = m.weight_mu.abs() / sigma < threshold
            m.weight_mu[least], m.weight_rho[least] = 0, -1e4
    expected = bbb.error(network, split.test, TINY, state.best_epoch - 1)
    assert results["runs"]["mixture"]["pruned"][by]["0.75"] == expected


def test_report(finished):
    folder, _, states, results = finished
    assert json.loads((folder / "results.json").read_text()) == json.loads(json.dumps(results))
    names = ["test_error.png", "weights.png", "snr-gaussian.png", "snr-mixture.png"]
    assert results["figures"] == names
    for name in names:
        assert (folder / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    text = bbb_report.text(results)
    assert "64-8-8-10 on 1200 images (297 to validate, 300 to test)" in text
    assert "report" not in text
    run = results["runs"]["mixture"]
    row = next(line for line in text.splitlines() if line.startswith("mixture "))
    assert row.split()[:4] == [
        "mixture",
        "2",
        str(run["best_epoch"]),
        f"{run['validation_error']:.2%}",
    ]
    row = [line for line in text.splitlines() if line.startswith("    75%")][1]
    ours = [f"{100 * run['pruned'][by]['0.75']:.2f}" for by in ("magnitude", "snr")]
    assert row.split() == ["75%", *ours]
    settings = results["settings"] | {"hidden": 400}
    comparable = bbb_report.text({**results, "comparable": True, "settings": settings}).splitlines()
    row = [line for line in comparable if line.startswith("    75%")][1]
    assert row.split() == ["75%", *ours, "30.67", "41.05"]
    titles = [line for line in comparable if line.startswith("Pruned")]
    assert all(line.endswith("[%] (report: MNIST, mixture, scaling 126)") for line in titles)


def of_counts(split, counts):
    """The split with as many test images of each class."""
    y = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return split._replace(test=data.Part(split.test.x[:1].expand(len(y), -1), y))


def test_the_report_s_numbers_stand_beside_the_same_work_only(finished):
    line = bbb_report.reported_line(400)
    assert line.split()[:5] == ["report", "(MNIST)", "600", "1.69%", "23"]
    assert "47 on a P100" in bbb_report.reported_line(1200)
    split, settings = finished[1], bbb.Settings()
    mnist = of_counts(split, bbb_report.MNIST_COUNTS)
    fashion = of_counts(split, [1000] * 10)
    for hidden in (400, 1200):
        assert bbb_report.is_comparable(mnist, replace(settings, hidden=hidden))
    assert not bbb_report.is_comparable(fashion, settings)
    assert not bbb_report.is_comparable(mnist, replace(settings, hidden=50))
    assert not bbb_report.is_comparable(mnist, replace(settings, num_samples=1))


def test_the_report_s_error_is_a_line_in_the_figure_of_the_same_work(finished):
    _, split, states, _ = finished
    settings, mnist = bbb.Settings(), of_counts(split, bbb_report.MNIST_COUNTS)
    for other in (split, of_counts(split, [1000] * 10)):
        plain = bbb_report.error_figure(states, other, settings)
        assert [line.get_linestyle() for line in plain.axes[0].lines].count("--") == 0
    beside = bbb_report.error_figure(states, mnist, settings)
    assert beside.axes[0].lines[-1].get_ydata()[0] == 1.69
    beside.savefig(io.BytesIO())


def test_the_documented_numbers_are_the_recorded_ones():
    docs = Path(bbb.__file__).parent.parent.parent / "docs"
    page, recorded = (docs / "bbb.md").read_text(), json.loads((docs / "bbb.json").read_text())
    changed = {"uniform": {"scheme": "uniform"}, "1200 units": {"hidden": 1200}}
    changed["scaling 126"] = {"scaling": "126"}
    assert "one thread a run (two for the uniform weights)" in page
    for name, results in recorded.items():
        assert results["threads"] == (2 if name == "uniform" else 1)
        results["comparable"] = True  # of MNIST, all of them
        assert bbb_report.text(results) in page and f"Commit {results['commit']}" in page
        settings = bbb.asdict(replace(bbb.Settings(), **changed.get(name, {})))
        del settings["epochs"]
        assert results["settings"] == json.loads(json.dumps(settings))
    for target in re.findall(r"\]\(([^)]+)\)", page):
        assert (docs / target).exists()
