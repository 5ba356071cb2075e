"""What replicas are given: each the caller's input, which stays as it is,
in the caller's classes."""

import warnings
from collections import OrderedDict, UserDict
from types import MappingProxyType

import pytest
import torch
import torch.nn.functional as F
from predicting import predict
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import bnuq_ext as bnuq
from bnuq_ext.inputs import map_tensors


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)


class CentredInPlace(Normed):
    def forward(self, x):
        return self.norm(self.linear(x.sub_(1).mul_(2)))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("strategy", ["auto", "folded", "loop"])
def test_every_replica_sees_the_input_that_was_given(strategy, inference):
    torch.manual_seed(0)
    model, x = bnuq.convert(CentredInPlace()).eval(), torch.randn(5, 4)
    bank = bnuq.collect(model, list(torch.randn(6, 16, 4)), 6, progress=False)
    for _ in range(2):  # before and after the model is known
        with torch.inference_mode(inference):
            given = x.clone()
            pred = predict(
                model, given, likelihood="gaussian", strategy=strategy, keep_samples=True
            )
        assert torch.equal(given, x)
        h = model.linear((x - 1) * 2).detach()
        mean, var = bank.mean["norm"][pred.snapshots], bank.var["norm"][pred.snapshots]
        expected = (h - mean[:, None]) / (var[:, None] + 1e-5).sqrt()
        torch.testing.assert_close(pred.samples, expected, rtol=1e-4, atol=1e-5)


def test_plug_in_and_mc_dropout_spare_the_input_too():
    model, x = nn.Sequential(CentredInPlace(), nn.Dropout(1e-12)).eval(), torch.randn(5, 4)
    given = x.clone()
    with torch.no_grad():
        expected = model(x.clone())
    options = {"likelihood": "gaussian", "keep_samples": True}
    for _ in range(2):
        samples = [bnuq.plug_in(model, given, **options).samples[0]]
        samples += bnuq.mc_dropout(model, given, num_samples=3, **options).samples
        for sample in samples:
            torch.testing.assert_close(sample, expected)
        assert torch.equal(given, x)


class Prepared(nn.Module):
    """Makes its input ready in place, once `ready` has made a copy where one is needed."""

    def __init__(self, ready):
        super().__init__()
        self.ready = ready
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x):
        h = self.norm(self.conv(self.ready(x).sub_(2).div_(3)))
        return self.head(h.relu().mean((2, 3)))


IMAGES = torch.rand(4, 3, 6, 6, generator=torch.Generator().manual_seed(1)) * 9
COPIED_FIRST = {
    "by dtype": (lambda x: x.float(), IMAGES.byte()),
    "by size": (lambda x: x if x.shape[-1] == 6 else F.interpolate(x, size=6), IMAGES[..., :5]),
    "by layout": (lambda x: x.contiguous(), IMAGES.contiguous(memory_format=torch.channels_last)),
}


@pytest.mark.parametrize("strategy", ["auto", "loop"])
@pytest.mark.parametrize(("ready", "first"), COPIED_FIRST.values(), ids=COPIED_FIRST)
def test_an_input_that_is_spared_by_chance_says_nothing_of_the_next(ready, first, strategy):
    torch.manual_seed(0)
    model = bnuq.convert(Prepared(ready)).eval()
    bnuq.collect(model, list(torch.rand(8, 16, 3, 6, 6) * 9), 8, progress=False)
    predict(model, first, strategy=strategy)
    given = IMAGES.clone()
    pred = predict(model, given, strategy=strategy, num_samples=4, keep_samples=True)
    assert torch.equal(given, IMAGES)
    with torch.no_grad(), bnuq.replicas(model, 4, 3):
        expected = model(IMAGES.clone()).unflatten(0, (4, -1))
    torch.testing.assert_close(pred.samples, expected, rtol=1e-5, atol=1e-5)


class Attributes(dict):
    __getattr__ = dict.__getitem__


