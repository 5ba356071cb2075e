"""What M and N of a collected bank count: rows, also where a batch has others than its items."""

from contextlib import nullcontext

import pytest
import torch
from test_collect_data import ROWS, WIDTH, N, loader, make_model
from torch import nn
from torch.utils import data as torch_data

import bnuq_ext as bnuq


@pytest.mark.parametrize(
    "input_fn,batch_size,dataset_size",
    [
        (lambda batch: (list(batch[0]),), 8, N),
        (lambda batch: batch[0].expand(20, *batch[0].shape), 8, N),
        (lambda batch: batch[0][:4], 4, N),
        (lambda batch: (batch[0][:4],), 4, N),
        (lambda batch: torch.cat([batch[0], -batch[0]]), 16, 2 * N),
    ],
    ids=[
        "a list of rows",
        "rows second",
        "half of them",
        "half of them in a tuple",
        "twice as many",
    ],
)
def test_rows_of_a_loader_behind_input_fn(input_fn, batch_size, dataset_size):
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm1d(WIDTH)

        def forward(self, x):
            x = torch.stack(x) if isinstance(x, list) else x
            return self.bn(x if x.dim() == 2 else x.mean(0))

    bank = bnuq.collect(bnuq.convert(Rows()), loader(), 15, input_fn=input_fn)
    assert bank.batch_size == batch_size and bank.dataset_size == dataset_size
    assert bank.count["bn"].max() == batch_size


@pytest.mark.filterwarnings("ignore:collect. the batches have 20 rows")
def test_items_that_are_batches():
    data = torch_data.DataLoader(list(ROWS.split(20)), 1, collate_fn=lambda s: s[0], shuffle=True)
    bank = bnuq.collect(make_model(), data, 6, input_fn=lambda x: (x,))
    assert (bank.batch_size, bank.dataset_size) == (20, N)


def test_rows_that_a_loader_makes_more_of():
    def crops(samples):
        x = torch.stack([x for x, _ in samples])
        return torch.cat([x + i for i in range(20)])

    bank = bnuq.collect(make_model(), loader(collate_fn=crops), 15)
    assert (bank.batch_size, bank.dataset_size) == (160, 2400)


@pytest.mark.parametrize("nodes", [lambda i: 20, lambda i: 18 + i % 5], ids=["even", "uneven"])
def test_nodes_of_graphs_count_in_both(nodes):
    """32 of 1000 graphs are 3 % of the data, whatever a graph has of nodes: no warning."""
    graphs = [torch.randn(nodes(i), WIDTH) for i in range(1000)]
    data = torch_data.DataLoader(graphs, 32, shuffle=True, collate_fn=torch.cat)
    bank = bnuq.collect(make_model(), data, 31)
    rows = bank.count["1"].tolist()
    assert bank.batch_size in rows and bank.dataset_size == bank.batch_size * 1000 // 32
    assert 0.9 * 20_000 < bank.dataset_size < 1.1 * 20_000


def test_all_items_of_many_rows_are_all_rows():
    """M = N, where nothing may vary, is all the loader has."""

    def views(samples):
        x = torch.stack([x for x, _ in samples])
        return torch.cat([x, -x])

    with pytest.warns(UserWarning, match=f"the batches have {2 * N} rows, more than a tenth"):
        bank = bnuq.collect(make_model(), loader(batch_size=N, collate_fn=views), 2)
    assert (bank.batch_size, bank.dataset_size) == (2 * N, 2 * N)


class Images(nn.Module):
    """Takes its images in a list, as detectors do."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, images):
        return self.bn(self.conv(torch.stack(images))).mean((2, 3))


class Buckets:
    """A batch sampler of one's own, which does not say how many rows it takes."""

    def __iter__(self):
        return iter(torch.randperm(400).view(-1, 20).tolist())

    def __len__(self):
        return 20


@pytest.mark.parametrize("size", [10, 11])  # of maps of 64 and 81: a multiple of the channels
@pytest.mark.parametrize("listed", [False, True], ids=["loader", "list of batches"])
@pytest.mark.parametrize("named", [False, True])
def test_images_in_a_list_count(listed, size, named):
    """Not the three channels of the first."""
    images = torch_data.TensorDataset(torch.randn(400, 3, size, size))
    collate = lambda samples: [image for (image,) in samples]  # noqa: E731
    data = torch_data.DataLoader(images, batch_sampler=Buckets(), collate_fn=collate)
    data = list(data) if listed else data
    given = lambda batch: {"images": batch} if named else (batch,)  # noqa: E731
    bank = bnuq.collect(bnuq.convert(Images()), data, 20, input_fn=given)
    assert (bank.batch_size, bank.dataset_size) == (20, 400)


def test_parts_of_an_input_in_a_list_are_no_rows():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.nodes, self.edges = nn.BatchNorm1d(6), nn.BatchNorm1d(6)

        def forward(self, parts):
            return self.nodes(parts[0]).sum() + self.edges(parts[1]).sum()

    batches = [([torch.randn(100, 6), torch.randn(331, 6)],) for _ in range(20)]
    bank = bnuq.collect(bnuq.convert(Graph()), batches, 20, input_fn=lambda batch: batch)
    assert (bank.batch_size, bank.dataset_size) == (100, 2000)


class Steps(nn.Module):
    """A recurrent network with time first, torch's default, and batch norm behind its last step."""

    def __init__(self):
        super().__init__()
        self.recurrent, self.bn = nn.GRU(WIDTH, 5), nn.BatchNorm1d(5)

    def forward(self, x, *, scale=1.0, **others):
        return self.bn(self.recurrent(x)[0][-1] * scale)


