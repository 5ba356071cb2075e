"""Loaders of unusual kinds: that use their memory again, that have no length, that choose rows."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import data as torch_data

import bnuq_ext as bnuq
from bnuq_ext.batches import Source

N, M = 80, 8
ROWS = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(N) % 3
DATA = torch_data.TensorDataset(ROWS, LABELS)
OPTIONS = {"likelihood": "categorical", "num_samples": 3, "seed": 0}


@pytest.fixture
def model():
    torch.manual_seed(0)
    made = bnuq.convert(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))
    bnuq.collect(made, DATA, 6, batch_size=M)
    return made


def same_memory(*parts):
    """Batches of the parts, each in the memory of the one before."""
    buffers = [torch.empty_like(part[:M]) for part in parts]
    for start in range(0, N, M):
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part[start : start + M])
        yield tuple(buffers) if len(buffers) > 1 else buffers[0]


@pytest.mark.parametrize("predict", [bnuq.predict, bnuq.plug_in, bnuq.mc_dropout])
def test_targets_in_memory_that_is_used_again(model, predict):
    options = {"likelihood": "categorical"} if predict is bnuq.plug_in else OPTIONS
    if predict is bnuq.mc_dropout:
        model.append(nn.Dropout(0.1))
    found = predict(model, same_memory(ROWS, LABELS), **options)
    assert torch.equal(found.targets, LABELS)


@pytest.mark.parametrize("query", ["in", "out"])
def test_batches_in_memory_that_is_used_again(model, query):
    options = {**OPTIONS, "sampler": "batch", "query": query}
    found = bnuq.predict(model, ROWS[:5], loader=same_memory(ROWS), **options)
    kept = bnuq.predict(model, ROWS[:5], loader=list(ROWS.split(M)), **options)
    assert torch.equal(found.mean, kept.mean) and found.variance.max() > 0


class Stream(torch_data.IterableDataset):
    """Its length is unknown, or known."""

    def __init__(self, length=None):
        self.length = length

    def __iter__(self):
        return iter(ROWS)

    def __len__(self):
        if self.length is None:
            raise TypeError("no length")
        return self.length


def test_a_length_that_is_not_known(model):
    loader = torch_data.DataLoader(Stream(), M)
    bank = bnuq.collect(model, loader, 10)
    assert len(bank) == 10 and bank.dataset_size == N
    found = bnuq.predict(model, ROWS[:5], loader=loader, sampler="batch", **OPTIONS)
    kept = bnuq.predict(model, ROWS[:5], loader=list(ROWS.split(M)), sampler="batch", **OPTIONS)
    assert torch.equal(found.mean, kept.mean)


def test_a_stream_has_no_rows_to_draw(model):
    with pytest.raises(TypeError, match="data must be a map-style data set.*, got Stream$"):
        bnuq.collect(model, Stream(N), 4, batch_size=M)
    loader = torch_data.DataLoader(Stream(N), M)
    with pytest.raises(TypeError, match="data must be a map-style data set.*, got Stream$"):
        bnuq.statistics_normality(model, loader, batch_size=M)
    with pytest.raises(TypeError, match="data must be a map-style data set.*, got Stream$"):
        bnuq.fit_batch_size(model, loader, [4, 8], likelihood="categorical", validation=DATA)


class Buckets(torch_data.Sampler):
    batch_size = [4, 6]

    def __iter__(self):
        return iter([list(range(4)), list(range(4, 10)), list(range(10, 14))])


def test_a_batch_sampler_of_several_sizes(model):
    bank = bnuq.collect(model, torch_data.DataLoader(DATA, batch_sampler=Buckets()), 3)
    assert bank.count["1"].tolist() == [4, 6, 4] and bank.batch_size == 4


def test_a_batch_sampler_with_a_size_of_numpy(model):
    sampler = torch_data.BatchSampler(torch_data.RandomSampler(DATA), M, False)
    sampler.batch_size = np.int64(M)
    bank = bnuq.collect(model, torch_data.DataLoader(DATA, batch_sampler=sampler), 3)
    assert bank.batch_size == M and bank.dataset_size == N


def test_the_data_are_the_rows_that_the_sampler_draws_from(model):
    sampler = torch_data.RandomSampler(range(50))
    assert (
        bnuq.collect(model, torch_data.DataLoader(DATA, 4, sampler=sampler), 3).dataset_size == 50
    )


@pytest.mark.parametrize(
    "part, options",
    [
        ("collate_fn", {"collate_fn": torch_data.default_collate}),
        ("sampler", {"sampler": torch_data.SubsetRandomSampler(range(40))}),
        ("sampler", {"batch_sampler": torch_data.BatchSampler(Buckets(), 4, False)}),
    ],
)
def test_what_of_a_loader_is_not_used_is_said(model, part, options):
    if part == "collate_fn":
        options = {part: lambda rows: torch_data.default_collate(rows)}
    size = {} if "batch_sampler" in options else {"batch_size": M}
    loader = torch_data.DataLoader(DATA, **size, **options)
    message = f"data stands for its data set, without its {part}$"
    with pytest.warns(UserWarning, match=message):
        bnuq.statistics_normality(model, loader, batch_size=M, num_batches=8)
    with pytest.warns(UserWarning, match=message):
        bnuq.fit_batch_size(model, loader, [4, 8], likelihood="categorical", num_samples=8)
    for plain in (torch_data.DataLoader(DATA, M, shuffle=True), torch_data.DataLoader(DATA, None)):
        bnuq.fit_batch_size(model, plain, [4, 8], likelihood="categorical", num_samples=8)


def test_a_bank_holds_plain_tensors(model):
    class Sub(torch.Tensor):
        pass

    bank = bnuq.collect(model, [rows.as_subclass(Sub) for rows in ROWS.split(M)], 4)
    assert {type(t) for t in (*bank.mean.values(), *bank.var.values())} == {torch.Tensor}
    assert bank.equal(bnuq.collect(model, list(ROWS.split(M)), 4))


@pytest.mark.parametrize("data", [(ROWS.numpy(), LABELS), (ROWS, LABELS.numpy())])
def test_arrays_beside_tensors_are_refused(model, data):
    with pytest.raises(TypeError, match="^collect: data must hold tensors .*, got NumPy arrays$"):
        bnuq.collect(model, data, 3, batch_size=M)


class Alternating(nn.Module):
    """Its state is back where it was after so many forwards."""

    def __init__(self, period, as_buffer):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.outer = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.period, self.as_buffer, self.turn = period, as_buffer, 0
        self.register_buffer("turns", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.turn = (self.turn + 1) % self.period
        if self.as_buffer:
            self.turns += 1
            self.turns %= self.period
        scale = 1 + (self.turns if self.as_buffer else self.turn)
        return self.outer(scale * self.norm(self.inner(x)).relu())


@pytest.mark.parametrize("strategy", ["auto", "loop"])
@pytest.mark.parametrize("as_buffer", [False, True])
@pytest.mark.parametrize("period", [2, 3, 4])
def test_a_state_that_comes_back(period, as_buffer, strategy):
    """Each batch begins with what the one before has left."""
    plain = Alternating(period, as_buffer).eval()
    model = bnuq.convert(plain)
    bank = bnuq.collect(model, DATA, 6, batch_size=M)
    model.turn = 0
    model.turns.zero_()
    options = {**OPTIONS, "likelihood": "gaussian", "keep_samples": True}
    pred = bnuq.predict(model, [*ROWS.split(M)], strategy=strategy, **options)
    of_batches = []
    for rows in ROWS.split(M):
        of_replicas = []
        for snapshot in pred.snapshots:
            plain.norm.running_mean.copy_(bank.mean["norm"][snapshot])
            plain.norm.running_var.copy_(bank.var["norm"][snapshot])
            of_replicas.append(plain(rows).detach())
        of_batches.append(torch.stack(of_replicas))
    torch.testing.assert_close(pred.samples, torch.cat(of_batches, 1))
    assert (model.turn, model.turns) == (plain.turn, plain.turns)


class InTurn(torch_data.SequentialSampler):
    pass


def test_a_sampler_of_ones_own_is_said_not_to_be_used(model):
    loader = torch_data.DataLoader(DATA, M, sampler=InTurn(DATA))
    with pytest.warns(UserWarning, match="data stands for its data set, without its sampler$"):
        bnuq.statistics_normality(model, loader, batch_size=M, num_batches=8)


class Backwards(torch_data.Sampler):
    """In one order, by a sampler that is not torch's."""

    def __iter__(self):
        return iter(range(N - 1, -1, -1))

    def __len__(self):
        return N


def test_a_sampler_of_ones_own_with_one_order_is_gone_through_once(model):
    loader = torch_data.DataLoader(DATA, M, sampler=Backwards())
    assert len(bnuq.collect(model, loader, 2 * N // M)) == N // M


def test_passes_are_told_apart_by_all_their_tensors():
    class Passes:
        def __iter__(self):
            return iter([passes.pop(0)])

    passes = [(ROWS,), (ROWS, LABELS), (ROWS, LABELS)]
    source = Source(Passes, reshuffles=None)
    assert [number for number, _ in source.batches(4)] == [0, 1]


def test_a_first_batch_in_memory_that_is_used_again():
    class Passes:
        def __iter__(self):
            return iter([memory.add_(1)])

    memory = torch.zeros(M, 4)
    source = Source(Passes, reshuffles=None)
    assert [number for number, _ in source.batches(3)] == [0, 1, 2]
