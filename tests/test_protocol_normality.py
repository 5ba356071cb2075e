"""The runner of the normality protocol, end to end on small settings."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from scipy import stats

import bnuq_ext as bnuq
from bnuq_ext.experiments.fitting import batch_norm_chain
from bnuq_ext.normality import lilliefors
from bnuq_ext.protocols import normality

TINY = normality.Settings(
    datasets=("tiny",), batch_sizes=(8, 20, 40), epochs=(1, 3), widths=(12, 10), num_batches=300
)


@pytest.fixture(scope="module")
def data_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    (root / "uci").mkdir()
    X = rng.exponential(size=(120, 5))
    np.savez(root / "uci" / "tiny.npz", X=X, y=X.sum(1) + rng.normal(size=120))
    return str(root)


@pytest.fixture(scope="module")
def done(data_root, run_protocol):
    return run_protocol(normality, "normality", TINY, data_root)


def test_theory_holds_in_the_first_layer_only(done):
    _, results = done
    rows = results["tables"]["normality"]["rows"]
    assert [row[:4] for row in rows] == [
        ["tiny", M, epoch, layer] for M in (8, 20, 40) for epoch in (1, 3) for layer in (1, 2)
    ]
    for row in rows:
        # 300 batches: a variance has a relative standard error of 8 %, the median of 12 less.
        assert 0.8 < row[4] < 1.25 if row[3] == 1 else row[4] > 5
    texts = results["remarks"]
    assert texts[0].startswith("Layer 1:") and texts[1].startswith("Layer 2:") and len(texts) == 3
    least = min(row[4] for row in rows if row[3] == 2)
    assert f"is {least:.3g} to" in texts[1]


def test_first_unit_is_shown_as_it_is(data_root):
    unit = normality.make_units(TINY, data_root)[1]
    found = normality.compute(unit, TINY, data_root)
    shown = found["3"][0]["unit"]
    mean, std = np.array(shown["mean"]), np.array(shown["std"])
    np.testing.assert_allclose(shown["observed"][1], mean.var(ddof=1), rtol=1e-4)
    np.testing.assert_allclose(shown["observed"][3], std.var(ddof=1), rtol=1e-4)
    assert abs(shown["mean_p"] - lilliefors(torch.tensor(mean)[:, None])[1].item()) < 1e-3
    z = stats.zscore(mean, ddof=1)
    # With parameters taken as known the p-value is never smaller.
    assert stats.kstest(z, "norm").pvalue >= shown["mean_p"]
    assert normality.compute(unit, TINY, data_root) == found


def test_figures_show_the_densities(data_root):
    panels = {
        name: normality.compute(unit, TINY, data_root)["3"]
        for name, unit in zip("abc", normality.make_units(TINY, data_root), strict=True)
    }
    figure = normality.histograms(panels)
    axes = np.array(figure.axes).reshape(4, 3)
    assert [ax.get_title() for ax in axes[0]] == ["a", "b", "c"]
    assert "layer 2" in axes[3, 0].get_xlabel() and "sigma" in axes[3, 0].get_xlabel()
    legend = figure.legends[0].get_texts()
    assert [t.get_text() for t in legend] == ["300 batches", "analytic Gaussian", "fitted Gaussian"]
    unit = panels["b"][1]["unit"]
    analytic, fitted = axes[2, 1].get_lines()
    for line, key in ((analytic, "analytic"), (fitted, "observed")):
        m, var = unit[key][:2]
        expected = stats.norm(m, var**0.5).pdf(line.get_xdata())
        np.testing.assert_allclose(line.get_ydata(), expected, rtol=1e-6)
    ratio = unit["analytic"][1] / unit["observed"][1]
    assert f"analytic / observed variance {ratio:.3g}" in axes[2, 1].texts[0].get_text()


def invented(seed):
    """A layer's summary, all of whose numbers differ; 200 statistics of the first unit."""
    rng = np.random.default_rng(seed)
    names = (
        "mean_ratio std_ratio mean_rejected std_rejected correlation analytic_correlation".split()
    )
    unit = {"mean": rng.normal(1, 2, 200).tolist(), "std": rng.normal(9, 1, 200).tolist()}
    unit |= {"analytic": [1.1, 3.0, 9.1, 1.5], "observed": [0.9, 4.0, 8.9, 0.6]}
    unit |= {"mean_p": 0.25, "std_p": 0.0001}
    return dict(zip(names, rng.uniform(0.1, 0.9, 6).tolist(), strict=True)) | {"unit": unit}


def test_every_number_stands_in_its_own_column(tmp_path, monkeypatch):
    settings = replace(TINY, datasets=("a",), epochs=(1, 3))
    found = {
        f"a-{M}": {e: [invented(M + 10 * int(e) + k) for k in (0, 1)] for e in ("1", "3")}
        for M in settings.batch_sizes
    }
    drawn = []
    monkeypatch.setattr(normality, "histograms", lambda panels: drawn.append(panels) or Figure())
    report = normality.report(found, settings, tmp_path)
    rows = report.tables[0].rows
    layers = [
        (e, k, f["mean_ratio"]) for u in found.values() for e in u for k, f in enumerate(u[e], 1)
    ]
    assert [(str(row[2]), row[3], row[4]) for row in rows] == layers
    for data, M, epoch, number, *cells in rows:
        layer = found[f"{data}-{M}"][str(epoch)][number - 1]
        ratios, shares = (
            [layer["mean_ratio"], layer["std_ratio"]],
            ["mean_rejected", "std_rejected"],
        )
        correlations = [layer["correlation"], layer["analytic_correlation"]]
        assert cells == [*ratios, *(100 * layer[k] for k in shares), *correlations]
    for number, text in enumerate(report.remarks[:2], 1):
        low, high = (f([r[4:] for r in rows if r[3] == number], axis=0) for f in (np.min, np.max))
        assert text.startswith(
            f"Layer {number}: the analytic variance of mu_B is {low[0]:.3g} to {high[0]:.3g}"
        )
        assert f"that of sigma_B {low[1]:.3g} to {high[1]:.3g} times" in text
        assert (
            f"of mu_B it is {low[2]:.0f} to {high[2]:.0f} %, of sigma_B {low[3]:.0f} to {high[3]:.0f} %"
            in text
        )
        assert f"is {low[4]:.2f} to {high[4]:.2f} (in theory {low[5]:.2f} to {high[5]:.2f})" in text
    over_epochs, over_sizes = drawn
    expected = {f"M = 20, epoch {e}": found["a-20"][e] for e in ("1", "3")}
    assert over_epochs == expected
    assert over_sizes == {f"M = {M}, epoch 3": found[f"a-{M}"]["3"] for M in (8, 20, 40)}


