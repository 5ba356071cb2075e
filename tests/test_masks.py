"""What a model does only where a mask is what it is for no row of the trial."""

import pytest
import torch
import torch.nn.functional as F
from coupled import ROWS, D, Norms
from folded import assert_goes_as_the_loop, way
from test_unset_flags import collected
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext.passes import Undecided
from bnuq_ext.proof.masks import Masks
from bnuq_ext.reads import Reads


class Rare(Norms):
    """What `edit` makes of the rows behind a stochastic layer."""

    def __init__(self, edit):
        super().__init__()
        self.edit, self.lstm = edit, nn.LSTM(D, D)
        self.missing = nn.Parameter(torch.linspace(-1, 1, D))

    def forward(self, x):
        return self.head(self.second(self.edit(self, x, self.first(x.nan_to_num()))))


def filled(rows):
    """Rows, by number, are replaced by what is learned for missing ones."""

    def edit(model, x, h):
        h = h.clone()
        h[rows(x)] = model.missing
        return h

    return edit


# The input picks rows by their numbers, which are those of the first replica.
PICKS = {
    "nonzero": lambda x: x.isnan().any(1).nonzero()[:, 0],
    "where": lambda x: torch.where(x.isnan().any(1))[0],
    "argwhere": lambda x: torch.argwhere(x.isnan().any(1))[:, 0],
    "arange": lambda x: torch.arange(len(x))[x.isnan().any(1)],
    "masked_select": lambda x: torch.arange(len(x)).masked_select(x.isnan().any(1)),
    "threshold": lambda x: (x.nan_to_num(9.0)[:, 0] > 8).nonzero()[:, 0],
    "cast": lambda x: (x.nan_to_num(9.0)[:, 0] - 8).relu().bool().nonzero()[:, 0],
    "band": lambda x: ((x.nan_to_num(9.0)[:, 0] > 8) & (x.nan_to_num(9.0)[:, 0] < 10)).nonzero()[:, 0],
}  # fmt: skip


def with_missing(rows):
    rows = rows.clone()
    rows[3, 0] = torch.nan
    return rows


def far(rows):
    rows = rows.clone()
    rows[::2, 0] = 50.0
    return rows


def tried(edit):
    return collected(bnuq.convert(Rare(edit).eval()), ROWS)


@pytest.mark.parametrize("pick", PICKS.values(), ids=PICKS)
def test_rows_that_the_input_picks_by_number(pick):
    model = tried(filled(pick))
    assert_goes_as_the_loop(model, ROWS[:12], with_missing(ROWS[:12]))
    assert way(model) == "expanded"


def among(operation):
    """Rows far out are treated together."""

    def edit(model, x, h):
        chosen, h = x[:, 0] > 20, h.clone()
        h[chosen] = operation(h[chosen])
        return h

    return edit


def behind(operation):
    """All rows are, and it shows in those far out."""
    return lambda model, x, h: torch.where(x[:, :1] > 20, operation(model, h), h)


COUPLED = {
    "mean": among(lambda z: z - z.mean(0)),
    "softmax": among(lambda z: z.softmax(0)),
    "attention": among(lambda z: (z @ z.T).softmax(1) @ z),
    "sort": among(lambda z: z.sort(0)[0]),
    "norm of all": behind(lambda model, h: F.layer_norm(h, h.shape)),
    "recurrence": behind(lambda model, h: model.lstm(h)[0]),
    "shift": behind(lambda model, h: F.pad(h, (0, 0, 1, 0))[:-1]),
    "top": behind(lambda model, h: h.topk(len(h), 0)[0]),
    "others": lambda model, x, h: torch.where(x[:, :1] <= 20, h, h - h.mean(0)),
    "sparse": lambda model, x, h: h + torch.sparse.mm(
        ((x[:, :1] > 20).float() @ h[:, :1].T).to_sparse(), h),
}  # fmt: skip


@pytest.mark.usefixtures("by_values_alone")
@pytest.mark.parametrize("edit", COUPLED.values(), ids=COUPLED)
def test_rows_that_meet_if_they_lie_far_out(edit):
    model = tried(edit)
    assert_goes_as_the_loop(model, ROWS[:12], far(ROWS[:12]))
    assert way(model) == "loop"


@pytest.mark.parametrize("operation", [torch.tanh, lambda z: z.softmax(1)], ids=["tanh", "softmax"])
def test_rows_that_are_chosen_by_their_own_values_fold(operation):
    def edit(model, x, h):
        chosen, h = h[:, 0] > 20, h.clone()
        h[chosen] = operation(h[chosen])
        return h

    model = tried(edit)
    assert_goes_as_the_loop(model, ROWS[:12], far(ROWS[:12]))
    assert way(model) == "folded"


@pytest.mark.usefixtures("by_values_alone")
@pytest.mark.parametrize("meet", [False, True])
def test_what_cannot_be_turned_together_is_turned_by_itself(meet):
    """A number that no row may have is an index out of range."""

    def edit(model, x, h):
        h = h + F.embedding((h.amax(1) > 1e9).long(), model.missing.view(1, D))
        return torch.where(x[:, :1] > 20, h - h.mean(0) if meet else -h, h)

    model = tried(edit)
    assert_goes_as_the_loop(model, ROWS[:12], far(ROWS[:12]))
    assert way(model) == ("loop" if meet else "expanded")


@pytest.mark.parametrize("value", [False, True])
def test_what_is_found_and_turned(value):
    x, model = torch.tensor([1.0, 2.0, 3.0]), nn.ParameterList([torch.ones(3)])
    weight, reads = model[0], Reads([model], x, 3)
    masks = Masks(reads)

    def run(masks=masks):
        with masks:
            masks = [x > 5, x > 2, x < 9, weight > 5, x[:0] > 5, (x > 5).any(), ~(x > 5)]
            return [mask.long() for mask in masks]

    plain = run()
    assert [found[0] for found in masks.found if found] == [False, None, True, None, False, True]
    places = [i for i, found in enumerate(masks.found) if found == [value]]
    assert masks.choices(value) == [{*places}, *({place} for place in places)]
    inverted = run(Masks(reads, masks.found, {*places}))
    for place, (a, b) in enumerate(zip(inverted, plain, strict=True)):
        assert torch.equal(a, 1 - b if place in ((2, 6) if value else (0, 5)) else b)
    torch.testing.assert_close(run(), plain)
    with Masks(reads, masks.found, {*places}), pytest.raises(Undecided, match="have other masks"):
        _ = [(x > 9).long() for _ in range(20)]


def test_infinities_are_kept_from_what_they_end_the_process_in():
    """torch.linalg.eigvals of infinities in float32, by MKL."""

    def edit(model, x, h):
        return h + torch.linalg.eigvals(h.view(-1, 2, 4)[:, :, :2]).abs().sum(1, keepdim=True)

    model = tried(edit)
    assert_goes_as_the_loop(model, ROWS[:12])
    assert way(model) == "folded"
