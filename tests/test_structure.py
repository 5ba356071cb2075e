"""What a first forward installs in its model goes in once, wherever the model remembers that."""

import functools
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext.state import State
from bnuq_ext.structure import OURS

KEY = {"num_samples": 4, "seed": 1}


def add_one(module, args, output):
    return output + 1.0


class ScaledOutput(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return 2.0 * self.layer(x)


class OneMore(nn.Module):
    """Of weights, by `torch.nn.utils.parametrize`."""

    def forward(self, weight):
        return weight + 1.0


def hook_kwargs(module, args, kwargs):
    return (args[0] * 2.0,), kwargs


INSTALL = {
    "a hook": lambda net: net.norm.register_forward_hook(add_one),
    "a pre-hook with kwargs": lambda net: net.head.register_forward_pre_hook(
        hook_kwargs, with_kwargs=True
    ),
    "a submodule appended": lambda net: net.blocks.append(nn.Tanh()),
    "a submodule wrapped": lambda net: setattr(net, "blocks", ScaledOutput(net.blocks)),
    "a weight of two": lambda net: nn.utils.parametrizations.weight_norm(net.body),
    "a weight of another": lambda net: nn.utils.parametrize.register_parametrization(
        net.body, "weight", OneMore()
    ),
    "a parameter": lambda net: net.register_parameter("shift", nn.Parameter(torch.ones(3))),
    "a buffer": lambda net: net.register_buffer("offset", torch.ones(3)),
}


SEEN = weakref.WeakSet()


class Installer:
    """No module, and no record: it has a method."""

    def __init__(self):
        self.done = False

    def once(self) -> bool:
        self.done, before = True, self.done
        return not before


def never_seen(net) -> bool:
    new = net not in SEEN
    SEEN.add(net)
    return new


def first_by_attribute(net) -> bool:
    net.installed, before = True, net.installed
    return not before


def first_of_its_calls(net) -> bool:
    net.calls += 1
    return never_seen(net)


FIRST = {
    "an attribute": first_by_attribute,
    "a set elsewhere": never_seen,
    "an object": lambda net: net.installer.once(),
    "a set elsewhere, and calls are counted": first_of_its_calls,
}


class Net(nn.Module):
    def __init__(self, install, when="always", first=first_by_attribute):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.blocks = nn.Sequential(nn.ReLU())
        self.install, self.when, self.first = install, when, first
        self.installed, self.installer, self.calls = False, Installer(), 0

    def forward(self, x):
        if (self.training or self.when == "always") and self.first(self):
            self.install(self)
        y = self.head(self.blocks(self.norm(self.body(x))))
        return y + getattr(self, "shift", 0.0) + getattr(self, "offset", 0.0)


def make(install, when="always", first=first_by_attribute) -> nn.Module:
    torch.manual_seed(0)
    return Net(install, when, first).eval()


def data() -> list[torch.Tensor]:
    return list(torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(0)))


@functools.cache
def bank() -> bnuq.Bank:
    return bnuq.collect(bnuq.convert(make(lambda net: None)), data()[:3], progress=False)


def stochastic(install, first=first_by_attribute) -> nn.Module:
    model = bnuq.convert(make(install, first=first))
    bnuq.attach(model, bank())
    return model


def bayesian(install, when="always", first=first_by_attribute) -> nn.Module:
    model = make(install, when, first)
    model.norm = nn.LayerNorm(8)
    return bnuq.to_bayesian(model, lambda name, layer: name == "head", rho_init=-2.0)


def halve(net) -> None:
    """Another parameter of the same name."""
    net.body.weight = nn.Parameter(net.body.weight.detach() / 2)


def merge(net) -> None:
    """As LoRA's layers do."""
    net.body.weight.data += 1.0


def change_and_go(module, args) -> None:
    with torch.no_grad():
        module.weight.mul_(2)
    module._forward_pre_hooks.clear()


STRUCTURAL = dict(INSTALL)
INSTALL |= {
    "another parameter": halve,
    "a merged weight": merge,
    "an orthogonal weight": lambda net: nn.utils.parametrizations.orthogonal(net.body),
    "a hook of one call": lambda net: net.body.register_forward_pre_hook(change_and_go),
    "a frozen bias": lambda net: net.body.bias.requires_grad_(False),
}


@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST)
@pytest.mark.parametrize("install", INSTALL.values(), ids=INSTALL)
def test_predictions_are_those_of_the_loop_and_installed_once(install, first):
    options = {"likelihood": "gaussian", "keep_samples": True, **KEY}
    model, other = stochastic(install, first), stochastic(install, first)
    expected = bnuq.predict(other, data()[3], strategy="loop", **options).samples
    for _ in range(3):
        samples = bnuq.predict(model, data()[3], **options).samples
        torch.testing.assert_close(samples, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(data()[3]), other(data()[3]))
    assert [*map(str, model.modules())] == [*map(str, other.modules())]
    assert len(model.norm._forward_hooks) == len(other.norm._forward_hooks) <= 1


@pytest.mark.parametrize("when", ["always", "in train()"])
@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST)
@pytest.mark.parametrize("install", INSTALL.values(), ids=INSTALL)
def test_losses_are_those_of_a_model_that_was_called_before(install, first, when):
    batch, y = data()[3], torch.arange(8) % 3
    model, other = bayesian(install, when, first).train(), bayesian(install, when, first).train()
    other(batch)
    for step in range(3):
        loss, expected = (
            bnuq.elbo_loss(net, batch, y, batch_weight=0.1, seed=step, num_samples=3)
            for net in (model, other)
        )
        torch.testing.assert_close(loss.nll, expected.nll, rtol=1e-4, atol=1e-5)
    assert len(model.norm._forward_hooks) == len(other.norm._forward_hooks) <= 1
    assert model.state_dict().keys() == other.state_dict().keys()


