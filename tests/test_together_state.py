"""Models that keep averages of their batches in training: the samples meet in them,
and trials leave no trace."""

import copy

import pytest
import torch
from torch import nn
from training import (
    N,
    Net,
    Residual,
    T,
    assert_right,
    counted,
    data,
    gradients,
    loop,
    step,
    ways_after,
)

import bnuq_ext as bnuq


class Centred(nn.Module):
    """A batch norm of one's own, of the mean alone."""

    def __init__(self, keep):
        super().__init__()
        self.register_buffer("average", torch.zeros(9, dtype=torch.float64))
        self.keep = keep

    def forward(self, h):
        if not self.training:
            return h - self.average
        mean = h.mean(0)
        self.keep(self, mean.detach())
        return h - mean


def in_place(module, mean):
    module.average.mul_(0.9).add_(0.1 * mean)


def assigned(module, mean):
    module.average = 0.9 * module.average + 0.1 * mean


def by_data(module, mean):
    module.average.data.mul_(0.9).add_(0.1 * mean)


KEPT = [in_place, assigned, by_data]


class Codebook(nn.Module):
    """Its average is a parameter that needs no gradient."""

    def __init__(self):
        super().__init__()
        self.average = nn.Parameter(torch.zeros(9, dtype=torch.float64), requires_grad=False)

    def forward(self, h):
        if self.training:
            with torch.no_grad():
                in_place(self, h.mean(0))
        return h - self.average.clone()


class Sampled(nn.Module):
    """Draws from a generator of its own in train()."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, h):
        noise = torch.randn(9, generator=self.generator, dtype=h.dtype) if self.training else 0
        return h + noise


MIDDLES = {kept.__name__: lambda kept=kept: Centred(kept) for kept in KEPT}
MIDDLES |= {"a parameter": Codebook, "a generator": Sampled}


@pytest.mark.parametrize("steps", [False, True], ids=["accumulating", "training"])
@pytest.mark.parametrize("make", MIDDLES.values(), ids=MIDDLES)
def test_losses_are_those_of_one_after_another(make, steps):
    model = Net(middle=make()).train()
    for seed in range(5):
        alone = copy.deepcopy(model)
        assert_right(model, seed)
        loop(alone, seed)
        for (name, mine), theirs in zip(
            model.state_dict().items(), alone.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(mine, theirs, msg=name)
        if steps:
            step(model)


@pytest.mark.parametrize("keep", KEPT)
def test_replicas_refuse_rows_that_meet_while_the_model_changes(keep):
    model, (x, _) = Net(middle=Centred(keep)).train(), data()
    for seed in range(3):
        with pytest.raises(ValueError, match="model must give the same folded as one by one, got"):
            with bnuq.replicas(model, T, seed):
                model(x)
    assert not model.middle.average.any()


def test_a_cuda_graph_has_them_one_after_another(monkeypatch):
    """While it is made no value can be read; what has been proven before stands afterwards."""
    model = Net(middle=Residual())
    assert ways_after(model, 0) == {"folded"}
    rows = counted(model)
    with monkeypatch.context() as capturing:
        capturing.setattr("bnuq_ext.together.is_captured", lambda device: True)
        gradients(model, 1)
    assert rows == [N] * T
    assert ways_after(model, 2) == {"folded"}
