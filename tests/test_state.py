"""What a forward has changed of a model, put back."""

import math
import operator
import random
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

import bnuq_ext as bnuq
from bnuq_ext.fingerprint import fingerprint
from bnuq_ext.reads import Reads
from bnuq_ext.state import State, all_names_of


@dataclass
class Config:
    on: bool = False


def test_a_sparse_buffer():
    layer = nn.BatchNorm1d(3)
    layer.register_buffer("adjacency", torch.eye(3).to_sparse())
    state = State([layer])
    assert not state.written()
    layer.running_mean.add_(1)
    assert state.written()
    state.restore()
    assert (layer.running_mean == 0).all()


def test_nested_and_fake_tensors_are_let_be():
    layer, parts = nn.BatchNorm1d(3), [torch.ones(2), torch.ones(3)]
    with FakeTensorMode():
        fake = torch.ones(2)
    layer.held = torch.nested.nested_tensor(parts, layout=torch.jagged), fake
    state = State([layer])
    assert not state.written()
    layer.running_mean.add_(1)
    state.restore()
    assert (layer.running_mean == 0).all()


@pytest.mark.parametrize("kind", [UninitializedBuffer, UninitializedParameter])
def test_tensors_that_have_no_shape_yet_are_let_be(kind):
    module = nn.Module()
    module.held = [kind()]
    module.register_buffer("buffer", UninitializedBuffer())
    state = State([module])
    assert not state.written()
    module.held.clear()
    state.restore()
    assert type(module.held[0]) is kind


def test_of_a_repeating_tensor_each_number_is_copied_once():
    layer = nn.Module()
    layer.register_buffer("mask", torch.zeros(3, 1).expand(3, 1 << 50))
    state = State([layer])
    ((_, copy),) = state.values
    assert copy.shape == layer.mask.shape and copy.untyped_storage().nbytes() == 12
    layer.mask[:, :1].add_(1)
    state.restore()
    assert not layer.mask[:, 0].any()


def test_content_written_by_way_of_data_shows():
    layer = nn.BatchNorm1d(3)
    state, before = State([layer]), fingerprint([layer])
    assert not state.written()
    layer.running_mean.data.add_(1)
    assert fingerprint([layer]) == before and state.written()
    state.restore()
    assert not state.written() and (layer.running_mean == 0).all()


def test_a_parameter_of_another_dtype_shows():
    layer = nn.Linear(3, 3).requires_grad_(False)
    layer.weight.zero_()
    state = State([layer])
    layer.weight.data = layer.weight.double()
    assert state.rebuilt()
    state.restore()
    assert layer.weight.dtype == torch.float32 and not state.rebuilt()


WAYS_TO_WRITE = {
    "in place": lambda p: p.mul_(2),
    "by way of .data": lambda p: p.data.add_(1),
    "of its part": lambda p: p[1:].zero_(),
    "with others": lambda p: torch._foreach_add_([torch.zeros(2), p], 1.0),
    "by its memory": lambda p: p.set_(torch.ones(2, 3)),
    "an output": lambda p: torch.add(torch.ones(3, 3), 1, out=p),
}


@pytest.mark.parametrize("write", WAYS_TO_WRITE.values(), ids=WAYS_TO_WRITE)
@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_are_copied_when_they_are_written_into(write, frozen):
    layer = nn.Linear(3, 3).requires_grad_(not frozen)
    state, reads = State([layer]), Reads([layer], torch.ones(1, 3), 1)
    state.follow(reads.overwritten)
    weight, bias, before = layer.weight, layer.bias, layer.weight.clone()
    with reads, torch.no_grad():
        layer(torch.ones(1, 3))
        assert not reads.overwritten and not state.written()
        for _ in range(2):
            write(weight)
    assert [*reads.overwritten] == [weight] and state.written()
    state.restore()
    assert layer.weight is weight and torch.equal(weight, before) and not state.written()
    assert layer.bias is bias and weight.requires_grad != frozen


class Output(OrderedDict):
    """Refuses what outputs of transformers refuse."""

    def update(self, *args, **kwargs):
        raise TypeError("update")


def remembering() -> nn.Module:
    module = nn.BatchNorm1d(3)
    module.items, module.options = [1, torch.zeros(2), [3, {"a": 4}]], {"inner": {"on": [False]}}
    module.counts, module.output = Counter(a=2), Output(logits=1)
    module.names, module.queue = {"a", "b"}, deque([1, torch.zeros(2)], maxlen=2)
    module.generator = torch.Generator().manual_seed(0)
    module.config, module.args = Config(), SimpleNamespace(calls=[0])
    module.array, module.bytes = np.ones((2, 3)), bytearray(b"abc")
    module.rngs = [np.random.default_rng(0), random.Random(0), np.random.RandomState(0)]
    return module


