"""What a forward has changed of a model, put back."""

import math
import operator
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext.fingerprint import fingerprint
from bnuq_ext.state import State


@dataclass
class Config:
    on: bool = False


def test_a_sparse_buffer():
    layer = nn.BatchNorm1d(3)
    layer.register_buffer("adjacency", torch.eye(3).to_sparse())
    state = State([layer])
    assert not state.written()
    layer.running_mean.add_(1)
    assert state.written()
    state.restore()
    assert (layer.running_mean == 0).all()


def test_content_written_by_way_of_data_shows():
    layer = nn.BatchNorm1d(3)
    state, before = State([layer]), fingerprint([layer])
    assert not state.written()
    layer.running_mean.data.add_(1)
    assert fingerprint([layer]) == before and state.written()
    state.restore()
    assert not state.written() and (layer.running_mean == 0).all()


@pytest.mark.parametrize("training", [False, True])
def test_a_parameter_without_gradient_is_put_back_in_train(training):
    """No forward in eval writes into one, and they may be a large model."""
    layer = nn.Linear(3, 3).train(training).requires_grad_(False)
    state, weight, before = State([layer]), layer.weight, layer.weight.clone()
    layer.weight.mul_(2)
    assert state.written() == training
    state.restore()
    assert layer.weight is weight and torch.equal(weight, before) == training


def remembering() -> nn.Module:
    module = nn.BatchNorm1d(3)
    module.items, module.options = [1, torch.zeros(2), [3, {"a": 4}]], {"inner": {"on": [False]}}
    module.names, module.queue = {"a", "b"}, deque([1, torch.zeros(2)], maxlen=2)
    module.generator = torch.Generator().manual_seed(0)
    module.config, module.args = Config(), SimpleNamespace(calls=[0])
    return module


WRITES = {
    "an item of a list": lambda m: m.items.__setitem__(0, 2),
    "a longer list": lambda m: m.items.append(5),
    "a shorter list": lambda m: m.items.pop(),
    "a tensor in a list": lambda m: m.items[1].add_(1),
    "a list in a list": lambda m: m.items[2].clear(),
    "a dict in both": lambda m: m.items[2][1].update(a=5, b=6),
    "a dict": lambda m: m.options.clear(),
    "a list in dicts": lambda m: m.options["inner"]["on"].__setitem__(0, True),
    "a set": lambda m: m.names.add("c"),
    "a smaller set": lambda m: m.names.clear(),
    "a field of a dataclass": lambda m: setattr(m.config, "on", True),
    "a new field": lambda m: setattr(m.args, "depth", 2),
    "an item in a field": lambda m: m.args.calls.append(1),
    "a queue": lambda m: m.queue.append(7),
    "a tensor in a queue": lambda m: m.queue[1].add_(1),
    "a generator": lambda m: torch.rand(3, generator=m.generator),
    "another object": lambda m: setattr(m, "items", []),
    "a new attribute": lambda m: setattr(m, "depth", 2),
    "an attribute gone": lambda m: delattr(m, "eps"),
    "a buffer in place": lambda m: m.running_mean.add_(1),
    "a buffer": lambda m: setattr(m, "running_var", torch.zeros(3)),
}


def content(module):
    state = module.generator.get_state().tolist()
    kept = {n: v for n, v in vars(module).items() if n not in ("generator", "_buffers")}
    return repr((sorted(kept.pop("names")), sorted(kept.items()), dict(module._buffers), state))


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_the_state_is_put_back_into_the_objects_that_held_it(write):
    module = remembering()
    before, state = content(module), State([module])
    held = [module.items, module.items[1:], module.queue, list(module.queue), module.running_var]
    write(module)
    assert content(module) != before
    state.restore()
    assert content(module) == before
    now = [module.items, module.items[1:], module.queue, list(module.queue), module.running_var]
    for old, new in zip(held, now, strict=True):
        assert old is new or all(map(operator.is_, old, new))


@pytest.mark.parametrize("before", [(0,), (1,), (2, 3)])
@pytest.mark.parametrize("by_data", [True, False])
def test_a_buffer_of_another_size(before, by_data):
    """Observers of torch.ao find theirs in their first forward."""
    layer = nn.Module()
    layer.register_buffer("peak", torch.full(before, 2.0))
    state, peak = State([layer]), layer.peak
    for _ in range(2):
        if by_data:
            peak.data = torch.ones(6)
        else:
            peak.resize_(6).fill_(1)
        assert state.written()
        state.restore()
        assert layer.peak is peak and not state.written()
        assert torch.equal(peak, torch.full(before, 2.0))


def test_nan_is_what_it_was():
    layer = nn.BatchNorm1d(3)
    layer.running_mean[1], layer.scale = math.nan, torch.tensor([math.nan, 1j])
    state, version = State([layer]), layer.running_mean._version
    assert not state.written()
    state.restore()
    assert layer.running_mean._version == version
    layer.running_mean[2] = math.nan
    assert state.written()
    state.restore()
    assert layer.running_mean.isnan().tolist() == [False, True, False]


def test_a_bank_that_another_thread_attaches_stays():
    model = bnuq.convert(nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()))
    banks = [
        bnuq.Bank({"0": torch.rand(2, 3)}, {"0": torch.rand(2, 3)}, 8, batch_size=8)
        for _ in range(2)
    ]
    for before, after in ((None, banks[0]), banks):
        if before:
            bnuq.attach(model, before)
        model[1].note = "before"
        state = State(list(model.modules()))
        bnuq.attach(model, after)
        model[1].note = "after"
        state.restore()
        assert model[0].bank is after and model[0].bank_name == "0" and model[1].note == "before"


def test_a_container_too_deep_in_others_is_left_as_it_is():
    module = nn.Module()
    module.items = [[[[1]]], {"a": [{"b": 2}]}]
    state, deepest = State([module]), module.items[0][0][0]
    deepest.append(3)
    module.items[0][0].append(4)
    module.items[1]["a"][0]["b"] = 5
    module.items.pop()
    state.restore()
    assert module.items == [[[[1, 3]]], {"a": [{"b": 5}]}]
    assert module.items[0][0][0] is deepest
