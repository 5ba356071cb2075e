"""What a first forward installs in its model stays out of it after a trial, and goes in once."""

import functools

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


class Net(nn.Module):
    def __init__(self, install, when="always"):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.blocks = nn.Sequential(nn.ReLU())
        self.install, self.when, self.installed = install, when, False

    def forward(self, x):
        if not self.installed and (self.training or self.when == "always"):
            self.install(self)
            self.installed = True
        y = self.head(self.blocks(self.norm(self.body(x))))
        return y + getattr(self, "shift", 0.0) + getattr(self, "offset", 0.0)


def make(install, when="always") -> nn.Module:
    torch.manual_seed(0)
    return Net(install, when).eval()


def data() -> list[torch.Tensor]:
    return list(torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(0)))


@functools.cache
def bank() -> bnuq.Bank:
    return bnuq.collect(bnuq.convert(make(lambda net: None)), data()[:3], progress=False)


def stochastic(install) -> nn.Module:
    model = bnuq.convert(make(install))
    bnuq.attach(model, bank())
    return model


def bayesian(install, when="always") -> nn.Module:
    model = make(install, when)
    model.norm = nn.LayerNorm(8)
    return bnuq.to_bayesian(model, lambda name, layer: name == "head", rho_init=-2.0)


@pytest.mark.parametrize("install", INSTALL.values(), ids=INSTALL)
def test_predictions_are_those_of_the_loop_and_installed_once(install):
    options = {"likelihood": "gaussian", "keep_samples": True, **KEY}
    model, other = stochastic(install), stochastic(install)
    expected = bnuq.predict(other, data()[3], strategy="loop", **options).samples
    for _ in range(3):
        samples = bnuq.predict(model, data()[3], **options).samples
        torch.testing.assert_close(samples, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(data()[3]), other(data()[3]))
    assert [*map(str, model.modules())] == [*map(str, other.modules())]
    assert len(model.norm._forward_hooks) == len(other.norm._forward_hooks) <= 1


@pytest.mark.parametrize("when", ["always", "in train()"])
@pytest.mark.parametrize("install", INSTALL.values(), ids=INSTALL)
def test_losses_are_those_of_a_model_that_was_called_before(install, when):
    batch, y = data()[3], torch.arange(8) % 3
    model, other = bayesian(install, when).train(), bayesian(install, when).train()
    other(batch)
    for step in range(3):
        loss, expected = (
            bnuq.elbo_loss(net, batch, y, batch_weight=0.1, seed=step, num_samples=3)
            for net in (model, other)
        )
        torch.testing.assert_close(loss.nll, expected.nll, rtol=1e-4, atol=1e-5)
    assert len(model.norm._forward_hooks) == len(other.norm._forward_hooks) <= 1
    assert model.state_dict().keys() == other.state_dict().keys()


@pytest.mark.parametrize("install", INSTALL.values(), ids=INSTALL)
def test_a_body_that_is_refused_leaves_nothing(install):
    model, fresh = stochastic(install), stochastic(install)
    with pytest.raises(ValueError, match="changes the model's state"), bnuq.replicas(model, 4):
        model(data()[3])
    assert str(model) == str(fresh) and model.state_dict().keys() == fresh.state_dict().keys()
    assert not model.installed and not model.norm._forward_hooks
    model(data()[3])
    with bnuq.replicas(model, 4):
        assert model(data()[3]).shape == (4 * 8, 3)


@pytest.mark.parametrize("install", INSTALL.values(), ids=INSTALL)
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


def test_a_lazy_layer_of_a_trial_is_an_ordinary_one():
    model = stochastic(lambda net: None)
    model.head = nn.LazyLinear(3)
    pred = bnuq.predict(model, data()[3], likelihood="gaussian", **KEY)
    assert type(model.head) is nn.Linear and not model.head._forward_pre_hooks
    expected = bnuq.predict(model, data()[3], likelihood="gaussian", strategy="loop", **KEY)
    torch.testing.assert_close(pred.mean, expected.mean)
