"""A forward that looks at values of its rows goes one replica after another,
whatever the trial's rows show."""

import copy
import gc
import warnings
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from coupled import D, Norms
from folded import assert_right_or_refused, prepared, samples, way
from torch import nn

from bnuq_ext.passes import DoesNotFold
from bnuq_ext.reads import Reads

N = 7


class Sign(Norms):
    def __init__(self, meets):
        super().__init__()
        self.meets = meets

    def forward(self, x):
        h = self.second(self.first(x) - 0.5)
        return self.head(h) if self.meets(h) else -self.head(h)


READS = {
    "if": lambda h: h.sum() > 8,
    "bool": lambda h: bool(h.max() > 2),
    "item": lambda h: h.sum().item() > 8,
    "float": lambda h: float(h.sum()) > 8,
    "int": lambda h: int(h.sum()) > 8,
    "index": lambda h: range(100)[h.sum().long()] > 8,
    "tolist": lambda h: sum(h.flatten().tolist()) > 8,
    "numpy": lambda h: h.numpy().sum() > 8,
    "array": lambda h: np.asarray(h).sum() > 8,
    "equal": lambda h: torch.equal(h.sum() > 8, torch.tensor(True)),
    "allclose": lambda h: torch.allclose(h, h.new_zeros(()), atol=2.0),
    "a view": lambda h: h[0, 0] > 0.2,
    "before a constant": lambda h: (h.sum() > 8).item() > torch.zeros(()).item(),
}


SIZES = {
    "len": lambda h: len((h > 1.3).nonzero()),
    "shape": lambda h: h[h[:, 0] > 0.6].shape[0] > 1,
    "size": lambda h: h.masked_select(h > 1.3).size(0),
    "numel": lambda h: h[h > 1.3].numel(),
    "iteration": lambda h: any(True for _ in h[h > 1.3]),
    "unbind": lambda h: (h > 1.3).nonzero().unbind(),
    "of what is made of it": lambda h: len(h[h > 1.3].abs() * 2),
    "of unique values": lambda h: len((h > 1.3).unique()) > 1,
    "of a histogram": lambda h: len(h.flatten().round().long().bincount()) > 2,
    "dlpack": lambda h: np.from_dlpack(h).max() > 1.3,
}
READS |= SIZES


def signs(meets, count):
    """Networks that branch on `meets`, each with its data."""
    for seed in range(count):
        torch.manual_seed(seed)
        x = torch.randn(48, D)
        yield prepared(partial(Sign, meets), x), x


@pytest.mark.parametrize("meets", READS.values(), ids=READS)
def test_values_of_the_rows(meets):
    """Each is right in all of ten networks; without the look at reads several of ten are wrong."""
    for model, x in signs(meets, 10):
        torch.testing.assert_close(
            samples(model, x[:N]), samples(copy.deepcopy(model), x[:N], strategy="loop")
        )
        assert way(model) == "loop"
    reason = "reads values of its rows|asks how many rows values have chosen, as by len, shape or"
    with pytest.raises(ValueError, match=f"does not fold: its forward ({reason})"):
        samples(copy.deepcopy(model), x[:N], strategy="folded")


@pytest.mark.parametrize("meets", READS.values(), ids=READS)
def test_values_of_the_rows_in_inference_mode(meets):
    """There bool() and item() would reach a dispatch mode as they are."""
    for model, x in signs(meets, 3):
        with torch.inference_mode():
            samples(model, x[:N])
        assert way(model) == "loop"


class OfMany(Norms):
    """Looks at the values of pieces only where there are more rows than in the trial, than in one
    replica, or just as many as in one."""

    def __init__(self, counts, piece, limit):
        super().__init__()
        self.counts, self.piece, self.limit = counts, piece, limit

    def forward(self, x):
        h = self.second(self.first(x) - 0.5)
        if len(h) in self.counts:
            h = torch.cat(
                [-p if p.sum() > self.limit else p for p in h.split(self.piece or len(h))]
            )
        return self.head(h)


