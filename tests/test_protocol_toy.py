"""The toy figure: its data, its scores against quadrature, and what the picture holds."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import nn

from bnuq_ext.protocols import runner, toy

TINY = toy.Settings(
    num_train=40,
    num_validation=20,
    num_test=30,
    width=8,
    batch_size=8,
    epochs=4,
    num_samples=6,
    num_runs=2,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    return folder, runner.run(toy, "toy", folder, TINY, None, 1, progress=False)


def test_report(run):
    folder, found = run
    rows = found["tables"]["toy"]["rows"]
    assert [row[0] for row in rows] == ["MCBN", "MCDO"]
    units = [toy.compute(unit, TINY, None) for unit in toy.make_units(TINY, None)]
    rmse = [unit["rmse"] for unit in units[::2]]  # MCBN and MCDO take turns
    error = abs(rmse[0] - rmse[1]) / 2
    assert rows[0][1] == f"{sum(rmse) / 2:.3f} ± {error:.3f}"
    assert (folder / "toy.png").stat().st_size > 10_000
    assert found["figures"] == ["toy.png"]
    assert found["remarks"][0] == "The paper prints no number for this figure."
    assert "of 2 runs of MCBN and " in found["remarks"][-1]


def test_data_are_the_function_and_noise():
    settings = replace(toy.Settings(), num_test=20_000)
    parts = toy.make_data(settings, 3)
    assert [len(x) for x, _ in parts] == [100, 100, 20_000]
    x, y = parts[2]
    assert x.min() > -5 and x.max() < 5
    # n = 20,000, fixed seed: five standard errors of a uniform's mean and of a normal's mean and spread.
    assert abs(x.mean()) < 5 * (10 / 12**0.5) / 20_000**0.5
    noise = y - x * torch.sin(x)
    assert abs(noise.mean()) < 5 * 0.3 / 20_000**0.5
    assert abs(noise.std() - 0.3) < 5 * 0.3 / 40_000**0.5
    assert not torch.equal(toy.make_data(settings, 4)[2][0], x)


def test_networks():
    widths = [1, 30, 30, 30, 1]
    for method, between in (("MCBN", nn.BatchNorm1d), ("MCDO", nn.Dropout)):
        network = toy.make_network(method, toy.FULL)
        linear = [m for m in network if isinstance(m, nn.Linear)]
        shapes = [tuple(m.weight.shape) for m in linear]
        assert shapes == list(zip(widths[1:], widths, strict=False))
        assert sum(isinstance(m, between) for m in network) == 3


def test_scores_against_quadrature():
    generator = np.random.default_rng(0)
    samples, y = generator.normal(size=(7, 5)), generator.normal(size=5)
    found = toy.scores(torch.from_numpy(samples), torch.from_numpy(y), 0.2, 0.5)

    def crps(mean, std, target):
        def squared(v, above):
            return (stats.norm.cdf(v, mean, std) - above) ** 2

        left = integrate.quad(squared, -20, target, args=(0,))[0]
        return left + integrate.quad(squared, target, 20, args=(1,))[0]

    mean, std = samples.mean(0), (samples.var(0) + 0.2) ** 0.5
    ours = np.mean([crps(*point) for point in zip(mean, std, y, strict=True)])
    constant = np.mean([crps(m, 0.5**0.5, target) for m, target in zip(mean, y, strict=True)])
    best = np.mean(
        [crps(m, abs(t - m) / np.log(2) ** 0.5, t) for m, t in zip(mean, y, strict=True)]
    )
    assert found["crps"] == pytest.approx(ours, rel=1e-6)
    assert found["crps_constant"] == pytest.approx(constant, rel=1e-6)
    normalised = 100 * (ours - constant) / (best - constant)
    assert found["crps_normalised"] == pytest.approx(normalised, rel=1e-4)
    assert found["rmse"] == pytest.approx(np.sqrt(np.mean((mean - y) ** 2)))


def test_replicas_are_in_the_unit_of_y():
    x = torch.linspace(-5, 5, 40)
    scale = toy.Scale(x, 100 + 7 * x)
    torch.testing.assert_close(scale.outputs(scale.y), 100 + 7 * x)
    assert abs(scale.y.mean()) < 1e-6 and abs(scale.y.std() - 1) < 1e-6
    for method in toy.METHODS:
        torch.manual_seed(0)
        network = toy.make_network(method, TINY)
        toy.train(network, scale, replace(TINY, epochs=200, learning_rate=0.01))
        samples = toy.make_sampler(network, method, scale, TINY, 0)(x)
        assert samples.shape == (6, 40) and samples.std(0).mean() > 0
        # A line is easily fitted: the replicas lie about it, far from the scale of the network, 0 and 1.
        assert (samples.mean(0) - 100 - 7 * x).abs().mean() < 10


def test_picture(run):
    folder, _ = run
    unit = toy.compute(toy.make_units(TINY, None)[0], TINY, None)
    panels = toy.draw({"MCBN": unit, "MCDO": unit}).axes
    assert [ax.get_title()[:4] for ax in panels] == ["MCBN", "MCDO"]
    for ax in panels:
        lines = {line.get_label(): line for line in ax.lines}
        constant = lines["95 %, constant uncertainty"]
        assert constant.get_linestyle() == "--"
        mean = lines["predictive mean"].get_ydata()
        np.testing.assert_allclose(mean, unit["mean"])
        width = constant.get_ydata() - mean
        np.testing.assert_allclose(width, 1.959964 * unit["constant_std"], rtol=1e-6)
        np.testing.assert_allclose(lines["training data"].get_xdata(), unit["x"])
        assert ax.get_xlim() == (-7, 7)


def test_runs_leave_the_generator_alone():
    state = torch.get_rng_state()
    toy.compute(toy.make_units(TINY, None)[0], TINY, None)
    assert torch.equal(torch.get_rng_state(), state)
