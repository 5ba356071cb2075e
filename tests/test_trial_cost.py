"""There is no trial of folding where it cannot pay."""

import copy

import pytest
import torch
from coupled import ROWS, D, Graph
from test_folding import Counting, assert_right_or_refused, count_passes, prepared, samples, way
from torch.nn.utils import prune, spectral_norm, weight_norm

from bnuq_ext import chunks


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