@pytest.mark.parametrize("counts", [range(4, 99), range(2 * N, 99), [N]])
@pytest.mark.parametrize("piece, limit", [(None, 8), (1, 10)])
def test_values_of_rows_that_are_read_in_some_batches(counts, piece, limit):
    """Single rows that are seldom large may lie in neither the first replica nor the last."""
    for seed in range(10):
        torch.manual_seed(seed)
        x = torch.randn(48, D)
        model = prepared(partial(OfMany, counts, piece, limit), x)
        for rows in (x[:N], x[-N:]):
            torch.testing.assert_close(
                samples(model, rows), samples(copy.deepcopy(model), rows, strategy="loop")
            )
        assert way(model) == "loop"


@pytest.mark.parametrize("places", [False, True])
def test_infinities_do_not_become_indices(places):
    """On a GPU an index out of range ends the process;
    the trial gives none to what looks values up."""
    finite, levels = [], []

    class Bins(Norms):
        def forward(self, x):
            h = self.second(self.first(x))
            finite.append(h.isfinite().all())
            if not places:
                return self.head(h + h)
            levels.append(h.mul(4).long())
            return self.head(h + torch.linspace(0, 1, 9)[levels[-1].clamp(0, 8)])

    x = torch.randn(48, D)
    model = prepared(Bins, x)
    samples(model, x[:N])
    assert way(model) == "folded" and not all(finite)
    assert len(levels) == places * len(finite)
    assert all(0 <= level.min() and level.max() < 60 for level in levels)


def test_scripted_branches():
    class Branch(nn.Module):
        def forward(self, h: torch.Tensor) -> torch.Tensor:
            if bool(h.sum() > 8):
                return h
            return -h

    class Scripted(Norms):
        def __init__(self):
            super().__init__()
            with warnings.catch_warnings():  # of newer torch: deprecated
                warnings.simplefilter("ignore")
                self.branch = torch.jit.script(Branch())

        def forward(self, x):
            return self.head(self.branch(self.second(self.first(x))))

    x = torch.randn(48, D)
    model = prepared(Scripted, x)
    samples(model, x[:N])
    assert way(model) == "loop"


class Conditional(Norms):
    def forward(self, x):
        h = self.second(self.first(x))
        return self.head(torch.cond(h.sum() > 8, lambda h: h * 1, lambda h: -h, (h,)))


@pytest.mark.skipif(
    torch.__version__.startswith(("2.11.", "2.12.", "2.13.")),
    reason="torch 2.11 to 2.13 never trace torch.cond again that they have met under a dispatch mode",
)
def test_an_operator_that_cannot_be_watched():
    torch._dynamo.reset()  # what was compiled inside a dispatch mode spoils the tracing of torch.cond
    x = torch.randn(48, D)
    model = prepared(Conditional, x)
    for _ in range(2):
        torch.testing.assert_close(
            samples(model, x[:N]), samples(copy.deepcopy(model), x[:N], strategy="loop")
        )
    assert way(model) == "loop"


