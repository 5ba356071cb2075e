"""Rows that are made up where an input has too few of its own for a trial."""

import pytest
import torch
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext.passes import DoesNotFold
from bnuq_ext.proof.agreement import _outlie, check_equal
from bnuq_ext.proof.probe import _stretched, probe_inputs

D, K = 5, 3


class Table(nn.Module):
    """Integers in, each column an index into a table of its own size."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, D) for size in (3, 50, 9))
        self.head = bnuq.BayesLinear(D, K)

    def forward(self, x):
        rows = [table(column) for table, column in zip(self.tables, x.T, strict=True)]
        return self.head(sum(rows))


def samples(model, x, strategy):
    options = {"likelihood": "categorical", "num_samples": 4, "seed": 5, "keep_samples": True}
    return bnuq.predict(model, x, strategy=strategy, **options).samples


def replicas(model, x):
    with bnuq.replicas(model, 4, seed=5):
        return model(x).unflatten(0, (4, -1))


def test_rows_that_a_model_does_not_take_decide_nothing():
    """The first input has too few rows; the next ones go through the model together all the
    same."""
    torch.manual_seed(0)
    model = Table().eval()
    x = torch.stack([torch.randint(low, end, (8,)) for low, end in ((0, 3), (9, 50), (3, 9))], 1)
    torch.testing.assert_close(samples(model, x[:1], "auto"), samples(model, x[:1], "loop"))
    refusal = "the model takes no rows made up for a trial: index out of range"
    with pytest.raises(ValueError, match=refusal):
        samples(model, x[:1], "folded")
    with pytest.raises(ValueError, match=refusal):
        replicas(model, x[:1])
    expected = samples(model, x, "loop")
    for found in (replicas(model, x), samples(model, x, "folded")):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_two_rows_are_crossed_column_by_column():
    torch.manual_seed(0)
    model = Table().eval()
    x = torch.tensor([[2, 40, 7], [1, 30, 5]])
    torch.testing.assert_close(samples(model, x, "folded"), samples(model, x, "loop"))
    rows, made_up = probe_inputs("test", x)
    assert made_up and rows.tolist() == [[2, 40, 7], [1, 30, 5], [2, 30, 5]]


def test_a_bag_of_tokens_by_itself_folds():
    """Flipped it would be the same bag."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(9, D), bnuq.BayesLinear(D, K)).eval()
    tokens = torch.tensor([[3, 1, 4, 1, 5, 2, 6]])
    expected = samples(model, tokens, "loop")
    for found in (replicas(model, tokens), samples(model, tokens, "folded")):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("values", [2, 3, 8])
def test_integers_are_made_of_the_rows_own(values):
    x = torch.arange(10, 10 + values)[None]
    y = torch.randn(1, 2)
    (integers, floats), made_up = probe_inputs("test", (x, y))
    assert made_up and set(integers.flatten().tolist()) <= set(x.flatten().tolist())
    assert len(torch.cat([integers, floats], 1).unique(dim=0)) == 3
    halves = [made[0].tolist() for [made] in _stretched([x])]
    expected = [10 + i // 2 for i in range(values)]
    assert halves == [expected, [i + values // 2 for i in expected]]
    assert not probe_inputs("test", torch.arange(6).view(3, 2))[1]
    assert not probe_inputs("test", y)[1]


def test_a_row_far_out_lies_among_small_ones():
    """Larger than activations bear, it would saturate a deep network,
    where rounding turns into anything."""
    torch.manual_seed(0)
    given = torch.randn(9, 3, 4)
    y = given.clone()
    _outlie(y)
    far, others = y[0, 0].abs().max(), y[0, 1:].abs().max()
    torch.testing.assert_close(far, 100 * others)
    torch.testing.assert_close(far, given[0, 1:].abs().max())
    torch.testing.assert_close(y.flatten(0, 1)[1:], 0.01 * given.flatten(0, 1)[1:])


@pytest.mark.parametrize(
    "large, off, rounding",
    [
        (1.0, (0.0, 1.1e-4), 9e-5),
        (1e3, (0.0, 5e-3), 3.9e-3),  # four times a hundredth of the tolerance
        (1e3, (0.0, 5e-2), 3.9e-3),
        (1e6, (10.0, 41.0), 39.0),  # four times what the large channel is off
    ],
)
@pytest.mark.parametrize("dim", [1, 2])
def test_small_channels_are_held_to_their_own_values(large, off, rounding, dim):
    """The second of two channels, with ones beside `large`."""
    loop = torch.tensor([large, 1.0], dtype=torch.float64).expand(3, 4, 2)
    difference = torch.tensor([off[0], rounding], dtype=torch.float64)
    far = torch.tensor(off, dtype=torch.float64)
    check_equal((loop + difference).movedim(2, dim), loop.movedim(2, dim), 1e-4)
    with pytest.raises(DoesNotFold, match="output differs from that of one replica after another"):
        check_equal((loop + far).movedim(2, dim), loop.movedim(2, dim), 1e-4)


def test_channels_of_infinities_and_zeros_are_equal():
    loop = torch.tensor([[1.0, 0.0, torch.inf, torch.nan]]).expand(3, 4)
    check_equal(loop, loop.clone(), 1e-4)