@pytest.mark.parametrize("first", [*FIRST.values()][:3], ids=[*FIRST][:3])
@pytest.mark.parametrize("install", INSTALL.values(), ids=INSTALL)
def test_bodies_of_replicas_too(install, first):
    model, other = stochastic(install, first), stochastic(install, first)
    options = {"likelihood": "gaussian", "keep_samples": True, **KEY}
    expected = bnuq.predict(other, data()[3], strategy="loop", **options).samples
    for _ in range(2):
        with bnuq.replicas(model, **KEY):
            samples = model(data()[3]).view(4, 8, 3)
        torch.testing.assert_close(samples, expected, rtol=1e-4, atol=1e-5)


def test_a_weight_that_is_merged_for_predictions_alone_is_not_merged_by_a_trial():
    """A trial of `elbo_loss` is in eval()."""
    model = bayesian(merge).train()
    model.first = lambda net: not net.training and first_by_attribute(net)
    before, y = {n: p.clone() for n, p in model.named_parameters()}, torch.arange(8) % 3
    for step in range(3):
        bnuq.elbo_loss(model, data()[3], y, batch_weight=0.1, seed=step, num_samples=3)
    assert not model.installed
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize("evaluating", [True, False])
def test_a_teacher_that_follows_each_forward_follows_those_of_the_loop(evaluating):
    class Taught(Net):
        def __init__(self):
            super().__init__(lambda net: None)
            self.teacher = nn.Linear(8, 3).requires_grad_(False)

        def train(self, mode=True):
            super().train(mode)
            self.teacher.train(mode and not evaluating)
            return self

        def forward(self, x):
            if self.training:
                self.teacher.weight.data.lerp_(torch.ones(3, 8), 0.1)
            return super().forward(x) + self.teacher(torch.ones(8))

    torch.manual_seed(0)
    model = bnuq.to_bayesian(Taught(), lambda name, layer: name == "head", rho_init=-2.0)
    model.norm, y = nn.LayerNorm(8), torch.arange(8) % 3
    before = model.train().teacher.weight.clone()
    for step in range(3):
        bnuq.elbo_loss(model, data()[3], y, batch_weight=0.1, seed=step, num_samples=4)
    expected = 1 + (before - 1) * 0.9**12
    torch.testing.assert_close(model.teacher.weight, expected, rtol=1e-5, atol=1e-6)


def test_a_model_that_changes_at_every_forward_is_as_the_loop_leaves_it():
    model, other = stochastic(lambda net: None), stochastic(lambda net: None)
    for net in (model, other):
        net.first = lambda net: setattr(net, "calls", net.calls + 1)
    for strategy, net in (("auto", model), ("loop", other)):
        bnuq.predict(net, data()[3], likelihood="gaussian", strategy=strategy, **KEY)
    assert model.calls == other.calls == 4


@pytest.mark.parametrize("change", [halve, merge], ids=["another parameter", "in place"])
def test_parameters_that_change_at_every_forward_are_as_the_loop_leaves_them(change):
    model, other = stochastic(change), stochastic(change)
    options = {"likelihood": "gaussian", "keep_samples": True, **KEY}
    for net in (model, other):
        net.first = lambda net: True
    for _ in range(3):
        samples = bnuq.predict(model, data()[3], **options).samples
        expected = bnuq.predict(other, data()[3], strategy="loop", **options).samples
        torch.testing.assert_close(samples, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(model.body.weight, other.body.weight)


class Frozen(Net):
    """Has a train() of its own."""

    def train(self, mode=True):
        return super().train(mode)


@pytest.mark.filterwarnings("ignore:in train.. with a train.. or eval.. of its own")
@pytest.mark.parametrize("strategy", ["auto", "loop"])
@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST)
@pytest.mark.parametrize("install", STRUCTURAL.values(), ids=STRUCTURAL)
def test_in_train_with_a_train_of_its_own(install, first, strategy):
    torch.manual_seed(0)
    model = bnuq.convert(Frozen(install, first=first))
    bnuq.attach(model, bank())
    model.train().norm.eval()
    expected = bnuq.predict(
        stochastic(install), data()[3], likelihood="gaussian", strategy="loop", **KEY
    )
    for _ in range(2):
        pred = bnuq.predict(model, data()[3], likelihood="gaussian", strategy=strategy, **KEY)
        torch.testing.assert_close(pred.mean, expected.mean, rtol=1e-4, atol=1e-5)
        assert model.training and len(model.norm._forward_hooks) <= 1


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


def test_lazy_layers_are_what_a_first_call_makes_of_them():
    model, other = (stochastic(lambda net: None) for _ in range(2))
    for net in (model, other):
        net.head = nn.Sequential(nn.LazyLinear(3), nn.LazyInstanceNorm1d(affine=True))
    options = {"likelihood": "gaussian", **KEY}
    torch.manual_seed(0)
    expected = bnuq.predict(other, data()[3][None], strategy="loop", **options)
    drawn = torch.randn(3)
    torch.manual_seed(0)
    for _ in range(2):
        pred = bnuq.predict(model, data()[3][None], **options)
        torch.testing.assert_close(pred.mean, expected.mean)
    assert torch.equal(torch.randn(3), drawn)
    assert repr(model.head) == repr(other.head) and model.head[0].in_features == 8
    assert not model.head[0]._forward_pre_hooks


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
