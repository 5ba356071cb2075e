"""`collect`: where batches come from, how they are drawn, what it warns of and what it refuses."""

import io
import math
import re
import sys
from typing import NamedTuple

import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils import data as torch_data

import bnuq_ext as bnuq
from bnuq_ext.batches import _draws
from bnuq_ext.inputs import move, tensors

N, WIDTH = 120, 4
ROWS = torch.randn(N, WIDTH, generator=torch.Generator().manual_seed(0)) + torch.arange(N)[:, None]


def make_model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return bnuq.convert(nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3)))


class Numbered(torch_data.Dataset):
    """(row, label), and a list of the rows asked for."""

    def __init__(self, rows=ROWS):
        self.rows, self.asked = rows, []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.asked.append(index)
        return self.rows[index], index


def chunks(size=8):
    return list(ROWS.split(size))


def loader(batch_size=8, shuffle=True, **arguments):
    return torch_data.DataLoader(Numbered(), batch_size=batch_size, shuffle=shuffle, **arguments)


def expected_bank(data):
    return bnuq.collect(make_model(), data, len(data))


# ---- what a batch may be -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: x,
        lambda x: (x, "label"),
        lambda x: [x, torch.zeros(3)],
        lambda x: {"input": x, "x": 3},
        lambda x: {"x": x, "y": 3},
    ],
    ids=["tensor", "tuple", "list", "input", "x"],
)
def test_batches(wrap):
    bank = bnuq.collect(make_model(), (wrap(x) for x in chunks()), 15)
    assert bank.equal(expected_bank(chunks()))


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(WIDTH)

    def forward(self, a, b, scale=1.0):
        return self.bn(a * scale + b[0])


@pytest.mark.parametrize(
    "input_fn",
    [
        lambda x: (x, [x + 1], 2.0),
        lambda x: {"a": x, "b": (x + 1,), "scale": 2.0},
    ],
    ids=["tuple", "dict"],
)
def test_input_fn(input_fn, device):
    model = bnuq.convert(TwoInputs()).to(device)
    bank = bnuq.collect(model, chunks(), 15, input_fn=input_fn)
    expected = torch.stack([(3 * x + 1).mean(0) for x in chunks()])
    torch.testing.assert_close(bank.mean["bn"], expected)
    assert bank.batch_size == 8


class Pair(NamedTuple):
    first: torch.Tensor
    second: int


def test_inputs_go_to_a_device():
    inputs = {"a": ROWS, "b": (ROWS, [ROWS, "text"]), "c": Pair(ROWS, 3)}
    moved = move(inputs, torch.device("meta"))
    assert [x.device.type for x in tensors(moved)] == ["meta"] * 4
    assert moved["b"][1][1] == "text" and moved["c"].second == 3
    assert all(x is ROWS for x in tensors(move(inputs, None)))
    with pytest.raises(RuntimeError, match="meta"):
        bnuq.collect(make_model(), chunks(), 15, device="meta")


def test_loader():
    torch.manual_seed(3)
    data = loader()
    bank = bnuq.collect(make_model(), data, 15)
    order = [list(map(int, labels)) for _, labels in data]
    for b, rows in enumerate(order):
        expected = make_model()[0](ROWS[rows]).mean(0)
        torch.testing.assert_close(bank.mean["1"][b], expected.detach(), rtol=1e-4, atol=1e-5)
    assert (len(bank), bank.batch_size, bank.dataset_size, bank.disjoint) == (15, 8, N, 1.0)


def test_loader_with_workers():
    torch.manual_seed(3)
    alone = bnuq.collect(make_model(), loader(), 20)
    torch.manual_seed(3)
    shared = bnuq.collect(make_model(), loader(num_workers=2), 20)
    assert shared.equal(alone)


def test_a_loader_that_shuffles_is_gone_through_again():
    bank = bnuq.collect(make_model(), loader(batch_size=12), 24)
    assert len(bank) == 24 and bank.mean["1"].unique(dim=0).shape[0] == 24
    # Passes of 10, 10 and 4 batches.
    pairs = 2 * math.comb(10, 2) + math.comb(4, 2)
    assert bank.disjoint == pairs / math.comb(24, 2)
    assert (bank.batch_size, bank.dataset_size) == (12, N)


def test_the_last_batch_of_a_pass_keeps_its_count():
    bank = bnuq.collect(make_model(), loader(batch_size=11), 11)
    assert sorted(bank.count["1"].tolist()) == [10] + [11] * 10 and bank.batch_size == 11


class Rows(torch_data.Sampler):
    def __iter__(self):
        return iter(range(0, N, 2))

    def __len__(self):
        return N // 2


class Stream(torch_data.IterableDataset):
    def __iter__(self):
        return iter(ROWS)


class Chunks(torch_data.Dataset):
    def __len__(self):
        return 15

    def __getitem__(self, index):
        return ROWS[8 * index : 8 * index + 8]


class Pairs(torch_data.BatchSampler):
    """A batch sampler of one's own: nothing is known of its batches."""


def sampler_loader(sampler, **arguments):
    return torch_data.DataLoader(Numbered(), batch_size=8, sampler=sampler, **arguments)


