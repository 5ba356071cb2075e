"""Rows that values have chosen: how many there are is a value too."""

import copy
import warnings
from functools import partial

import pytest
import torch
from coupled import D, K, Norms
from folded import assert_right_or_refused, prepared, samples, way
from test_reads import N
from torch import nn

from bnuq_ext.passes import DoesNotFold
from bnuq_ext.reads import Reads


class Experts(Norms):
    """Each row goes to one of two experts with batch norm of their own, as its first value says."""

    def __init__(self, select):
        super().__init__()
        self.select = select

    def forward(self, x):
        h = self.first(x)
        rows = self.select(h[:, 0] > 0.1), self.select(h[:, 0] <= 0.1)
        out = torch.empty_like(h)
        out[rows[0]] = self.second(h[rows[0]])
        out[rows[1]] = self.norm_b(h[rows[1]])
        return self.head(out)


@pytest.mark.parametrize("select", [lambda m: m, lambda m: m.nonzero()[:, 0]])
def test_rows_that_go_to_experts(select):
    """A replica's rows at an expert are as many as another's lack, now and then."""
    ways = set()
    for seed in range(10):
        torch.manual_seed(seed)
        x = torch.randn(48, D)
        with warnings.catch_warnings():  # of batches with a single row for an expert
            warnings.simplefilter("ignore")
            model = prepared(partial(Experts, select), x)
        for i in range(0, 48, 4):
            rows = x[i : i + 4]
            torch.testing.assert_close(
                samples(model, rows, num_samples=2),
                samples(copy.deepcopy(model), rows, num_samples=2, strategy="loop"),
            )
        ways.add(way(model))
    assert ways == {"loop"}


PICKS = {
    "mask": lambda h: h[h[:, 0] > 0],
    "mask of bytes": lambda h: h[(h[:, 0] > 0).byte()],
    "mask among indices": lambda h: h[h[:, 0] > 0, 0],
    "select": lambda h: h.masked_select(h > 0),
    "nonzero": lambda h: h[(h[:, 0] > 0).nonzero()[:, 0]],
    "unique": lambda h: h.unique(dim=0),
}


@pytest.mark.parametrize("pick", PICKS.values(), ids=PICKS)
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_rows_that_are_picked_count_where_any_call_has_another_number(pick):
    h = torch.randn(3, 2)
    reads = Reads([], h, 3)
    with reads:
        pick(h)
    reads.check({"whole": 3, "folded": 6})
    with pytest.raises(DoesNotFold, match="^a stochastic layer gets rows that are chosen"):
        reads.check({"whole": 3, "picked": 2})


def test_sizes_that_values_do_not_choose_may_be_asked():
    h, where = torch.randn(3, 2), torch.tensor([0, 2])
    reads = Reads([], h, 3)
    with reads:
        picked = h[:, 0] > 0
        out = h.clone()
        out[picked] = 2 * h[picked]
        assert len(out) == 3 and out.relu().numel() == 6
        out = torch.index_add(h, 0, picked.nonzero()[:, 0], h[picked])
        assert out.shape == (3, 2) and len(h[where]) == 2 and len(out.unbind()) == 3
        assert h[picked].size(1) == h[picked].size(dim=-1) == 2
    reads.check({})


@pytest.mark.parametrize("name", ["new_zeros", "embedding_bag"])
def test_what_is_told_how_long_to_be_may_be_asked_for_it(name):
    h = torch.randn(4, 2)
    reads = Reads([], h, 4)
    with reads:
        chosen = h[h[:, 0] > -9]
        if name == "new_zeros":
            made = chosen.new_zeros(3, 2).add(1)
        else:
            table, offsets = torch.ones(5, 2), torch.tensor([0, 1, 2])
            made = nn.functional.embedding_bag(chosen[:, 0].long().clamp(0, 4), table, offsets)
        assert len(made.relu()) == 3
    reads.check({})


def test_indices_pick_as_many_rows_whatever_they_are():
    h = torch.randn(3, 2)
    reads = Reads([], h, 3)
    with reads:
        h[h[:, 0].argsort()[:2]]
        h[:, torch.arange(2) > 0]
    reads.check({"whole": 3, "part": 2})


class Masked(Norms):
    """Picks rows by their values, and channels by a buffer, behind every stochastic layer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.arange(K) > 0)

    def forward(self, x):
        out = self.head(self.second(self.first(x)))
        picked = out[:, 0] > 0
        out[picked] = 2 * out[picked]
        return out[:, self.kept]


def test_rows_that_are_picked_behind_stochastic_layers_fold():
    x = torch.randn(48, D)
    model = prepared(Masked, x)
    assert assert_right_or_refused(model, x[:N]) == "folded"


class PutTogether(Norms):
    """Rows go to one of two layers; its output has them in their order again."""

    def forward(self, x):
        h = self.first(x)
        mask = h[:, 0] > 0.1
        order = torch.cat([mask.nonzero(), (~mask).nonzero()])[:, 0].argsort()
        return torch.cat([self.head(h[mask]), -self.head(h[~mask])])[order]


def test_an_output_of_rows_that_are_put_together_again():
    x = torch.randn(48, D, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = prepared(PutTogether, x)
    expected = samples(copy.deepcopy(model), x, num_samples=8, strategy="loop")
    torch.testing.assert_close(samples(model, x, num_samples=8), expected)
    assert way(model) == "folded"
