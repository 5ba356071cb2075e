"""What a model's forward depends on, seen again after a change."""

import operator
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bnuq_ext.fingerprint import State, fingerprint, modules_of


@dataclass
class Config:
    on: bool = False


def network() -> nn.Sequential:
    shared = nn.Linear(3, 3)
    inner = nn.Sequential(nn.ReLU(), shared, nn.BatchNorm1d(3, track_running_stats=False))
    model = nn.Sequential(shared, inner, nn.BatchNorm1d(3), inner, nn.Identity())
    model.nothing = None
    model.options, model.scales = {"inner": {"on": False}}, [1.0, torch.ones(2)]
    model.scales.append(model.scales)
    model.long, model.names = list(range(99)), {"a"}
    model.config, model.args = Config(), SimpleNamespace(on=[False])
    model.register_module("absent", None)
    return model


def test_modules_of_gives_each_module_once_in_torchs_order():
    model = network()
    assert modules_of(model) == list(model.modules())
    assert modules_of(nn.ReLU())[0].inplace is False


CHANGES = {
    "a parameter in place": lambda m: m[0].weight.detach().mul_(2),
    "a parameter": lambda m: setattr(m[0], "weight", nn.Parameter(torch.zeros(3, 3))),
    "a parameter gone": lambda m: m[0].register_parameter("bias", None),
    "a buffer in place": lambda m: m[2].running_mean.add_(1),
    "a buffer": lambda m: setattr(m[2], "running_var", torch.ones(3)),
    "a module": lambda m: m.__setitem__(4, nn.ReLU()),
    "a class": lambda m: setattr(m[4], "__class__", nn.Flatten),
    "an attribute": lambda m: setattr(m[2], "eps", 1e-3),
    "a new attribute": lambda m: setattr(m, "depth", 2),
    "an attribute gone": lambda m: delattr(m[2], "momentum"),
    "a hook": lambda m: m[1].register_forward_hook(lambda *_: None),
    "an item of a dict": lambda m: m.options["inner"].update(on=True),
    "an item of a list": lambda m: m.scales.__setitem__(0, 2.0),
    "an item in place": lambda m: m.scales[1].add_(1),
    "a longer list": lambda m: m.long.append(0),
    "a larger set": lambda m: m.names.add("b"),
    "an item of a set": lambda m: (m.names.clear(), m.names.add("b")),
    "a field of a dataclass": lambda m: setattr(m.config, "on", True),
    "an item in a field": lambda m: m.args.on.__setitem__(0, True),
    "a hook of the backward": lambda m: m[1].register_full_backward_hook(lambda *_: None),
    "a pre-hook of the backward": lambda m: m[1].register_full_backward_pre_hook(lambda *_: None),
    "a pre-hook": lambda m: m[1].register_forward_pre_hook(lambda *_: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_shows(change):
    model = network()
    before = fingerprint(modules_of(model))
    assert fingerprint(modules_of(model)) == before
    CHANGES[change](model)
    assert fingerprint(modules_of(model)) != before


def test_training_flags_and_tensors_without_versions():
    with torch.inference_mode():
        model = network()
    before = fingerprint(modules_of(model))
    model.eval()
    assert fingerprint(modules_of(model)) == before
    with torch.inference_mode():
        model[0].weight = nn.Parameter(torch.zeros(3, 3))
    assert fingerprint(modules_of(model)) != before


def test_another_hook_shows_where_its_address_comes_again():
    layer, found = nn.ReLU(), []
    for value in (1, 2):
        handle = layer.register_forward_hook(lambda *_, value=value: value)
        found.append(fingerprint([layer]))
        handle.remove()
    assert found[0] != found[1]


def test_content_written_by_way_of_data_shows():
    layer = nn.BatchNorm1d(3)
    state, before = State([layer]), fingerprint([layer])
    assert not state.written()
    layer.running_mean.data.add_(1)
    assert fingerprint([layer]) == before and state.written()
    state.restore()
    assert not state.written() and (layer.running_mean == 0).all()


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
