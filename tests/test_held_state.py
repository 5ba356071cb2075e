"""What forwards change of a model, wherever it holds that, is as the loop leaves it."""

from array import array
from collections import ChainMap, Counter, OrderedDict, namedtuple
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import bnuq_ext as bnuq


class Helper:
    """Has methods and fields in slots."""

    __slots__ = ("total", "count", "unset", "__dict__")

    def __init__(self):
        self.total, self.count, self.calls = torch.zeros(3), 0, 0

    def step(self):
        self.total.add_(0.1)
        self.count += 1
        self.calls, self.new = self.calls + 1, True
        self.unset = [1]
        return self.total + 0.01 * self.count + 0.001 * self.calls


class Memo:
    """Has a slot that is filled later."""

    __slots__ = ("calls",)

    def step(self):
        self.calls = getattr(self, "calls", 0) + 1
        return 0.1 * self.calls


class Newest(OrderedDict):
    """Has what was set last first."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self.move_to_end(key, last=False)

    def step(self):
        self[len(self)] = 0.1 * len(self)
        return 0.1 * next(iter(self)) + 0.01 * [*self][-1]


class Replaced:
    """Takes another dict for its fields."""

    def __init__(self):
        self.calls = 0

    def step(self):
        self.__dict__ = {"calls": self.calls + 1}
        return 0.1 * self.calls


def unfilled():
    def step():
        nonlocal calls
        try:
            calls += 1
        except NameError:
            calls = 0
        return 0.1 * calls

    if calls := False:
        return None
    del calls
    return step


def closure():
    total, count = torch.zeros(3), 0

    def step():
        nonlocal count
        total.add_(0.1)
        count += 1
        step.calls = getattr(step, "calls", 0) + 1
        return total + 0.01 * count + 0.001 * step.calls

    return step


def step_norm(held):
    held[0].running_mean.add_(0.1)
    held[0].calls = getattr(held[0], "calls", 0) + 1
    return held[0].running_mean + 0.01 * held[0].calls


def step_lazy(held):
    return held[1].step() + held[0](torch.ones(2)).detach()


def step_repeated(held):
    held[1].add_(0.1)
    return held[0][0].clone()


def repeated():
    tensor = torch.zeros(3)
    return tensor.expand(8, 3), tensor


def step_weight(held):
    with torch.no_grad():
        held["layer"].weight.mul_(1.1)
    return held["layer"](torch.ones(2)).detach()


HELD = {
    "a tensor in a tuple": (lambda: (torch.zeros(3), 1), lambda h: h[0].add_(0.1).clone()),
    "a tensor in a named tuple": (
        lambda: Pair(torch.zeros(3), [0]),
        lambda h: h.first.add_(0.1).clone(),
    ),
    "a list in a tuple": (lambda: ([0],), lambda h: h[0].append(0) or float(len(h[0]))),
    "dicts four deep": (
        lambda: {1: {2: {3: {4: torch.zeros(3)}}}},
        lambda h: h[1][2][3][4].add_(0.1).clone(),
    ),
    "the last of many": (
        lambda: [torch.zeros(3) for _ in range(120)],
        lambda h: h[-1].add_(0.1).clone(),
    ),
    "an unregistered module": (lambda: [nn.BatchNorm1d(3).eval()], step_norm),
    "its weights": (lambda: {"layer": nn.Linear(2, 3)}, step_weight),
    "a lazy layer": (lambda: [nn.LazyLinear(3), Helper()], step_lazy),
    "a tensor and its repetition": (repeated, step_repeated),
    "a generator in a dict": (
        lambda: {"g": torch.Generator().manual_seed(1)},
        lambda h: torch.randn(3, generator=h["g"]),
    ),
    "a generator in a list": (
        lambda: [np.random.default_rng(0)],
        lambda h: float(h[0].standard_normal()),
    ),
    "an array in a tuple": (lambda: (np.zeros(3),), lambda h: float(h[0].__iadd__(0.1)[0])),
    "an array of Python's": (
        lambda: (array("d", [0.0]),),
        lambda h: h[0].append(0.1) or sum(h[0]),
    ),
    "a counter": (Counter, lambda h: h.update(["a"]) or 0.1 * h["a"]),
    "a table of its own kind": (lambda: Newest({1: 0.1, 0: 0.5}), Newest.step),
    "other fields": (Replaced, Replaced.step),
    "behind many": (
        lambda: [[Pair([], []) for _ in range(1024)], [Pair([], []) for _ in range(1024)], []],
        lambda h: h[2].append(1) or 0.1 * len(h[2]),
    ),
    "a chain of maps": (
        lambda: ChainMap({}, {"n": 0}),
        lambda h: h.update(n=h["n"] + 1) or 0.1 * h["n"],
    ),
    "a slot that is not filled": (Memo, Memo.step),
    "a cell that is not filled": (unfilled, lambda h: h()),
    "an object with methods": (Helper, lambda h: h.step()),
    "its methods": (lambda: Helper().step, lambda h: h()),
    "a closure": (closure, lambda h: h()),
    "in a partial": (lambda: partial(closure()), lambda h: h()),
    "of the class": (lambda: None, lambda h: Holding.shared.add_(0.1).clone()),
    "an attribute of the class": (lambda: setattr(Holding, "calls", 0), lambda h: call()),
    "one that it gets later": (lambda: forget(), lambda h: call()),
}
Pair = namedtuple("Pair", "first second")


def forget():
    if "calls" in vars(Holding):
        del Holding.calls


def call():
    Holding.calls = getattr(Holding, "calls", 0) + 1
    return 0.1 * Holding.calls


class Holding(nn.Module):
    """Adds what it holds, which changes at every forward."""

    shared = torch.zeros(3)

    def __init__(self, make, step):
        super().__init__()
        torch.manual_seed(0)
        Holding.shared.zero_()
        self.body, self.norm, self.held = nn.Linear(4, 3), nn.BatchNorm1d(3), make()
        self.step = step

    def forward(self, x):
        return self.norm(self.body(x)) + self.step(self.held)


@pytest.mark.parametrize(("make", "step"), HELD.values(), ids=HELD)
def test_what_forwards_change_anywhere_in_a_model_is_as_in_the_loop(make, step):
    bank = bnuq.Bank({"norm": torch.randn(9, 3)}, {"norm": torch.rand(9, 3) + 1}, 8, batch_size=8)
    options, x = {"likelihood": "gaussian", "num_samples": 4, "seed": 0}, torch.randn(6, 4)
    found = []
    for strategy in ("auto", "loop"):
        model = bnuq.convert(Holding(make, step), inplace=True).eval()
        bnuq.attach(model, bank)
        preds = [bnuq.predict(model, x, strategy=strategy, **options) for _ in range(3)]
        found.append([pred.mean for pred in preds])
    for auto, loop in zip(*found, strict=True):
        torch.testing.assert_close(auto, loop)
    assert not torch.equal(*found[1][:2])
