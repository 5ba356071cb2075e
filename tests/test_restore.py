"""Modules with a train() of their own, which nothing here calls."""

import pytest
import torch
from rows import ROWS
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext.restore import evaluating


def merging():
    """A class made anew, for each is warned of once."""

    class Merging(nn.Linear):
        merged = 0

        def train(self, mode=True):
            self.merged += 1
            return super().train(mode)

    return Merging


def frozen():
    class Frozen(nn.Linear):
        def eval(self):
            return super().eval()

    return Frozen


RUNS = [
    lambda model: bnuq.collect(model, list(ROWS.split(10)), 6),
    lambda model: bnuq.predict(model, ROWS, likelihood="gaussian", num_samples=2),
    lambda model: bnuq.plug_in(model, ROWS, likelihood="gaussian"),
    lambda model: bnuq.doctor(model, ROWS),
]


@pytest.mark.parametrize("make", [merging, frozen])
@pytest.mark.parametrize("run", RUNS, ids=["collect", "predict", "plug_in", "doctor"])
def test_train_and_eval_of_modules_are_not_called_but_warned_of(run, make):
    own = make()
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
    run(model)  # warned of once


def test_classes_of_torch_and_of_this_package_are_not_warned_of():
    layers = [
        nn.Linear(4, 4),
        nn.BatchNorm1d(4),
        bnuq.BayesLinear(4, 4),
        nn.MultiheadAttention(4, 1),
    ]
    model = torch.compile(bnuq.convert(nn.ModuleList(layers)), backend="eager")
    with evaluating(list(model.modules())):
        assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("attribute", [None, property(lambda self: True)], ids=["none", "property"])
def test_modes_that_are_no_methods(attribute):
    odd = type("Odd", (nn.Linear,), {"eval": attribute})
    with pytest.warns(UserWarning, match="Odd has a train"), evaluating([odd(4, 4)]):
        pass


def test_a_trial_in_training_is_not_warned_of():
    model = nn.Sequential(merging()(4, 4), bnuq.BayesLinear(4, 2)).train()
    y = torch.zeros(10, dtype=torch.long)
    bnuq.elbo_loss(model, ROWS[:10], y, num_samples=3, batch_weight=0.1, seed=0).loss.backward()
    with bnuq.replicas(model, 3, seed=0):
        assert model(ROWS[:10]).shape == (30, 2)
