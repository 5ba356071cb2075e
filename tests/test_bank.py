"""The bank: what it holds, what it refuses, and attaching it."""

import copy
import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode

import bnuq_ext as bnuq
from bnuq_ext.attach import find_bank


def statistics(num_snapshots=4, channels=(3, 5), dtype=torch.float32):
    torch.manual_seed(0)
    names = [f"layers.{i}" for i in range(len(channels))]
    mean = {
        n: torch.randn(num_snapshots, c, dtype=dtype) for n, c in zip(names, channels, strict=True)
    }
    var = {
        n: torch.rand(num_snapshots, c, dtype=dtype) for n, c in zip(names, channels, strict=True)
    }
    return mean, var


def make_bank(num_snapshots=4, channels=(3, 5), dtype=torch.float32, **fields):
    mean, var = statistics(num_snapshots, channels, dtype)
    return bnuq.Bank(mean, var, 32, **{"batch_size": 8, **fields})


class Chain(nn.Module):
    def __init__(self, channels=(3, 5)):
        super().__init__()
        self.layers = nn.ModuleList(nn.BatchNorm1d(c) for c in channels)


def test_holds_what_it_was_given():
    mean, var = statistics()
    count = {name: torch.tensor([16, 16, 16, 9]) for name in mean}
    bank = bnuq.Bank(
        mean,
        var,
        count,
        batch_size=16,
        dataset_size=57,
        disjoint=0.5,
        unused=["head"],
        metadata={"data": "digits"},
    )
    for name in mean:
        assert torch.equal(bank.mean[name], mean[name])
        assert torch.equal(bank.var[name], var[name])
        assert torch.equal(bank.count[name], count[name])
    assert (len(bank), bank.batch_size, bank.dataset_size, bank.disjoint) == (4, 16, 57, 0.5)
    assert (bank.names, bank.unused) == (("layers.0", "layers.1"), ("head",))
    assert bank.metadata == {"data": "digits"}
    assert (
        repr(bank)
        == "Bank(4 snapshots of 16 rows (1 of 9) out of 57; 2 batch-norm calls, 8 channels)"
    )


def test_defaults():
    bank = make_bank()
    assert bank.count["layers.1"].tolist() == [32, 32, 32, 32]
    assert (bank.dataset_size, bank.disjoint, bank.unused, bank.metadata) == (32, 1.0, (), {})


