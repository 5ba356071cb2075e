"""The toy figure: its data, and what the picture holds."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from estimates import shown
from torch import nn

from bnuq_ext import metrics
from bnuq_ext.protocols import toy, uci

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
def run(run_protocol):
    return run_protocol(toy, "toy", TINY)


def test_report(run):
    folder, found = run
    rows = found["tables"]["toy"]["rows"]
    assert [row[0] for row in rows] == ["MCBN", "MCDO"]
    units = {u.name: toy.compute(u, TINY, None) for u in toy.make_units(TINY, None)}
    digits = {"rmse": 3, "crps": 3, "constant_crps": 3, "normalised_crps": 1}
    digits |= {"noise_std": 2, "std_inside": 2, "std_outside": 2}
    for method, *cells in rows:
        for cell, (name, places) in zip(cells, digits.items(), strict=True):
            one, two = (units[f"{method}-{run}"][name] for run in (0, 1))
            assert cell == shown((one + two) / 2, abs(one - two) / 2, places)
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
    # n = 20,000, fixed seed: five standard errors of a uniform's mean and
    # of a normal's mean and spread.
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
        # A line is easily fitted: the replicas lie about it,
        # far from the scale of the network, 0 and 1.
        assert (samples.mean(0) - 100 - 7 * x).abs().mean() < 10


@pytest.mark.parametrize("method", toy.METHODS)
def test_a_unit_is_fitted_on_validation_and_scored_on_test(method):
    """The same network by hand: which part goes where, in float64 by numpy."""
    found = toy.compute(toy.Unit(f"{method}-1", {"method": method, "run": 1}), TINY, None)
    (x, y), validation, test = toy.make_data(TINY, 1)
    assert (found["x"], found["y"]) == (x.tolist(), y.tolist())
    torch.manual_seed(1)
    scale, network = toy.Scale(x, y), toy.make_network(method, TINY)
    toy.train(network, scale, TINY)
    sample = toy.make_sampler(network, method, scale, TINY, 1)
    held_out, tested, on_grid = (
        sample(v) for v in (validation[0], test[0], torch.tensor(found["grid"]))
    )
    noise = metrics.fit_noise_variance(held_out, validation[1])
    constant = metrics.fit_constant_variance(held_out.mean(0), validation[1])
    assert found["noise_std"] == pytest.approx(noise**0.5, rel=1e-6)
    assert found["constant_std"] == pytest.approx(constant**0.5, rel=1e-6)
    scores = uci.run_scores(tested, test[1], noise, constant)
    assert {k: found[k] for k in scores} == pytest.approx(scores, rel=1e-5)
    grid, values = np.array(found["grid"]), on_grid.double().numpy()
    variance = values.var(0)
    np.testing.assert_allclose(found["mean"], values.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["std"], np.sqrt(variance + noise), rtol=1e-4)
    inside = np.abs(grid) <= 5
    assert grid[[0, -1]].tolist() == [-7, 7] and 0 < inside.sum() < len(grid)
    assert found["std_inside"] == pytest.approx(variance[inside].mean() ** 0.5, rel=1e-4)
    assert found["std_outside"] == pytest.approx(variance[~inside].mean() ** 0.5, rel=1e-4)


def test_weights_decay(monkeypatch):
    made = []

    class Recorded(torch.optim.Adam):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            made.append(self.defaults)

    monkeypatch.setattr(torch.optim, "Adam", Recorded)
    settings = replace(TINY, learning_rate=0.02, weight_decay=0.3)
    scale = toy.Scale(torch.linspace(-5, 5, 40), torch.linspace(0, 1, 40))
    toy.train(toy.make_network("MCBN", settings), scale, settings)
    assert (made[0]["lr"], made[0]["weight_decay"]) == (0.02, 0.3)


def test_remarks_by_hand():
    def runs(normalised, noise):
        inside, outside = (1.0, 2.0, 3.0), (5.0, 6.0, 7.0)
        columns = zip(normalised, noise, inside, outside, strict=True)
        names = ("normalised_crps", "noise_std", "std_inside", "std_outside")
        return [dict(zip(names, column, strict=True)) for column in columns]

    settings = replace(TINY, num_runs=3, noise_std=0.3)
    # Means of 3 and -3 with standard errors of 1, and of 1.9 with one of 1: at two of them.
    found = {
        "MCBN": runs((3.0, 3.0 + 3**0.5, 3.0 - 3**0.5), (0.02, 0.5, 0.01)),
        "MCDO": runs((-3.0, -3.0 + 3**0.5, -3.0 - 3**0.5), (0.02, 0.031, 0.4)),
    }
    _, bn, do, low = toy.remarks(found, settings)
    assert bn.startswith("MCBN: the drawn spread is 3.0 times as wide outside the data as inside")
    assert "is better than a constant one" in bn and "is worse than a constant one" in do
    assert "In 2 of 3 runs of MCBN and 1 of 3 runs of MCDO" in low
    assert low.endswith("is below a tenth of that: the replicas alone spread too wide already.")
    found["MCBN"] = runs((1.9, 1.9 + 3**0.5, 1.9 - 3**0.5), (0.2, 0.5, 0.1))
    assert "is no different from a constant one" in toy.remarks(found, settings)[1]
    assert "In 0 of 3 runs of MCBN and 1" in toy.remarks(found, settings)[3]
    quiet = {"MCBN": found["MCBN"]}
    assert toy.remarks(quiet, settings)[2].endswith("is below a tenth of that.")
    found["MCBN"] = found["MCBN"][:1]
    assert toy.remarks(found, replace(settings, num_runs=1))[1].endswith(
        "is better than a constant one by CRPS, at one run, which has no standard error."
    )


def test_picture(tmp_path, monkeypatch):
    found = {u.name: toy.compute(u, TINY, None) for u in toy.make_units(TINY, None)}
    figures, draw = [], toy.draw
    monkeypatch.setattr(toy, "draw", lambda first: figures.append(draw(first)) or figures[0])
    toy.report(found, TINY, tmp_path)
    panels = figures[0].axes
    assert [ax.get_title()[:4] for ax in panels] == ["MCBN", "MCDO"]
    for ax in panels:
        unit = found[f"{ax.get_title()[:4]}-0"]
        lines = {line.get_label(): line for line in ax.lines}
        constant = lines["95 %, constant uncertainty"]
        assert constant.get_linestyle() == "--"
        mean = lines["predictive mean"].get_ydata()
        np.testing.assert_allclose(mean, unit["mean"])
        width = constant.get_ydata() - mean
        np.testing.assert_allclose(width, 1.959964 * unit["constant_std"], rtol=1e-6)
        np.testing.assert_allclose(lines["training data"].get_data(), [unit["x"], unit["y"]])
        middle = len(unit["grid"]) // 2
        for band, width in zip(ax.collections, (1.959964, 0.674490), strict=True):
            points = band.get_paths()[0].vertices
            edges = points[np.isclose(points[:, 0], unit["grid"][middle]), 1]
            expected = width * unit["std"][middle]
            assert edges.max() - unit["mean"][middle] == pytest.approx(expected, rel=1e-5)
        assert ax.get_xlim() == (-7, 7)


def test_runs_leave_the_generator_alone():
    state = torch.get_rng_state()
    toy.compute(toy.make_units(TINY, None)[0], TINY, None)
    assert torch.equal(torch.get_rng_state(), state)
