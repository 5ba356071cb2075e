"""Rows that meet only where a flag is set that none of the rows of the trial sets."""

import copy

import pytest
import torch
from coupled import ROWS, D, Norms
from test_folding import samples, way
from torch import nn

import bnuq_ext as bnuq

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
    bnuq.collect(model, [x] * 4, input_fn=lambda b: b, progress=False)
    return model


def assert_goes_as_the_loop(model, *inputs):
    for x in inputs:
        expected = samples(copy.deepcopy(model), x, strategy="loop")
        torch.testing.assert_close(samples(model, x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("unset", FLAGS.values(), ids=FLAGS)
def test_a_flag_that_no_row_of_the_first_batch_sets(unset):
    value = unset.flatten()[0].item()
    some = unset.clone()
    some[2:8] = value == 0
    x = ROWS[:12]
    model = collected(bnuq.convert(Centred(value).eval()), (x, unset))
    assert_goes_as_the_loop(model, (x, unset), (x, some))
    assert way(model) == "loop"


def test_a_column_that_is_the_same_in_all_rows_of_the_first_batch():
    x = ROWS[:12].clone()
    x[:, -1] = 0
    some = x.clone()
    some[2:8, -1] = 1
    model = collected(bnuq.convert(Column().eval()), x)
    assert_goes_as_the_loop(model, x, some)
    assert way(model) == "loop"


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
