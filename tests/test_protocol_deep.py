"""Ninety layers: which networks are made, which rate is shown, and what the report says."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from real_data import REAL, needs_real_data
from torch import nn

from bnuq_ext.protocols import deep, runner

TINY = deep.Settings(
    num_layers=5, width=16, learning_rates=(1e-2, 1e-5), batch_size=32, steps=40, num_runs=2
)


@pytest.fixture(scope="module")
def run(run_protocol):
    return run_protocol(deep, "deep", TINY)


def test_report(run):
    folder, found = run
    rows = found["tables"]["deep"]["rows"]
    assert len(rows) == 8 and len({tuple(row[:3]) for row in rows}) == 8
    assert rows[0][:3] == ["tanh", "torch's initialisation", "with BN"]
    assert rows[3][:3] == ["tanh", "variance kept", "without BN"]
    # Five layers train with the large rate and not at all with the small one.
    assert all(row[6] == "0.01" for row in rows)
    assert found["figures"] == ["deep.png"] and (folder / "deep.png").stat().st_size > 10_000
    good, bad = found["remarks"][1:3]
    assert good.startswith(
        "All runs end below nine tenths of the loss of chance: tanh, torch's init"
    )
    names = [", ".join([row[0], row[1], row[2]]) for row in rows]
    assert all((name in good) != (name in bad) for name in names)


def test_remarks():
    def runs(*entries):
        return [{"final_loss": loss, "gradient_ratio": ratio} for loss, ratio in entries]

    settings = deep.Settings(num_layers=13, activations=("relu",), inits=("torch",))
    found = {
        ("bn", "relu", "torch"): runs((0.1, 2.0**20), (0.2, 1.0)),
        ("plain", "relu", "torch"): runs((0.1, 1.0), (2.3, 0.0)),
    }
    assert deep.remarks(found, settings)[1:] == [
        "All runs end below nine tenths of the loss of chance: relu, torch's initialisation, with BN.",
        "Not all do: relu, torch's initialisation, without BN.",
        "Before the first step of relu with batch norm the gradient grows by a factor of 2.00 a layer on its way "
        "back; for wide layers theory has 1.21 (Yang et al. 2019).",
    ]
    assert deep.mean_ratio(found["plain", "relu", "torch"]) == 0


@pytest.mark.parametrize("norm", deep.NORMS)
@pytest.mark.parametrize("activation", deep.ACTIVATIONS)
def test_networks_have_ninety_layers(norm, activation):
    torch.manual_seed(0)
    network = deep.make_network(64, deep.FULL, norm, activation, "kept")
    linear = [m for m in network if isinstance(m, nn.Linear)]
    assert len(linear) == 90 and linear[-1].out_features == 10
    count = sum(isinstance(m, nn.BatchNorm1d) for m in network)
    assert count == (89 if norm == "bn" else 0)
    assert sum(isinstance(m, deep.ACTIVATIONS[activation]) for m in network) == 89


def test_he_keeps_the_signal_and_torch_loses_it():
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    sizes = {}
    for init in deep.INITS:
        torch.manual_seed(0)
        hidden = deep.make_network(64, deep.FULL, "plain", "relu", init)[:-1]
        with torch.no_grad():
            spread = hidden(x) - (0 if init == "kept" else hidden(torch.zeros(1, 64)))
        sizes[init] = spread.square().mean().item()
    # Each layer keeps E y^2, up to the draw of the weights; torch's keeps a sixth: 6^-89 = 1e-69,
    # which float32 has no digits for.
    assert 1e-3 < sizes["kept"] < 1e3 and sizes["torch"] < 1e-12


def test_the_rate_with_the_least_training_loss_is_shown():
    unit = deep.make_units(TINY, None)[0]
    both = deep.compute(unit, TINY, None)
    alone = {
        rate: deep.compute(unit, replace(TINY, learning_rates=(rate,)), None)
        for rate in TINY.learning_rates
    }
    assert alone[1e-2]["final_loss"] < alone[1e-5]["final_loss"]
    assert both == alone[1e-2]
    assert both["final_loss"] == pytest.approx(np.mean(both["losses"][-4:]))
    assert both["accuracy"] > 0.3
    other = deep.compute(deep.Unit("1", unit.arguments | {"run": 1}), TINY, None)
    assert other["losses"] != both["losses"]


def test_accuracy_is_of_the_test_images_in_eval():
    unit, settings = deep.make_units(TINY, None)[0], replace(TINY, learning_rates=(1e-2,))
    found = deep.compute(unit, settings, None)
    split = deep.load(None, 0)
    torch.manual_seed(0)
    network = deep.make_network(64, settings, "bn", "tanh", "torch")
    deep.train(network, split.train, 1e-2, settings)
    right = network.eval()(split.test.x).argmax(1) == split.test.y
    assert found["accuracy"] == pytest.approx(right.double().mean().item(), rel=1e-9)


def test_a_rate_that_diverges_is_not_shown(monkeypatch):
    losses = {1e-2: [math.nan] * 3, 1e-3: [3.0] * 3, 1e-5: [2.0] * 3}
    monkeypatch.setattr(deep, "train", lambda network, part, rate, _: (losses[rate], rate))
    settings = replace(TINY, learning_rates=tuple(losses))
    found = deep.compute(deep.make_units(TINY, None)[0], settings, None)
    assert (found["learning_rate"], found["final_loss"]) == (1e-5, 2.0)
    assert (found["losses"], found["gradient_ratio"]) == ([2.0] * 3, 1e-5)


@pytest.mark.parametrize("activation, gain", [("tanh", 1.0), ("relu", 2.0)])
def test_kept_variance(activation, gain):
    """65,536 weights: five standard errors of a variance, sqrt(2 / n)."""
    linear = nn.Linear(256, 256)
    torch.manual_seed(0)
    deep.keep_variance(linear, activation)
    variance = linear.weight.var().item() * 256
    assert abs(variance / gain - 1) < 5 * (2 / 65_536) ** 0.5 and not linear.bias.any()


def test_gradients_are_those_before_the_first_step():
    torch.manual_seed(0)
    network = deep.make_network(64, TINY, "plain", "relu", "kept")
    part, settings = deep.load(None, 0).train, replace(TINY, steps=2)
    before = torch.random.get_rng_state()
    _, ratio = deep.train(network, part, 1e-1, settings)
    torch.manual_seed(0)
    network = deep.make_network(64, TINY, "plain", "relu", "kept")
    torch.random.set_rng_state(before)
    _, first = deep.train(network, part, 1e-1, replace(settings, steps=1))
    assert ratio == first


def test_cells():
    runs = [
        {"final_loss": loss, "accuracy": accuracy, "gradient_ratio": ratio, "learning_rate": rate}
        for loss, accuracy, ratio, rate in ((1.0, 0.5, 1e2, 1e-4), (2.0, 0.7, 1e4, 1e-3))
    ]
    assert deep.row(("plain", "tanh", "kept"), runs) == [
        "tanh", "variance kept", "without BN", "1.50 ± 0.50", "0.60 ± 0.10", pytest.approx(1e3), "0.0001, 0.001"
    ]  # fmt: skip


def test_gradient_ratio():
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    x = torch.randn(3, 4)
    network(x).sum().backward()
    weights = [m.weight.detach() for m in network]
    after = torch.ones(3, 4) @ weights[3]  # gradient by the output of the third layer
    third = after.T @ (x @ weights[0].T @ weights[1].T)
    second = (after @ weights[2]).T @ (x @ weights[0].T)
    expected = (second.norm() / third.norm()).item()
    assert deep.gradient_ratio(network) == pytest.approx(expected, rel=1e-5)


def test_smoothing():
    losses = np.random.default_rng(0).normal(size=50).tolist()
    found = deep.smoothed(losses)
    np.testing.assert_allclose(found[19:], np.convolve(losses, np.full(20, 0.05), "valid"))
    assert found[0] == losses[0] and found[1] == pytest.approx((losses[0] + losses[1]) / 2)


def test_picture(run):
    keys = [(n, a, i) for a in TINY.activations for i in TINY.inits for n in deep.NORMS]
    found = {
        key: [{"losses": [2.0 + k, 1.0 + k, 0.5 + k]}, {"losses": [99.0]}]
        for k, key in enumerate(keys)
    }
    panels = deep.draw(found, TINY).axes
    assert [ax.get_title() for ax in panels] == ["5 layers, tanh", "5 layers, relu"]
    for ax, activation in zip(panels, TINY.activations, strict=True):
        assert ax.get_xlabel() == "step (means over 20)"
        assert panels[0].get_ylabel() == "training loss, first run (nats)"
        named = {line.get_label(): line.get_ydata() for line in ax.lines}
        assert len(named) == 5 and named["chance, log 10"][0] == math.log(10)
        for k, (norm, kind, init) in enumerate(keys):
            if kind == activation:
                curve = named[f"{deep.NORMS[norm]}, {deep.INITS[init]}"]
                np.testing.assert_allclose(curve, np.array([2.0, 1.5, 3.5 / 3]) + k)


def test_missing_data_are_named(tmp_path):
    message = "deep: data_root must hold the folder mnist \\(to be had from .*\\), got"
    with pytest.raises(ValueError, match=message):
        runner.run(deep, "deep", tmp_path / "out", TINY, str(tmp_path), 1, progress=False)
    assert not (tmp_path / "out").exists()


@needs_real_data
def test_mnist_is_taken_where_it_is_given():
    split = deep.load(str(REAL), 0)
    assert split.train.x.shape == (50_000, 784)


def test_without_a_gradient_there_is_no_ratio():
    network = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert math.isnan(deep.gradient_ratio(network))