def test_panels_of_means_and_of_deviations():
    layer = invented(0)
    mean, std = normality.histograms({"a": [layer]}).axes
    for ax, values, place, p in ((mean, "mean", 0, "= 0.25"), (std, "std", 2, "< 0.001")):
        unit = layer["unit"]
        heights, edges, _ = ax.patches[0].get_data()
        np.testing.assert_allclose(
            heights * np.diff(edges) * 200, np.histogram(unit[values], edges)[0]
        )
        for line, key in zip(ax.get_lines(), ("analytic", "observed"), strict=True):
            m, var = unit[key][place : place + 2]
            density = stats.norm(m, var**0.5).pdf(line.get_xdata())
            np.testing.assert_allclose(line.get_ydata(), density, rtol=1e-6)
        ratio = unit["analytic"][place + 1] / unit["observed"][place + 1]
        assert ax.texts[0].get_text() == f"KS p {p}, analytic / observed variance {ratio:.3g}"


def test_epochs_are_counted_from_the_start(data_root, monkeypatch):
    trained, counts = [], []

    def judge(*arguments, **options):
        counts.append(len(trained))
        return bnuq.statistics_normality(*arguments, **options)

    monkeypatch.setattr(normality, "train_epoch", lambda *arguments: trained.append(arguments))
    monkeypatch.setattr(normality, "statistics_normality", judge)
    settings = replace(TINY, epochs=(1, 3, 10), num_batches=8)
    normality.compute(normality.make_units(settings, data_root)[0], settings, data_root)
    assert counts == [1, 3, 10]


def median(values):
    """The lower of the two in the middle, as torch has it."""
    return np.percentile(values.numpy(), 50, method="lower")


def test_summary_of_a_layer(data_root):
    x, _ = normality._inputs_and_targets("tiny", data_root)
    torch.manual_seed(0)
    model = bnuq.convert(batch_norm_chain(5, (12, 10), 1))
    data = torch.utils.data.TensorDataset(x)
    found = bnuq.statistics_normality(model, data, 20, num_batches=60, seed=0, progress=False)
    for name, layer in found.layers.items():
        mean, var = found.bank.mean[name][:, 3], found.bank.var[name][:, 3]
        summary = normality._summary(layer, mean, var)
        expected = {
            "mean_ratio": median(layer.analytic.mean_var / layer.observed.mean_var),
            "std_ratio": median(layer.analytic.std_var / layer.observed.std_var),
            "mean_rejected": (layer.mean_p < 0.05).double().mean().item(),
            "std_rejected": (layer.std_p < 0.05).double().mean().item(),
            "correlation": median(layer.correlation.abs()),
            "analytic_correlation": median(layer.analytic_correlation.abs()),
        }
        unit = summary.pop("unit")
        assert summary == pytest.approx(expected, rel=1e-12)
        np.testing.assert_allclose(unit["mean"], mean)
        np.testing.assert_allclose(unit["std"], var.sqrt())
        assert (unit["mean_p"], unit["std_p"]) == (layer.mean_p[0].item(), layer.std_p[0].item())


def test_files(done):
    folder, results = done
    assert results["figures"] == ["tiny-epochs.png", "tiny-batch-sizes.png"]
    for name in [*results["figures"], "normality.csv", "report.md"]:
        assert (folder / name).stat().st_size > 500


def test_diabetes_is_at_hand():
    pytest.importorskip("sklearn")
    units = normality.make_units(normality.QUICK, None)
    assert [u.name for u in units] == ["diabetes-8", "diabetes-32", "diabetes-128"]
    settings = replace(TINY, epochs=(1,), num_batches=20)
    assert set(normality.compute(units[0], settings, None)) == {"1"}


def test_a_constant_column_is_zero(tmp_path):
    (tmp_path / "uci").mkdir()
    x = np.stack([np.ones(9), np.arange(9.0)], 1)
    np.savez(tmp_path / "uci" / "flat.npz", X=x, y=np.arange(9.0))
    x, y = normality._inputs_and_targets("flat", tmp_path)
    assert (x[:, 0] == 0).all()
    torch.testing.assert_close(x[:, 1:].std(0), torch.ones(1))
    torch.testing.assert_close(x[:, 1:], y)


def test_rejects(data_root):
    with pytest.raises(ValueError, match=r"nowhere\.npz"):
        normality.make_units(replace(TINY, datasets=("nowhere",)), data_root)
    with pytest.raises(
        ValueError, match="batch_sizes must be less than the 120 rows of tiny, got 120"
    ):
        normality.make_units(replace(TINY, batch_sizes=(8, 120)), data_root)
