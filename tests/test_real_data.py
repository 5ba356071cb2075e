"""The loaders on the real files, against what is published of them."""

import pytest
import torch
from real_data import REAL, needs_real_data

from bnuq_ext import data


@needs_real_data
def test_real_uci_tables():
    sizes = {"boston": (506, 13), "energy": (768, 8), "power": (9568, 4)}
    for name, shape in sizes.items():
        part = data.table(REAL / "uci" / f"{name}.npz")
        assert part.x.shape == shape and part.y.shape == shape[:1]


@needs_real_data
def test_real_fashion_mnist():
    split = data.mnist(REAL / "fashion-mnist")
    assert [len(part.x) for part in split] == [50_000, 10_000, 10_000]
    everything = torch.cat([split.train.x, split.validation.x])
    # As published: mean 0.2860, standard deviation 0.3530.
    assert abs(everything.mean() - 0.2860) < 1e-4 and abs(everything.std() - 0.3530) < 1e-4


@needs_real_data
def test_real_cifar10():
    split = data.cifar10(REAL / "cifar10")
    assert len(split.validation.x) == 5_000 and len(split.test.x) >= 1_000
    assert split.test.y[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    # A sample of the train set, published means of the whole: 0.4914, 0.4822, 0.4465.
    means = split.validation.x.mean((0, 2, 3)).tolist()
    assert means == pytest.approx([0.4914, 0.4822, 0.4465], abs=0.01)


@needs_real_data
def test_real_camvid():
    split = data.camvid(REAL / "camvid")
    assert split.test.x.shape[1:] == (3, 180, 240) and split.test.y.shape[1:] == (180, 240)
    shares = split.train.y.flatten().bincount(minlength=12) / split.train.y.numel()
    # Sky, buildings and roads are most of a street.
    assert shares[[0, 1, 3]].sum() > 0.6 and (shares > 0).all()
