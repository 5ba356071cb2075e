"""Rows that meet only where values are large, or many are alike: what the trial makes up for that
reaches every model that it can."""

import copy
import math
import random
import threading

import pytest
import torch
from coupled import ROWS, D, Norms
from folded import prepared, samples, way
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext.reads import Ranges, Reads, num_watchers


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
    """Experts that take so many rows and no more, the first ones first, or those of most weight."""

    def __init__(self, least=8, experts=4, by_weight=False):
        super().__init__()
        self.gate, self.least, self.by_weight = nn.Linear(D, experts), least, by_weight
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(experts))

    def forward(self, x):
        h = self.second(self.first(x))
        share, expert = self.gate(h).softmax(-1).max(-1)
        capacity = max(self.least, math.ceil(1.5 * len(h) / len(self.experts)))
        chosen = expert[:, None] == torch.arange(len(self.experts))
        order = share.argsort(descending=True) if self.by_weight else torch.arange(len(h))
        kept = chosen[order] & (chosen[order].long().cumsum(0) <= capacity)
        kept = kept[order.argsort()].to(h.dtype)
        mixed = sum(kept[:, i : i + 1] * e(h) for i, e in enumerate(self.experts))
        return self.head(h + share[:, None] * mixed)


class Unbiased(Switch):
    """Its gate does not see how large values are."""

    def __init__(self, **options):
        super().__init__(**options)
        self.gate = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 4, bias=False))


class LeavesEarly(Norms):
    """By another head where all rows are confident."""

    def __init__(self):
        super().__init__()
        self.early = nn.Linear(D, 4)

    def forward(self, x):
        h = self.first(x)
        early = self.early(h)
        sure = (early.softmax(1).amax(1) > 0.4).all()
        return torch.where(sure, early, self.head(self.second(h)))


class Quantised(Norms):
    """To eight bits by the largest value of the batch, at most six."""

    def forward(self, x):
        h = self.second(self.first(x)).clamp(max=6.0)
        scale = h.amax().clamp(min=5.0) / 127
        return self.head((h / scale).round().to(torch.int8).to(h.dtype) * scale)


class Distinct(Norms):
    """Leaves out rows that point where an earlier one does."""

    def forward(self, x):
        h = self.second(self.first(x))
        unit = h / h.norm(dim=1, keepdim=True).clamp(min=1e-6)
        again = torch.tril(unit @ unit.T > 0.995, -1).any(1, keepdim=True)
        return self.head(torch.where(again, 0.0, h))


class Skips(Norms):
    """Leaves out a layer for all rows, one time in twenty."""

    def forward(self, x):
        h = self.first(x)
        return self.head(h + torch.bernoulli(torch.tensor(0.95)) * self.second(h))


class Waves(Norms):
    """Cosines of large numbers, which show how sums were rounded: of three rows otherwise than of
    six."""

    def __init__(self):
        super().__init__()
        self.register_buffer("waves", 19 * torch.randn(D, 1))

    def forward(self, x):
        h = self.second(self.first(x))
        angles = (h @ self.waves) * (1 + 2e-7 * (len(h) > 3))
        return self.head(torch.cos(angles + torch.arange(float(D))))


class Scaled(Norms):
    """Each row by a number of its own, within `torch.vmap`, which makes tensors of numbers."""

    def forward(self, x):
        h = self.second(self.first(x))
        return self.head(h) + torch.vmap(lambda row: row.mean() * 5)(h)[:, None]


MEANWHILE = []


class Waits(Norms):
    """For what another thread does meanwhile."""

    def forward(self, x):
        for work in MEANWHILE:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        return self.head(self.second(self.first(x)))


def collected(net, *others):
    torch.manual_seed(1)
    model = bnuq.convert(net.eval())
    others = [t[:1].expand(64, *t.shape[1:]) for t in others]
    batches = [(torch.randn(64, D), *others) for _ in range(8)]
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


@pytest.mark.usefixtures("by_values_alone")
@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_a_mask_that_is_cast_hides_nothing(cast):
    mask = torch.tensor([1.0, 0.0]).repeat(6)[:, None]
    model = collected(Limited(cast), mask)
    assert_never_folds(model, (ROWS[:12] / 4, mask), (3 * ROWS[12:24], mask))


@pytest.mark.usefixtures("by_values_alone")
def test_a_forward_that_takes_no_infinities_is_given_large_values():
    assert_never_folds(collected(Spectral()), ROWS[:12] / 4, 3 * ROWS[12:24])