class Batched(Normed):
    """Takes a batch as one argument, and changes it."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, batch):
        return self.norm(self.linear(self.change(batch)))


def rebind(batch):
    batch["x"] = batch["x"] * 2 + 1
    return batch["x"]


def add(batch):
    batch["features"] = batch["x"] * 2 + 1
    return batch["features"]


CHANGES = {
    "rebinds": (dict, rebind),
    "adds": (dict, add),
    "takes out": (dict, lambda batch: batch.pop("x") * 2 + 1),
    "asks for an attribute": (Attributes, lambda batch: batch.x * 2 + 1),
    "asks for what a UserDict has": (UserDict, lambda batch: batch.data["x"] * 2 + 1),
}


@pytest.mark.parametrize("strategy", ["auto", "loop"])
@pytest.mark.parametrize(("kind", "change"), CHANGES.values(), ids=CHANGES)
def test_a_batch_that_is_changed_by_the_forward(kind, change, strategy):
    torch.manual_seed(0)
    model, x = bnuq.convert(Batched(change)).eval(), torch.randn(5, 4)
    batches = [{"x": batch} for batch in torch.randn(6, 16, 4)]
    bank = bnuq.collect(model, batches, 6, progress=False, input_fn=lambda batch: (kind(batch),))
    for _ in range(2):  # before and after the model is known
        given = (kind({"x": x}),)
        pred = predict(model, given, likelihood="gaussian", strategy=strategy, keep_samples=True)
        assert list(given[0]) == ["x"] and given[0]["x"] is x
        h = model.linear(x * 2 + 1).detach()
        mean, var = bank.mean["norm"][pred.snapshots], bank.var["norm"][pred.snapshots]
        expected = (h - mean[:, None]) / (var[:, None] + 1e-5).sqrt()
        torch.testing.assert_close(pred.samples, expected, rtol=1e-4, atol=1e-5)


class Attending(Normed):
    """Does something else where it attends to itself."""

    def forward(self, query, context):
        return self.norm(self.linear(query if query is context else query - context))


@pytest.mark.parametrize("strategy", ["auto", "loop"])
@pytest.mark.parametrize("same", [True, False])
def test_one_tensor_that_is_given_twice_stays_one(same, strategy):
    torch.manual_seed(0)
    model, x = bnuq.convert(Attending()).eval(), torch.randn(5, 4)
    pairs = [(rows, rows) for rows in torch.randn(6, 16, 4)]
    bnuq.collect(model, pairs, 6, progress=False, input_fn=lambda pair: pair)
    options = {"likelihood": "gaussian", "num_samples": 4, "seed": 3, "strategy": strategy}
    given = (x, x) if same else (x, torch.randn(5, 4))
    pred = bnuq.predict(model, given, keep_samples=True, **options)
    with torch.no_grad():
        plain = bnuq.plug_in(model, given, likelihood="gaussian").mean
        torch.testing.assert_close(plain, model(*given))
        with bnuq.replicas(model, 4, 3):
            expected = model(*given).unflatten(0, (4, -1))
    torch.testing.assert_close(pred.samples, expected, rtol=1e-5, atol=1e-5)


class OfOthers(dict):
    """Made of arguments of its own."""

    def __init__(self, x):
        super().__init__(x=x)


class OfRows(UserDict):
    """Keeps a number of rows, which is its length; copies have it too."""

    def __init__(self, data, rows=0):
        super().__init__(data)
        self.rows = rows

    def __len__(self):
        return self.rows


def test_containers_keep_their_class_where_it_takes_a_dict():
    x = torch.ones(2)
    for kind in (dict, OrderedDict, UserDict, Attributes, MappingProxyType):
        made = map_tensors(kind({"x": x, "n": 3}), torch.neg)
        assert type(made) is kind and dict(made).keys() == {"x", "n"}
        assert torch.equal(made["x"], -x) and made["n"] == 3
    made = map_tensors(OfOthers(x), torch.neg)
    assert type(made) is dict and torch.equal(made["x"], -x)
    given = OfRows({"x": x}, 2)
    made = map_tensors(given, torch.neg)
    assert type(made) is OfRows and made.rows == 2 and torch.equal(made["x"], -x)
    assert given["x"] is x


class Twins(Normed):
    def forward(self, x, other):
        h = self.norm(self.linear(x))
        return h if other is x else h - h.mean(0)


def test_one_tensor_twice_is_not_two_tensors():
    torch.manual_seed(0)
    model, x = bnuq.convert(Twins()).eval(), torch.randn(5, 4)
    batches = [(b, b) for b in torch.randn(8, 6, 4)]
    bnuq.collect(model, batches, 8, progress=False, input_fn=lambda pair: pair)
    options = {"likelihood": "gaussian", "num_samples": 6, "seed": 0}
    bnuq.predict(model, (x, x), **options)
    actual = bnuq.predict(model, (x, x.clone()), **options)
    expected = bnuq.predict(model, (x, x.clone()), strategy="loop", **options)
    torch.testing.assert_close(actual.mean, expected.mean)


class Pair(Normed):
    def forward(self, a, b):
        return self.norm(self.linear(a - 2 * b))


class Pairs(torch.utils.data.Dataset):
    a, b = torch.arange(36.0).view(9, 4).sin(), torch.arange(36.0).view(9, 4).cos()

    def __len__(self):
        return 9

    def __getitem__(self, i):
        return (self.a[i], self.b[i]), torch.tensor([i, -i])


def test_pairs_of_a_data_set_become_a_list_in_its_loader():
    torch.manual_seed(0)
    model, options = bnuq.convert(Pair()), dict(likelihood="gaussian", num_samples=3, seed=0)
    bnuq.collect(model, [(Pairs.a, Pairs.b)] * 2, input_fn=tuple, progress=False)
    pred = bnuq.predict(model, torch.utils.data.DataLoader(Pairs(), 4), **options)
    expected = bnuq.predict(model, (Pairs.a, Pairs.b), **options)
    torch.testing.assert_close(pred.mean, expected.mean)
    assert pred.targets.tolist() == [[i, -i] for i in range(9)]
    for key in ("input", "x"):
        for given in ((Pairs.a, Pairs.b), [Pairs.a, Pairs.b], {"a": Pairs.a, "b": Pairs.b}):
            pred = bnuq.predict(model, [{key: given, "y": torch.ones(9)}], **options)
            torch.testing.assert_close(pred.mean, expected.mean)
    for images, y in [(torch.ones(3, 4, 4), torch.ones(2)), ("text", torch.ones(2))]:
        with pytest.raises(TypeError, match="a batch must be .* got list of list"):
            bnuq.predict(model, [[[images, images], y]], **options)
        with pytest.raises(TypeError, match="a batch must be .* got dict with keys"):
            bnuq.predict(model, [{"x": [images, images], "y": y}], **options)


class Named(Pair):
    """Gives and takes names."""

    def forward(self, a, b):
        return {"logits": super().forward(a, b)}


ENTRIES = {
    "(tuple, y)": lambda a, b, y: ((a, b), y),
    "(dict, y)": lambda a, b, y: ({"a": a, "b": b}, y),
    "a dict of a tuple": lambda a, b, y: {"x": (a, b), "target": y},
    "a dict of a dict": lambda a, b, y: {"input": {"a": a, "b": b}, "label": y},
}


class Entries(torch.utils.data.Dataset):
    def __init__(self, make):
        generator = torch.Generator().manual_seed(0)
        self.make, (self.a, self.b) = make, torch.randn(2, 24, 4, generator=generator)

    def __len__(self):
        return 24

    def __getitem__(self, i):
        return self.make(self.a[i], self.b[i], i % 6)


@pytest.mark.parametrize("make", ENTRIES.values(), ids=ENTRIES)
@pytest.mark.parametrize("by_loader", [True, False])
def test_all_that_take_data_take_several_arguments_beside_targets(make, by_loader):
    torch.manual_seed(0)
    model, data = bnuq.convert(Named()).eval(), Entries(make)
    batches = torch.utils.data.DataLoader(data, 8) if by_loader else data
    size = None if by_loader else 8
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of data in order
        bank = bnuq.collect(model, batches, 3, batch_size=size, progress=False)
    z = model.linear(data.a - 2 * data.b)
    if by_loader:
        torch.testing.assert_close(bank.mean["norm"], z.view(3, 8, 6).mean(1).detach())
    options = {"likelihood": "categorical", "output_fn": lambda out: out["logits"]}
    pred = bnuq.predict(model, torch.utils.data.DataLoader(data, 8), num_samples=3, **options)
    assert pred.targets.tolist() == [i % 6 for i in range(24)]
    found = bnuq.statistics_normality(model, data, 8, num_batches=8, progress=False)
    moments = found.layers["norm"].analytic
    torch.testing.assert_close(moments.mean, z.double().mean(0).detach(), rtol=1e-4, atol=1e-5)
    fit = bnuq.fit_batch_size(
        model, data, [8, 12], num_samples=4, seed=0, progress=False, **options
    )
    plain = bnuq.convert(Pair()).eval()
    plain.load_state_dict(model.state_dict())
    options["output_fn"] = None
    expected = bnuq.fit_batch_size(
        plain,
        Entries(ENTRIES["(tuple, y)"]),
        [8, 12],
        num_samples=4,
        seed=0,
        progress=False,
        **options,
    )
    assert torch.equal(fit.log_likelihood, expected.log_likelihood) and model.norm.bank is bank


def test_an_output_fn_of_the_batch_size_must_be_callable():
    model = bnuq.convert(nn.Sequential(nn.BatchNorm1d(4)))
    data, options = (torch.randn(9, 4), torch.arange(9) % 4), {"likelihood": "categorical"}
    with pytest.raises(TypeError, match="^fit_batch_size: output_fn must be callable, got int$"):
        bnuq.fit_batch_size(model, data, [4], output_fn=3, **options)


@pytest.mark.filterwarnings("ignore:collect. M is taken as 56, the first size")
def test_a_packed_sequence_is_one_argument():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.recurrent, self.bn = nn.GRU(4, 6), nn.BatchNorm1d(6)

        def forward(self, packed):
            return self.bn(self.recurrent(packed)[1][0])

    def packed(rows):
        return pack_sequence([torch.randn(2 + i % 4, 4) for i in range(rows)], False)

    torch.manual_seed(0)
    model, x = bnuq.convert(Recurrent()).eval(), packed(5)
    bank = bnuq.collect(model, [packed(16) for _ in range(6)], 6, input_fn=lambda p: p)
    pred = predict(model, x, likelihood="gaussian", keep_samples=True, num_samples=6)
    plain = bnuq.revert(model)
    for sample, snapshot in zip(pred.samples, pred.snapshots, strict=True):
        plain.bn.running_mean.copy_(bank.mean["bn"][snapshot])
        plain.bn.running_var.copy_(bank.var["bn"][snapshot])
        torch.testing.assert_close(sample, plain(x).detach(), rtol=1e-5, atol=1e-5)
