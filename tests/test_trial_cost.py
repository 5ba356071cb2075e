"""There is no trial of folding where it cannot pay."""

import copy

import pytest
import torch
from coupled import ROWS, D, Graph, K
from folded import assert_right_or_refused, prepared, samples, way
from test_folding import Counting, count_passes
from torch.nn.utils import prune, spectral_norm, weight_norm

from bnuq_ext import chunks, predictor


def test_where_one_replica_fills_a_chunk_there_is_no_trial(monkeypatch):
    monkeypatch.setattr(chunks, "CPU_BYTES", 16 * D * 4)
    model = prepared(Counting, ROWS)
    expected = samples(copy.deepcopy(model), ROWS[:16], strategy="loop")
    assert (
        count_passes(lambda: samples(model, ROWS[:16])) == [16] * 7
    )  # the first finds out the size
    assert count_passes(lambda: samples(model, ROWS[:16])) == [16] * 6
    assert way(model) == ""
    for options in ({"chunk": 3}, {"strategy": "folded"}, {}):
        torch.testing.assert_close(samples(model, ROWS[:16], **options), expected)
        assert way(model) == "folded"
    coupled = prepared(Graph, ROWS)
    samples(coupled, ROWS[:6])
    with pytest.raises(ValueError, match="does not fold"):
        samples(coupled, ROWS[:6], strategy="folded")


class Faint(Counting):
    """Replicas and rows are nearly the same until `loud` is set,
    which the model's state does not show."""

    loud = False

    def forward(self, x):
        y = super().forward(x)
        return y if Faint.loud else 1 + 1e-6 * y


def test_trials_that_cannot_tell_come_to_an_end(monkeypatch):
    model = prepared(Faint, ROWS)
    for i in range(8):
        assert len(count_passes(lambda i=i: samples(model, ROWS[i : i + 6]))) > 7
    # Of another number of rows too, after one forward for the record.
    for rows, first in ((6, 7), (9, 7)):
        assert len(count_passes(lambda rows=rows: samples(model, ROWS[:rows]))) == first
        assert len(count_passes(lambda rows=rows: samples(model, ROWS[1 : rows + 1]))) == 6
    with pytest.raises(
        ValueError,
        match=r"tell replicas and rows apart: two differ by \de-0\d of the largest value, not by more than 0.0003",
    ):
        samples(model, ROWS[:6], strategy="folded")
    monkeypatch.setattr(Faint, "loud", True)
    samples(model, ROWS[:6], strategy="folded")
    assert count_passes(lambda: samples(model, ROWS[:6])) == [6]


def take(model, x, **options):
    """The rows that each forward of a prediction is given, if it gives the loop's answer."""
    expected = samples(copy.deepcopy(model), x, **options | {"strategy": "loop"})
    found = []
    passes = count_passes(lambda: found.append(samples(model, x, **options)))
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)
    return passes


def tries(model, x, **options):
    """Whether such a prediction makes a trial, on three rows."""
    return 3 in take(model, x, **options)


def dear(monkeypatch, cls=Counting):
    """A model whose trial takes one product more than is spent at first sight."""
    of_a_row = 2 * D * D + D * K
    monkeypatch.setattr(predictor, "_DEAR", 160 * of_a_row - 1)
    return prepared(cls, ROWS)


def test_a_dear_trial_waits_until_the_loop_has_cost_as_much(monkeypatch):
    model = dear(monkeypatch)
    assert take(model, ROWS[:5]) == [5] * 7  # the first finds out what a row takes
    for _ in range(4):
        assert take(model, ROWS[:5]) == [5] * 6
        assert way(model) == ""
    assert tries(model, ROWS[:5])  # at 180 rows; a trial costs as much as 160
    assert way(model) == "folded"
    assert take(model, ROWS[:5]) == [5]


def test_a_trial_that_is_not_dear_waits_for_nothing(monkeypatch):
    model = dear(monkeypatch)
    monkeypatch.setattr(predictor, "_DEAR", predictor._DEAR + 1)
    assert tries(model, ROWS[:5])
    assert take(model, ROWS[:5]) == [5]


def test_one_prediction_of_as_many_rows_makes_a_dear_trial_at_once(monkeypatch):
    model = dear(monkeypatch)
    assert not tries(model, ROWS[:5], num_samples=32)
    assert tries(dear(monkeypatch), ROWS[:5], num_samples=33)


def test_batches_of_all_sizes_add_up_to_a_dear_trial(monkeypatch):
    model, loader = dear(monkeypatch), [ROWS[:5], ROWS[5:14]]
    assert take(model, loader) == [5] * 7 + [9] * 7
    passes = take(model, loader)
    assert passes[:6] == [5] * 6 and 3 in passes and way(model) == "folded"
    # The fives without one more: the record, all together, and four alone.
    assert take(model, loader) == [5] * 6 + [9]


def test_asked_to_fold_a_dear_trial_is_made_at_once(monkeypatch):
    model = dear(monkeypatch)
    assert not tries(model, ROWS[:5])
    assert tries(model, ROWS[:5], strategy="folded")
    assert take(model, ROWS[:5]) == [5]
    assert take(model, ROWS[:7]) == [7] * 6  # without one more


def test_after_a_change_of_the_weights_a_dear_trial_waits_anew(monkeypatch):
    model = dear(monkeypatch)
    for _ in range(5):
        take(model, ROWS[:5])
    with torch.no_grad():
        model.head.bias[0] += 1
    assert take(model, ROWS[:5]) == [5] * 7


def test_dear_trials_that_cannot_tell_wait_for_as_much_again(monkeypatch):
    model = dear(monkeypatch, Faint)
    # Each tries both ways: at more than 160 rows, than 480, than 800.
    assert [i for i in range(1, 28) if tries(model, ROWS[:5])] == [6, 17, 27]


REPARAMETRISED = {
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "pruned twice": lambda layer: [prune.random_unstructured(layer, "weight", 0.3) for _ in "ab"],
    "weight norm": weight_norm,
    "spectral norm": spectral_norm,
}


@pytest.mark.parametrize("kind", REPARAMETRISED)
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_weights_that_torchs_hooks_make_anew_are_no_change(kind):
    model = prepared(Counting, ROWS)
    REPARAMETRISED[kind](model.head)
    samples(model, ROWS[:16])
    assert way(model) == "folded"
    assert count_passes(lambda: samples(model, ROWS[:16])) == [16]
    assert_right_or_refused(model, ROWS[:16])
    before = samples(model, ROWS[:16])
    part = next(p for name, p in model.head.named_parameters() if name.startswith("weight_"))
    with torch.no_grad():
        part[0] += 1
    assert len(count_passes(lambda: samples(model, ROWS[:16]))) > 1
    assert not torch.equal(samples(model, ROWS[:16]), before)
