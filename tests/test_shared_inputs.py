"""Inputs without rows, which all replicas share: a plan holds for their values."""

import copy
import enum
import functools

import numpy as np
import pytest
import torch
from coupled import next_rows
from folded import assert_goes_as_the_loop, prepared, samples, way
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext import model_cache

ROWS = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
SEEN: list[int] = []  # rows of the forwards


class Net(nn.Module):
    """What it does with the second argument is told by `mode`."""

    def __init__(self, mode="centre"):
        super().__init__()
        self.a, self.bn, self.o = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.mode = mode

    def forward(self, x, given=None):
        h = self.bn(self.a(x)).relu()
        SEEN.append(len(h))
        return self.o(getattr(self, self.mode)(h, given))

    def centre(self, h, flag):
        return h - h.mean(0) if flag else h

    def gate(self, h, gate):
        return h if gate is None else h - gate * h.mean(0)

    def choose(self, h, flag):
        return h if flag is None else torch.where(flag, h - next_rows(h), h)

    def first_rows(self, h, most):
        return h if most is None else h * (torch.arange(len(h)) < most).unsqueeze(1)

    def beyond(self, h, level):
        return h if level is None or level > -1.5 else h - h.mean(0)

    def beyond_in_training(self, h, level):
        return self.beyond(h, level) if self.training else h

    def in_training(self, h, gate):
        return h - gate * h.mean(0) if self.training else h

    def straight(self, h, gate):
        return h + gate * (h.mean(0) - h.mean(0).detach()) if gate else h

    def ignore(self, h, given):
        return h

    def scale(self, h, rate):
        return h if rate is None else h * rate


@pytest.mark.parametrize(
    "mode,values",
    [
        ("centre", [torch.tensor(False), torch.tensor(True)]),
        ("centre", [torch.tensor(0), torch.tensor(3)]),
        ("centre", [torch.tensor(0.0), torch.tensor(0.5)]),
        ("choose", [torch.tensor(False), torch.tensor(True)]),
        ("gate", [torch.tensor(0.0), torch.tensor(0.5)]),
        ("gate", [torch.zeros(8), torch.linspace(0, 1, 8)]),
        ("gate", [0.0, 0.5]),
        ("beyond", [-1.0, -2.0]),
        ("beyond", [torch.tensor(-1.0), torch.tensor(-2.0)]),
        ("first_rows", [torch.tensor(100), torch.tensor(2)]),
        ("first_rows", [torch.tensor([100]), torch.tensor([2])]),
        ("first_rows", [100.0, 2.0]),
    ],
)
def test_another_value_is_another_function(mode, values):
    model = prepared(functools.partial(Net, mode), ROWS)
    for given in (*values, *values):
        assert_goes_as_the_loop(model, (ROWS[:5], given))


def one_by_one(model, given, y, num_samples=4):
    """The mean of the samples' negative log-likelihoods at seed 3."""
    found = []
    for t in range(num_samples):
        with bnuq.replicas(model, 1, 3, first_replica=t):
            found.append(nn.functional.cross_entropy(model(*given), y))
    return torch.stack(found).mean()


def assert_step_is_right(model, given, y):
    nll = bnuq.elbo_loss(model, given, y, num_samples=4, seed=3, batch_weight=0.1).nll
    expected = one_by_one(model, given, y)
    torch.testing.assert_close(nll, expected, rtol=1e-5, atol=1e-6)
    parameters = [model.a.weight_mu, model.o.weight_mu]
    actual, wanted = (torch.autograd.grad(value, parameters) for value in (nll, expected))
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", [float, torch.tensor])
@pytest.mark.parametrize(
    "mode,rates",
    [
        ("gate", (0.0, 0.5, 0.7, 0.0)),
        ("in_training", (0.0, 0.5, 0.7, 0.0)),
        ("straight", (0.0, 0.5, 0.7, 0.0)),
        ("beyond", (-1.0, -2.0, -1.0)),
        ("beyond_in_training", (-1.0, -2.0, -1.0)),
    ],
)
def test_another_value_in_a_training_step(mode, rates, make):
    """With parameters that stay, where it shows in training or in gradients alone too."""
    torch.manual_seed(0)
    model = bnuq.to_bayesian(Net(mode).eval(), rho_init=-1.0)
    model.training = mode.endswith("in_training")
    y = torch.arange(5) % 4
    for rate in rates:
        assert_step_is_right(model, (ROWS[:5], make(rate)), y)
    model = copy.deepcopy(model)  # of which nothing is known
    with bnuq.replicas(model, 4, 0):
        if mode.startswith("beyond"):
            model(ROWS[:5], make(rates[0]))
        with pytest.raises(ValueError, match="must give the same folded as one by one"):
            model(ROWS[:5], make(rates[1]))


