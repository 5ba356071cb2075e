"""Modules with a train() of their own, which nothing here calls."""

import pytest
import torch
from rows import ROWS
from torch import nn

import bnuq_ext as bnuq


class Merging(nn.Linear):
    merged = 0

    def train(self, mode=True):
        self.merged += 1
        return super().train(mode)


class Frozen(nn.Linear):
    def eval(self):
        return super().eval()


RUNS = [
    lambda model: bnuq.collect(model, list(ROWS.split(10)), 6),
    lambda model: bnuq.predict(model, ROWS, likelihood="gaussian", num_samples=2),
    lambda model: bnuq.plug_in(model, ROWS, likelihood="gaussian"),
    lambda model: bnuq.doctor(model, ROWS),
]


@pytest.mark.parametrize("own", [Merging, Frozen])
@pytest.mark.parametrize("run", RUNS, ids=["collect", "predict", "plug_in", "doctor"])
def test_train_and_eval_of_modules_are_not_called_but_warned_of(run, own):
    model = bnuq.convert(nn.Sequential(own(4, 4), nn.BatchNorm1d(4)))
    bnuq.collect(model.eval(), list(ROWS.split(10)), 6)  # in eval there is nothing to warn of
    model.train()
    before = getattr(model[0], "merged", 0)
    with pytest.warns(
        UserWarning, match=f"{own.__name__} has a train.. or eval.. of its own"
    ) as caught:
        run(model)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert getattr(model[0], "merged", 0) == before and model[0].training


def test_classes_of_torch_and_of_this_package_are_not_warned_of():
    layers = nn.Linear(4, 4), nn.BatchNorm1d(4), bnuq.BayesLinear(4, 4), nn.MultiheadAttention(4, 1)
    model = bnuq.convert(nn.ModuleList(layers))
    bnuq.collect(nn.Sequential(*model[:3]), list(ROWS.split(10)), 6)
    compiled = torch.compile(bnuq.convert(nn.Sequential(nn.BatchNorm1d(4))), backend="eager")
    bnuq.collect(compiled, list(ROWS.split(10)), 6)


def test_a_trial_in_training_is_not_warned_of():
    model = nn.Sequential(Merging(4, 4), bnuq.BayesLinear(4, 2)).train()
    y = torch.zeros(10, dtype=torch.long)
    bnuq.elbo_loss(model, ROWS[:10], y, num_samples=3, batch_weight=0.1, seed=0).loss.backward()
    with bnuq.replicas(model, 3, seed=0):
        assert model(ROWS[:10]).shape == (30, 2)
