"""What a model's forward depends on, seen again after a change."""

import gc
import weakref
from array import array
from collections import ChainMap, UserDict
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from types import MappingProxyType, MethodType, SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext.fingerprint import fingerprint
from bnuq_ext.state import State, modules_of


@dataclass
class Config:
    on: bool = False


@dataclass(slots=True)
class Slotted:
    on: bool = False


class Plain:
    """An object of the code that the model comes from."""

    flag = False

    def __init__(self, on=False):
        self._on, self.missing = on, None

    def __call__(self, *args):
        return self._on

    @property
    def on(self):
        raise AssertionError("called by a fingerprint")


class Settings:
    """As one of another package, without methods."""

    __module__ = "settings"

    def __init__(self):
        self.share = 0.0

    @classmethod
    def read(cls):
        return cls()


class Trainer(Settings):
    """As one of another package, with a method."""

    __module__ = "trainers"

    def __init__(self):
        self.on, self.mode = False, "a"

    def step(self):
        self.on = True


class Counter:
    def __init__(self):
        self.steps = 0

    def count(self):
        self.steps += 1


class Slots:
    __slots__ = ("__hidden", "unset")

    def __init__(self):
        self.__hidden = [False]

    def change(self):
        self.__hidden[0] = True


class Named(dict):
    on = False


def closure():
    on = False

    def read():
        return on

    def write():
        nonlocal on
        on = True

    return read, write


class Own(nn.ReLU):
    """A class beside `Plain`."""

    depth, options = 1, {"on": False}

    def forward(self, x):
        return super().forward(x)


def network() -> nn.Sequential:
    shared = nn.Linear(3, 3)
    inner = nn.Sequential(nn.ReLU(), shared, nn.BatchNorm1d(3, track_running_stats=False))
    model = nn.Sequential(shared, inner, nn.BatchNorm1d(3), inner, nn.Identity())
    model.nothing = None
    model.options, model.scales = {"inner": {"on": False}}, [1.0, torch.ones(2)]
    model.scales.append(model.scales)
    model.long, model.names = list(range(199)), {"a"}
    model.index = {str(i): i for i in range(499)}
    model.large, model.one = np.zeros(8000), 1
    model.settings, model.trainer = Settings(), Trainer()
    model.config, model.args = Config(), SimpleNamespace(on=[False])
    model.register_module("absent", None)
    model.own, model.plain, model.slots, model.slotted = Own(), Plain(), Slots(), Slotted()
    model.plain.back = model.plain.model = model
    model.named, model.user = Named(), UserDict(on=False)
    model.numbers, model.table = np.zeros((2, 2)), np.array("2020", dtype="datetime64[Y]")
    model.bytes, model.array = bytearray(2), array("d", [0.0])
    model.read, model.write = closure()
    model.part, model.method = partial(Plain.__call__, Plain()), MethodType(Plain.__call__, Plain())
    model.apart, model.frozen = [nn.Dropout(0.1)], frozenset({1})
    model.deep = [{"a": [{"b": [{"c": [False]}]}]}]
    model.pair = ("a",), type("Kind", (), {"on": False})
    model.function = lambda *, x=(1, [2]): x
    model.function.on, model.second = False, lambda x=[1]: x
    model.chain, model.view = ChainMap({"on": False}), MappingProxyType(model.named)
    model[1].register_forward_pre_hook(Plain())
    return model


def test_modules_of_gives_each_module_once_in_torchs_order():
    model = network()
    assert modules_of(model) == list(model.modules())
    assert modules_of(nn.ReLU())[0].inplace is False


