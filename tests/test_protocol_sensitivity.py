"""The sensitivity protocol on a tiny table, end to end."""

import json
from dataclasses import replace

import numpy as np
import pytest
from estimates import shown

from bnuq_ext.protocols import sensitivity

TINY = replace(
    sensitivity.QUICK,
    num_splits=2,
    num_seeds=2,
    num_folds=4,
    batch_sizes=(8, 16, 128),
    weight_decays=(1e-4,),
    max_epochs=4,
    num_samples=6,
    sample_counts=(4, 6, 9),
    sampled_batch_size=16,
    hidden=8,
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, run_protocol):
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3))
    np.savez(root / "wine.npz", X=x, y=x[:, 0] + rng.normal(size=60))
    return run_protocol(sensitivity, "sensitivity", TINY, root)


def values(folder, M, T, score):
    units = [json.loads((folder / "units" / f"wine-{M}-{s}.json").read_text()) for s in (1, 2)]
    runs = [run for unit in units for run in unit["result"]["by_count"][str(T)]["runs"]]
    return np.array([run[f"normalised_{score}"] for run in runs])


def test_units_are_the_batch_sizes_that_fit(finished):
    folder, _ = finished
    names = sorted(path.stem for path in (folder / "units").iterdir())
    assert names == ["wine-16-1", "wine-16-2", "wine-8-1", "wine-8-2"]
    for name in names:
        result = json.loads((folder / "units" / f"{name}.json").read_text())["result"]
        M = int(name.split("-")[1])
        assert result["choice"]["batch_size"] == M
        assert [*result["by_count"]] == (["4", "6", "9"] if M == 16 else ["6"])
    assert sensitivity.FULL.num_splits == 3 and sensitivity.FULL.num_seeds == 5
    assert sensitivity.FULL.num_samples == 100 and len(sensitivity.FULL.weight_decays) == 15
    # Of boston's 506 rows a fold is trained on 324: the paper's table ends at 256 too.
    assert 256 <= sensitivity.FULL.fold_rows(506) == 324


def test_a_table_that_no_batch_size_fits_is_refused(tmp_path):
    np.savez(tmp_path / "few.npz", X=np.ones((9, 2)), y=np.arange(9))
    with pytest.raises(ValueError) as caught:
        sensitivity.make_units(TINY, tmp_path)
    assert str(caught.value) == (
        "sensitivity: data_root must hold a table whose folds have 8 rows, got tables of [9] rows"
    )
    np.savez(tmp_path / "few.npz", X=np.ones((12, 2)), y=np.arange(12))  # folds of 8
    assert {u.arguments["batch_size"] for u in sensitivity.make_units(TINY, tmp_path)} == {8}


@pytest.mark.parametrize("score,paper_size,paper_T", [("crps", "1.6", None), ("pll", "2.0", None)])
def test_tables(finished, score, paper_size, paper_T):
    folder, results = finished
    ours, paper = results["tables"][f"batch-size-{score}"]["rows"]
    for M, cell in zip((8, 16), ours[2:4], strict=True):
        found = values(folder, M, 6, score)
        assert len(found) == 4
        assert cell == shown(found.mean(), found.std(ddof=1) / 2, 1)
    assert ours[4] is None and paper[3] == paper_size and paper[:2] == ["wine", "paper"]
    ours, paper = results["tables"][f"T-{score}"]["rows"]
    for T, cell in zip((4, 6, 9), ours[2:], strict=True):
        found = values(folder, 16, T, score)
        assert cell == shown(found.mean(), found.std(ddof=1) / 2, 1)
    assert paper[2:] == [paper_T] * 3


def test_remarks_and_figure(finished):
    folder, results = finished
    # The tiny table has no larger batch size.
    assert results["remarks"][0].endswith("standard errors on 0 of 0 data sets (none).")
    gain = values(folder, 16, 9, "pll") - values(folder, 16, 4, "pll")
    better = gain.mean() > 2 * gain.std(ddof=1) / 2  # of four runs
    where = "1 of 1 data sets (wine)" if better else "0 of 1 data sets (none)"
    expected = f"PLL: T = 9 is better than T = 4 by more than two standard errors on {where}."
    assert results["remarks"][3] == expected
    assert (folder / "batch-size.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_claims_by_hand():
    sizes = {
        "a": {8: [1.0, 1.1], 32: [2.0, 2.2]},
        "d": {8: [0.0, 0.0], 16: [3.0, 3.0], 32: [2.0, 2.1], 64: [1.0, 1.0]},
        "b": {16: [3.0, 3.0], 64: [1.0, 1.1]},
        "noise": {16: [3.0, 3.0], 64: [2.0, 5.0]},
        "one run": {16: [3.0], 64: [5.0]},
        "c": {64: [1.0, 1.0]},
    }
    counts = {
        "a": {4: [1.0, 3.0], 9: [2.0, 4.1]},
        "b": {4: [1.0, 1.0], 9: [0.0, 0.1]},
        "noise": {4: [1.0, 1.0], 9: [0.9, 1.4]},
    }
    about_size, about_count = sensitivity.claims("crps", sizes, counts, TINY)
    assert about_size.endswith("on 1 of 4 data sets (a).")
    assert about_count.endswith("on 1 of 3 data sets (a).")


def test_the_figure_is_logarithmic_only_where_scores_are_large():
    sizes = {"crps": {"a": {8: [3.0, 1.0]}}, "pll": {"a": {8: [-400.0, -200.0], 16: [3.0]}}}
    small, large = sensitivity.draw(sizes, TINY).axes
    found = [np.array(ax.containers[0][0].get_data(), float).tolist() for ax in (small, large)]
    assert found == [[[8], [2]], [[8, 16], [-300, 3]]]
    (bars,) = large.containers[0][2]
    (_, low), (_, high) = bars.get_segments()[0]
    assert (low, high) == (-400, -200)  # an error of 100 to each side
    assert (small.get_yscale(), large.get_yscale()) == ("linear", "symlog")
    assert small.get_ylabel() == "normalised CRPS [%]"
    assert large.get_ylabel() == "normalised PLL [%], logarithmic beyond ±10"
