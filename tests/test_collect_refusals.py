"""`collect`: what it warns of, leaves out and refuses, and when it shows its progress."""

import io
import re
import sys

import numpy as np
import pytest
import torch
from rows import ROWS, WIDTH, N, Numbered, chunks, expected_bank, loader, make_model
from torch import nn
from torch.utils import data as torch_data

import bnuq_ext as bnuq


class Stream(torch_data.IterableDataset):
    def __iter__(self):
        return iter(ROWS)


# ---- warnings ----------------------------------------------------------------------------------


def test_warns_of_a_loader_that_does_not_shuffle():
    text = "collect: the loader does not shuffle, and batches in the order of the data"
    in_order = torch_data.BatchSampler(torch_data.SequentialSampler(range(N)), 8, False)
    part = torch_data.DistributedSampler(range(N), num_replicas=1, rank=0, shuffle=False)
    for data in (
        loader(shuffle=False),
        loader(shuffle=False, sampler=part),
        torch_data.DataLoader(Numbered(), batch_sampler=in_order),
        torch_data.DataLoader(torch_data.TensorDataset(ROWS), sampler=in_order, batch_size=None),
    ):
        with pytest.warns(UserWarning, match=text) as caught:
            bank = bnuq.collect(make_model(), data, 10)
        assert len(caught) == 1 and caught[0].filename == __file__
        assert bank.disjoint == 1.0


def test_one_batch_of_everything_needs_no_shuffling():
    for data in (loader(batch_size=N, shuffle=False), loader(batch_size=500, shuffle=False)):
        with pytest.warns(UserWarning, match="more than a tenth") as caught:
            bank = bnuq.collect(make_model(), data, 1)
        assert len(caught) == 1 and (bank.batch_size, bank.dataset_size) == (N, N)


def test_data_that_ends_gives_a_smaller_bank():
    assert len(bnuq.collect(make_model(), chunks())) == 15


def test_warns_of_large_batches():
    text = (
        "collect: the batches have 13 rows, more than a tenth of the data's 120: the larger they are the "
        "less their statistics vary, and the mutual information vanishes"
    )
    with pytest.warns(UserWarning, match=text) as caught:
        bnuq.collect(make_model(), Numbered(), 3, batch_size=13)
    assert len(caught) == 1 and caught[0].filename == __file__
    bnuq.collect(make_model(), Numbered(), 3, batch_size=12)
    # Nothing tells how large the data behind an iterable is.
    bnuq.collect(make_model(), iter(chunks(40)), 4)


def test_a_batch_size_of_another_integer_type():
    model, data = make_model(), torch_data.TensorDataset(ROWS)
    expected = bnuq.collect(model, data, 3, batch_size=8)
    for batch_size in (torch.tensor(8), np.int64(8)):
        assert bnuq.collect(model, data, 3, batch_size=batch_size).equal(expected)


def test_leaves_out_small_batches():
    data = [*chunks()[:12], ROWS[:1], ROWS[:0], *chunks()[12:]]
    text = "collect: 2 of 17 batches were left out: they have fewer than two values a channel"
    with pytest.warns(UserWarning, match=text) as caught:
        bank = bnuq.collect(make_model(), data, 17)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert bank.equal(expected_bank(chunks()))


def test_leaves_out_a_batch_that_only_a_deeper_layer_finds_small():
    model = bnuq.convert(
        nn.Sequential(nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3), nn.BatchNorm1d(3))
    )
    x = torch.randn(11, 2, 2, 2)
    with pytest.warns(UserWarning, match="collect: 1 of 3 batches were left out: they have fewer"):
        bank = bnuq.collect(model, [x[:5], x[5:6], x[6:]], 3)
    assert len(bank) == 2 and bank.count["0"].tolist() == bank.count["3"].mul(4).tolist() == [
        20,
        20,
    ]


def test_a_model_that_swallows_errors_does_not_hide_a_small_batch():
    class Careless(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)

        def forward(self, x):
            try:
                x = self.first(x)
            except Exception:
                x = x.repeat(4, 1)
            return self.second(x)

    with pytest.warns(UserWarning, match="collect: 1 of 2 batches were left out"):
        bank = bnuq.collect(bnuq.convert(Careless()), [ROWS[:9], ROWS[:1]], 2)
    assert bank.names == ("first", "second") and len(bank) == 1


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_input_that_is_not_finite(value):
    data = chunks()
    data[3] = data[3].clone()
    data[3][2, 1] = value
    model = make_model()
    before = bnuq.collect(model, chunks(), 15)
    error = "collect: batch 3 must be finite, got NaN or infinity in the input"
    with pytest.raises(ValueError, match=error):
        bnuq.collect(model, data, 15)
    assert model[1].bank is before
    text = "collect: 1 of 15 batches were left out: NaN or infinity"
    with pytest.warns(UserWarning, match=text) as caught:
        bank = bnuq.collect(model, data, 15, on_nonfinite="skip")
    assert len(caught) == 1 and caught[0].filename == __file__
    assert bank.equal(expected_bank(data[:3] + data[4:])) and model[1].bank is bank


