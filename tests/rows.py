"""A small data set, loaders of it and a model for it."""

import torch
from torch import nn
from torch.utils import data as torch_data

import bnuq_ext as bnuq

N, WIDTH = 120, 4
ROWS = torch.randn(N, WIDTH, generator=torch.Generator().manual_seed(0)) + torch.arange(N)[:, None]


def make_model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return bnuq.convert(nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3)))


class Numbered(torch_data.Dataset):
    """(row, label), and a list of the rows asked for."""

    def __init__(self, rows=ROWS):
        self.rows, self.asked = rows, []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.asked.append(index)
        return self.rows[index], index


def chunks(size=8):
    return list(ROWS.split(size))


def loader(batch_size=8, shuffle=True, **arguments):
    return torch_data.DataLoader(Numbered(), batch_size=batch_size, shuffle=shuffle, **arguments)


def expected_bank(data):
    return bnuq.collect(make_model(), data, len(data))
