"""Rows that meet, and states that change, where the trial's own values do not show it."""

import copy
from functools import partial
from itertools import product

import pytest
import torch
from coupled import ROWS, Clipped, Norms, Threshold, ZeroGate
from folded import assert_goes_as_the_loop, prepared, samples, way
from predicting import X, make_model
from torch import nn

import bnuq_ext as bnuq


class ZeroGateAhead(ZeroGate):
    """Rows meet those three behind them: of the next replica, in a trial, not of the one before."""

    def shifted(self, h):
        return nn.functional.pad(h, (0, 0, 0, 3))[3:]

    def forward(self, x):
        h = self.second(self.first(x))
        return self.head(h - self.gate * self.shifted(h))


class ZeroGateBehind(ZeroGateAhead):
    def shifted(self, h):
        return nn.functional.pad(h, (0, 0, 3, 0))[:-3]


@pytest.mark.usefixtures("by_values_alone")
@pytest.mark.parametrize("cls", [ZeroGate, ZeroGateAhead, ZeroGateBehind, Clipped, Threshold])
def test_rows_that_meet_on_other_values_than_the_trials(cls):
    """The first rows show nothing; the others do, on the same plan."""
    model = prepared(cls, ROWS)
    for x, gate in ((ROWS[:6], 0.0), (ROWS[6:12] * 30 + 9, 0.5)):
        if issubclass(cls, ZeroGate):
            model.gate.data.fill_(gate)  # of which no version tells
        assert_goes_as_the_loop(model, x)
    assert way(model) == "loop"


class Outliers(Norms):
    """Leaves out what lies `most` standard deviations from the mean of the rows:
    of n rows none beyond sqrt(n - 1)."""

    most = 3.0
    activation = staticmethod(lambda h: h)

    def forward(self, x):
        h = self.activation(self.norm_b(self.b(self.first(x))))
        far = (h - h.mean(0)).abs() > self.most * h.std(0, correction=0)
        return self.head(h.masked_fill(far, 0))


class BoundedOutliers(Outliers):
    """Behind an activation that ends at one, where a row lies far out only among small ones."""

    activation = staticmethod(torch.tanh)


class BelowMedian(Norms):
    """Clips at five times the median of all rows."""

    def forward(self, x):
        h = self.second(self.first(x))
        return self.head(h.minimum(5 * h.abs().median()))


@pytest.mark.usefixtures("by_values_alone")
@pytest.mark.parametrize(
    "cls, most",
    [*product((Outliers, BoundedOutliers), (1.5, 2, 3, 4, 5)), (BelowMedian, None)],
)
def test_what_is_rare_among_few_rows_and_not_among_many(cls, most):
    model = prepared(cls, ROWS)
    model.most = most
    for N in (2, 3, 6, 64):
        assert_goes_as_the_loop(model, ROWS[:N])
    assert way(model) == "loop"


class Units(Norms):
    """Beside a large output a small one: in the second dimension, or in the last of three."""

    def __init__(self, small, scale, dim):
        super().__init__()
        self.small, self.scale, self.dim = small, scale, dim

    def forward(self, x):
        z = self.head(self.second(self.first(x)))
        both = torch.stack([self.scale * z, self.small(z)], 1)
        return both if self.dim == 1 else both.mT


SMALL = {
    "above the mean": lambda z: (z > z.mean(0)).to(z),
    "rank": lambda z: z.argsort(0).argsort(0).to(z) / len(z),
    "most": lambda z: (z == z.amax(0)).to(z),
    "share": lambda z: (z > 0).to(z).mean(0) + z,
}


