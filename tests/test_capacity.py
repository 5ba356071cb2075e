"""Experts, and heads, that take a number of the rows that values have chosen, and drop the others: of
all replicas together they take as many as of one."""

import functools

import pytest
import torch
import torch.nn.functional as F
from folded import prepared, samples, way
from torch import nn

LIMIT, EXPERTS = 60, 4  # more rows than one replica has, fewer than all


class Experts(nn.Module):
    """Each row goes to one of four experts, or to none."""

    def __init__(self, take):
        super().__init__()
        self.first, self.norm, self.router = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(EXPERTS))
        self.head, self.take = nn.Linear(6, 3), take

    def forward(self, x):
        h = self.norm(self.first(x))
        scores, y = self.router(h), self.head(h)
        for number, expert in enumerate(self.experts):
            rows = self.take(scores.argmax(1) == number, scores[:, number])
            y = y.index_add(0, rows, expert(h[rows]))
        return y


def chosen(mask):
    return mask.nonzero(as_tuple=True)[0]


def by_score(mask, score):
    rows = chosen(mask)
    return rows[score[rows].argsort(descending=True)]


def written_over(rows):
    rows[LIMIT:] = 0
    return rows


def twice(mask):
    """The numbers of the rows, (2, N)."""
    return torch.arange(len(mask)).expand(2, -1)


LIMITED = {
    "slice": lambda mask, score: chosen(mask)[:LIMIT],
    "of torch.where": lambda mask, score: torch.where(mask)[0][:LIMIT],
    "of a mask": lambda mask, score: torch.arange(len(mask))[mask][:LIMIT],
    "of a matrix": lambda mask, score: mask.nonzero()[:LIMIT, 0],
    "with a new dimension": lambda mask, score: chosen(mask)[None, :LIMIT][0],
    "behind a new dimension": lambda mask, score: chosen(mask)[None][:, :LIMIT][0],
    "of columns": lambda mask, score: mask.nonzero().T[0, :LIMIT],
    "of columns by split": lambda mask, score: mask.nonzero().t().split(LIMIT, 1)[0].flatten(),
    "of columns by hsplit": lambda mask, score: mask.nonzero().t().hsplit([LIMIT])[0].flatten(),
    "of columns made in place": lambda mask, score: mask.nonzero().t_()[0, :LIMIT],
    "of a dimension made in place": lambda mask, score: chosen(mask).unsqueeze_(0)[:, :LIMIT][0],
    "of masked columns": lambda mask, score: twice(mask)[:, mask][:, :LIMIT][0],
    "of the last, masked": lambda mask, score: twice(mask)[..., mask][..., :LIMIT][0],
    "of a mask behind a new dimension": lambda mask, score: twice(mask)[0][None, mask][0, :LIMIT],
    "of masked columns by split": lambda mask, score: twice(mask)[:, mask].split(LIMIT, 1)[0][0],
    "of an entry of columns": lambda mask, score: [*mask.nonzero().T][0][:LIMIT],
    "of repeated columns": lambda mask, score: twice(mask).repeat_interleave(mask.long(), dim=1)[
        0, :LIMIT
    ],
    "dsplit": lambda mask, score: chosen(mask)[None, None].dsplit([LIMIT])[0].flatten(),
    "behind an ellipsis": lambda mask, score: chosen(mask)[..., :LIMIT],
    "the last": lambda mask, score: chosen(mask)[-LIMIT:],
    "every other": lambda mask, score: chosen(mask)[::2],
    "split": lambda mask, score: chosen(mask).split(LIMIT)[0],
    "torch.split by name": lambda mask, score: torch.split(chosen(mask), LIMIT, dim=0)[0],
    "torch.split by names alone": lambda mask, score: torch.split(
        tensor=chosen(mask), split_size_or_sections=LIMIT
    )[0],
    "chunk": lambda mask, score: chosen(mask).chunk(2)[0],
    "tensor_split": lambda mask, score: chosen(mask).tensor_split([LIMIT])[0],
    "unsafe_split": lambda mask, score: chosen(mask).unsafe_split(LIMIT)[0],
    "hsplit": lambda mask, score: torch.hsplit(chosen(mask), [LIMIT])[0],
    "vsplit": lambda mask, score: mask.nonzero().vsplit([LIMIT])[0].flatten(),
    "written": lambda mask, score: written_over(chosen(mask).clone()),
    "narrow": lambda mask, score: F.pad(chosen(mask), (0, LIMIT)).narrow(0, 0, LIMIT),
    "the best": lambda mask, score: by_score(mask, score)[:LIMIT],
}
WHOLE = {
    "all": lambda mask, score: chosen(mask),
    "a column": lambda mask, score: mask.nonzero()[:, 0],
    "part of a column": lambda mask, score: mask.nonzero()[:, :1].flatten(),
    "an ellipsis": lambda mask, score: mask.nonzero()[..., 0],
    "part behind an ellipsis": lambda mask, score: mask.nonzero()[..., :1].squeeze(1),
    "a column by narrow": lambda mask, score: mask.nonzero().narrow(1, 0, 1).squeeze(1),
    "columns by unbind": lambda mask, score: mask.nonzero().unbind(1)[0],
    "without a dimension, in place": lambda mask, score: chosen(mask)[None].squeeze_(0),
    "part of masked columns": lambda mask, score: twice(mask)[:, mask][:1].flatten(),
    "a slice of a table": lambda mask, score: torch.arange(len(mask)).expand(2, -1)[
        :1, chosen(mask)
    ][0],
    "a whole slice": lambda mask, score: chosen(mask)[:],
}