@pytest.mark.parametrize(
    "given, kept",
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_keeps_the_accumulation_dtype(given, kept):
    mean, var = statistics(dtype=given)
    bank = bnuq.Bank(mean, var, 32, batch_size=8)
    assert bank.mean["layers.0"].dtype == bank.var["layers.0"].dtype == kept
    assert torch.equal(bank.mean["layers.0"], mean["layers.0"].to(kept))


def test_copies_its_tensors():
    mean, var = statistics()
    strided = torch.randn(5, 4).requires_grad_()
    mean["layers.1"] = strided.t()
    count = {key: torch.full((len(tensor),), 32) for key, tensor in mean.items()}
    bank = bnuq.Bank(mean, var, count, batch_size=8)
    expected = copy.deepcopy(bank)
    with torch.no_grad():
        for tensor in (strided, mean["layers.0"], var["layers.0"], count["layers.0"]):
            tensor.add_(1)
    assert bank.equal(expected)
    assert bank.mean["layers.1"].is_contiguous() and not bank.mean["layers.1"].requires_grad


def test_holds_no_inference_tensors():
    with torch.inference_mode():
        bank = make_bank()
        on_cpu = bank.on("cpu")
    assert not any(t.is_inference() for t in (*bank.mean.values(), *bank.count.values()))
    assert not on_cpu["layers.0"][0].is_inference()


NAN, INF = float("nan"), float("inf")
REFUSED = [
    (dict(mean=[1]), TypeError, "mean must be a dict of tensors, got list"),
    (dict(mean={}, var={}), ValueError, "mean must hold at least one layer, got none"),
    (dict(mean={1: torch.ones(2, 3)}), TypeError, "mean must have names for keys, got 1"),
    (dict(mean={"a": 1.0}), TypeError, "mean['a'] must be a tensor, got float"),
    (
        dict(mean={"a": torch.ones(2, 3, dtype=torch.int64)}),
        TypeError,
        "mean['a'] must be a floating-point tensor, got torch.int64",
    ),
    (
        dict(var={"b": torch.ones(2, 3)}),
        ValueError,
        "var must have the keys of mean ['a'], got ['b']",
    ),
    (
        dict(count={"b": torch.tensor([4, 4])}),
        ValueError,
        "count must have the keys of mean ['a'], got ['b']",
    ),
    (
        dict(mean={"a": torch.ones(3)}, count=4),
        ValueError,
        "mean['a'] must have shape (B, C) with B and C at least 1, got [3]",
    ),
    (
        dict(mean={"a": torch.ones(0, 3)}),
        ValueError,
        "mean['a'] must have shape (B, C) with B and C at least 1, got [0, 3]",
    ),
    (dict(var={"a": torch.ones(2, 4)}), ValueError, "var['a'] must have shape [2, 3], got [2, 4]"),
    (
        dict(
            mean={"a": torch.ones(2, 3), "b": torch.ones(1, 3)},
            var={"a": torch.ones(2, 3), "b": torch.ones(1, 3)},
        ),
        ValueError,
        "mean['b'] must have shape [2, 3], got [1, 3]",
    ),
    (
        dict(var={"a": torch.ones(2, 3, dtype=torch.float64)}),
        ValueError,
        "mean['a'] and var['a'] must be both float32 or float64, got torch.float32 and torch.float64",
    ),
    (
        dict(mean={"a": torch.tensor([[NAN]]).expand(2, 3)}),
        ValueError,
        "mean['a'] must be finite, got NaN",
    ),
    (
        dict(var={"a": torch.tensor([[INF]]).expand(2, 3)}),
        ValueError,
        "var['a'] must be finite, got NaN",
    ),
    (dict(mean={"a": torch.full((2, 3), -INF)}), ValueError, "mean['a'] must be finite, got NaN"),
    (
        dict(var={"a": torch.full((2, 3), -0.5)}),
        ValueError,
        "var['a'] must be at least 0, got -0.5",
    ),
    (dict(count=1), ValueError, "count must be at least 2, got 1"),
    (dict(count=2.5), TypeError, "count must be an integer, got 2.5"),
    (dict(count={"a": 4}), TypeError, "count['a'] must be a tensor, got int"),
    (dict(count={"a": torch.tensor([4])}), ValueError, "count['a'] must have shape [2], got [1]"),
    (dict(count={"a": torch.tensor([4, 1])}), ValueError, "count['a'] must be at least 2, got 1"),
    (
        dict(count={"a": torch.tensor([4.0, 4.0])}),
        TypeError,
        "count['a'] must be int64, got torch.float32",
    ),
    (dict(batch_size=0), ValueError, "batch_size must be at least 1, got 0"),
    (dict(batch_size=True), TypeError, "batch_size must be an integer, got True"),
    (dict(batch_size=None), TypeError, "batch_size must be an integer, got None"),
    (dict(dataset_size=3), ValueError, "dataset_size must be at least 4, got 3"),
    (dict(dataset_size="9"), TypeError, "dataset_size must be an integer, got '9'"),
    (dict(disjoint=1.5), ValueError, "disjoint must lie in [0, 1], got 1.5"),
    (dict(disjoint=NAN), ValueError, "disjoint must lie in [0, 1], got nan"),
    (dict(disjoint=True), TypeError, "disjoint must be a number, got True"),
    (dict(disjoint="1"), TypeError, "disjoint must be a number, got '1'"),
    (
        dict(unused=["a"]),
        ValueError,
        "unused must be names of layers without statistics, got ['a']",
    ),
    (dict(unused=5), TypeError, "unused must be names of layers, in a list, got 5"),
    (dict(unused="a"), TypeError, "unused must be names of layers, in a list, got 'a'"),
    (dict(metadata={"a": 1}), TypeError, "metadata must be a dict of str to str, got {'a': 1}"),
]


@pytest.mark.parametrize("change, error, text", REFUSED, ids=[text for _, _, text in REFUSED])
def test_rejects(change, error, text):
    arguments = {"mean": {"a": torch.ones(2, 3)}, "var": {"a": torch.ones(2, 3)}, "count": 4}
    with pytest.raises(error, match=re.escape(f"Bank: {text}")):
        bnuq.Bank(**{**arguments, "batch_size": 4, **change})


def test_equal():
    bank = make_bank()
    assert bank.equal(make_bank())
    assert not bank.equal(make_bank(disjoint=0.0))
    assert not bank.equal(make_bank(dtype=torch.float64))
    (mean, var), options = statistics(), {"batch_size": 8, "dataset_size": 99}
    bank = bnuq.Bank(mean, var, 32, **options)
    assert bank.equal(bnuq.Bank(mean, var, 32, **options))
    wide = [{key: t.double() for key, t in group.items()} for group in (mean, var)]
    assert not bank.equal(bnuq.Bank(*wide, 32, **options))
    for other in ({"batch_size": 9}, {"dataset_size": 98}, {"unused": ("a",)}, {"disjoint": 0.5}):
        assert not bank.equal(bnuq.Bank(mean, var, 32, **{**options, **other}))
    assert not bank.equal(bnuq.Bank(mean, var, 33, **options))
    bank = make_bank()
    assert not bank.equal(make_bank(channels=(3, 5, 2)))
    other = make_bank()
    other.var["layers.1"][3, 4] += 1e-7
    assert not bank.equal(other)
    with pytest.raises(TypeError, match="Bank.equal: other must be a Bank, got dict"):
        bank.equal({})


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda bank: pickle.loads(pickle.dumps(bank))])
def test_survives_deepcopy_and_pickle(copied):
    bank = make_bank(metadata={"torch": torch.__version__})
    bank.on("meta")
    other = copied(bank)
    assert other.equal(bank) and other.metadata == bank.metadata
    assert "_cache" not in bank.__getstate__()
    other.mean["layers.0"].add_(1)
    assert not other.equal(bank)
    assert other.on("meta")["layers.0"][0].shape == (4, 3)