WRITES = {
    "an item of a list": lambda m: m.items.__setitem__(0, 2),
    "a longer list": lambda m: m.items.append(5),
    "a shorter list": lambda m: m.items.pop(),
    "a tensor in a list": lambda m: m.items[1].add_(1),
    "a list in a list": lambda m: m.items[2].clear(),
    "a dict in both": lambda m: m.items[2][1].update(a=5, b=6),
    "a dict": lambda m: m.options.clear(),
    "a list in dicts": lambda m: m.options["inner"]["on"].__setitem__(0, True),
    "a count": lambda m: m.counts.update("ab"),
    "an output": lambda m: m.output.__setitem__("loss", 2),
    "a set": lambda m: m.names.add("c"),
    "a smaller set": lambda m: m.names.clear(),
    "a field of a dataclass": lambda m: setattr(m.config, "on", True),
    "a new field": lambda m: setattr(m.args, "depth", 2),
    "an item in a field": lambda m: m.args.calls.append(1),
    "a queue": lambda m: m.queue.append(7),
    "a tensor in a queue": lambda m: m.queue[1].add_(1),
    "a generator": lambda m: torch.rand(3, generator=m.generator),
    "an array": lambda m: m.array.__setitem__((0, 0), np.nan),
    "bytes": lambda m: m.bytes.__setitem__(0, 0),
    "longer bytes": lambda m: m.bytes.extend(b"d"),
    "a generator of NumPy": lambda m: m.rngs[0].random(),
    "a generator of Python": lambda m: m.rngs[1].random(),
    "an old generator of NumPy": lambda m: m.rngs[2].rand(),
    "another object": lambda m: setattr(m, "items", []),
    "a new attribute": lambda m: setattr(m, "depth", 2),
    "an attribute gone": lambda m: delattr(m, "eps"),
    "a buffer in place": lambda m: m.running_mean.add_(1),
    "a buffer": lambda m: setattr(m, "running_var", torch.zeros(3)),
}


def content(module):
    state = module.generator.get_state().tolist()
    kept = {n: v for n, v in vars(module).items() if n not in ("generator", "_buffers", "rngs")}
    states = [module.rngs[0].bit_generator.state, module.rngs[1].getstate()]
    states.append([repr(part) for part in module.rngs[2].get_state()])
    names = sorted(kept.pop("names"))
    return repr((names, sorted(kept.items()), dict(module._buffers), state, states))


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_the_state_is_put_back_into_the_objects_that_held_it(write):
    module = remembering()
    before, state = content(module), State([module])
    held = [module.items, module.items[1:], module.queue, list(module.queue), module.running_var]
    held += [module.array, module.bytes, *module.rngs]
    write(module)
    assert content(module) != before
    state.restore()
    assert content(module) == before
    now = [module.items, module.items[1:], module.queue, list(module.queue), module.running_var]
    now += [module.array, module.bytes, *module.rngs]
    for old, new in zip(held, now, strict=True):
        assert old is new or all(map(operator.is_, old, new))


@pytest.mark.parametrize("before", [(0,), (1,), (2, 3)])
@pytest.mark.parametrize("by_data", [True, False])
def test_a_buffer_of_another_size(before, by_data):
    """Observers of torch.ao find theirs in their first forward."""
    layer = nn.Module()
    layer.register_buffer("peak", torch.full(before, 2.0))
    state, peak = State([layer]), layer.peak
    for _ in range(2):
        if by_data:
            peak.data = torch.ones(6)
        else:
            peak.resize_(6).fill_(1)
        assert state.written()
        state.restore()
        assert layer.peak is peak and not state.written()
        assert torch.equal(peak, torch.full(before, 2.0))


def test_nan_is_what_it_was():
    layer = nn.BatchNorm1d(3)
    layer.running_mean[1], layer.scale = math.nan, torch.tensor([math.nan, 1j])
    state, version = State([layer]), layer.running_mean._version
    assert not state.written()
    state.restore()
    assert layer.running_mean._version == version
    layer.running_mean[2] = math.nan
    assert state.written()
    state.restore()
    assert layer.running_mean.isnan().tolist() == [False, True, False]


def test_a_bank_that_another_thread_attaches_stays():
    model = bnuq.convert(nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()))
    banks = [
        bnuq.Bank({"0": torch.rand(2, 3)}, {"0": torch.rand(2, 3)}, 8, batch_size=8)
        for _ in range(2)
    ]
    for before, after in ((None, banks[0]), banks):
        if before:
            bnuq.attach(model, before)
        model[1].note = "before"
        state = State(list(model.modules()))
        bnuq.attach(model, after)
        model[1].note = "after"
        state.restore()
        assert model[0].bank is after and model[0].bank_name == "0" and model[1].note == "before"