def test_statistics_that_are_not_finite():
    """An overflow of float16 inside the model, from finite inputs."""
    model = make_model().half()
    data = [x.half() for x in chunks()]
    data[5] = data[5] * (3e4 / data[5].abs().max().item())
    model[0].weight.data.fill_(3.0)
    error = "collect: batch 5 must be finite, got NaN or infinity in the statistics of layer '1'"
    with pytest.raises(ValueError, match=error):
        bnuq.collect(model, data, 15)
    with pytest.warns(UserWarning, match="collect: 1 of 15 batches were left out: NaN or infinity"):
        bank = bnuq.collect(model, data, 15, on_nonfinite="skip")
    assert len(bank) == 14 and bank.mean["1"].isfinite().all() and bank.var["1"].isfinite().all()


def test_a_variance_alone_that_is_not_finite():
    """Its square overflows, the mean does not."""
    data = chunks()
    data[5] = data[5] * 1e25
    model = make_model()
    error = "collect: batch 5 must be finite, got NaN or infinity in the statistics of layer '1'"
    with pytest.raises(ValueError, match=error):
        bnuq.collect(model, data, 15)
    with pytest.warns(UserWarning, match="collect: 1 of 15 batches were left out: NaN or infinity"):
        bank = bnuq.collect(model, data, 15, on_nonfinite="skip")
    assert bank.equal(expected_bank(data[:5] + data[6:]))


def test_a_batch_without_rows_does_not_reach_the_model():
    """Whose forward may not take it."""
    model, data = make_model(), chunks()
    model.register_forward_pre_hook(lambda module, args: (args[0].view(len(args[0]), -1),))
    with pytest.warns(UserWarning, match="collect: 1 of 16 batches were left out: they have fewer"):
        bank = bnuq.collect(model, [*data[:3], ROWS[:0], *data[3:]], 16)
    assert bank.equal(expected_bank(data))


def test_nothing_that_could_be_used():
    error = (
        "collect: data must hold a batch with two finite values a channel, got 2, of which 1 too "
    )
    with pytest.raises(ValueError, match=error + "small and 1 not finite"):
        bnuq.collect(make_model(), [ROWS[:1], ROWS * NAN], 9, on_nonfinite="skip")
    for data in ([], loader(batch_size=121, drop_last=True)):
        with pytest.raises(
            ValueError, match="collect: data must hold a batch .* got 0, of which 0 too"
        ):
            bnuq.collect(make_model(), data, 9)
    with pytest.raises(
        ValueError, match="collect: data must hold a batch .* got 8, of which 8 too"
    ):
        bnuq.collect(make_model(), loader(batch_size=1), 8)


# ---- refusals ----------------------------------------------------------------------------------


def test_integers_that_reach_a_layer_are_refused():
    model = bnuq.convert(nn.Sequential(nn.Identity(), nn.BatchNorm1d(WIDTH, affine=False)))
    message = "collect: the input of '1' must be float32, .*, got torch.int64"
    with pytest.raises(TypeError, match=message):
        bnuq.collect(model, [torch.ones(9, WIDTH, dtype=torch.long)], 1)


def test_refuses_models():
    # Its constructor asks for a process group.
    distributed = nn.Module()
    distributed.__class__ = nn.parallel.DistributedDataParallel
    distributed.module = make_model()
    for model, error, text in (
        (3, TypeError, "model must be a torch.nn.Module, got int"),
        (
            nn.BatchNorm1d(3),
            ValueError,
            "model must contain stochastic batch-norm layers, got none; run bnuq_ext.convert first",
        ),
        (
            nn.DataParallel(make_model()),
            ValueError,
            "model must not be wrapped for several devices, got DataParallel; give its .module",
        ),
        (
            nn.Sequential(nn.DataParallel(make_model())),
            ValueError,
            "model must not be wrapped for several devices, got DataParallel; put its .module into "
            "the place of '0'",
        ),
        (
            distributed,
            ValueError,
            "model must not be wrapped for several devices, got DistributedDataParallel; give its",
        ),
    ):
        with pytest.raises(error, match=re.escape(f"collect: {text}")):
            bnuq.collect(model, chunks())