SHUFFLED = torch_data.RandomSampler(range(N))
KNOWLEDGE = {
    # name: (loader, batches asked for, batches got, N, fraction disjoint)
    "shuffle": (loader(), 15, 15, N, 1.0),
    "one": (loader(), 1, 1, N, 1.0),
    "subset": (sampler_loader(torch_data.SubsetRandomSampler(range(96))), 24, 24, 96, 11 / 23),
    "replacement": (
        sampler_loader(torch_data.RandomSampler(range(N), replacement=True)),
        20,
        20,
        N,
        0.0,
    ),
    "more samples than rows": (
        sampler_loader(torch_data.RandomSampler(range(N), num_samples=2 * N)),
        20,
        20,
        N,
        0.0,
    ),
    "weighted": (
        sampler_loader(torch_data.WeightedRandomSampler(torch.ones(N), N)),
        20,
        20,
        N,
        0.0,
    ),
    "weighted, each once": (
        sampler_loader(torch_data.WeightedRandomSampler(torch.ones(N), 80, replacement=False)),
        20,
        20,
        N,
        9 / 19,
    ),
    "distributed": (
        sampler_loader(torch_data.DistributedSampler(range(N), num_replicas=1, rank=0)),
        20,
        15,
        N,
        1.0,
    ),
    "another sampler": (sampler_loader(Rows()), 20, 8, N, 0.0),
    "batch sampler": (
        torch_data.DataLoader(Numbered(), batch_sampler=torch_data.BatchSampler(SHUFFLED, 8, True)),
        20,
        20,
        N,
        (105 + 10) / 190,
    ),
    "another batch sampler": (
        torch_data.DataLoader(Numbered(), batch_sampler=Pairs(SHUFFLED, 8, True)),
        20,
        20,
        N,
        0.0,
    ),
    "list of batches": (
        torch_data.DataLoader(Numbered(), batch_sampler=[range(8), range(4, 12)]),
        2,
        2,
        N,
        0.0,
    ),
    "stream": (torch_data.DataLoader(Stream(), batch_size=8), 12, 12, 96, 1.0),
    "data set of batches": (
        torch_data.DataLoader(Chunks(), batch_size=None, shuffle=True),
        12,
        12,
        96,
        1.0,
    ),
}


@pytest.mark.filterwarnings("ignore:collect. the data ended")
@pytest.mark.parametrize("name", KNOWLEDGE)
def test_what_is_known_of_a_loader(name):
    data, asked, got, dataset_size, disjoint = KNOWLEDGE[name]
    bank = bnuq.collect(make_model(), data, asked)
    found = (len(bank), bank.batch_size, bank.dataset_size)
    assert found == (got, 8, dataset_size)
    assert bank.disjoint == pytest.approx(disjoint, abs=1e-12)


def test_rows_that_a_loader_makes_more_of():
    def crops(samples):
        x = torch.stack([x for x, _ in samples])
        return torch.cat([x + i for i in range(20)])

    bank = bnuq.collect(make_model(), loader(collate_fn=crops), 15)
    assert (bank.batch_size, bank.dataset_size) == (160, 2400)


# ---- draws from a data set ---------------------------------------------------------------------


class Fetched(Numbered):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.parametrize(
    "dataset",
    [Numbered(), Fetched(), ROWS, ROWS.numpy(), list(ROWS), [{"x": row} for row in ROWS]],
    ids=["dataset", "getitems", "tensor", "array", "list", "dicts"],
)
def test_data_sets(dataset):
    torch.manual_seed(5)
    bank = bnuq.collect(make_model(), dataset, 20, batch_size=10)
    torch.manual_seed(5)
    draws = _draws(Numbered(), 10)
    drawn = [next(draws)[0] for _ in range(20)]
    assert (len(bank), bank.batch_size, bank.dataset_size, bank.disjoint) == (20, 10, N, 0.0)
    for b, x in enumerate(drawn):
        torch.testing.assert_close(
            bank.mean["1"][b], make_model()[0](x).mean(0).detach(), rtol=1e-4, atol=1e-5
        )


def test_rows_are_drawn_without_replacement_and_batches_independently():
    """chi2 of the rows and z of the overlap of neighbours, alpha 1e-6 each, 4,000 batches of 5 of 20.

    Finds (power 0.999) a row drawn 3.6 % more often, and a mean overlap off by 0.11 of 1.25.
    """
    M, rows, num_batches = 5, 20, 4000
    dataset = Numbered(ROWS[:rows])
    torch.manual_seed(0)
    draws = _draws(dataset, M)
    for _ in range(num_batches):
        next(draws)
    drawn = torch.tensor(dataset.asked).view(num_batches, M)
    assert (drawn.diff(dim=1) > 0).all()
    p = M / rows
    counts = torch.bincount(drawn.flatten(), minlength=rows).double()
    # The counts of one batch add up to M: their covariance has this factor over the multinomial's.
    chi2 = ((counts - num_batches * p) ** 2).sum() / (num_batches * p * (1 - p)) * (rows - 1) / rows
    assert stats.chi2.sf(chi2.item(), rows - 1) > 1e-6
    overlap = (drawn[:-1, :, None] == drawn[1:, None, :]).sum((1, 2)).double()
    variance = M * p * (1 - p) * (rows - M) / (rows - 1)
    z = (overlap.mean() - M * p) / math.sqrt(variance / len(overlap))
    assert abs(z) < stats.norm.isf(0.5e-6)


