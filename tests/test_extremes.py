"""Rows that meet only where values are large, or many are alike: what the trial makes up for that
reaches every model that it can."""

import copy
import math

import pytest
import torch
from coupled import ROWS, D, Norms
from test_folding import samples, way
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext.reads import Reads


class Limited(Norms):
    """Scales all rows down where one is large, behind what a mask among the inputs leaves."""

    def __init__(self, cast):
        super().__init__()
        self.cast = cast

    def forward(self, x, mask):
        h = self.second(self.first(x))
        h = torch.where(self.cast(mask) != 0, h, 0 * h)
        return self.head(h * (3.5 / h.max().clamp(min=3.5)))


class Spectral(Norms):
    """Takes no infinities."""

    def forward(self, x):
        h = self.second(self.first(x))
        torch.linalg.eigvalsh(h[:, :, None] * h[:, None, :])
        return self.head(h * (3.5 / h.max().clamp(min=3.5)))


class Switch(Norms):
    """Experts that take so many rows and no more, the first ones first."""

    def __init__(self, least=8, experts=4):
        super().__init__()
        self.gate, self.least = nn.Linear(D, experts), least
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(experts))

    def forward(self, x):
        h = self.second(self.first(x))
        share, expert = self.gate(h).softmax(-1).max(-1)
        capacity = max(self.least, math.ceil(1.5 * len(h) / len(self.experts)))
        chosen = expert[:, None] == torch.arange(len(self.experts))
        kept = (chosen & (chosen.long().cumsum(0) <= capacity)).to(h.dtype)
        mixed = sum(kept[:, i : i + 1] * e(h) for i, e in enumerate(self.experts))
        return self.head(h + share[:, None] * mixed)


def collected(net, *others):
    torch.manual_seed(1)
    model = bnuq.convert(net.eval())
    batches = [(torch.randn(64, D), *(t[:1].expand(64, *t.shape[1:]) for t in others))] * 8
    bnuq.collect(model, batches, input_fn=lambda b: b, progress=False)
    return model


def assert_never_folds(model, *inputs):
    for x in inputs:
        expected = samples(copy.deepcopy(model), x, num_samples=16, strategy="loop")
        torch.testing.assert_close(samples(model, x, num_samples=16), expected)
    assert way(model) == "loop"


CASTS = {
    "bool": lambda t: t.bool(),
    "long": lambda t: t.long(),
    "uint8": lambda t: t.to(torch.uint8),
    "complex": lambda t: t.to(torch.cfloat),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_a_mask_that_is_cast_hides_nothing(cast):
    mask = torch.tensor([1.0, 0.0]).repeat(6)[:, None]
    model = collected(Limited(cast), mask)
    assert_never_folds(model, (ROWS[:12] / 4, mask), (3 * ROWS[12:24], mask))


def test_a_forward_that_takes_no_infinities_is_given_large_values():
    assert_never_folds(collected(Spectral()), ROWS[:12] / 4, 3 * ROWS[12:24])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("least, experts", [(8, 4), (16, 2)])
def test_a_queue_that_no_three_rows_fill(least, experts, seed):
    torch.manual_seed(seed)
    inputs = [ROWS[6 * i : 6 * i + 6] for i in range(3)]
    assert_never_folds(collected(Switch(least, experts)), *inputs)


def test_what_is_made_of_replicas_and_becomes_integers():
    x, weight = torch.randn(3, 4), torch.randn(4, 4)
    reads = Reads([], x, 3)
    with reads:
        x.long(), (x @ weight).round().int()
        assert not reads.rounds
        y = x @ weight
        reads.mark(y.view(3, 2, 2))
        (y.view(12) > 0).long(), y.bool(), y.to(torch.cfloat), x.long()
        assert not reads.rounds
        (y[1:] @ weight).relu().add_(1).view(-1).to(torch.int32)
        assert reads.rounds


def test_what_lies_where_a_replica_lay_is_none():
    x = torch.randn(3, 4)
    reads = Reads([], x, 3)
    with reads:
        for _ in range(50):
            y = x + 1
            reads.mark(y)
            del y
            (x + 2).long()
        assert not reads.rounds
        y = torch.zeros(3, 4)
        y.copy_(x)
        y.long()
        assert not reads.rounds
        reads.mark(x)
        y.copy_(x)
        y.long()
        assert reads.rounds
