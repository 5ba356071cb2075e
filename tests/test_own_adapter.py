"""The adapter of register_adapter's docstring, for a batch norm that extends no class of torch."""

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


def test_the_adapter_of_the_docstring(monkeypatch):
    monkeypatch.setattr(adapters, "_ADAPTERS", dict(adapters._ADAPTERS))

    def adapt(module):
        module.__class__ = StochasticOwnNorm
        return module

    bnuq.register_adapter(OwnNorm, adapt)
    model = nn.Sequential(nn.Linear(3, 4), OwnNorm(4), nn.Linear(4, 2)).eval()
    converted, rows = bnuq.convert(model), torch.randn(9, 3)
    bank = bnuq.collect(converted, [torch.randn(8, 3) for _ in range(3)], progress=False)
    pred = bnuq.predict(
        converted, rows, likelihood="gaussian", num_samples=3, seed=0, keep_samples=True
    )
    for replica, snapshot in zip(pred.samples, pred.snapshots, strict=True):
        model[1].running_mean.copy_(bank.mean["1"][snapshot])
        model[1].running_var.copy_(bank.var["1"][snapshot])
        torch.testing.assert_close(replica, model(rows), rtol=1e-5, atol=1e-5)