def test_on_copies_once_from_sixteen_threads():
    bank = make_bank()
    together = threading.Barrier(16)

    def ask(_):
        together.wait()
        return bank.on("meta")

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))
    assert all(answer is answers[0] for answer in answers)
    assert answers[0]["layers.1"][1].device.type == "meta"
    assert bank.on("cpu")["layers.1"][0] is bank.mean["layers.1"]


def test_on_a_device(device):
    bank = make_bank()
    placed = bank.on(device)
    assert bank.on(str(device)) is placed and list(placed) == list(bank.names)
    for key, (mean, var) in placed.items():
        assert mean.device.type == var.device.type == device.type
        assert torch.equal(mean.cpu(), bank.mean[key]) and torch.equal(var.cpu(), bank.var[key])


def test_tables_without_values_are_not_kept():
    """An export would leave them to the predictions after it."""
    bank = make_bank()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(bank.on("meta")["layers.0"][0], FakeTensor)
    assert type(bank.on("meta")["layers.0"][0]) is torch.Tensor


def test_attach():
    model, bank = bnuq.convert(Chain()), make_bank()
    bnuq.attach(model, bank)
    assert [layer.bank for layer in model.layers] == [bank, bank]
    assert [layer.bank_name for layer in model.layers] == ["layers.0", "layers.1"]
    assert find_bank(model, "predict") is bank
    assert list(model.state_dict()) == list(Chain().state_dict())
    clone = copy.deepcopy(model)
    assert clone.layers[0].bank is clone.layers[1].bank is not bank
    assert find_bank(clone, "predict").equal(bank)