def test_a_body_of_replicas_refuses_the_other_value():
    model = prepared(functools.partial(Net, "choose"), ROWS)
    with bnuq.replicas(model, 4, 0):
        model(ROWS[:5], torch.tensor(False))
        with pytest.raises(ValueError, match="must give the same folded as one by one"):
            model(ROWS[:5], torch.tensor(True))
        model(ROWS[:5], torch.tensor(False))


def test_another_value_where_dropout_is_left_out_of_the_comparison():
    torch.manual_seed(0)
    model = bnuq.to_bayesian(Net("beyond_in_training"), rho_init=-1.0)
    model.bn.eval()
    model.o = nn.Sequential(nn.Dropout(0.3), model.o)
    for level, end in ((-1.0, [5, 20, 20]), (-2.0, [5] * 4)):
        SEEN.clear()
        bnuq.elbo_loss(model, (ROWS[:5], level), torch.arange(5) % 4, num_samples=4, batch_weight=1)
        assert SEEN[-len(end) :] == end


@pytest.mark.parametrize("make", [float, torch.tensor, lambda rate: torch.full((8,), rate)])
def test_other_real_numbers_need_a_comparison_alone(make):
    model = prepared(functools.partial(Net, "scale"), ROWS)
    assert_goes_as_the_loop(model, (ROWS[:5], make(0.1)))
    SEEN.clear()
    samples(model, (ROWS[:5], make(0.2)))
    assert sorted(SEEN) == [5] * 4 + [30]  # four of the six replicas alone
    SEEN.clear()
    samples(model, (ROWS[:5], make(0.2)))
    assert SEEN == [30] and way(model) == "folded"


def test_so_many_real_numbers_are_remembered():
    model = prepared(functools.partial(Net, "scale"), ROWS)
    for step in range(300):
        samples(model, (ROWS[:5], 1 + step / 1000), num_samples=2)
    SEEN.clear()
    samples(model, (ROWS[:5], 1.299), num_samples=2)
    samples(model, (ROWS[:5], 1.0), num_samples=2)
    assert sorted(SEEN) == [5, 5, 10, 10]


class Mode(enum.Enum):
    ONE = 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: Mode.ONE,
        lambda: torch.float32,
        lambda: torch.device("cpu"),
        lambda: torch.channels_last,
        lambda: np.float32(1),
        lambda: np.int64(1),
        lambda: slice(0, 2),
        lambda: slice([1], None),
        lambda: range(4),
        lambda: b"a",
        lambda: 1j,
        lambda: torch.tensor([1, 2]),
        lambda: torch.zeros(3, 2),
        lambda: {"rates": [1.5, None]},
    ],
)
def test_an_equal_value_is_the_same(make):
    model = prepared(functools.partial(Net, "ignore"), ROWS)
    samples(model, (ROWS[:5], make()))
    SEEN.clear()
    samples(model, (ROWS[:5], make()))
    assert SEEN == [30]


class Share(Net):
    """Takes 1.0 as a share of all rows, and 1 as a number of them."""

    def __init__(self):
        super().__init__("take")
        self.kept = None

    def take(self, h, given):
        share = self.kept if given is None else given
        return h if type(share) in (float, np.float32) else h - h.mean(0)


@pytest.mark.parametrize("values", [(1.0, 1), (1.0, True), (np.float32(1), 1)])
def test_numbers_of_other_types_are_others(values):
    model = prepared(Share, ROWS)
    for given in values:
        assert_goes_as_the_loop(model, (ROWS[:5], given))
    for model.kept in values:
        assert_goes_as_the_loop(model, (ROWS[:5], None))


class Table(Net):
    def gate(self, h, table):
        return h if table is None else torch.where(table[0] > 0.25, h - h.mean(0), h)


