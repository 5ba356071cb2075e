"""Random generators that the model, the loader, its samplers and the data set have as attributes are
left as found."""

import pickle
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import data as torch_data

import bnuq_ext as bnuq

ROWS = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
# How each kind is made, asked for its state, and drawn from.
KINDS = {
    "torch": (
        lambda: torch.Generator().manual_seed(0),
        lambda g: g.get_state().tolist(),
        lambda g: torch.rand((), generator=g).item(),
    ),
    "numpy": (
        lambda: np.random.default_rng(0),
        lambda g: pickle.dumps(g.bit_generator.state),
        lambda g: g.random(),
    ),
    "numpy of old": (
        lambda: np.random.RandomState(0),
        lambda g: pickle.dumps(g.get_state()),
        lambda g: g.rand(),
    ),
    "python": (lambda: random.Random(0), random.Random.getstate, random.Random.random),
}


class Own:
    """Holds a generator of a kind; `draws` counts."""

    def __init__(self, kind="torch"):
        make, self._state_of, self._draw = KINDS[kind]
        self.rng, self.draws = make(), 0

    def draw(self):
        self.draws += 1
        return self._draw(self.rng)

    def state(self):
        return self._state_of(self.rng)

    def order(self):
        return sorted(range(len(ROWS)), key=lambda i: self.draw())


class Drawing(nn.Module):
    def __init__(self, own):
        super().__init__()
        self.own, self.rng = own, own.rng
        self.fail = lambda: None

    def forward(self, x):
        self.fail()
        return x * self.own.draw()


class Rows(Own, torch_data.Dataset):
    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        return ROWS[index] * self.draw()


class Stream(Own, torch_data.IterableDataset):
    def __iter__(self):
        return (row * self.draw() for row in ROWS)


class Batches(Own):
    def __iter__(self):
        return (batch * self.draw() for batch in ROWS.split(10))


class Order(Own, torch_data.Sampler):
    def __iter__(self):
        return iter(self.order())

    def __len__(self):
        return len(ROWS)


class BatchesOf(Own, torch_data.Sampler):
    def __iter__(self):
        return (list(batch) for batch in zip(*[iter(self.order())] * 10, strict=True))

    def __len__(self):
        return len(ROWS) // 10


def loader(dataset=None, **options):
    return torch_data.DataLoader(ROWS if dataset is None else dataset, **options)


def by_ten(sampler):
    return torch_data.BatchSampler(sampler, 10, drop_last=False)


# What makes an owner of a kind's generator, and the arguments of `collect` that it comes by.
SOURCES = {
    "data set": (Rows, lambda own: {"data": own, "batch_size": 10}),
    "loader": (Rows, lambda own: {"data": loader(own, batch_size=10, shuffle=True)}),
    "subset": (
        Rows,
        lambda own: {"data": torch_data.Subset(own, range(5, 155)), "batch_size": 10},
    ),
    "joined": (
        Rows,
        lambda own: {"data": torch_data.ConcatDataset([ROWS, own]), "batch_size": 20},
    ),
    "joined by name": (
        Rows,
        lambda own: {"data": torch_data.StackDataset(input=own), "batch_size": 10},
    ),
    "stream": (Stream, lambda own: {"data": loader(own, batch_size=10)}),
    "stream of batches": (Batches, lambda own: {"data": own}),
    "sampler": (Order, lambda own: {"data": loader(batch_size=10, sampler=own)}),
    "sampler of batches": (BatchesOf, lambda own: {"data": loader(batch_sampler=own)}),
    "sampler of one": (Order, lambda own: {"data": loader(batch_sampler=by_ten(own))}),
    "sampler of a whole batch": (
        Order,
        lambda own: {"data": loader(sampler=by_ten(own), batch_size=None)},
    ),
}


def model_of(own):
    return bnuq.convert(nn.Sequential(Drawing(own), nn.BatchNorm1d(4)).eval(), inplace=True)


def collect(model, **arguments):
    return bnuq.collect(model, **arguments, num_batches=4, progress=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", SOURCES)
def test_of_data(source, kind):
    make, arguments = SOURCES[source]
    own, model = make(kind), model_of(Own())
    before = own.state()
    banks = [collect(model, **arguments(own)) for _ in range(2)]
    assert own.draws and own.state() == before
    assert banks[0].equal(banks[1])
    model[0].fail = raise_at_second_call()
    with pytest.raises(OSError, match="injected"):
        collect(model, **arguments(own))
    assert own.state() == before


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_module(kind):
    own = Own(kind)
    model, before = model_of(own), own.state()
    banks = [collect(model, data=list(ROWS.split(10))) for _ in range(2)]
    assert own.draws == 8 and own.state() == before
    assert banks[0].equal(banks[1])
    model[0].fail = raise_at_second_call()
    with pytest.raises(OSError, match="injected"):
        collect(model, data=list(ROWS.split(10)))
    assert own.draws == 9 and own.state() == before


def raise_at_second_call():
    calls = []

    def fail():
        calls.append(None)
        if len(calls) == 2:
            raise OSError("injected")

    return fail


@pytest.mark.parametrize("query", ["out", "in"])
def test_of_the_loader_of_a_prediction(query):
    own, model = Rows("numpy"), bnuq.convert(nn.Sequential(nn.BatchNorm1d(4)).eval())
    data, before = loader(own, batch_size=10, shuffle=True), own.state()
    options = {"likelihood": "gaussian", "num_samples": 3, "seed": 0, "query": query}
    first, second = (
        bnuq.predict(model, ROWS[:2], sampler="batch", loader=data, **options) for _ in range(2)
    )
    assert own.draws and own.state() == before
    assert torch.equal(first.mean, second.mean)


class Targets(Rows):
    def __getitem__(self, index):
        return super().__getitem__(index), ROWS[index]


def test_of_what_is_fitted():
    data, validation, inner = Targets("python"), Targets("numpy"), Own("numpy of old")
    model = model_of(inner)
    options = {"likelihood": "gaussian", "noise_var": 1.0, "num_samples": 2, "progress": False}

    def fit():
        return bnuq.fit_batch_size(model, data, [4, 6], validation=validation, seed=0, **options)

    check_left_as_found(fit, lambda fit: fit.log_likelihood, data, validation, inner)


def test_of_what_is_tested():
    data, inner = Rows("python"), Own("numpy")
    model = model_of(inner)

    def judge():
        return bnuq.statistics_normality(model, data, 4, num_batches=8, seed=0, progress=False)

    check_left_as_found(judge, lambda found: found.layers["1"].analytic.mean, data, inner)


def check_left_as_found(run, number, *owners):
    before = [own.state() for own in owners]
    found = [number(run()) for _ in range(2)]
    assert all(own.draws for own in owners) and [own.state() for own in owners] == before
    assert torch.equal(*found)


class Slots:
    __slots__ = ("rng",)

    def __getattr__(self, name):
        raise OSError("a proxy of nothing") if name == "__dict__" else AttributeError(name)

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        return ROWS[index]


class Proxy(Slots):
    @property
    def __dict__(self):
        raise OSError("a proxy of nothing")


class Ring(Rows):
    """One that holds itself, and what must not be looked at."""

    def __init__(self):
        super().__init__()
        self.dataset, self.datasets, self.odd = self, [self, Proxy()], Odd()


class Odd:
    def __eq__(self, other):
        raise OSError("compared")

    __hash__ = None

    def __getattribute__(self, name):
        raise OSError(f"asked for {name}")


@pytest.mark.parametrize("make", [Slots, Proxy, Ring])
def test_odd_data_sets(make):
    assert len(collect(model_of(Own()), data=make(), batch_size=10)) == 4