def test_a_container_too_deep_in_others_is_left_as_it_is():
    module, deepest, held = nn.Module(), [1], []
    nested = deepest
    for _ in range(9):
        held.append(nested)
        nested = [nested]
    module.items = nested
    state = State([module])
    deepest.append(3)
    held[1].append(4)
    held[2].clear()
    state.restore()
    assert deepest == [1, 3] and held[1] == [deepest, 4] and held[2] == [held[1]]


@pytest.mark.parametrize("container", [{"a": 1, "b": 2}, [1, 2], {1, 2}, deque([1, 2])], ids=str)
def test_a_container_with_its_items_is_let_be(container):
    """Another thread may go through it."""
    module = nn.Module()
    module.held = container
    state, items = State([module]), iter(container)
    first = next(items)
    state.restore()
    assert [first, *items] == [*container]


@pytest.mark.parametrize(
    ("held", "write"),
    [
        (np.zeros(3), lambda v: v.__setitem__(1, 1.0)),
        (bytearray(2), lambda v: v.append(1)),
        (np.random.default_rng(0), lambda v: v.random()),
        (random.Random(0), lambda v: v.random()),
        (torch.Generator(), lambda v: torch.rand(1, generator=v)),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_an_object_holds_shows_when_it_changes(held, write):
    module = nn.Module()
    module.held = held
    state = State([module])
    assert not state.written()
    write(held)
    assert state.written()
    state.restore()
    assert not state.written() and module.held is held


def test_a_large_tensor_is_copied_as_an_operation_writes_into_it(monkeypatch):
    monkeypatch.setattr("bnuq_ext.state._LARGE", 64)
    module = nn.BatchNorm1d(3)
    module.table, module.held = torch.zeros(40), ([torch.zeros(50)],)
    tables = [module.table, module.held[0][0]]
    state, reads = State([module]), Reads([module], torch.ones(1, 3), 1)
    assert {*map(id, state.others)} == {*map(id, tables)}
    reads.guard(state.others)
    state.follow(reads.overwritten)
    with reads:
        tables[0].sum()
        assert not reads.overwritten and not state.written()
        tables[0].add_(1)
        tables[1][3:] = 2
    assert len(reads.overwritten) == 2 and state.written()
    state.restore()
    assert not state.written() and not any(table.any() for table in tables)
    tables[0].data = torch.ones(40)
    assert state.written()
    state.restore()
    assert not tables[0].any()


def test_a_large_tensor_is_copied_at_once_where_no_operations_are_followed(monkeypatch):
    monkeypatch.setattr("bnuq_ext.state._LARGE", 64)
    module = nn.Module()
    module.table = torch.zeros(40)
    state = State([module], followed=False)
    module.table.add_(1)
    state.restore()
    assert not state.others and not module.table.any()


def test_a_slot_behind_a_property_of_a_derived_class_hinders_nothing():
    class Field:
        __slots__ = ("value",)

    class ReadOnly(Field):
        @property
        def value(self):
            return Field.value.__get__(self)

    module = nn.Module()
    module.held, module.args = SimpleNamespace(field=ReadOnly()), [0]
    Field.value.__set__(module.held.field, 1)
    state = State([module])
    Field.value.__set__(module.held.field, 2)
    module.args.append(1)
    state.restore()
    assert module.args == [0]


def test_a_large_array_is_not_copied(monkeypatch):
    monkeypatch.setattr("bnuq_ext.state._LARGE", 64)
    module = nn.Module()
    module.arrays = [np.zeros(8), np.zeros(9)]
    state = State([module])
    for held in module.arrays:
        held += 1
    state.restore()
    assert not module.arrays[0].any() and module.arrays[1].all()


def test_an_array_to_read_is_let_be():
    module = nn.Module()
    module.table = np.broadcast_to(np.ones(2), (3, 2))
    state = State([module])
    state.restore()
    assert not state.written()


def test_a_lazy_layer_that_was_made_meanwhile_has_counted_no_batch():
    layer = nn.LazyBatchNorm1d()
    state = State([layer])
    layer(torch.randn(5, 3))
    state.restore()
    assert not layer.running_mean.any() and (layer.running_var == 1).all()
    assert layer.num_batches_tracked == 0 and state.completed()


def test_modules_inside_of_themselves_have_one_name():
    module, part = nn.Module(), nn.Module()
    module.itself = part.whole = module
    module.part = part
    module.register_module("none", None)
    assert all_names_of(module) == {module: [""], part: ["part"]}
