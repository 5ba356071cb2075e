"""Models with parts that TorchScript has compiled."""

import warnings

import pytest
import torch
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext.fingerprint import fingerprint
from bnuq_ext.state import modules_of

X = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
BATCHES = list(torch.randn(4, 9, 6, generator=torch.Generator().manual_seed(1)))


def compiled(kind):
    torch.manual_seed(2)
    part = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).eval()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.* is deprecated")
        if kind == "traced":
            return torch.jit.trace(part, X)
        script = torch.jit.script(part)
        return torch.jit.freeze(script) if kind == "frozen" else script


class Branched(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part, self.head = part, nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))

    def forward(self, x):
        return self.head(self.part(x) + x)


MAKERS = {
    "chain": lambda part: nn.Sequential(part, nn.BatchNorm1d(6), nn.Linear(6, 3)),
    "branched": Branched,
}


@pytest.mark.parametrize("kind", ["scripted", "traced", "frozen"])
@pytest.mark.parametrize("name", MAKERS)
def test_predicts_and_trains(name, kind):
    original = MAKERS[name](compiled(kind)).train()
    model = bnuq.convert(original)
    bnuq.collect(model, BATCHES, progress=False)
    options = dict(likelihood="gaussian", num_samples=6, seed=0, keep_samples=True)
    loop = bnuq.predict(model, X, strategy="loop", **options)
    for strategy in ("auto", "folded"):
        samples = bnuq.predict(model, X, strategy=strategy, **options).samples
        torch.testing.assert_close(samples, loop.samples, rtol=1e-5, atol=1e-6)
    assert loop.variance.min() > 0
    assert all(getattr(m, "training", True) for m in model.modules())
    assert bnuq.doctor(model, X).uncovered == 0
    model.eval()
    with bnuq.replicas(model, 6, seed=0):
        torch.testing.assert_close(model(X).view(6, 7, 3), loop.samples, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(bnuq.revert(model)(X), original.eval()(X))
    bayesian = bnuq.to_bayesian(original).eval()
    y = torch.zeros(7).long()
    nll = bnuq.elbo_loss(bayesian, X, y, batch_weight=1.0, num_samples=3, seed=0).nll
    with bnuq.replicas(bayesian, 3, seed=0):
        expected = nn.functional.cross_entropy(bayesian(X), y.repeat(3))
    torch.testing.assert_close(nll, expected, rtol=1e-5, atol=1e-6)


def test_a_traced_part_can_be_looked_at():
    modules = modules_of(Branched(compiled("traced")))
    assert fingerprint(modules) == fingerprint(modules)