def test_batches_of_all_rows_have_identical_statistics():
    with pytest.warns(
        UserWarning, match="the batches have 120 rows, more than a tenth of the data's"
    ):
        bank = bnuq.collect(make_model(), Numbered(), 5, batch_size=N)
    assert (bank.mean["1"] == bank.mean["1"][0]).all() and (bank.var["1"] == bank.var["1"][0]).all()


@pytest.mark.parametrize("source", ["loader", "data set"])
def test_draws_follow_torchs_generator(source):
    def bank(seed):
        torch.manual_seed(seed)
        if source == "loader":
            return bnuq.collect(make_model(), loader(), 10)
        return bnuq.collect(make_model(), Numbered(), 10, batch_size=8)

    assert bank(7).equal(bank(7)) and not bank(7).equal(bank(8))


# ---- warnings ----------------------------------------------------------------------------------


def test_warns_of_a_loader_that_does_not_shuffle():
    text = "collect: the loader does not shuffle, and batches in the order of the data"
    in_order = torch_data.BatchSampler(torch_data.SequentialSampler(range(N)), 8, False)
    for data in (loader(shuffle=False), torch_data.DataLoader(Numbered(), batch_sampler=in_order)):
        with pytest.warns(UserWarning, match=text) as caught:
            bank = bnuq.collect(make_model(), data, 10)
        assert len(caught) == 1 and caught[0].filename == __file__
        assert bank.disjoint == 1.0


def test_one_batch_of_everything_needs_no_shuffling():
    for data in (loader(batch_size=N, shuffle=False), loader(batch_size=500, shuffle=False)):
        with pytest.warns(UserWarning, match="more than a tenth") as caught:
            bank = bnuq.collect(make_model(), data, 1)
        assert len(caught) == 1 and (bank.batch_size, bank.dataset_size) == (N, N)


def test_warns_of_data_that_ended():
    with pytest.warns(
        UserWarning, match="collect: the data ended after 15 of 64 batches"
    ) as caught:
        assert len(bnuq.collect(make_model(), chunks())) == 15
    assert len(caught) == 1 and caught[0].filename == __file__


def test_warns_of_large_batches():
    text = (
        "collect: the batches have 13 rows, more than a tenth of the data's 120: the larger they are the "
        "less their statistics vary, and the mutual information vanishes"
    )
    with pytest.warns(UserWarning, match=text) as caught:
        bnuq.collect(make_model(), Numbered(), 3, batch_size=13)
    assert len(caught) == 1 and caught[0].filename == __file__
    bnuq.collect(make_model(), Numbered(), 3, batch_size=12)
    # Nothing tells how much more an iterable has.
    bnuq.collect(make_model(), iter(chunks(40)), 2)
    with pytest.warns(UserWarning) as caught:
        bnuq.collect(make_model(), iter(chunks(40)), 4)
    assert [str(w.message)[:40] for w in caught] == [
        "collect: the data ended after 3 of 4 bat",
        "collect: the batches have 40 rows, more ",
    ]


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
            distributed,
            ValueError,
            "model must not be wrapped for several devices, got DistributedDataParallel; give its",
        ),
    ):
        with pytest.raises(error, match=re.escape(f"collect: {text}")):
            bnuq.collect(model, chunks())


BATCH = (
    "a batch must be a tensor, a tuple whose first entry is one, or a dict with one under 'input' or 'x' "
    "(input_fn takes it out of anything else), got "
)
SOURCE = "data must be a loader, an iterable of batches, or a data set, got "
MAP_STYLE = "data must be a map-style data set when batch_size is given, got "
REFUSED = [
    (dict(num_batches=0), ValueError, "num_batches must be at least 1, got 0"),
    (dict(num_batches=2.0), TypeError, "num_batches must be an integer, got 2.0"),
    (dict(num_batches=True), TypeError, "num_batches must be an integer, got True"),
    (
        dict(on_nonfinite="ignore"),
        ValueError,
        "on_nonfinite must be 'raise' or 'skip', got 'ignore'",
    ),
    (dict(input_fn=3), TypeError, "input_fn must be callable, got 3"),
    (
        dict(input_fn=lambda x: [x]),
        TypeError,
        "input_fn must return a tensor, a tuple or a dict, got list",
    ),
    (dict(input_fn=lambda x: (3,)), ValueError, "an input must hold a tensor with rows, got none"),
    (dict(data=[torch.tensor(3.0)]), ValueError, "an input must hold a tensor with rows, got none"),
    (dict(device="gpu"), ValueError, "device must name a torch device, got 'gpu'"),
    (dict(device=2.5), ValueError, "device must name a torch device, got 2.5"),
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
    (dict(data=ROWS, batch_size=1), ValueError, "batch_size must be at least 2, got 1"),
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
