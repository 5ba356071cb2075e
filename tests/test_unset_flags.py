"""Rows that meet only where flags are set otherwise than in the rows of the trial."""

import pytest
import torch
from coupled import ROWS, D, Norms
from folded import assert_goes_as_the_loop, way
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext.proof.probe import _opposite, varied_probes

FLAGS = {
    "bool": torch.zeros(12, 1, dtype=torch.bool),
    "vector": torch.zeros(12, dtype=torch.bool),
    "int": torch.zeros(12, 1, dtype=torch.int64),
    "float": torch.zeros(12, 1),
    "ones": torch.ones(12, 1),
    "wide": torch.zeros(12, D),
}


class Centred(Norms):
    """Those rows that a flag says lose the mean of all rows that have it."""

    def __init__(self, unset):
        super().__init__()
        self.unset = unset

    def forward(self, x, flag):
        h = self.second(self.first(x))
        chosen = (flag != self.unset).reshape(len(x), -1)
        count = chosen.sum(0).clamp_min(1)
        return self.head(torch.where(chosen, h - h.where(chosen, 0).sum(0) / count, h))


class Column(Centred):
    """The flag is the last column of the rows."""

    def __init__(self):
        super().__init__(0.0)

    def forward(self, x):
        return super().forward(x, x[:, -1:])


def collected(model, x):
    x, *others = x if isinstance(x, tuple) else (x,)
    batches = [(x * (1 + 0.1 * i) + 0.1 * i, *others) for i in range(6)]
    bnuq.collect(model, batches, input_fn=lambda b: b, progress=False)
    return model


@pytest.mark.usefixtures("by_values_alone")
@pytest.mark.parametrize("unset", FLAGS.values(), ids=FLAGS)
def test_a_flag_that_no_row_of_the_first_batch_sets(unset):
    value = unset.flatten()[0].item()
    some = unset.clone()
    some[2:8] = value == 0
    x = ROWS[:12]
    model = collected(bnuq.convert(Centred(value).eval()), (x, unset))
    assert_goes_as_the_loop(model, (x, unset), (x, some))
    assert way(model) == "loop"


@pytest.mark.usefixtures("by_values_alone")
def test_a_column_that_is_the_same_in_all_rows_of_the_first_batch():
    x = ROWS[:12].clone()
    x[:, -1] = 0
    some = x.clone()
    some[2:8, -1] = 1
    model = collected(bnuq.convert(Column().eval()), x)
    assert_goes_as_the_loop(model, x, some)
    assert way(model) == "loop"


class Swapped(Norms):
    """Of the rows of a trial one that a flag chooses is then as another."""

    def forward(self, x, flag):
        h = self.second(self.first(x))
        partner = h[torch.arange(len(h) - 1, -1, -1)]
        return self.head(torch.where(flag.bool().reshape(len(x), -1), partner, h))


@pytest.mark.parametrize("unset", FLAGS.values(), ids=FLAGS)
def test_rows_that_a_flag_makes_equal(unset):
    x, model = ROWS[:12], collected(bnuq.convert(Swapped().eval()), (ROWS[:12], unset))
    assert_goes_as_the_loop(model, (x, unset), (x, (1 - unset.int()).to(unset.dtype)))
    assert way(model) == "loop"


IDS = {
    "lookup": lambda ids: (torch.arange(12) >= 5)[ids],
    "isin": lambda ids: torch.isin(ids, torch.tensor([5, 6])),
    "column": lambda ids: (ids[:, None] == torch.arange(8))[:, 5],
    "length": lambda ids: (torch.arange(6) < ids[:, None])[:, 5],
    "band": lambda ids: (ids > 4) & ~(ids > 6),
}


