"""What a forward depends on in classes and functions, exchanged after a prediction."""

import copy
import functools
import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext.fingerprint import fingerprint
from bnuq_ext.proof.signature import key_of

X = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
BATCHES = list(torch.randn(4, 9, 6, generator=torch.Generator().manual_seed(1)))


class Apart:
    mixes = False

    def go(self, h):
        return h - h.mean(0) if self.mixes else h


class Together(Apart):
    mixes = True


class Chosen:
    """A configuration that is a class."""

    mixes = False


class Net(nn.Module):
    options = {"mixes": False}

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.act, self.last = nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)
        self.helper, self.chosen, self.function = Apart(), Chosen, same

    def forward(self, x):
        h = self.function(self.helper.go(self.act(self.norm(x))))
        if self.options["mixes"] or self.chosen.mixes:
            h = h - h.mean(0)
        return self.last(h)


def same(h):
    return h


def centred(h):
    return h - h.mean(0)


def centred_forward(self, x):
    h = self.act(self.norm(x))
    return self.last(h - h.mean(0))


def set_code(patch, function, other):
    patch.setattr(function, "__code__", other.__code__)  # as a reload of the source does


CHANGES = {
    "code of a function": lambda model, patch: set_code(patch, same, centred),
    "code of a method": lambda model, patch: set_code(patch, Net.forward, centred_forward),
    "class of a helper": lambda model, patch: setattr(model.helper, "__class__", Together),
    "method of a helper": lambda model, patch: patch.setattr(
        Apart, "go", lambda self, h: centred(h)
    ),
    "attribute of a helper's class": lambda model, patch: patch.setattr(Apart, "mixes", True),
    "a class that is held": lambda model, patch: patch.setattr(Chosen, "mixes", True),
    "a dict of the class": lambda model, patch: patch.setitem(Net.options, "mixes", True),
    "forward of a class of torch": lambda model, patch: patch.setattr(
        nn.ReLU, "forward", lambda self, h: centred(h)
    ),
}


def made(model, **options):
    model = bnuq.convert(model, **options).eval()
    bnuq.collect(model, BATCHES, progress=False)
    return model


def predicted(model, strategy="auto"):
    return bnuq.predict(
        model, X, likelihood="gaussian", num_samples=5, seed=0, strategy=strategy
    ).mean


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name, monkeypatch):
    model = made(Net())
    before = predicted(model, "folded")
    CHANGES[name](model, monkeypatch)
    expected = predicted(copy.deepcopy(model), "loop")
    assert (expected - before).abs().max() > 0.01
    torch.testing.assert_close(predicted(model), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="does not fold"):
        predicted(model, "folded")


class Counts(nn.Module):
    """Counts and remembers in classes, which is no change of the model."""

    memo, calls = {}, []
    settings = {"a": {"mixes": False}}

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.last, self.timer = nn.BatchNorm1d(6), nn.Linear(6, 3), Timer()
        self.given = self.settings

    def forward(self, x):
        self.calls.append(len(x))
        self.memo.setdefault(len(x), torch.ones(6))
        self.timer.tick()
        h = self.norm(x).relu() * self.memo[len(x)]
        return self.last(h - h.mean(0) if self.given["a"]["mixes"] else h)


class Timer:
    ticks, totals = 0, {"n": 0}

    def tick(self):
        type(self).ticks += 1
        self.totals["n"] += 1


class Partial(Counts):
    forward = functools.partialmethod(Counts.forward)


@pytest.mark.parametrize("cls", [Counts, Partial])
def test_what_classes_count_is_no_change(cls):
    model = made(cls())
    modules = list(model.modules())
    before = fingerprint(modules)
    for rows in (X, X[:3]):
        model(rows)
    assert fingerprint(modules) == before
    torch.testing.assert_close(
        predicted(model, "folded"), predicted(model, "loop"), rtol=1e-5, atol=1e-6
    )


def test_what_a_class_and_its_object_share_is_looked_into(monkeypatch):
    model = made(Counts(), inplace=True)
    before = predicted(model, "folded")
    monkeypatch.setitem(Counts.settings["a"], "mixes", True)
    assert (predicted(model, "loop") - before).abs().max() > 0.01
    torch.testing.assert_close(predicted(model), predicted(model, "loop"), rtol=1e-5, atol=1e-6)


def test_a_model_with_classes_of_its_own_is_freed():
    class Local(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.last = nn.BatchNorm1d(6), nn.Linear(6, 3)

            class Head:
                def go(_, h):  # noqa: N805
                    return self.last(h)

            self.head = Head()

        def forward(self, x):
            return self.head.go(self.norm(x).relu())

    model = made(Local(), inplace=True)
    predicted(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_keys_do_not_hold_the_arrays_of_an_output_fn():
    kept = [np.zeros(1000), bytearray(8000)]

    def scaled(output):
        return output * len(kept)

    before = key_of(scaled, [])
    held = [part for part in before.values if isinstance(part, bytes)]
    assert len(held) == 2 and max(map(len, held)) < 100
    assert before == key_of(scaled, [])
    for array in kept:
        array[3] += 1
        assert before != key_of(scaled, [])
        array[3] -= 1
    assert before == key_of(scaled, [])
