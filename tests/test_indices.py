"""What would end the process on a GPU is an error in a trial there, before it is computed."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from coupled import ROWS, D, Norms
from folded import assert_goes_as_the_loop, samples, way
from test_unset_flags import collected
from torch import nn, tensor

import bnuq_ext as bnuq
from bnuq_ext.passes import DoesNotFold
from bnuq_ext.proof import indices
from bnuq_ext.proof.indices import checked_indices

T = torch.randn(3, 4)
HELD = nn.Embedding(3, 4)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Whatever is computed here is checked."""
    monkeypatch.setattr(indices, "_ends_process", lambda t: True)


# What each operation makes of a number, with those that suit it and those that do not.
TAKEN = {
    "index": (lambda i: T[tensor([i, 0])], (-3, 2), (-4, 3)),
    "second index": (lambda i: T[:, tensor([i])], (-4, 3), (-5, 4)),
    "index behind a mask": (lambda i: T[None, T[:, 0] < 9, tensor([i, i, i])], (-4, 3), (-5, 4)),
    "index_put": (lambda i: T.clone().index_put((tensor([i]),), tensor(1.0)), (-3, 2), (-4, 3)),
    "assignment": (lambda i: T.clone().__setitem__((slice(None), tensor([i])), 1.0), (-4, 3), (-5, 4)),
    "index_select": (lambda i: T.index_select(1, tensor([i])), (0, 3), (-1, 4)),
    "of a number": (lambda i: T[0, 0].index_select(0, tensor([i])), (0,), (-1, 1)),
    "index_add": (lambda i: T.index_add(0, tensor([i]), T[:1]), (0, 2), (-1, 3)),
    "index_copy": (lambda i: T.index_copy(-1, tensor([i]), T[:, :1]), (0, 3), (-1, 4)),
    "index_reduce": (lambda i: T.index_reduce(0, tensor([i]), T[:1], "amax"), (0, 2), (-1, 3)),
    "index_fill": (lambda i: T.index_fill(0, tensor([i]), 1.0), (-3, 2), (-4, 3)),
    "gather": (lambda i: T.gather(1, tensor([[i]])), (0, 3), (-1, 4)),
    "scatter": (lambda i: T.scatter(1, tensor([[i]]), 1.0), (0, 3), (-1, 4)),
    "scatter_add": (lambda i: T.scatter_add(1, tensor([[i]]), T), (0, 3), (-1, 4)),
    "scatter_reduce": (lambda i: T.scatter_reduce(1, tensor([[i]]), T, "sum"), (0, 3), (-1, 4)),
    "take": (lambda i: T.take(tensor([i])), (-12, 11), (-13, 12)),
    "put": (lambda i: T.put(tensor([i]), tensor([1.0])), (-12, 11), (-13, 12)),
    "embedding": (lambda i: HELD(tensor([i])), (0, 2), (-1, 3)),
    "embedding_bag": (lambda i: F.embedding_bag(tensor([[i, 0]]), HELD.weight), (0, 2), (-1, 3)),
    "nll_loss": (lambda i: F.nll_loss(T, tensor([i, 0, 1])), (0, 3, -100), (-1, 4)),
    "cross_entropy": (lambda i: F.cross_entropy(T[0], tensor(i), ignore_index=7), (0, 3, 7), (-1, 4)),
    "pixels": (lambda i: F.nll_loss(T.view(1, 3, 2, 2), tensor([[[i, 0], [0, 0]]])), (2,), (-1, 3)),
    "max_unpool2d": (lambda i: F.max_unpool2d(T[:1, :1, None], tensor([[[i]]]), 2), (0, 3), (-1, 4)),
    "masked_scatter": (lambda n: T.masked_scatter(T[:1] > -9, torch.zeros(n)), (12, 13), (0, 11)),
    "bce": (lambda p: F.binary_cross_entropy(torch.full((2,), float(p)), T[0, :2] * 0 + 1),
            (0, 0.5, 1), (-0.1, 1.1, torch.nan)),
    "bernoulli": (lambda p: torch.bernoulli(torch.full((2,), float(p))), (0, 1), (1.1, torch.nan)),
    "bernoulli_": (lambda p: T.clone().bernoulli_(torch.full((3, 4), float(p))), (0, 1), (-1,)),
    "of a rate": (lambda p: T.bernoulli(p), (0.5,), ()),
    "multinomial": (lambda p: torch.multinomial(tensor([1.0, p]), 1), (0.0, 2.0), (-1.0, torch.inf)),
    "no weight": (lambda p: torch.multinomial(tensor([p, p]), 1), (1.0,), (0.0, torch.nan)),
    "repeat_interleave": (lambda n: T.repeat_interleave(tensor([n, 1, 2]), 0), (0, 3), (-1,)),
    "output_size": (lambda n: T.repeat_interleave(tensor([1, 1, 2]), 0, output_size=n), (4,), (3, 5)),
    "max_norm": (lambda i: F.embedding(tensor([i]), T.clone(), max_norm=1.0), (0, 2), (-1, 3)),
    "offsets": (lambda i: F.embedding_bag(tensor([0, 1]), T, tensor([0, i])), (0, 2), (3,)),
    "last offset": (lambda i: F.embedding_bag(tensor([0, 1]), T, tensor([0, i, 2]), include_last_offset=True),
                    (0, 2), (3,)),
    "multi_margin_loss": (lambda i: F.multi_margin_loss(T, tensor([i, 0, 1])), (0, 3), (-1, 4)),
    "multilabel_margin": (lambda i: F.multilabel_margin_loss(T[0], tensor([i, 0, -1, 0])), (-1, 3), (-2, 4)),
    "poisson": (lambda rate: torch.poisson(tensor([rate])), (0.0, 2.0), (-1.0, torch.nan)),
    "_assert_async": (lambda n: torch._assert_async(tensor(n)), (1, True), (0, False)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("take, suit, others", TAKEN.values(), ids=TAKEN)
def test_numbers_out_of_range_are_refused(take, suit, others):
    for number in suit:
        with checked_indices(T):
            take(number)
    for number in others:
        with pytest.raises(IndexError, match="^numbers out of range for aten"), checked_indices(T):
            take(number)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_no_number_at_all_is_in_range():
    none = torch.empty(0, dtype=torch.int64)
    with checked_indices(T):
        assert T[none].shape == (0, 4) and HELD(none).shape == (0, 4)


def test_on_the_cpu_torch_says_so_itself():
    with checked_indices(T), pytest.raises(IndexError, match="^index"):
        HELD(tensor([3]))


def test_other_devices_are_checked():
    assert indices._ends_process(torch.empty(1, device="meta")) and not indices._ends_process(T)


class Neighbours(nn.Module):
    """A graph convolution over edges (2, E) that are given or its own."""

    def __init__(self, edges=None):
        super().__init__()
        self.first, self.norm = nn.Linear(D, D), nn.BatchNorm1d(D)
        self.head = nn.Linear(D, 3)
        self.register_buffer("edges", edges)

    def forward(self, x, edges=None):
        source, target = self.edges if edges is None else edges
        h = self.norm(self.first(x))
        return self.head(h.index_add(0, target, h[source]))


class Nearest(Neighbours):
    """Neighbours are numbers that each row has of others."""

    def forward(self, x, near):
        h = self.norm(self.first(x))
        return self.head(h + h[near].mean(1))


EDGES = torch.stack([torch.arange(12), (torch.arange(12) + 5) % 12])
GRAPHS = {
    "edges": (Neighbours(), (ROWS[:12], EDGES)),
    "edges of the model": (Neighbours(EDGES), ROWS[:12]),
    "neighbours": (Nearest(), (ROWS[:12], EDGES.T.contiguous())),
}


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("model, inputs", GRAPHS.values(), ids=GRAPHS)
def test_rows_that_are_cut_from_under_a_graph(model, inputs):
    torch.manual_seed(0)
    converted = collected(bnuq.convert(model.eval()), inputs)
    assert_goes_as_the_loop(converted, inputs)
    assert way(converted) == "loop"
    with pytest.raises(ValueError, match="numbers out of range for aten.index.Tensor"):
        samples(converted, inputs, strategy="folded")


@pytest.mark.usefixtures("as_on_a_gpu")
def test_forwards_without_indices_are_not_checked_for_long(monkeypatch):
    class Plain(Norms):
        def forward(self, x):
            return self.head(self.second(self.first(x)))

    class Looked(Plain):
        def forward(self, x):
            return super().forward(x.index_select(1, torch.arange(D)))

    seen, dispatch = [], indices.Checks.__torch_dispatch__
    monkeypatch.setattr(
        indices.Checks,
        "__torch_dispatch__",
        lambda self, func, *args: seen.append(func) or dispatch(self, func, *args),
    )
    counts = []
    for kind in (Plain, Looked):
        model = collected(bnuq.convert(kind().eval()), ROWS[:12])
        seen.clear()
        samples(model, ROWS[:12])
        assert way(model) == "folded"
        counts.append(len(seen))
    assert 0 < 4 * counts[0] < counts[1]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_turned_comparisons_choose_is_checked():
    """A number that no row may have is an index out of range."""

    class Chosen(Norms):
        def forward(self, x):
            h = self.first(x)
            h = h + F.embedding((x[:, 0] > 20).long(), torch.ones(1, D))
            return self.head(self.second(h))

    model = collected(bnuq.convert(Chosen().eval()), ROWS)
    assert_goes_as_the_loop(model, ROWS[:12])
    assert way(model) == "expanded"


@torch.library.custom_op("bnuq_tests::picked", mutates_args=())
def picked(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return table[index]


class Picking(Norms):
    def forward(self, x, kind):
        h = self.first(x)
        return self.head(self.second(h + picked(torch.ones(2, D), kind)))


@pytest.mark.parametrize("gpu", [True, False])
def test_operations_that_are_not_torchs_are_given_no_integers_in_a_trial(gpu, monkeypatch):
    monkeypatch.setattr(indices, "_ends_process", lambda t: gpu)
    inputs = ROWS[:12], torch.arange(12) % 2
    model = collected(bnuq.convert(Picking().eval()), inputs)
    assert_goes_as_the_loop(model, inputs)
    assert way(model) == ("loop" if gpu else "expanded")
    with pytest.raises(DoesNotFold) if gpu else nullcontext(), checked_indices(inputs):
        picked(torch.ones(2, D), inputs[1])


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("gpu", [True, False])
def test_where_a_sparse_tensor_has_numbers_is_checked_anywhere(gpu, monkeypatch):
    """Those of a matrix that is made compressed again are written beyond its end."""
    monkeypatch.setattr(indices, "_ends_process", lambda t: gpu)

    class Adjacent(Norms):
        def forward(self, x, edges):
            size = len(x), len(x)
            matrix = torch.sparse_coo_tensor(edges, torch.ones(edges.shape[1]), size)
            return self.head(self.second(matrix.coalesce().to_sparse_csr() @ self.first(x)))

    model = collected(bnuq.convert(Adjacent().eval()), (ROWS[:12], EDGES))
    assert_goes_as_the_loop(model, (ROWS[:12], EDGES))
    assert way(model) == "loop" and not torch.sparse.check_sparse_tensor_invariants.is_enabled()


def test_parameters_tell_where_a_model_is(monkeypatch):
    model = collected(bnuq.convert(Nearest().eval()), GRAPHS["neighbours"][1])
    monkeypatch.setattr(indices, "_ends_process", lambda t: isinstance(t, nn.Parameter))
    with pytest.raises(ValueError, match="numbers out of range for aten.index.Tensor"):
        samples(model, GRAPHS["neighbours"][1], strategy="folded")
