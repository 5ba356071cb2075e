"""The report of `bbb` from logs all of whose numbers differ, and what makes a run another run."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from bnuq_ext import BayesLinear, data, plots, reference
from bnuq_ext.experiments import bbb, bbb_report

TINY = bbb.Settings(hidden=6, epochs=3, test_samples=2)


def split_of(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.rand(60, 12, generator=generator), torch.randint(10, (60,), generator=generator)
    return data.Split(*(data.Part(x[i::3], y[i::3]) for i in range(3)))


def state_of(seed):
    """Three epochs, the second with the least validation error;
    the best network is another than the last."""
    settings = replace(TINY, seed=seed)
    network, best = (bbb.make_network(s, 12, bbb.PRIORS["gaussian"]) for s in (settings, TINY))
    with torch.no_grad():
        for parameter in best.parameters():
            parameter += 0.1 * (1 + seed)
    names = ("validation_error", "test_error", "seconds", "test_seconds")
    values = [(0.3, 0.35, 1.0, 10.0), (0.1, 0.15, 2.0, 20.0), (0.2, 0.25, 6.0, 60.0)]
    log = [dict(zip(names, np.array(v) * (1 + seed / 10), strict=True)) for v in values]
    return bbb.State(network, best.state_dict(), log)


@pytest.fixture
def states():
    return {"gaussian": state_of(1), "mixture": state_of(2)}


def test_summary(states):
    state = states["gaussian"]
    found = bbb_report.summarise(state, split_of(), TINY)
    expected = {"validation_error": 0.11, "test_error": 0.165, "final_test_error": 0.275}
    expected |= {"seconds_per_epoch": 2.2, "test_seconds_per_epoch": 22.0}
    assert {k: found[k] for k in expected} == pytest.approx(expected)
    assert (found["epochs"], found["best_epoch"]) == (3, 2)


def test_text_has_each_number_in_its_column(states):
    runs = {name: bbb_report.summarise(s, split_of(), TINY) for name, s in states.items()}
    results = {"runs": runs, "images": [20, 20, 20], "pixels": 12, "settings": bbb.asdict(TINY)}
    results["comparable"] = False
    lines = bbb_report.text(results).splitlines()
    (row,) = (line for line in lines if line.startswith("gaussian "))
    assert row.split() == ["gaussian", "3", "2", "11.00%", "16.50%", "27.50%", "2.20"]
    (row,) = (line for line in lines if line.startswith("mixture "))
    assert row.split() == ["mixture", "3", "2", "12.00%", "18.00%", "30.00%", "2.40"]


def test_figures_hold_each_network_s_own_weights(states, tmp_path, monkeypatch):
    drawn = {"weight_histograms": [], "signal_to_noise": []}
    for name, calls in drawn.items():
        draw = getattr(plots, name)
        monkeypatch.setattr(
            plots,
            name,
            lambda *a, draw=draw, calls=calls, **o: calls.append((a, o)) or draw(*a, **o),
        )
    split = split_of()
    names = bbb_report.figures(tmp_path, split, states, TINY)
    assert names[2:] == ["snr-gaussian.png", "snr-mixture.png"]
    ((weights,), options) = drawn["weight_histograms"][0]
    initial = bbb.make_network(TINY, 12, bbb.PRIORS["gaussian"])
    for place, (name, state) in enumerate(states.items()):
        layers = [m for m in copy.deepcopy(state.load_best()) if isinstance(m, BayesLinear)]
        mu = torch.cat([m.weight_mu.flatten() for m in layers])
        assert torch.equal(weights[f"prior {name}"], mu)
        sigma = reference.softplus(torch.cat([m.weight_rho.flatten() for m in layers]))
        ((snr,), _) = drawn["signal_to_noise"][place]
        torch.testing.assert_close(snr.sort().values, (mu.abs() / sigma).sort().values)
    before = torch.cat([m.weight_mu.flatten() for m in initial if isinstance(m, BayesLinear)])
    assert torch.equal(options["initial"], before)


def test_error_figure(states):
    ax = bbb_report.error_figure(states, split_of(), TINY).axes[0]
    for name, scale, (line, dot) in zip(
        states, (1.1, 1.2), (ax.lines[:2], ax.lines[2:4]), strict=True
    ):
        assert line.get_label() == name
        np.testing.assert_allclose(line.get_data(), [[1, 2, 3], np.array([35, 15, 25]) * scale])
        np.testing.assert_allclose(dot.get_data(), [[2], [15 * scale]])


def test_a_prior_has_its_colour_in_every_run(states, tmp_path, monkeypatch):
    draw, colors = plots.weight_histograms, []
    noted = lambda *a, **o: colors.append(o["colors"]["prior mixture"]) or draw(*a, **o)  # noqa: E731
    monkeypatch.setattr(plots, "weight_histograms", noted)
    for shown in (states, {"mixture": states["mixture"]}):
        bbb_report.figures(tmp_path, split_of(), shown, TINY)
        curves = bbb_report.error_figure(shown, split_of(), TINY).axes[0].lines
        colors.append(curves[-1].get_color())
    assert len(colors) == 4 and len({*colors}) == 1


def test_labels_and_versions_make_another_run(tmp_path, monkeypatch):
    split = split_of()
    other = split._replace(test=data.Part(split.test.x, split.test.y.flip(0)))
    assert bbb.crc32_of(split) == bbb.crc32_of(split_of()) != bbb.crc32_of(other)
    monkeypatch.setattr(bbb, "load_data", lambda *_: split)
    bbb.run(tmp_path, ["gaussian"], TINY, progress=False)
    for place, name in ((bbb, "bnuq_ext"), (torch, "torch")):
        with monkeypatch.context() as patch:
            patch.setattr(place, "__version__", "0.0.1")
            with pytest.raises(ValueError, match=f"got one with {name} [^;]*$"):
                bbb.run(tmp_path, [], TINY, progress=False)