@pytest.mark.parametrize("length", [2, 3, 4, 8, 16, 24])
@pytest.mark.parametrize("form", ["loader", "data set", "batches"])
def test_steps_of_sequences_are_no_rows(form, length):
    data = torch_data.TensorDataset(torch.randn(400, length, WIDTH))
    given = {"data": data, "batch_size": 8}
    if form != "data set":
        given = {"data": torch_data.DataLoader(data, 8, shuffle=True)}
    if form == "batches":
        given = {"data": list(given["data"])}
    told = form != "batches"  # else nothing tells of 8
    model, doubtful = bnuq.convert(Steps()), not told and 8 % length != 0
    doubt = f"M is taken as {length}, the first size of the input, but layers see multiples of 8;"
    with pytest.warns(UserWarning, match=doubt) if doubtful else nullcontext():
        bank = bnuq.collect(model, **given, num_batches=50, input_fn=lambda b: b[0].transpose(0, 1))
    assert bank.count["bn"].eq(8).all()
    assert (bank.batch_size, bank.dataset_size) == ((8, 400) if told else (length, 50 * length))


@pytest.mark.parametrize("told", [True, False])
def test_a_batch_size_that_is_told_is_not_doubted(told):
    """Of 16 rows and 5 others, which are seven channels' multiple."""

    class Among(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn, self.others = nn.BatchNorm1d(7), torch.randn(5, 7)

        def forward(self, x):
            return self.bn(torch.cat([x, self.others]))

    data = torch_data.DataLoader(torch.randn(320, 7), 16, shuffle=True)
    model, data = bnuq.convert(Among()), data if told else list(data)
    doubt = "M is taken as 16, the first size of the input, but layers see multiples of 7;"
    with nullcontext() if told else pytest.warns(UserWarning, match=doubt):
        bank = bnuq.collect(model, data, 20)
    assert (bank.batch_size, bank.dataset_size) == (16, 320)


def test_other_arguments_before_the_rows():
    data = torch_data.TensorDataset(torch.randn(404, WIDTH))
    batches = torch_data.DataLoader(data, 8, shuffle=True)

    def keywords(batch):
        return {"scale": torch.ones(1), "x": batch[0][None], "mask": torch.ones(len(batch[0]))}

    bank = bnuq.collect(bnuq.convert(Steps()), batches, 50, input_fn=keywords)
    assert (bank.batch_size, bank.dataset_size) == (8, 404)


def test_edges_of_graphs_before_their_nodes():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm1d(WIDTH)

        def forward(self, edges, nodes):
            return self.bn(nodes.index_add(0, edges[0], nodes[edges[1]]))

    def together(graphs):
        edges = torch.cat([e + 12 * i for i, (e, _) in enumerate(graphs)], 1)
        return edges, torch.cat([nodes for _, nodes in graphs])

    graphs = [(torch.randint(12, (2, 30)), torch.randn(12, WIDTH)) for _ in range(200)]
    data = torch_data.DataLoader(graphs, 4, shuffle=True, collate_fn=together)
    bank = bnuq.collect(bnuq.convert(Graph()), data, 50, input_fn=lambda batch: batch)
    assert (bank.batch_size, bank.dataset_size) == (48, 2400)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_have_their_number_of_rows():
    class Ragged(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm1d(WIDTH)

        def forward(self, x):
            return self.bn(x.values())

    def batch():
        rows = [torch.randn(2 + i % 3, WIDTH) for i in range(8)]
        return torch.nested.nested_tensor(rows, layout=torch.jagged)

    bank = bnuq.collect(bnuq.convert(Ragged()), [batch() for _ in range(6)], 6)
    assert (bank.batch_size, bank.dataset_size) == (8, 48)


def test_channels_are_no_rows_where_fewer_rows_are_left():
    """Of 20 rows of 32 channels and 64 places some 15 are taken: 32 divides all counts."""
    model = bnuq.convert(nn.Sequential(nn.BatchNorm1d(32)))
    data = torch_data.DataLoader(
        torch_data.TensorDataset(torch.randn(400, 32, 64)), 20, shuffle=True
    )
    sizes = iter([15, 15, 14, 15, 16, 15])
    bank = bnuq.collect(model, data, 6, input_fn=lambda batch: batch[0][: next(sizes)])
    assert (bank.batch_size, bank.dataset_size) == (15, 400)


@pytest.mark.filterwarnings("ignore:collect. the batches have 32 rows")
@pytest.mark.parametrize("form", ["list", "iterable", "items"])
def test_where_nothing_tells_of_items_the_first_size_counts(form):
    """Though layers see no multiple of it, but of the channels."""

    class Among(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn, self.others = nn.BatchNorm2d(1), torch.randn(5, 1, 7, 7)

        def forward(self, x):
            return self.bn(torch.cat([x, self.others]))

    class Stream(torch_data.IterableDataset):
        def __iter__(self):
            return iter(torch.randn(96, 1, 7, 7))

    data = [torch.randn(32, 1, 7, 7) for _ in range(3)]
    if form == "iterable":
        data = torch_data.DataLoader(Stream(), 32)
    if form == "items":
        data = torch_data.DataLoader(data, 1, shuffle=True, collate_fn=lambda items: items[0])
    bank = bnuq.collect(bnuq.convert(Among()), data, 3)
    assert (bank.batch_size, bank.dataset_size) == (32, 96)
