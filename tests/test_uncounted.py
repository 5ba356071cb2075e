"""Changes of parameters that their version counters do not show: a plan must not outlive them."""

import gc
from functools import partial
from types import MethodType, SimpleNamespace

import pytest
import torch
from coupled import ROWS, ZeroGate
from test_folding import prepared, samples, way
from torch import nn
from training import Attention, Net, assert_right, ways

from bnuq_ext import known, uncounted
from bnuq_ext.fingerprint import fingerprint

FUSED = {
    "Adam": lambda p: torch.optim.Adam(p, 0.1, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, 0.1, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1, fused=True),
}


class SoftGate(ZeroGate):
    """What meets behind the gate is finite, whatever goes in."""

    def forward(self, x):
        h = self.second(self.first(x)).tanh()
        return self.head(h + self.gate * h.softmax(0))


class ByData(torch.optim.Optimizer):
    """One of another package, whose kernels torch knows nothing of."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad)


def stepped(make, parameters):
    parameters = list(parameters)
    for p in parameters:
        p.grad = torch.full_like(p, -1.0)
    make(parameters).step()


def by_vector(parameters):
    parameters = list(parameters)
    vector = nn.utils.parameters_to_vector(parameters)
    nn.utils.vector_to_parameters(vector + 1, parameters)


def by_assignment(parameters):
    for p in parameters:
        p.data = p.data + 1


CHANGES = {
    name: lambda parameters, make=make: stepped(make, parameters)
    for name, make in {**FUSED, "another package's": ByData}.items()
}
CHANGES |= {"vector_to_parameters": by_vector, "p.data = ...": by_assignment}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_predict_sees_rows_that_meet_now(change):
    model = prepared(SoftGate, ROWS)
    x = ROWS[:6]
    samples(model, x)
    assert way(model) == "folded"
    versions = [p._version for p in model.parameters()]
    change([model.gate])
    assert [p._version for p in model.parameters()] == versions
    torch.testing.assert_close(
        samples(model, x), samples(model, x, strategy="loop"), rtol=1e-5, atol=1e-5
    )
    assert way(model) == "loop"


def test_a_step_that_torch_counts_is_not_counted_twice():
    layer = nn.Linear(2, 2)
    fingerprint([layer])
    stepped(lambda p: torch.optim.Adam(p), layer.parameters())
    assert not any(uncounted.steps_of(p) for p in layer.parameters())


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_of_training_is_held_to_one_sample(fused):
    """Behind a threshold, which parameters moved by their own size do not reach."""

    class Late(Attention):
        def weight(self):
            return (self.gate - 0.9).relu()

    model = Net(mix=Late()).train()
    assert_right(model)
    assert ways(model) == {"folded"}
    model.zero_grad()
    model.mix.gate.grad = torch.full_like(model.mix.gate, -2.0)
    torch.optim.SGD([model.mix.gate], 1.0, fused=fused).step()
    assert_right(model)
    assert ways(model) == {"loop"}


@pytest.mark.filterwarnings("ignore")  # torch's own, inside its compiler
def test_a_compiled_step_counts():
    layer = nn.Linear(2, 2)
    before = fingerprint([layer])
    optimizer = torch.optim.Adam(layer.parameters(), fused=True)
    for p in layer.parameters():
        p.grad = torch.ones_like(p)
    torch.compile(lambda: optimizer.step(), backend="eager")()
    assert fingerprint([layer]) != before


def test_nothing_is_kept_of_parameters_that_are_gone():
    layer = nn.Linear(2, 2)
    fingerprint([layer])
    stepped(FUSED["Adam"], layer.parameters())
    keys = [id(p) for p in layer.parameters()]
    assert all(uncounted.steps_of(p) == 1 for p in layer.parameters())
    del layer
    gc.collect()
    assert not any(key in uncounted.STEPS for key in keys)


class Centring:
    """A hook with a switch."""

    def __init__(self):
        self.on = False

    def __call__(self, module, args, output):
        return output - output.mean(0) if self.on else output

    method = __call__


def centred_if(switches, module, args, output):
    return output - output.mean(0) if switches["on"] else output


def bound(hook):
    return hook, lambda: setattr(hook, "on", True)


def method():
    hook, switch = bound(Centring())
    return hook.method, switch


def closure():
    options = {"on": False}
    hook = lambda *args: centred_if(options, *args)  # noqa: E731
    return hook, lambda: options.update(on=True)


def partially():
    switches = SimpleNamespace(on=False)
    return partial(centred_if, vars(switches)), lambda: setattr(switches, "on", True)


HOOKS = {"an object": lambda: bound(Centring()), "a method": method}
HOOKS |= {"a closure": closure, "a partial": partially}


@pytest.mark.parametrize("make", HOOKS.values(), ids=HOOKS)
def test_a_hook_is_switched_on(make):
    hook, switch = make()
    model = prepared(SoftGate, ROWS)
    model.norm_b.register_forward_hook(hook)
    samples(model, ROWS[:6])
    assert way(model) == "folded"
    switch()
    samples(model, ROWS[:6])
    assert way(model) == "loop"


def test_a_hook_of_the_model_itself_is_no_switch():
    """Its training flag is left out, as everywhere."""
    model = prepared(SoftGate, ROWS).train()
    model.norm_b.register_forward_hook(MethodType(lambda self, *args: None, model))
    samples(model, ROWS[:6])
    assert way(model) == "folded" and model.training


def test_a_plan_of_one_autocast_is_not_that_of_another():
    """What the tolerance of bfloat16 lets pass, that of float16 does not."""
    model = prepared(SoftGate, ROWS)
    model.gate.detach().fill_(0.02)
    x = ROWS[:6]
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            samples(model, x)
    plans = known._KNOWN[model].plans
    assert {place[-2] for place in plans} == {torch.bfloat16, torch.float16}
