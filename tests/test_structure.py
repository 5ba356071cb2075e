"""What a module consists of, put back after a trial."""

import functools
from collections import OrderedDict

import pytest
import torch
from installing import KEY, STRUCTURAL, make
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext.state import State
from bnuq_ext.structure import OURS


@pytest.mark.parametrize("install", STRUCTURAL.values(), ids=STRUCTURAL)
def test_a_structure_is_put_back_into_the_same_tables(install):
    net = make(install)
    handle = net.norm.register_forward_hook(lambda *_: None)
    before = torch.randn(2, 6)
    expected, state, keys = net.body(before), State([*net.modules()]), [*net.state_dict()]
    install(net)
    assert state.written()
    state.restore()
    assert not state.written() and [*net.state_dict()] == keys
    assert torch.equal(net.body(before), expected) and type(net.body) is nn.Linear
    assert len(net.norm._forward_hooks) == 1 and not hasattr(net, "shift")
    handle.remove()
    assert not net.norm._forward_hooks


def test_hooks_of_other_threads_bodies_stay_and_go_as_they_did():
    layer = nn.Linear(2, 2)
    kept, gone, new = (functools.partial(lambda *_: None) for _ in range(3))
    for hook in (kept, gone, new):
        setattr(hook, OURS, True)
    layer.register_forward_hook(kept)
    going = layer.register_forward_pre_hook(gone, with_kwargs=True)
    state = State([layer])
    going.remove()
    layer.register_forward_pre_hook(new, with_kwargs=True)
    assert not state.written()
    layer.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
    assert state.written()
    state.restore()
    assert [*layer._forward_pre_hooks.values()] == [new]
    assert [*layer._forward_pre_hooks_with_kwargs] == [*layer._forward_pre_hooks]
    assert [*layer._forward_hooks.values()] == [kept] and not state.written()


def test_a_body_of_another_thread_may_end_while_hooks_are_put_back():
    class Hooks(OrderedDict):
        def pop(self, *args):
            ending.remove()
            return super().pop(*args)

        def clear(self):
            ending.remove()
            super().clear()

    layer, ours = nn.Linear(2, 2), functools.partial(lambda *_: None)
    setattr(ours, OURS, True)
    layer._forward_hooks = Hooks()
    ending = layer.register_forward_hook(ours)
    state = State([layer])
    layer.register_forward_hook(lambda *_: None)
    state.restore()
    assert not layer._forward_hooks and not state.written()


def test_what_a_forward_removes_comes_back_in_its_place():
    net = nn.Sequential(nn.ReLU(), nn.Tanh(), nn.Sigmoid())
    hooks = [lambda *_: None for _ in range(3)]
    handles = [net.register_forward_hook(hook) for hook in hooks]
    state, children = State([*net.modules()]), [*net]
    handles[0].remove()
    net.register_forward_hook(lambda *_: None)
    del net[1]
    net.insert(0, nn.Linear(2, 2))
    assert state.written()
    state.restore()
    assert [*net] == children and [*net._forward_hooks.values()] == hooks


@pytest.mark.parametrize("strategy", ["auto", "folded", "loop"])
def test_a_pooling_that_is_made_anew_goes_together(strategy):
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.pool = nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.Identity()

        def forward(self, x):
            self.pool = nn.AvgPool1d(x.shape[2])
            return self.pool(self.norm(self.conv(x)))

    torch.manual_seed(0)
    model, x = bnuq.convert(Pooled().eval()), torch.randn(4, 6, 2, 5)
    bnuq.collect(model, [*x], progress=False)
    samples = [
        bnuq.predict(model, x[0], likelihood="gaussian", strategy=how, **KEY).mean
        for how in (strategy, "loop")
    ]
    torch.testing.assert_close(*samples)
    with bnuq.replicas(model, **KEY):
        torch.testing.assert_close(model(x[0]).view(4, 6, 3, 1).mean(0), samples[1])