CHANGES = {
    "a parameter in place": lambda m: m[0].weight.detach().mul_(2),
    "a parameter": lambda m: setattr(m[0], "weight", nn.Parameter(torch.zeros(3, 3))),
    "a parameter that is trained no more": lambda m: m[0].weight.requires_grad_(False),
    "a parameter gone": lambda m: m[0].register_parameter("bias", None),
    "a buffer in place": lambda m: m[2].running_mean.add_(1),
    "a buffer": lambda m: setattr(m[2], "running_var", torch.ones(3)),
    "a module": lambda m: m.__setitem__(4, nn.ReLU()),
    "a class": lambda m: setattr(m[4], "__class__", nn.Flatten),
    "an attribute": lambda m: setattr(m[2], "eps", 1e-3),
    "a new attribute": lambda m: setattr(m, "depth", 2),
    "an attribute gone": lambda m: delattr(m[2], "momentum"),
    "a hook": lambda m: m[1].register_forward_hook(lambda *_: None),
    "the class of an object": lambda m: setattr(m.plain, "__class__", Counter),
    "a flag of a class that it holds": lambda m: setattr(m.pair[1], "on", True),
    "where a tuple ends": lambda m: setattr(m, "pair", (("a", m.pair[1]),)),
    "an item of a dict": lambda m: m.options["inner"].update(on=True),
    "an item of a list": lambda m: m.scales.__setitem__(0, 2.0),
    "an item in place": lambda m: m.scales[1].add_(1),
    "a longer list": lambda m: m.long.append(0),
    "a late item of a list": lambda m: m.long.__setitem__(160, -1),
    "a late item of a dict": lambda m: m.index.update({"400": -1}),
    "a late number of an array": lambda m: m.large.__setitem__(7000, 1.0),
    "a truth value for a number": lambda m: setattr(m, "one", True),
    "a share for a number": lambda m: setattr(m, "one", 1.0),
    "a number of another type in a list": lambda m: m.long.__setitem__(1, True),
    "a field of a foreign record": lambda m: setattr(m.settings, "share", 0.5),
    "a flag of a foreign object": lambda m: setattr(m.trainer, "on", True),
    "a name in a foreign object": lambda m: setattr(m.trainer, "mode", "b"),
    "a larger set": lambda m: m.names.add("b"),
    "an item of a set": lambda m: (m.names.clear(), m.names.add("b")),
    "a field of a dataclass": lambda m: setattr(m.config, "on", True),
    "an item in a field": lambda m: m.args.on.__setitem__(0, True),
    "a hook of the backward": lambda m: m[1].register_full_backward_hook(lambda *_: None),
    "a pre-hook of the backward": lambda m: m[1].register_full_backward_pre_hook(lambda *_: None),
    "a pre-hook": lambda m: m[1].register_forward_pre_hook(lambda *_: None),
    "a field of an object": lambda m: setattr(m.plain, "_on", True),
    "a new field of one": lambda m: setattr(m.plain, "other", True),
    "a slot": lambda m: m.slots.change(),
    "a slot that was not set": lambda m: setattr(m.slots, "unset", 1),
    "a slot of a dataclass": lambda m: setattr(m.slotted, "on", True),
    "an attribute of a dict": lambda m: setattr(m.named, "on", True),
    "an item of a UserDict": lambda m: m.user.update(on=True),
    "a number of an array": lambda m: m.numbers.__setitem__((1, 1), 1),
    "an array without dimensions": lambda m: m.table.__setitem__((), np.datetime64("2021")),
    "a shape": lambda m: m.numbers.resize((4,), refcheck=False),
    "a byte": lambda m: m.bytes.__setitem__(1, 1),
    "an entry of an array": lambda m: m.array.__setitem__(0, 1.0),
    "a variable of a closure": lambda m: m.write(),
    "what a partial is bound to": lambda m: setattr(m.part.args[0], "_on", True),
    "what a method is bound to": lambda m: setattr(m.method.__self__, "_on", True),
    "a module in a list": lambda m: setattr(m.apart[0], "p", 0.5),
    "a set that cannot change": lambda m: setattr(m, "frozen", frozenset({2})),
    "a deep item": lambda m: m.deep[0]["a"][0]["b"][0]["c"].__setitem__(0, True),
    "an attribute of a function": lambda m: setattr(m.function, "on", True),
    "an item of a ChainMap": lambda m: m.chain.update(on=True),
    "what a view shows": lambda m: m.named.update(on=True),
    "the code of a function": lambda m: setattr(
        m.function, "__code__", (lambda *, x=1: 0).__code__
    ),
    "a default": lambda m: m.second.__defaults__[0].append(3),
    "a default of a name": lambda m: m.function.__kwdefaults__["x"][1].append(3),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_shows(change):
    model = network()
    before = fingerprint(modules_of(model))
    assert fingerprint(modules_of(model)) == before
    CHANGES[change](model)
    assert fingerprint(modules_of(model)) != before


def test_another_object_shows_where_its_address_comes_again():
    """Nothing keeps the old one alive."""

    def adding(size):
        return lambda h: h + size

    again, made = (
        0,
        {
            "function": lambda i: lambda h: h,
            "closure": adding,
            "object": lambda i: Plain(),
            "tensor": lambda i: torch.zeros(2),
            "array": lambda i: np.zeros(9000),
        },
    )
    layer = Own()
    for make in made.values():
        layer.held, addresses = make(0), set()
        for i in range(1, 50):
            before = fingerprint([layer])
            addresses.add(id(layer.held))
            del layer.held
            layer.held = make(i)
            again += id(layer.held) in addresses
            assert fingerprint([layer]) != before
    assert again > 0
    layer.weight = nn.Parameter(torch.zeros(2))
    for _ in range(20):
        before = fingerprint([layer])
        del layer.weight
        layer.weight = nn.Parameter(torch.ones(2))
        assert fingerprint([layer]) != before


def test_objects_of_others_are_not_looked_into():
    """A trainer that counts steps is no part of a forward; nor is one of this package."""
    layer = nn.ReLU()  # no code of ours in the model
    layer.counter, layer.fraction = Counter(), Fraction(1, 2)
    before = fingerprint([layer])
    layer.counter.count()
    assert fingerprint([layer]) == before
    both = [layer, Own()]
    before = fingerprint(both)
    layer.counter.count()
    assert fingerprint(both) != before


def test_what_a_hook_takes_down_is_no_change():
    layer, taken = nn.ReLU(), []
    layer.register_forward_hook(lambda module, args, output: taken.append(output))
    before = fingerprint([layer])
    layer(torch.ones(2))
    assert fingerprint([layer]) == before and len(taken) == 1


def test_a_fingerprint_keeps_nothing_alive_and_is_bounded():
    model = network()
    model.many = [[[object() for _ in range(60)] for _ in range(60)] for _ in range(60)]
    found, gone = fingerprint(modules_of(model)), weakref.ref(model)
    assert len(found.structure) < 20_000
    del model
    gc.collect()
    assert gone() is None


class Hostile:
    @property
    def __dict__(self):
        raise RuntimeError("not to be looked into")


def test_odd_attributes_are_told_by_who_they_are():
    model = network()
    model.odd = [Hostile(), np.ma.masked, Mock(spec=np.ndarray), nn.LazyLinear(3)]
    before = fingerprint(modules_of(model))
    assert fingerprint(modules_of(model)) == before
    model.odd[0] = Hostile()
    assert fingerprint(modules_of(model)) != before
    state = State(modules_of(model))
    assert not state.written()
    state.restore()


def test_layers_that_have_never_been_called():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
    model[0].unused, model[0].norm = nn.LazyLinear(3), nn.LazyBatchNorm1d()
    with pytest.warns(UserWarning, match="0.norm .*lazy"):
        model = bnuq.convert(model, strict=False)
    bnuq.collect(model, list(torch.randn(4, 8, 3)), 4, progress=False)
    options = {"likelihood": "gaussian", "num_samples": 4, "seed": 0}
    pred = bnuq.predict(model, torch.ones(2, 3), **options)
    expected = bnuq.predict(model, torch.ones(2, 3), strategy="loop", **options)
    torch.testing.assert_close(pred.mean, expected.mean)


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


def test_a_hook_of_all_modules_is_a_change():
    model = bnuq.convert(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).eval())
    bnuq.collect(model, list(torch.randn(8, 16, 3)), 4, progress=False)
    x, options = torch.randn(4, 3), {"likelihood": "gaussian", "num_samples": 4, "seed": 0}
    bnuq.predict(model, x, **options)

    def centre(module, args, output):
        return output - output.mean(0) if isinstance(module, nn.Linear) else output

    handle = nn.modules.module.register_module_forward_hook(centre)
    try:
        pred = bnuq.predict(model, x, **options)
        expected = bnuq.predict(model, x, strategy="loop", **options)
    finally:
        handle.remove()
    torch.testing.assert_close(pred.variance, expected.variance)


def test_a_tensor_at_the_address_of_another():
    model = nn.Module()
    model.register_buffer("table", torch.zeros(1))
    before, address = fingerprint([model]), id(model.table)
    model.table, others = None, []
    for _ in range(100_000):  # until the free places are filled
        model.table = torch.ones(1)
        if id(model.table) == address:
            break
        others.append(model.table)
    assert id(model.table) == address and fingerprint([model]) != before