@pytest.mark.usefixtures("by_values_alone")
@pytest.mark.parametrize("mask", IDS.values(), ids=IDS)
def test_rows_of_a_kind_that_is_not_in_the_first_batch(mask):
    class Attending(Norms):
        def forward(self, x, ids):
            h, chosen = self.second(self.first(x)), mask(ids)
            rows = h[chosen]
            return self.head(h.index_put((chosen,), (rows @ rows.T).softmax(1) @ rows))

    x, first, later = ROWS[:12], torch.arange(12) % 4, torch.tensor([0, 5, 1, 6] * 3)
    model = collected(bnuq.convert(Attending().eval()), (x, first))
    assert_goes_as_the_loop(model, (x, first), (x, later))
    assert way(model) == "loop"


@pytest.mark.filterwarnings("ignore:predict. 1 batch-norm calls")
@pytest.mark.usefixtures("by_values_alone")
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_rows_of_a_flag_that_meet_only_if_all_have_it(dtype):
    """One row alone has no statistics."""

    class Domains(Norms):
        def forward(self, x, flag):
            h, chosen = self.second(self.first(x)), flag > 0
            h = h.index_put(
                (chosen,), nn.functional.batch_norm(h[chosen], None, None, training=True)
            )
            return self.head(h)

    x, none = ROWS[:12], torch.zeros(12, dtype=dtype)
    some = (torch.arange(12) % 2).to(dtype)
    model = collected(bnuq.convert(Domains().eval()), (x, some))
    assert_goes_as_the_loop(model, (x, none), (x, some))
    assert way(model) == "loop"


def test_an_opposite_is_of_one_value_alone():
    assert _opposite(torch.arange(3)) is None and _opposite(torch.ones(3, 0)) is None
    for dtype in OTHERS:
        made = _opposite(torch.tensor([[0, 1, 2]] * 3).to(dtype))
        assert made.dtype == dtype and torch.equal(made, torch.tensor([[1, 0, 0]] * 3).to(dtype))


class Divided(Centred):
    """Takes no zeros beside the flag."""

    def forward(self, x, scale, flag):
        return super().forward(x / scale, flag)


class OfOneKind(Centred):
    """Takes no ones beside the flag."""

    def forward(self, x, kind, flag):
        return super().forward(x + nn.functional.embedding(kind, torch.ones(1, D)), flag)


BESIDE = {
    "scale": (Divided, torch.full((12, 1), 2.0)),
    "kind": (OfOneKind, torch.zeros(12, dtype=torch.int64)),
}


@pytest.mark.usefixtures("by_values_alone")
@pytest.mark.parametrize("cls, other", BESIDE.values(), ids=BESIDE)
def test_an_input_that_the_model_takes_in_one_form_alone_hides_no_flag(cls, other):
    unset, some = torch.zeros(12, 1), torch.zeros(12, 1)
    some[2:8] = 1
    x = ROWS[:12]
    model = collected(bnuq.convert(cls(0.0).eval()), (x, other, unset))
    assert_goes_as_the_loop(model, (x, other, unset), (x, other, some))
    assert way(model) == "loop"


@pytest.mark.usefixtures("by_values_alone")
def test_each_input_is_looked_at_though_the_model_takes_another():
    class Second(Divided):
        def forward(self, x, other, scale, flag):
            return super().forward(x + other, scale, flag)

    zeros, some, scale = torch.zeros(12, 1), torch.zeros(12, 1), torch.full((12, 1), 2.0)
    some[2:8] = 1
    x = ROWS[:12]
    model = collected(bnuq.convert(Second(0.0).eval()), (x, zeros, scale, zeros.clone()))
    assert_goes_as_the_loop(model, (x, zeros, scale, zeros.clone()), (x, zeros, scale, some))
    assert way(model) == "loop"


class Kept(Norms):
    """A state goes from row to row, until one says that it begins anew."""

    def forward(self, x, reset):
        state, states = torch.zeros(D), []
        for h, begins in zip(self.second(self.first(x)), reset, strict=True):
            state = h + torch.where(begins > 0, torch.zeros(D), 0.5 * state)
            states.append(state)
        return self.head(torch.stack(states))