def test_a_large_one_is_known_by_its_version():
    model, table = prepared(functools.partial(Table, "gate"), ROWS), torch.zeros(40_000, 8)
    for table[0] in (0.0, 0.5):
        assert_goes_as_the_loop(model, (ROWS[:5], table))


class Peeking(Net):
    """Branches on the rows, of which it is given a part without rows as well."""

    def forward(self, x, part):
        h = self.bn(self.a(x)).relu()
        return self.o(h - h.mean(0) if x[:, 0].max() > 0 else h)


def test_a_part_of_the_rows_is_not_the_same_for_all():
    torch.manual_seed(0)
    model, x = bnuq.convert(Peeking().eval()), -ROWS[:5].abs()
    bnuq.collect(model, [(ROWS[:20], None)] * 4, input_fn=tuple, progress=False)
    for x[3, 0] in (-1.0, 1.0):
        assert_goes_as_the_loop(model, (x, x[0]))
    assert way(model) == "loop"


def test_as_long_as_the_batch_by_chance():
    """Such a batch goes one replica after another, and the next ones do not."""
    model, rates = prepared(functools.partial(Net, "scale"), ROWS), torch.linspace(1, 2, 8)
    assert_goes_as_the_loop(model, (ROWS[:8], rates))
    assert way(model) == "loop"
    for rows in (5, 7):
        with bnuq.replicas(model, 3, 0):
            assert len(model(ROWS[:rows], rates)) == 3 * rows


def times(rate, h):
    return rate * h


def named(*args, rate=1.0):
    return args[-1] * rate


def test_a_function_with_arguments_that_is_made_anew_is_the_same():
    model, folded = prepared(functools.partial(Net, "ignore"), ROWS), []
    for rate in (2.0, 2.0, 3.0):
        SEEN.clear()
        samples(model, ROWS[:5], output_fn=functools.partial(times, rate))
        folded.append(SEEN == [30])
    assert folded == [False, True, False]
    model = prepared(functools.partial(Net, "ignore"), ROWS)
    samples(model, ROWS[:5], output_fn=functools.partial(named, "rate", 2.0))
    SEEN.clear()
    samples(model, ROWS[:5], output_fn=functools.partial(named, rate=2.0))
    assert SEEN != [30]


class Anchors(Net):
    """Keeps a table for the last input's shape, rows and all, or the last table."""

    shape, anew = None, False

    def forward(self, x):
        if self.anew or self.shape != x.shape:
            self.table, self.shape = torch.linspace(0, 1, x.shape[1]), x.shape
        return super().forward(x + self.table)


def counted(model, predictions) -> list[int]:
    """Forwards of each of the predictions, which are the loop's."""
    expected = samples(copy.deepcopy(model), ROWS[:5], strategy="loop")
    counts = []
    for _ in range(predictions):
        SEEN.clear()
        torch.testing.assert_close(samples(model, ROWS[:5]), expected, rtol=1e-5, atol=1e-5)
        counts.append(len(SEEN))
    return counts


def test_a_table_that_one_forward_makes_stays_for_the_next():
    model = prepared(functools.partial(Anchors, "ignore"), ROWS)
    assert counted(model, 4)[2:] == [1, 1]  # together


def test_a_model_that_changes_in_each_prediction_is_tried_no_more():
    model = prepared(functools.partial(Anchors, "ignore"), ROWS)
    model.anew = True
    counts = counted(model, 12)
    assert max(counts) > 7 and counts[6:] == [6] * 6


def test_a_change_now_and_then_costs_a_trial_at_once():
    model = prepared(functools.partial(Net, "ignore"), ROWS)
    for model.note in range(4):
        for _ in range(3):
            SEEN.clear()
            samples(model, ROWS[:5])
        assert SEEN == [30]


def test_what_is_decided_is_not_forgotten_with_the_trials():
    model = prepared(functools.partial(Net, "ignore"), ROWS)
    for value in range(4):
        for _ in range(9):
            samples(model, (ROWS[:5], value))
    model_cache._CACHES[model].trials.clear()
    for value in range(4):
        model_cache._CACHES[model].trials.update({f"{value} {i}": None for i in range(2)})
        SEEN.clear()
        samples(model, (ROWS[:5], value))
        assert SEEN == [30]
