"""Modules with a train() of their own, which nothing here calls, and generators."""

import random

import numpy as np
import pytest
import torch
from rows import ROWS, WIDTH, N
from torch import nn
from torch.utils import data as torch_data

import bnuq_ext as bnuq
from bnuq_ext import restore, state
from bnuq_ext.restore import drawn_since, evaluating, preserved_rng, random_states


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
    with pytest.warns(UserWarning, match=f"or eval.. of its own: {own.__name__};") as caught:
        run(model)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert getattr(model[0], "merged", 0) == before and model[0].training
    run(model)  # warned of once


def test_several_classes_are_one_warning():
    modules = [merging()(4, 4), frozen()(4, 4), frozen()(4, 4)]
    with pytest.warns(UserWarning, match="Frozen, Frozen, Merging; only") as caught:
        with evaluating(modules):
            pass
    assert len(caught) == 1


def test_modules_in_eval_are_not_warned_of_beside_others_in_train():
    modules = [nn.Linear(4, 4), frozen()(4, 4)]
    modules[1].training = False
    with evaluating(modules):
        assert not modules[0].training
    assert modules[0].training and not modules[1].training


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
    with pytest.warns(UserWarning, match="of its own: Odd;"), evaluating([odd(4, 4)]):
        pass


def test_with_a_module_that_has_a_train_of_its_own_no_others_are_put_back():
    """One that refers to the model would copy all of it."""
    model = nn.Sequential(frozen()(4, 4), nn.Linear(4, 4))
    model[0].root, model[1].calls = [model], 0
    with pytest.warns(UserWarning, match="of its own"), evaluating(list(model.modules())):
        model[0].calls = model[1].calls = 1
    assert model[1].calls == 1 and not hasattr(model[0], "calls")


def test_a_package_whose_name_begins_as_torchs_is_another():
    def method(self):
        return self.train(False)

    method.__module__ = "torchother.models"
    other = type("Other", (nn.Linear,), {"eval": method})
    with pytest.warns(UserWarning, match="of its own: Other;"), evaluating([other(4, 4)]):
        pass


def test_methods_that_are_known_to_set_flags_alone_are_not_warned_of():
    """Of every model of transformers; a class of theirs with others still is."""
    home = {"__module__": "transformers.modeling_utils"}

    def method(of):
        def train(self, mode=True):
            return nn.Module.train(self, mode)

        train.__module__, train.__qualname__ = home["__module__"], f"{of}.train"
        return train

    model = type("ResNetModel", (nn.Linear,), home | {"train": method("PreTrainedModel")})(4, 4)
    with evaluating([model]):
        assert not model.training
    other = type("LevitAttention", (nn.Linear,), home | {"train": method("LevitAttention")})(4, 4)
    with pytest.warns(UserWarning, match="of its own: LevitAttention;"), evaluating([other]):
        pass


def test_a_trial_in_training_is_not_warned_of():
    model = nn.Sequential(merging()(4, 4), bnuq.BayesLinear(4, 2)).train()
    y = torch.zeros(10, dtype=torch.long)
    bnuq.elbo_loss(model, ROWS[:10], y, num_samples=3, batch_weight=0.1, seed=0).loss.backward()
    with bnuq.replicas(model, 3, seed=0):
        assert model(ROWS[:10]).shape == (30, 2)


def caching():
    class Caching(nn.Linear):
        """Its cache is filled in eval and emptied by train(), as in timm's LeViT."""

        def __init__(self, *args):
            super().__init__(*args)
            self.cache = {}

        def train(self, mode=True):
            self.cache = {} if mode else self.cache
            return super().train(mode)

        def forward(self, x):
            if self.training:
                return super().forward(x) * 2
            if "weight" not in self.cache:
                self.cache["weight"], self.last = self.weight * 2, len(x)
            return nn.functional.linear(x, self.cache["weight"], self.bias * 2)

    return Caching


