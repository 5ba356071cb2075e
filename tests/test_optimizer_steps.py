"""Changes of parameters that their version counters do not show: a plan must not outlive them."""

import gc

import numpy as np
import pytest
import torch
from coupled import ROWS, ZeroGate
from folded import prepared, samples, way
from torch import nn
from training import Attention, Net, assert_right, ways

from bnuq_ext import optimizer_steps
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
    """The second may lie where the first did."""
    for p in parameters:
        p.data = p.data + 0.5
        p.data = p.data + 0.5


CHANGES = {
    name: lambda parameters, make=make: stepped(make, parameters)
    for name, make in {**FUSED, "another package's": ByData}.items()
}
CHANGES |= {"vector_to_parameters": by_vector, "p.data = ...": by_assignment}


@pytest.mark.usefixtures("by_values_alone")
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
    assert not any(optimizer_steps.steps_of(p) for p in layer.parameters())


def test_memory_that_comes_again_is_other_memory():
    layer, memory = nn.Linear(2, 2), np.ones((2, 2), np.float32)
    layer.weight.data = torch.from_numpy(memory)
    before, address = fingerprint([layer]), layer.weight.data_ptr()
    assert fingerprint([layer]) == before
    layer.weight.data = torch.from_numpy(memory)
    assert layer.weight.data_ptr() == address and fingerprint([layer]) != before


def test_steps_of_one_model_are_nothing_to_another():
    mine, other = nn.Linear(2, 2), nn.Linear(2, 2)
    before = fingerprint([mine])
    stepped(FUSED["Adam"], other.parameters())
    assert fingerprint([mine]) == before
    del other
    gc.collect()
    assert fingerprint([mine]) == before


@pytest.mark.usefixtures("by_values_alone")
def test_what_a_hook_notes_is_no_change():
    """Nor is a truth value: a trial would take it for a state of the model."""
    model, noted = prepared(SoftGate, ROWS), {}
    model.norm_b.register_forward_hook(lambda module, *_: noted.update(train=module.training))
    model.train()(ROWS[:6])
    samples(model, ROWS[:6])
    assert way(model) == "folded" and noted == {"train": False}


class Plain(torch.optim.Optimizer):
    """One of another package, in operations of torch."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad)


@pytest.mark.filterwarnings("ignore")  # torch's own, inside its compiler
def test_other_packages_steps_compile_whole():
    layer = nn.Linear(2, 2)
    fingerprint([layer])
    optimizer = Plain(layer.parameters())
    for p in layer.parameters():
        p.grad = torch.ones_like(p)
    before = fingerprint([layer])
    torch.compile(optimizer.step, backend="aot_eager", fullgraph=True)()
    assert fingerprint([layer]) != before


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_of_training_is_held_to_one_sample(fused, by_values_alone):
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
    assert all(optimizer_steps.steps_of(p) == 1 for p in layer.parameters())
    del layer
    gc.collect()
    assert not any(key in optimizer_steps.STEPS for key in keys)


@pytest.mark.usefixtures("by_values_alone")
def test_a_plan_of_one_autocast_is_not_that_of_another():
    """What the tolerance of bfloat16 lets pass, that of float16 does not."""
    model = prepared(SoftGate, ROWS)
    with torch.no_grad():
        model.gate.fill_(0.02)
    found = []
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            samples(model, ROWS[:6])
        found.append(way(model))
    assert found == ["folded", "loop"]
