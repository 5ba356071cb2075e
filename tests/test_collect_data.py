"""`collect`: where batches come from and how they are drawn."""

import math
from typing import NamedTuple

import pytest
import torch
from rows import ROWS, WIDTH, N, Numbered, chunks, expected_bank, loader, make_model
from scipy import stats
from torch import nn
from torch.utils import data as torch_data

import bnuq_ext as bnuq
from bnuq_ext.batches import Source, _draws
from bnuq_ext.inputs import move, tensors

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
    assert all(x is ROWS for x in tensors(move(inputs, torch.device("cpu"))))


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


def test_the_size_that_most_batches_have_is_that_of_the_bank():
    batches = [ROWS[:5], ROWS[5:13], *ROWS[13:28].split(3), ROWS[28:30]]
    bank = bnuq.collect(make_model(), batches, 9)
    assert bank.count["1"].tolist() == [5, 8, 3, 3, 3, 3, 3, 2]
    assert (bank.batch_size, bank.dataset_size) == (3, 30)


class Rows(torch_data.Sampler):
    def __iter__(self):
        return iter(range(0, N, 2))

    def __len__(self):
        return N // 2


class Shuffled(Rows):
    def __iter__(self):
        return iter((2 * torch.randperm(N // 2)).tolist())


class Stream(torch_data.IterableDataset):
    def __iter__(self):
        return iter(ROWS)


class SizedStream(Stream):
    def __len__(self):
        return N


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
        1.0,
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
        1.0,
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
    "another sampler that shuffles": (sampler_loader(Shuffled()), 20, 20, N, 0.0),
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
    "stream of known size": (torch_data.DataLoader(SizedStream(), batch_size=8), 12, 12, N, 1.0),
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


def test_other_tensors_than_the_first_may_be_infinite():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm1d(WIDTH)

        def forward(self, x, mask):
            return self.bn((x[:, :, None] + mask).softmax(1).sum(2) + x)

    mask = torch.full((WIDTH, WIDTH), -torch.inf).triu(1)
    model = bnuq.convert(Masked())
    bank = bnuq.collect(model, chunks(), 15, input_fn=lambda x: (x, mask))
    assert len(bank) == 15 and bank.mean["bn"].isfinite().all()
    with pytest.raises(
        ValueError, match="batch 0 must be finite, got NaN or infinity in the input"
    ):
        bnuq.collect(model, chunks(), 15, input_fn=lambda x: (x * torch.inf, mask))


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
    """chi2 of the rows and z of the overlap of neighbours, alpha 1e-6 each,
    4,000 batches of 5 of 20.

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


class Halved(torch_data.TensorDataset):
    """Makes something else of its tensors."""

    def __getitem__(self, index):
        return (super().__getitem__(index)[0] / 2,)


def test_a_tensor_dataset_with_rows_of_its_own_is_asked_for_them():
    with pytest.warns(UserWarning, match="more than a tenth"):
        bank = bnuq.collect(make_model(), Halved(ROWS), 1, batch_size=N)
    expected = expected_bank([ROWS / 2])
    assert torch.equal(bank.mean["1"], expected.mean["1"])
    assert torch.equal(bank.var["1"], expected.var["1"])


def test_a_tuple_of_tensors_is_a_data_set_where_rows_are_drawn():
    torch.manual_seed(1)
    bank = bnuq.collect(make_model(), (ROWS, torch.arange(N)), 4, batch_size=8)
    torch.manual_seed(1)
    expected = bnuq.collect(make_model(), torch_data.TensorDataset(ROWS), 4, batch_size=8)
    assert bank.equal(expected) and bank.dataset_size == N


def test_a_loader_that_shuffles_and_gives_nothing_is_not_asked_for_ever():
    passes = iter([["first", "second"], [], ["third"]])
    loader = type("Loader", (), {"__iter__": lambda self: iter(next(passes))})
    source = Source(loader, reshuffles=True)
    assert list(source.batches(5)) == [(0, "first"), (0, "second")]