def test_flags_that_the_rows_of_the_trial_set_otherwise():
    reset = torch.zeros(12)
    reset[[0, 4]] = 1
    x = ROWS[:12]
    model = collected(bnuq.convert(Kept().eval()), (x, reset))
    assert_goes_as_the_loop(model, (x, reset), (x, 1 - reset))
    assert way(model) == "loop"


OTHERS = [torch.bool, torch.uint8, torch.int32, torch.uint16, torch.bfloat16, torch.complex64]


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_columns_of_two_values_change_them_and_of_one_get_another(dtype):
    rows = torch.tensor([[0, 1, 0, 3, 2], [1, 0, 0, 3, 1], [0, 1, 0, 3, 0]]).to(dtype)
    (made,) = varied_probes(rows)
    if dtype == torch.bool:
        assert made.int().tolist() == [[1, 0, 1, 1, 0], [0, 1, 0, 1, 0], [1, 0, 0, 0, 1]]
    else:
        assert made.tolist() == [[1, 0, 1, 3, 2], [0, 1, 0, 3, 1], [1, 0, 0, 0, 0]]


def test_columns_of_three_values_stay_as_they_are():
    assert list(varied_probes(torch.arange(9).view(3, 3))) == []


@pytest.mark.usefixtures("by_values_alone")
@pytest.mark.parametrize("column", [0, 1, 2])
def test_each_of_several_flags_is_set(column):
    class Chosen(Centred):
        def forward(self, x, flags):
            return super().forward(x, flags[:, column])

    unset = torch.tensor([0.0, 0.0, 1.0]).repeat(12, 1)
    some = unset.clone()
    some[2:8, column] = 1 - unset[0, column]
    x = ROWS[:12]
    model = collected(bnuq.convert(Chosen(unset[0, column].item()).eval()), (x, unset))
    assert_goes_as_the_loop(model, (x, unset), (x, some))
    assert way(model) == "loop"


@pytest.mark.usefixtures("by_values_alone")
def test_of_many_inputs_that_a_model_does_not_take_otherwise_some_are_looked_at():
    class Many(Norms):
        def forward(self, x, *scales):
            forwards.append(len(x))
            for scale in scales:
                x = x / scale
            return self.head(self.second(self.first(x)))

    forwards, x = [], ROWS[:12]
    inputs = (x, *(torch.full((12, 1), 1.0 + i / 10) for i in range(20)))
    model = collected(bnuq.convert(Many().eval()), inputs)
    forwards.clear()
    assert_goes_as_the_loop(model, inputs)
    assert way(model) == "folded" and len(forwards) < 90


class Padded(Norms):
    """Attention within each row, whose padding nothing attends to, and none of all padding."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)

    def forward(self, x, padding):
        h = self.second(self.first(x)).unsqueeze(1) * torch.linspace(1, 2, 5)[:, None]
        out, _ = self.attention(h, h, h, key_padding_mask=padding)
        return self.head(out.mean(1))


def test_a_model_that_keeps_its_rows_apart_still_folds():
    none, some = torch.zeros(12, 5, dtype=torch.bool), torch.zeros(12, 5, dtype=torch.bool)
    some[3:, 2:] = True
    x = ROWS[:12]
    model = collected(bnuq.convert(Padded().eval()), (x, none))
    assert_goes_as_the_loop(model, (x, none), (x, some))
    assert way(model) == "expanded"


class Picky(Norms):
    """Takes no flags but those of the first batch."""

    def forward(self, x, kind):
        return self.head(
            self.second(self.first(x)) + nn.functional.embedding(kind, torch.ones(1, D))
        )


def test_numbers_that_a_model_does_not_take_decide_nothing():
    kind = torch.zeros(12, dtype=torch.int64)
    model = collected(bnuq.convert(Picky().eval()), (ROWS[:12], kind))
    assert_goes_as_the_loop(model, (ROWS[:12], kind))
    assert way(model) == "expanded"