def test_what_eval_keeps_does_not_outlive_a_prediction_in_training():
    model = bnuq.convert(nn.Sequential(caching()(4, 3), nn.BatchNorm1d(3))).train()
    options = {"likelihood": "gaussian", "num_samples": 4, "seed": 0}
    with pytest.warns(UserWarning, match="of its own: Caching;"):
        bank = bnuq.collect(model, list(ROWS.split(20)), 6, progress=False)
    for _ in range(2):
        actual = bnuq.predict(model, ROWS[:5], **options)
        assert model[0].cache == {} and not hasattr(model[0], "last") and model[0].training
        fresh = bnuq.convert(nn.Sequential(caching()(4, 3), nn.BatchNorm1d(3))).eval()
        fresh.load_state_dict(model.state_dict())
        bnuq.attach(fresh, bank)
        torch.testing.assert_close(actual.mean, bnuq.predict(fresh, ROWS[:5], **options).mean)
        with torch.no_grad():
            model[0].weight.mul_(3)


def test_nor_that_of_a_body_that_begins_as_another_ends():
    layer = caching()(4, 3).train()
    first = evaluating([layer], warns=False)
    with first:
        second = evaluating([layer], warns=False)
    with second:
        layer(ROWS)
    assert layer.training and layer.cache == {}


def test_numbers_drawn_from_numpy_show():
    """Its state is 624 words and a place among them."""
    with preserved_rng():
        np.random.rand()
        before = random_states()
        np.random.rand()
        assert drawn_since(before)


@pytest.mark.parametrize("first", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("module, name", [(random, "setstate"), (torch, "set_rng_state")])
def test_an_interrupt_does_not_cost_the_generators(monkeypatch, module, name, first):
    put_back, left = getattr(module, name), [KeyboardInterrupt, first]

    def interrupted(state):
        if left:
            raise left.pop()
        put_back(state)

    monkeypatch.setattr(module, name, interrupted)
    own = torch.Generator().manual_seed(1)
    before = random_states(), own.get_state()
    with pytest.raises(KeyboardInterrupt), preserved_rng(own):
        random.random(), np.random.rand(), torch.rand(1), torch.rand(1, generator=own)
        assert drawn_since(before[0])
    assert not drawn_since(before[0]) and torch.equal(own.get_state(), before[1]) and not left


def test_a_given_generator_that_refuses_does_not_cost_the_global_ones(monkeypatch):
    """As one of a GPU after an error there."""

    def refuse(generator, state):
        raise RuntimeError("of a test")

    get, _ = state._GENERATORS[torch.Generator]
    monkeypatch.setitem(state._GENERATORS, torch.Generator, (get, refuse))
    before = random_states()
    with pytest.raises(RuntimeError, match="of a test"), preserved_rng(torch.Generator()):
        random.random(), np.random.rand(), torch.rand(1)
        assert drawn_since(before)
    assert not drawn_since(before)


def test_the_generator_of_a_batch_sampler_is_left_as_found():
    class Batches(torch_data.Sampler):
        def __init__(self):
            self.generator = torch.Generator().manual_seed(1)

        def __iter__(self):
            for _ in range(20):
                yield torch.randperm(N, generator=self.generator)[:10].tolist()

    batches, model = Batches(), bnuq.convert(nn.BatchNorm1d(WIDTH))
    before = batches.generator.get_state()
    loader = torch_data.DataLoader(torch_data.TensorDataset(ROWS), batch_sampler=batches)
    bnuq.collect(model, loader, 6, progress=False)
    assert torch.equal(batches.generator.get_state(), before)


class Interrupted(nn.Linear):
    """Putting its flag back is interrupted so many times."""

    def __setattr__(self, name, value):
        if name == "training" and value and self.__dict__.get("left", 0) > 0:
            self.__dict__["left"] -= 1
            raise KeyboardInterrupt
        super().__setattr__(name, value)


@pytest.mark.parametrize("times", [1, 3])
def test_an_interrupt_does_not_cost_the_flags(times):
    modules = [nn.ReLU(), Interrupted(2, 2), nn.ReLU(), Interrupted(2, 2)]
    for module in modules:
        module.__dict__["left"] = times
    with pytest.raises(KeyboardInterrupt), evaluating(modules):
        assert not any(m.training for m in modules)
    assert all(m.training for m in modules) and not restore._EVAL_USERS
    with evaluating(modules):
        pass
    assert all(m.training for m in modules)


def test_what_cannot_be_put_back_ends_it():
    module = Interrupted(2, 2)
    module.__dict__["left"] = 100
    with pytest.raises(KeyboardInterrupt), evaluating([module]):
        pass
    assert module.left > 80
    module.__dict__["left"] = 0
    restore._EVAL_USERS.clear()
