"""The runner of the normality protocol, end to end on small settings."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from bnuq_ext.normality import lilliefors
from bnuq_ext.protocols import normality, runner

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
def done(data_root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("normality")
    return folder, runner.run(normality, "normality", folder, TINY, data_root, 1, progress=False)


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
    assert f"is {least:.2g} to" in texts[1]


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
    assert f"times$ {ratio:.2g}" in axes[2, 1].texts[0].get_text()


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


def test_rejects(data_root):
    with pytest.raises(ValueError, match=r"nowhere\.npz"):
        normality.make_units(replace(TINY, datasets=("nowhere",)), data_root)
    with pytest.raises(
        ValueError, match="batch_sizes must be less than the 120 rows of tiny, got 120"
    ):
        normality.make_units(replace(TINY, batch_sizes=(8, 120)), data_root)
