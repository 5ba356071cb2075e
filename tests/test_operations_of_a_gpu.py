"""Trials of models whose operations torch has for a GPU alone, or gives other results there: with
stand-ins for the CPU."""

import pytest
import torch
from coupled import ROWS, D
from folded import prepared, samples, way
from test_mixed import Between, assert_folds
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")
_aten = torch.ops.aten


def batch_norm(x, weight, bias, mean, var, training, momentum, eps):
    """With the statistics beside the result in eval too."""
    y, *own = _aten._native_batch_norm_legit(x, weight, bias, mean, var, training, momentum, eps)
    return (y, *own) if training else (y, mean.clone(), (var + eps).rsqrt())


def recurrent(x, weights, _, memory, first, cell, mode, size, proj, layers, batch_first, *others):
    """A layer of tanh, which hands the memory of its weights back."""
    hidden, outputs = first[0], []
    for step in x.unbind(1 if batch_first else 0):
        hidden = torch.tanh(step @ weights[0].T + hidden @ weights[1].T)
        outputs.append(hidden)
    empty = first.new_empty(0)
    return torch.stack(outputs, 1 if batch_first else 0), hidden[None].clone(), empty, empty, memory


@pytest.fixture(autouse=True)
def as_on_a_gpu():
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("native_batch_norm", batch_norm, "CPU")
        library.impl("_cudnn_rnn", recurrent, "CPU")
        yield


class Recurrent(nn.Module):
    """Over sequences of two, or over the rows as one sequence."""

    def __init__(self, calls=1, over_rows=False):
        super().__init__()
        self.calls, self.over_rows = calls, over_rows
        self.memory = nn.Parameter(torch.randn(2 * 4 * 4))

    def forward(self, h):
        x, weights = h.view(len(h), 2, 4), [*self.memory.view(2, 4, 4)]
        for _ in range(self.calls):
            first = x.new_zeros(1, x.shape[1 if self.over_rows else 0], 4)
            options = 1, 4, 0, 1, not self.over_rows, 0.0, False, False, [], None
            x = _aten._cudnn_rnn(x, weights, 2, self.memory, first, None, *options)[0]
        return x.flatten(1)


@pytest.mark.filterwarnings("ignore:predict. 1 batch-norm calls")
def test_batch_norm_in_eval_couples_nothing():
    assert_folds(lambda: Between(lambda h: nn.functional.batch_norm(h, *torch.ones(2, D))))


@pytest.mark.parametrize("calls", [1, 2])
def test_recurrent_layers_fold(calls):
    assert_folds(lambda: Between(Recurrent(calls)))


def test_a_sequence_of_rows_couples_them():
    along = Recurrent(over_rows=True)
    model = prepared(lambda: Between(lambda h: h + (along(h) > 2)), ROWS)
    samples(model, ROWS[:6])
    assert way(model) == "loop"
