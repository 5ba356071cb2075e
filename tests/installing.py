"""Networks whose first forward installs something, and remembers that somewhere."""

import functools
import weakref

import torch
from torch import nn

import bnuq_ext as bnuq

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