@pytest.mark.usefixtures("by_values_alone")
@pytest.mark.parametrize("small", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("scale, dtype", [(1e5, torch.float32), (100, torch.bfloat16)])
@pytest.mark.parametrize("dim", [1, 2])
def test_rows_that_meet_in_an_output_far_smaller_than_another(small, scale, dtype, dim):
    x = ROWS.to(dtype)
    model = prepared(lambda: Units(small, scale, dim).to(dtype), x)
    expected = samples(copy.deepcopy(model), x[:6], strategy="loop").select(1 + dim, 1)
    actual = samples(model, x[:6]).select(1 + dim, 1)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert way(model) == "loop"


class Config:
    """A plain object."""

    def __init__(self):
        self.mix = False


class ListCounter(Norms):
    """Scales by the number of its forwards, which it keeps in a list, a dict,
    a buffer's data or a generator."""

    def __init__(self, keep):
        super().__init__()
        self.counts, self.state = [0], {"forward": {"count": 0}}
        self.register_buffer("count", torch.zeros(()))
        self.generator = torch.Generator().manual_seed(0)
        self.keep = keep

    def forward(self, x):
        return self.head(self.second(self.first(x))) * self.keep(self)


def in_a_list(model):
    model.counts[0] += 1
    return model.counts[0]


def in_a_dict(model):
    model.state["forward"]["count"] += 1
    return model.state["forward"]["count"]


def in_data(model):
    model.count.data.add_(1)
    return model.count


def in_a_generator(model):
    return torch.rand((), generator=model.generator)


@pytest.mark.parametrize("keep", [in_a_list, in_a_dict, in_data, in_a_generator])
def test_a_forward_that_counts_starts_where_the_loop_does(keep):
    model = prepared(partial(ListCounter, keep), ROWS)
    loop = copy.deepcopy(model)
    loop.generator.set_state(model.generator.get_state())
    for _ in range(2):
        expected = samples(loop, ROWS[:6], strategy="loop")
        torch.testing.assert_close(samples(model, ROWS[:6]), expected)


class Configured(Norms):
    """Couples its rows where its configuration, or a function that it holds, says so."""

    def __init__(self):
        super().__init__()
        self.config, self.act = Config(), torch.relu

    def forward(self, x):
        h = self.act(self.second(self.first(x)))
        return self.head(h - h.mean(0) if self.config.mix else h)


def mixing(mix):
    return lambda h: h - h.mean(0) if mix else h


@pytest.mark.parametrize("by", ["config", "act"])
def test_a_coupling_that_is_switched_on_is_found_out_anew(by):
    model = prepared(Configured, ROWS)
    for on in (False, True, False, True):
        if by == "config":
            model.config.mix = on
        else:
            del model.act  # the next may lie where this was
            model.act = mixing(on)
        assert_goes_as_the_loop(model, ROWS[:6])
        with bnuq.replicas(model.eval(), 5, seed=0), torch.no_grad():
            if on:
                with pytest.raises(ValueError, match="must give the same folded as one by one"):
                    model(ROWS[:6])
            else:
                model(ROWS[:6])


class Warned(Norms):
    """Changes something once, in a place that is not put back after a trial."""

    warned = False

    def forward(self, x):
        if not type(self).warned:
            type(self).warned = True
        return self.head(self.second(self.first(x)))


def test_what_a_forward_changes_once_costs_one_more_look():
    model, seen = prepared(Warned, ROWS), []
    Warned.warned = False
    model.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    samples(model, ROWS[:6])
    samples(model, ROWS[:6])
    seen.clear()
    samples(model, ROWS[:6])
    assert len(seen) == 1 and way(model) == "folded"


class Tiring(Norms):
    """Has an effect of its forwards' number after the twelfth only, later than a trial goes on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes.data.add_(1)  # of which no version tells
        return self.head(self.second(self.first(x))) * torch.where(self.passes > 12, 2, 1)


def test_a_state_whose_change_shows_later_than_in_the_trial():
    model = prepared(Tiring, ROWS)
    model.passes.zero_()
    loop = copy.deepcopy(model)
    expected = samples(loop, ROWS[:6], strategy="loop", num_samples=16)
    actual = samples(model, ROWS[:6], num_samples=16)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert model.passes == loop.passes == 16


class Levels(Norms):
    """Looks up each value's level, if it has them, where an infinity would be an index out
    of range."""

    met, indices = [], []

    def __init__(self, levels):
        super().__init__()
        self.levels = levels

    def forward(self, x):
        h = self.second(self.first(x))
        self.met.append(h)
        if not self.levels:
            return self.head(h)
        self.indices.append(h.mul(4).long())
        return self.head(torch.linspace(0, 1, 99)[self.indices[-1]])


@pytest.mark.parametrize("levels", [True, False])
def test_what_becomes_an_index_is_one_though_infinities_are_met(levels):
    model = prepared(partial(Levels, levels), ROWS)
    model.met.clear()
    model.indices.clear()
    assert_goes_as_the_loop(model, ROWS[:6])
    assert way(model) == "folded"
    assert not all(h.isfinite().all() for h in model.met)
    assert len(model.indices) == levels * len(model.met)
    assert all(0 <= i.min() and i.max() < 40 for i in model.indices)


class Centred(nn.Module):
    """Beside the output, what its rows make of each other."""

    def forward(self, h):
        return {"logits": h, "centred": h - h.mean(0)}


def test_every_output_of_replicas_is_compared():
    both = nn.Sequential(make_model(), Centred())
    with (
        bnuq.replicas(both, 5, 3),
        pytest.raises(ValueError, match="same folded as one by one"),
    ):
        both(X)
