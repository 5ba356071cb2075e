"""What a model's forward depends on in classes, seen again after a change."""

import gc
import weakref

import pytest
from test_fingerprint import Own, Plain, network
from torch import nn

from bnuq_ext.fingerprint import fingerprint
from bnuq_ext.state import modules_of

CLASS_CHANGES = {
    "a flag": lambda patch: patch.setattr(Own, "depth", 2),
    "a forward": lambda patch: patch.setattr(Own, "forward", lambda self, x: x),
    "a new attribute": lambda patch: patch.setattr(Own, "other", 1, raising=False),
    "a flag in a dict": lambda patch: patch.setitem(Own.options, "on", True),
    "a flag of an object's": lambda patch: patch.setattr(Plain, "flag", True),
    "a method of an object's": lambda patch: patch.setattr(Plain, "__call__", lambda self, *_: 0),
}


@pytest.mark.parametrize("change", CLASS_CHANGES.values(), ids=CLASS_CHANGES)
def test_a_change_of_a_class_shows(change, monkeypatch):
    model = network()
    before = fingerprint(modules_of(model))
    change(monkeypatch)
    assert fingerprint(modules_of(model)) != before
    monkeypatch.undo()
    assert fingerprint(modules_of(model)) == before


def test_classes_are_let_go():
    def used():
        class Made(nn.ReLU):
            pass

        fingerprint([Made()])
        return weakref.ref(Made)

    gone = used()
    gc.collect()
    assert gone() is None
