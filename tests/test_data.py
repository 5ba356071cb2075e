"""The digits: sizes, scale, no row in two parts, and what is said when something is missing."""

import sys

import pytest
import torch

from bnuq_ext import data


def test_parts_are_disjoint_and_complete():
    parts = data.digits(seed=3)
    assert [len(part.x) for part in parts] == [300, 300, 1197]
    everything = torch.cat([torch.cat([part.x, part.y[:, None]], 1) for part in parts])
    # The 1,797 images are all different.
    assert len(everything.unique(dim=0)) == 1797
    assert parts.train.x.dtype == torch.float32 and parts.train.y.dtype == torch.int64
    assert everything[:, :64].min() == 0 and everything[:, :64].max() == 1


def test_classes_and_proportions():
    known = data.digits(num_train=200, num_validation=100, classes=range(5))
    assert sum(len(part.x) for part in known) == 901
    assert known.train.y.bincount().tolist() == [40, 40, 39, 41, 40]
    assert known.test.y.max() == 4


def test_split_depends_on_the_seed_alone():
    assert torch.equal(data.digits(seed=1).train.x, data.digits(seed=1).train.x)
    assert not torch.equal(data.digits(seed=1).train.x, data.digits(seed=2).train.x)


def test_noise_scales_one_draw():
    x = torch.rand(500, 64)
    one, two = data.add_noise(x, 0.1, seed=0) - x, data.add_noise(x, 0.2, seed=0) - x
    torch.testing.assert_close(2 * one, two, rtol=0, atol=1e-6)
    # n = 32,000, fixed seed: five standard errors, 0.1 / sqrt(n) and 0.1 / sqrt(2 n).
    assert abs(one.mean()) < 5 * 0.1 / 32000**0.5
    assert abs(one.std() - 0.1) < 5 * 0.1 / 64000**0.5
    assert torch.equal(data.add_noise(x, 0.0, seed=0), x)


def test_rejects():
    with pytest.raises(ValueError) as caught:
        data.digits(num_train=1700, num_validation=97)
    assert str(caught.value) == (
        "digits: num_train and num_validation must be positive and leave test rows out of 1797, "
        "got (1700, 97)"
    )
    with pytest.raises(ValueError, match="^add_noise: std must not be negative, got -1$"):
        data.add_noise(torch.zeros(1), -1, seed=0)


def test_missing_scikit_learn_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        data.digits()
    assert str(caught.value).startswith(
        "digits: scikit-learn must be installed (pip install 'bnuq_ext[demo]'), got "
    )