BATCH = (
    "a batch must be a tensor, a tuple (input, targets), or a dict with the input under 'input' or 'x', "
    "the input being a tensor, a tuple or a dict (input_fn takes it out of anything else), got "
)
NO_ROWS = "an input must hold a tensor with rows (wrap a model of other objects), got none in "
SOURCE = "data must be a loader, an iterable of batches, or a data set, got "
MAP_STYLE = "data must be a map-style data set when batch_size is given, got "
REFUSED = [
    (dict(num_batches=0), ValueError, "num_batches must be at least 1, got 0"),
    (dict(num_batches=2.0), TypeError, "num_batches must be an integer, got 2.0"),
    (dict(num_batches=True), TypeError, "num_batches must be an integer, got True"),
    (
        dict(on_nonfinite="ignore"),
        ValueError,
        "on_nonfinite must be one of raise, skip, got 'ignore'",
    ),
    (dict(input_fn=3), TypeError, "input_fn must be callable, got int"),
    (
        dict(input_fn=lambda x: [x]),
        TypeError,
        "input_fn must return a tensor, a tuple or a dict, got list",
    ),
    (dict(input_fn=lambda x: (3,)), ValueError, NO_ROWS + "tuple of int"),
    (dict(data=[torch.tensor(3.0)]), ValueError, NO_ROWS + "Tensor"),
    (dict(device="gpu"), ValueError, "device must name a torch device, got 'gpu'"),
    (dict(device=2.5), ValueError, "device must name a torch device, got 2.5"),
    (dict(device="cuda:99"), ValueError, "device must be one that this machine has, got 'cuda:99'"),
    (dict(device="meta"), ValueError, "device must hold numbers, got meta tensors"),
    (dict(model=make_model().to("meta")), ValueError, "model must hold numbers, got meta tensors"),
    (dict(data=3), TypeError, SOURCE + "int"),
    (dict(data="train"), TypeError, SOURCE + "str"),
    (dict(data={"input": ROWS}), TypeError, SOURCE + "dict"),
    (dict(data=[3]), TypeError, BATCH + "int"),
    (dict(data=[()]), TypeError, BATCH + "an empty tuple"),
    (dict(data=[[3, ROWS]]), TypeError, BATCH + "list of int"),
    (dict(data=[{"image": ROWS}]), TypeError, BATCH + "dict with keys ['image']"),
    (dict(data=Numbered()), ValueError, "batch_size must be given for a data set, got None"),
    (dict(data=ROWS), ValueError, "batch_size must be given for a data set, got None"),
    (
        dict(data=loader(), batch_size=8),
        ValueError,
        "batch_size must be None for a loader, which has its own, got 8",
    ),
    (dict(data=Stream(), batch_size=8), TypeError, MAP_STYLE + "Stream"),
    (dict(data=iter(ROWS), batch_size=8), TypeError, MAP_STYLE),
    (
        dict(data=(ROWS, ROWS[:4]), batch_size=8),
        ValueError,
        "data must have as many rows in each tensor, got [[120, ",
    ),
    (dict(data=ROWS, batch_size=0), ValueError, "batch_size must be at least 1, got 0"),
    (
        dict(data=ROWS, batch_size=1),
        ValueError,
        "data must hold a batch with two finite values a channel, got 5, of which 5 too small",
    ),
    (dict(data=ROWS, batch_size="8"), TypeError, "batch_size must be an integer, got '8'"),
    (
        dict(data=ROWS, batch_size=121),
        ValueError,
        "batch_size must be at most the data set's size 120, got 121",
    ),
]


@pytest.mark.parametrize("change, error, text", REFUSED, ids=[text for _, _, text in REFUSED])
def test_rejects(change, error, text):
    with pytest.raises(error, match=re.escape(f"collect: {text}")):
        bnuq.collect(**{"model": make_model(), "data": chunks(), "num_batches": 5, **change})


# ---- progress ----------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_shown_on_a_terminal_only(monkeypatch, capsys):
    bnuq.collect(make_model(), chunks(), 15)
    assert capsys.readouterr() == ("", "")
    for progress, shown in ((True, True), (False, False)):
        monkeypatch.setattr(sys, "stderr", Terminal())
        bnuq.collect(make_model(), chunks(), 15, progress=progress)
        assert ("collect: 100%" in sys.stderr.getvalue()) == shown
        assert bool(sys.stderr.getvalue()) == shown
    assert capsys.readouterr().out == ""


class Mapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return torch.func.vmap(self.norm, in_dims=1, out_dims=1)(x)


def test_layers_inside_a_transform_are_refused():
    original, x = Mapped().eval(), torch.randn(6, 3, 4)
    model = bnuq.convert(original)
    assert torch.equal(model(x), original(x))
    text = "collect: model must call its stochastic layers outside of torch.func's transforms, got a call"
    with pytest.raises(ValueError, match=text):
        bnuq.collect(model, [x], progress=False)