def test_attach_takes_several_calls_and_unused_layers():
    mean, var = statistics()
    for group in (mean, var):
        group["layers.0#1"] = group["layers.0"]
        del group["layers.1"]
    bank = bnuq.Bank(mean, var, 32, batch_size=8, unused=["layers.1"])
    model = bnuq.convert(Chain())
    bnuq.attach(model, bank)
    assert find_bank(model, "predict") is bank


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.half(),
        lambda model: model.to(torch.float64),
        lambda model: model.train().requires_grad_(False),
        lambda model: (model.load_state_dict(Chain().state_dict()), model)[1],
        lambda model: pickle.loads(pickle.dumps(model)),
        copy.deepcopy,
    ],
    ids=["half", "to", "train", "load_state_dict", "pickle", "deepcopy"],
)
def test_a_model_keeps_its_bank(change):
    model = bnuq.convert(Chain())
    bnuq.attach(model, make_bank())
    model = change(model)
    assert find_bank(model, "predict").equal(make_bank())
    assert [layer.bank_name for layer in model.layers] == ["layers.0", "layers.1"]
    assert not any("bank" in key for key in model.state_dict())


def test_attach_to_a_root_layer():
    layer = bnuq.convert(nn.BatchNorm1d(3))
    bank = bnuq.Bank({"": torch.ones(2, 3)}, {"": torch.ones(2, 3)}, 4, batch_size=4)
    bnuq.attach(layer, bank)
    assert layer.bank is bank and layer.bank_name == ""


@pytest.mark.parametrize(
    "channels, error",
    [
        ((3,), "got one that has layers.1 besides"),
        ((3, 5, 2), "got one that lacks layers.2"),
        ((3, 4), "attach: bank.mean['layers.1'] must have 4 channels, got 5"),
        ((3, 6), "attach: bank.mean['layers.1'] must have 6 channels, got 5"),
    ],
)
def test_attach_rejects_other_layers(channels, error):
    model = bnuq.convert(Chain(channels))
    before = make_bank(channels=channels)
    bnuq.attach(model, before)
    with pytest.raises(ValueError, match=re.escape(error)):
        bnuq.attach(model, make_bank())
    with pytest.raises(ValueError, match=re.escape("got one that has gone besides")):
        bnuq.attach(model, make_bank(channels=channels, unused=("gone",)))
    assert find_bank(model, "predict") is before


@pytest.mark.parametrize(
    "group, value, error",
    [
        ("mean", float("nan"), "be finite"),
        ("var", float("inf"), "be finite"),
        ("var", -1.0, "be at least 0, got -1.0"),
    ],
)
def test_attach_rejects_a_bank_that_was_spoilt(group, value, error):
    model, before, spoilt = bnuq.convert(Chain()), make_bank(), make_bank()
    bnuq.attach(model, before)
    getattr(spoilt, group)["layers.1"][2, 3] = value
    with pytest.raises(ValueError, match=re.escape(f"Bank: {group}['layers.1'] must {error}")):
        bnuq.attach(model, spoilt)
    assert find_bank(model, "predict") is before


def test_attach_rejects_other_types():
    with pytest.raises(TypeError, match="attach: bank must be a Bank, got dict"):
        bnuq.attach(bnuq.convert(Chain()), {})
    with pytest.raises(TypeError, match="attach: model must be a torch.nn.Module, got int"):
        bnuq.attach(3, make_bank())
    with pytest.raises(ValueError, match="attach: model must contain stochastic batch-norm layers"):
        bnuq.attach(Chain(), make_bank())


def test_attach_interrupted_changes_nothing():
    model, bank = bnuq.convert(Chain()), make_bank()

    class Interrupted(type(model.layers[1])):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "bank" and value is bank:
                raise KeyboardInterrupt

    model.layers[1].__class__ = Interrupted
    with pytest.raises(KeyboardInterrupt):
        bnuq.attach(model, bank)
    assert [layer.bank for layer in model.layers] == [None, None]
    assert [layer.bank_name for layer in model.layers] == [None, None]


def test_find_bank_rejects():
    model = bnuq.convert(Chain())
    with pytest.raises(
        ValueError, match="predict: model must have a bank, got none; run bnuq_ext.c"
    ):
        find_bank(model, "predict")
    bnuq.attach(model, make_bank())
    model.layers[1].bank = None
    with pytest.raises(ValueError, match="predict: model must have a bank, got none"):
        find_bank(model, "predict")
    model.layers[1].bank = make_bank()
    with pytest.raises(ValueError, match="predict: model must have one bank in all layers, got 2"):
        find_bank(model, "predict")
