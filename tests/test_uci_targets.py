"""Tables of which a network of the regression protocols would be trained on one target alone."""

from dataclasses import replace

import numpy as np
import pytest
from test_data_files import refusal

from bnuq_ext.protocols import sensitivity, uci

SETTINGS = {"num_splits": 2, "num_folds": 4, "folds_used": 2}
MODULES = {"uci": uci, "sensitivity": sensitivity}


def refused(name, root):
    settings = replace(MODULES[name].QUICK, **SETTINGS)
    return refusal(MODULES[name].make_units, settings, str(root))


def save(path, y):
    np.savez(path, X=np.arange(2.0 * len(y)).reshape(-1, 2), y=y)


def other_than(row, value=0.1, num_rows=60):
    """Targets of one value but for a row; the mean of so many is rounded."""
    y = np.full(num_rows, value)
    y[row] = 1
    return y


def lone_rows():
    """By the part whose training rows have one target alone, a row of another target."""
    splits = {}
    for split in (1, 2):
        rows = np.arange(60)
        np.random.RandomState(split).shuffle(rows)
        splits[split] = rows[12:]
    rows = splits[1][np.random.RandomState(1).permutation(48)]
    return {
        "split 1": min(set(range(60)) - set(splits[1])),
        "fold 2 of split 1": min(rows[12:24]),  # that it holds out
        "split 2": min(set(rows[24:]) - set(splits[2])),
    }


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("where, row", lone_rows().items())
def test_a_training_part_of_one_target_is_named(name, where, row, tmp_path):
    save(tmp_path / "more.npz", np.arange(70.0))
    save(tmp_path / "flat.npz", other_than(row))
    requirement = f"have a target of more than one value in the training rows of {where}"
    path = tmp_path / "flat.npz"
    assert refused(name, tmp_path) == f"{name}: {path} must {requirement}, got 0.1"


@pytest.mark.parametrize("name", MODULES)
def test_a_table_of_one_target_is_named(name, tmp_path):
    path = tmp_path / "flat.npz"
    save(path, np.full(60, 3.0))
    assert refused(name, path).startswith(f"{name}: {path} must have a target of more than one")


def test_a_table_that_sensitivity_leaves_out_may_have_any_target(tmp_path):
    save(tmp_path / "few.npz", np.zeros(5))
    save(tmp_path / "more.npz", np.arange(70.0))
    settings = replace(sensitivity.QUICK, **SETTINGS)
    units = sensitivity.make_units(settings, str(tmp_path))
    assert {unit.arguments["data"] for unit in units} == {"more"}
