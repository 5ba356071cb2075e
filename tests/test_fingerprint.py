"""What a model's forward depends on, seen again after a change."""

import pytest
import torch
from torch import nn

from bnuq_ext.fingerprint import State, fingerprint, modules_of


def network() -> nn.Sequential:
    shared = nn.Linear(3, 3)
    inner = nn.Sequential(nn.ReLU(), shared, nn.BatchNorm1d(3, track_running_stats=False))
    model = nn.Sequential(shared, inner, nn.BatchNorm1d(3), inner, nn.Identity())
    model.nothing = None
    model.options, model.scales = {"inner": {"on": False}}, [1.0, torch.ones(2)]
    model.scales.append(model.scales)
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