class Constants(Norms):
    """Reads what is the same for every row and replica."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("steps", torch.arange(3))

    def forward(self, x, scale=None):
        h = self.second(self.first(x))
        times = self.gate.item() + self.steps[1].item() + sum(self.steps.tolist())
        if self.gate.exp() + self.steps.max() > 1:
            times = 2 * times
        return self.head(h) * times * (1 if scale is None else scale.item())


def test_parameters_buffers_and_inputs_without_rows_may_be_read():
    x = torch.randn(48, D)
    model = prepared(Constants, x)
    for inputs in (x[:N], (x[:N], torch.tensor(2.0))):
        torch.testing.assert_close(
            samples(model, inputs), samples(copy.deepcopy(model), inputs, strategy="loop")
        )
        assert way(model) == "folded"


class OfNothing(Norms):
    """Reads tensors that it makes of no others, one of as many rows as it has."""

    def forward(self, x):
        h = self.second(self.first(x))
        shape = torch.tensor([h.shape[1], 1])
        mask = torch.ones(len(h), dtype=torch.bool)
        mask[0] = False
        if mask[1:].all() and not mask[0] and int(shape.prod()) == D:
            return self.head(h)
        return -self.head(h)


def test_tensors_made_of_no_others_may_be_read():
    x = torch.randn(48, D)
    model = prepared(OfNothing, x)
    assert assert_right_or_refused(model, x[:N]) == "folded"


def through_data(made, value):
    made.data.copy_(value)
    return made


MAKES = {
    "added": lambda h: torch.zeros(()).add_(h.sum()),
    "put": lambda h: torch.zeros(2).index_put_((torch.tensor([0]),), h.sum()).max(),
    "of a view": lambda h: torch.zeros(2)[:1].copy_(h.sum()),
    "out": lambda h: torch.sum(h, (0, 1), out=torch.empty(())),
    "through data": lambda h: through_data(torch.zeros(()), h.sum()),
    "where": lambda h: torch.where(h > 0, torch.ones(()), torch.zeros(())).sum(),
    "a list": lambda h: torch.tensor([h[0, 0], 1.0]).max(),
    "a list, by name": lambda h: torch.as_tensor(data=[[h[0, 0]], [1.0]]).max(),
    "a list, as another": lambda h: torch.ones(()).new_tensor([h[0, 0]]),
    "a list, to an array": lambda h: torch.asarray((h[0, 0], 1.0)).max(),
    "a list, in the old way": lambda h: torch.Tensor([h[0, 0]]),
    "what was there": lambda h: torch.empty(2).sum(),
    "what was there, like a constant": lambda h: torch.empty_like(torch.ones(2)).sum(),
    "at random": lambda h: torch.rand(()),
    "at random, in place": lambda h: torch.zeros(()).normal_(),
    "at random, of a constant": lambda h: torch.bernoulli(torch.full((), 0.5)),
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_nothing_is_constant_that_has_values_of_rows_or_of_a_generator(make):
    h = torch.ones(3, 2)
    reads = Reads([], h, 3)
    with reads:
        make(h).item()
    with pytest.raises(DoesNotFold, match="^its forward reads values of its rows"):
        reads.check({})


def test_what_was_kept_goes_with_it_at_once():
    """No cycle holds it until the next collection of garbage."""
    reads, made = Reads([], torch.ones(3), 3), []
    with reads:
        made.append(torch.zeros(2))
    freed = weakref.ref(made[0])
    gc.collect()
    gc.disable()
    try:
        made.clear()
        assert freed() is not None
        del reads
        assert freed() is None
    finally:
        gc.enable()


def test_what_a_list_operation_writes_into_is_no_constant():
    h = torch.ones(3, 2)
    reads = Reads([], h, 3)
    with reads:
        made = torch.zeros(())
        torch._foreach_copy_([made], [h.sum()])
        made.item()
    with pytest.raises(DoesNotFold):
        reads.check({})


def test_tells_reads_from_arithmetic():
    layer, x = nn.Linear(2, 2), torch.ones(3, 2)
    reads = Reads([layer], x, 3)
    with reads:
        (layer(x).relu() > 0).any()
        layer.weight.sum(), layer.weight[0, 0].item(), layer.bias.tolist()
    reads.check({})
    layer(x).sum().item()
    with reads:
        made = layer.bias * 2
        made.sum().item()
        made.add_(x.sum())
    reads.check({})
    with pytest.raises(ZeroDivisionError), reads:
        layer.weight[0, 0].item() / 0
    reads.check({})
    with reads:
        layer(x).sum().item()
    with pytest.raises(DoesNotFold, match="^its forward reads values of its rows, to branch"):
        reads.check({})
    written = Reads([layer], x, 3)
    with written:
        made = layer.bias.detach() * 2
        made.add_(x.sum())
        made.sum().item()
    with pytest.raises(DoesNotFold):
        written.check({})