@pytest.mark.usefixtures("by_values_alone")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("least, experts", [(8, 4), (16, 2)])
@pytest.mark.parametrize("by_weight", [False, True])
def test_a_queue_that_no_three_rows_fill(least, experts, by_weight, seed):
    torch.manual_seed(seed)
    inputs = [ROWS[6 * i : 6 * i + 6] for i in range(3)]
    assert_never_folds(collected(Switch(least, experts, by_weight)), *inputs)


@pytest.mark.usefixtures("by_values_alone")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cls", [LeavesEarly, Quantised, Distinct, Unbiased])
def test_what_all_rows_decide_together(cls, seed):
    torch.manual_seed(seed)
    inputs = [scale * ROWS[6 * i : 6 * i + 6] for i, scale in enumerate((1, 1, 3, 0.3))]
    assert_never_folds(collected(cls()), *inputs)


def test_a_layer_that_is_left_out_at_random_is_so_in_each_replica_by_itself():
    model = collected(Skips())
    samples(model, ROWS[:6])
    assert way(model) == "loop"
    with pytest.raises(ValueError, match="its forward draws random numbers, which replicas"):
        samples(model, ROWS[:6], strategy="folded")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cls", [Waves, Scaled])
def test_rows_that_are_kept_apart_fold(cls, seed):
    torch.manual_seed(seed)
    model = collected(cls())
    expected = samples(copy.deepcopy(model), ROWS[:6], strategy="loop")
    torch.testing.assert_close(samples(model, ROWS[:6]), expected, rtol=1e-4, atol=1e-5)
    assert way(model) == "folded"


def test_random_numbers_of_another_thread_decide_for_one_prediction_alone():
    model = collected(Waits())
    MEANWHILE.append(random.random)
    try:
        expected = samples(copy.deepcopy(model), ROWS[:6], strategy="loop")
        torch.testing.assert_close(samples(model, ROWS[:6]), expected, rtol=0, atol=0)
    finally:
        MEANWHILE.clear()
    torch.testing.assert_close(samples(model, ROWS[:6]), expected)
    assert way(model) == "folded"


class Binned(Norms):
    """By a table of what the first feature is rounded to."""

    def forward(self, x):
        h = self.second(self.first(x))
        return self.head(h) + torch.arange(4.0)[h[:, :1].clamp(0, 3).long()]


def test_an_interrupt_leaves_casts_as_they_are(monkeypatch):
    def interrupted(self, *error):
        monkeypatch.undo()
        raise KeyboardInterrupt

    torch.manual_seed(0)
    model = prepared(Binned, ROWS)
    monkeypatch.setattr(Ranges, "__exit__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        samples(model, ROWS[:6])
    assert (9 * torch.tensor([2.0, 3.0])).long().tolist() == [18, 27]
    assert num_watchers() == 0
    samples(model, ROWS[:6])
    assert way(model) == "folded"


def test_integers_stay_in_the_range_of_the_first_forward():
    ranges, x = Ranges(), torch.tensor([1.2, 3.7, 2.0])
    with ranges:
        assert x.long().tolist() == [1, 3, 2] and (-x).to(torch.int8).tolist() == [-1, -3, -2]
    with ranges:
        y = torch.tensor([math.inf, -math.inf, math.nan])
        assert y.long().tolist() == [3, 1, 1] and y.to(torch.int8).tolist() == [-1, -3, -3]
        assert y.bool().all() and y.to(torch.cfloat).isnan().any()
        with pytest.raises(IndexError):
            y.long()
    with torch.inference_mode(), ranges:
        assert (9 * x).long().tolist() == [3, 3, 3]
    assert (9 * x).long().tolist() == [10, 33, 18]


def test_values_that_are_written_into_integers_stay_in_their_range():
    ranges, whole = Ranges(), torch.zeros(3, dtype=torch.int64)
    with ranges:
        whole.copy_(torch.tensor([1.2, 3.7, 2.0]))
    with ranges:
        whole[:] = torch.tensor([math.inf, -math.inf, math.nan])
    assert whole.tolist() == [3, 1, 1]


def test_what_becomes_integers_is_noted():
    x = torch.randn(3, 4)
    reads = Reads([], x, 3)
    with reads:
        torch.ones(3).long(), x.bool(), x.to(torch.cfloat), x.half(), torch.ones(3).bool().sum()
        torch.where(x > 0, x, 0.0), (x > 0) | (x < -1), (x > 0).float(), x.argmax(1)
        torch.zeros(3).copy_(x[:, 0]), torch.zeros(3, dtype=torch.long).copy_(torch.ones(3))
        assert not reads.casts and not reads.draws
        x.relu().to(torch.uint16)
        assert reads.casts and not reads.draws
        nn.functional.dropout(x)
    assert reads.draws
    with reads:
        reads.casts = False
        torch.zeros(3, dtype=torch.long).copy_(x[:, 0])
    assert reads.casts
