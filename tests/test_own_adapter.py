"""Adapters of batch norms that extend no class of torch: that of register_adapter's docstring,
and others."""

import pytest
import torch
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext import adapters


class OwnNorm(nn.Module):
    def __init__(self, C):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(C)), nn.Parameter(torch.rand(C))
        self.register_buffer("running_mean", torch.zeros(C))
        self.register_buffer("running_var", torch.ones(C))
        self.eps = 1e-5

    def forward(self, x):
        state = (self.running_mean, self.running_var, self.weight, self.bias, self.training)
        return nn.functional.batch_norm(x, *state, eps=self.eps).relu()


class StochasticOwnNorm(bnuq.nn.Stochastic, OwnNorm):
    def finish(self, y):
        return y.relu()


class OtherNames(nn.Module):
    def __init__(self, C, affine=True):
        super().__init__()
        self.gain, self.shift = (nn.Parameter(torch.rand(C)) if affine else None for _ in range(2))
        self.register_buffer("centre", torch.zeros(C))
        self.register_buffer("spread", torch.ones(C))
        self.epsilon = 1e-3

    def forward(self, x):
        y = (x - self.centre) / (self.spread + self.epsilon).sqrt()
        return y if self.gain is None else y * self.gain + self.shift


class StochasticOtherNames(bnuq.nn.Stochastic, OtherNames):
    def affine_parameters(self):
        return self.gain, self.shift, self.epsilon


def register(monkeypatch, original, stochastic):
    """The adapter of the docstring, for the length of a test."""

    def adapt(module):
        module.__class__ = stochastic
        return module

    monkeypatch.setattr(adapters, "_ADAPTERS", dict(adapters._ADAPTERS))
    bnuq.register_adapter(original, adapt)


@pytest.mark.parametrize(
    "made, stochastic, buffers",
    [
        (lambda: OwnNorm(4), StochasticOwnNorm, ("running_mean", "running_var")),
        (lambda: OtherNames(4), StochasticOtherNames, ("centre", "spread")),
        (lambda: OtherNames(4, affine=False), StochasticOtherNames, ("centre", "spread")),
    ],
    ids=["docstring", "other names", "no parameters"],
)
def test_adapters_of_own_classes(monkeypatch, made, stochastic, buffers):
    norm = made()
    register(monkeypatch, type(norm), stochastic)
    model = nn.Sequential(nn.Linear(3, 4), norm, nn.Linear(4, 2)).eval()
    converted, rows = bnuq.convert(model), torch.randn(9, 3)
    bank = bnuq.collect(converted, [torch.randn(8, 3) for _ in range(3)], progress=False)
    assert bnuq.doctor(converted, rows).covered == 1
    pred = bnuq.predict(
        converted, rows, likelihood="gaussian", num_samples=3, seed=0, keep_samples=True
    )
    for replica, snapshot in zip(pred.samples, pred.snapshots, strict=True):
        for buffer, table in zip(buffers, (bank.mean, bank.var), strict=True):
            getattr(norm, buffer).copy_(table["1"][snapshot])
        torch.testing.assert_close(replica, model(rows), rtol=1e-5, atol=1e-5)


def test_a_bank_of_other_channels_is_refused_where_a_class_tells_its_own(monkeypatch):
    register(monkeypatch, OtherNames, StochasticOtherNames)
    bank = bnuq.Bank({"0": torch.zeros(3, 5)}, {"0": torch.ones(3, 5)}, 8, batch_size=8)
    with pytest.raises(ValueError, match=r"bank.mean\['0'\] must have 4 channels, got 5"):
        bnuq.attach(bnuq.convert(nn.Sequential(OtherNames(4))), bank)


def test_revert_to_the_object_before_keeps_the_hooks_of_the_one_that_took_its_place(monkeypatch):
    def adapt(module):
        made = StochasticOtherNames(4)
        made.load_state_dict(module.state_dict())
        return made

    monkeypatch.setattr(adapters, "_ADAPTERS", dict(adapters._ADAPTERS))
    bnuq.register_adapter(OtherNames, adapt)
    norm, seen = OtherNames(4), []
    model = bnuq.convert(nn.Sequential(norm), inplace=True).eval()
    model[0].register_forward_pre_hook(lambda module, args: seen.append(module))
    doubled = model[0].register_forward_hook(lambda m, args, kw, y: 2 * y, with_kwargs=True)
    rows = torch.randn(3, 4)
    expected = model(rows)
    bnuq.revert(model, inplace=True)
    torch.testing.assert_close(model(rows), expected, rtol=0, atol=0)
    assert model[0] is norm and seen[1:] == [norm]
    doubled.remove()
    torch.testing.assert_close(2 * model(rows), expected)
