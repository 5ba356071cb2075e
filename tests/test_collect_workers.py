"""Loaders that keep their workers from pass to pass: their own loops, and equal banks."""

import multiprocessing
from itertools import islice

import pytest
import torch
from torch import nn
from torch.utils import data as torch_data

import bnuq_ext as bnuq


class Noisy(torch_data.Dataset):
    """Row i is (i, noise, ...), the noise by the worker's generator."""

    def __len__(self):
        return 40

    def __getitem__(self, row):
        return torch.cat([torch.full((1,), float(row)), torch.randn(5)])


def make_model():
    torch.manual_seed(0)
    return bnuq.convert(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))


def loader(workers=1):
    return torch_data.DataLoader(
        Noisy(), 4, shuffle=True, num_workers=workers, persistent_workers=True
    )


def test_a_loop_that_is_under_way_gets_its_batches():
    data, model, rows = loader(), make_model(), []
    for number, batch in enumerate(islice(data, 20)):
        rows += batch[:, 0].tolist()
        if number in (0, 4, 9):
            bnuq.collect(model, data, 2)
    assert sorted(rows) == list(range(40))


@pytest.mark.parametrize("workers", [1, 2])
def test_two_calls_in_a_row_give_the_same_bank(workers):
    data, model = loader(workers), make_model()
    first = bnuq.collect(model, data, 2)
    assert bnuq.collect(model, data, 2).equal(first)
    for _ in data:
        pass
    torch.manual_seed(7)
    other = bnuq.collect(model, data, 2)
    assert not other.equal(first)
    torch.manual_seed(7)
    assert bnuq.collect(model, loader(workers), 2).equal(other)


def test_workers_start_once():
    """A row ends with what tells its worker from a later one."""

    def collate(rows):
        seed = torch_data.get_worker_info().seed % 2**20
        return torch.cat([torch.stack(rows), torch.full((len(rows), 1), float(seed))], 1)

    data = torch_data.DataLoader(
        Noisy(), 4, shuffle=True, num_workers=1, persistent_workers=True, collate_fn=collate
    )
    seeds = []

    def input_fn(batch):
        seeds.extend(batch[:, -1].tolist())
        return batch[:, :6]

    bank = bnuq.collect(make_model(), data, 25, input_fn=input_fn)
    assert len(bank) == 25 and len(seeds) == 100 and len({*seeds}) == 1


def test_batches_for_the_sampler_batch():
    data, model, rows = loader(), make_model(), []
    bnuq.collect(model, data, 2)
    options = {"likelihood": "gaussian", "sampler": "batch", "num_samples": 3, "seed": 0}
    for batch in islice(data, 20):
        rows += batch[:, 0].tolist()
        bnuq.predict(model, batch, loader=data, **options)
    assert sorted(rows) == list(range(40))


def test_no_worker_stays():
    data, model = loader(), make_model()
    bnuq.collect(model, data, 2)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        bnuq.collect(model, data, 2, input_fn=lambda batch: batch[:, :2])
    assert caught.tb is not None and not multiprocessing.active_children()