class Dispatched(nn.Module):
    """The same without a loop, with a place for `limit` rows of each expert."""

    def __init__(self, limit):
        super().__init__()
        self.first, self.norm, self.router = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)
        self.weight, self.head = nn.Parameter(torch.randn(EXPERTS, 6, 3)), nn.Linear(6, 3)
        self.limit = limit

    def forward(self, x):
        h = self.norm(self.first(x))
        expert = self.router(h).argmax(1)
        order, count = expert.argsort(stable=True), torch.bincount(expert, minlength=EXPERTS)
        places, start = torch.arange(self.limit), count.cumsum(0) - count
        inside = places[None] < count[:, None]
        taken = torch.where(inside, start[:, None] + places[None], len(h))
        rows = torch.cat([order, order.new_full((1,), len(h))])[taken]
        made = torch.bmm(torch.cat([h, h.new_zeros(1, 6)])[rows], self.weight)
        y = h.new_zeros(len(h) + 1, 3).index_add(0, rows.flatten(), made.flatten(0, 1))
        return self.head(h) + y[:-1]


X = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
ALIKE = 0.01 * X + torch.tensor([2.0, -1.0, 0.5, 1.0])  # all for one expert


def compare(make) -> tuple[str, float]:
    """The way that rows went which have no more than a place each, and then others, and by how much
    these were off."""
    torch.manual_seed(0)
    model, worst = prepared(make, X), 0.0
    for x in (X[:8], ALIKE[:8]):
        expected = samples(model, x, strategy="loop", num_samples=16)
        difference = (
            samples(model, x, num_samples=16) - expected
        ).abs().max() / expected.abs().max()
        worst = max(worst, difference.item())
    return way(model), worst


@pytest.mark.parametrize("take", LIMITED.values(), ids=LIMITED)
def test_a_limit_on_chosen_rows(take):
    assert compare(functools.partial(Experts, take)) == ("loop", 0.0)


@pytest.mark.parametrize("take", WHOLE.values(), ids=WHOLE)
def test_without_a_limit_they_go_together(take):
    found, difference = compare(functools.partial(Experts, take))
    assert found != "loop" and difference < 1e-5


@pytest.mark.parametrize("limit", [2, LIMIT, 200])
def test_a_limit_on_places(limit):
    assert compare(functools.partial(Dispatched, limit)) == ("loop", 0.0)
