"""Folding never changes an answer: what it gives is the loop's, or an error."""

import contextlib
import copy
import sys
import traceback

import pytest
import torch
from coupled import (
    CLIPS,
    COUPLED,
    FOLDS,
    ROWS,
    VIDEO,
    D,
    Dropping,
    Gated,
    Graph,
    GraphInput,
    K,
    MemoryBank,
    Norms,
    QueueInPlace,
)
from folded import assert_right_or_refused, prepared, samples, way
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext import model_cache
from bnuq_ext.forward import Forward
from bnuq_ext.passes import DoesNotFold, ReplicaPass, running
from bnuq_ext.proof import folding
from bnuq_ext.proof.folding import Folding
from bnuq_ext.proof.probe import probe_draws, probe_inputs
from bnuq_ext.samplers import make_sampler


@pytest.mark.parametrize("rows", [1, 2, 6, 16, 24])
@pytest.mark.parametrize("cls", [*COUPLED, Dropping])
def test_coupled_rows(cls, rows):
    if (cls is Graph and rows != 6) or (cls.__name__ == "Pairs" and rows == 1):
        return
    model = prepared(cls, ROWS)
    for num_samples in (2, 6):  # 6 is a number of rows too
        used = assert_right_or_refused(model, ROWS[:rows], num_samples=num_samples)
        if cls in FOLDS:
            assert used == FOLDS[cls]


@pytest.mark.filterwarnings("ignore:collect. M is taken as 6, the first size")
@pytest.mark.parametrize("cls", VIDEO)
@pytest.mark.parametrize("clips", [1, 4, 5])
def test_frames_as_rows_with_as_many_frames_as_replicas(cls, clips):
    model = prepared(cls, CLIPS)
    x = CLIPS[:clips] if cls is not VIDEO[2] else CLIPS[:clips].transpose(0, 1)
    for num_samples in (5, 10):
        used = assert_right_or_refused(model, x, num_samples=num_samples)
        if cls in FOLDS:
            assert used == FOLDS[cls]


def test_an_adjacency_matrix_among_the_inputs():
    torch.manual_seed(0)
    model = bnuq.convert(GraphInput()).eval()
    for rows in (3, 6):
        adjacency = torch.rand(rows, rows).softmax(1)
        bnuq.collect(
            model, [ROWS[i * rows : (i + 1) * rows] for i in range(8)], 8, progress=False,
            input_fn=lambda x, adjacency=adjacency: (x, adjacency),
        )  # fmt: skip
        assert_right_or_refused(model, (ROWS[:rows], adjacency))
        assert_right_or_refused(model, {"x": ROWS[:rows], "adjacency": adjacency})


@pytest.mark.parametrize("cls", COUPLED)
def test_another_size_on_a_plan_that_is_known(cls):
    model = prepared(cls, ROWS)
    if cls is Graph:
        return
    assert_right_or_refused(model, ROWS[:4])
    known_to_fold = copy.deepcopy(model)
    samples(known_to_fold, ROWS[:4])
    loop = copy.deepcopy(known_to_fold)
    actual, expected = (
        samples(m, ROWS[:24], strategy=s) for m, s in ((known_to_fold, "auto"), (loop, "loop"))
    )
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


class Counting(Norms):
    """Counts its forwards where nobody looks."""

    passes = []

    def forward(self, x):
        self.passes.append(x.shape[0])
        return self.head(self.second(self.first(x)))


def count_passes(function):
    Counting.passes.clear()
    function()
    return list(Counting.passes)


def test_a_known_model_is_run_once_a_chunk():
    model = prepared(Counting, ROWS)
    assert len(count_passes(lambda: samples(model, ROWS[:16]))) > 1
    assert count_passes(lambda: samples(model, ROWS[:16])) == [16]
    assert count_passes(lambda: samples(model, ROWS[16:32] + 1, seed=9)) == [16]
    # Three are the check, all of a chunk.
    assert count_passes(lambda: samples(model, ROWS[:16], chunk=4)) == [16] * 5
    assert count_passes(lambda: samples(model, ROWS[:16], chunk=4)) == [16, 16]
    # Another number of rows: a record, the chunk and its check of four; the trial is not repeated.
    assert count_passes(lambda: samples(model, ROWS[:8])) == [8] * 6
    assert count_passes(lambda: samples(model, ROWS[:8], strategy="loop")) == [8] * 6
    assert count_passes(lambda: samples(model, ROWS[:8], num_samples=1)) == [8]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: nn.init.constant_(m.gate, 0.5),
        lambda m: m.load_state_dict({**m.state_dict(), "gate": torch.tensor(0.7)}),
        lambda m: m.register_forward_hook(lambda module, args, out: out - out.mean(0)) and None,
        lambda m: setattr(m, "head", nn.Sequential(m.head, CentredRows())),
        lambda m: setattr(m.head, "forward", lambda h: (h - h.mean(0)) @ m.head.weight.T),
        lambda m: m.options.update(centred=True),
    ],
)
def test_a_changed_model_is_proved_again(change):
    model = prepared(Gated, ROWS)
    samples(model, ROWS[:16])
    assert way(model) == "folded"
    change(model)
    expected = samples(model, ROWS[:16], strategy="loop")
    torch.testing.assert_close(samples(model, ROWS[:16]), expected, rtol=1e-5, atol=1e-5)
    assert way(model) == "loop"


class CentredRows(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Tokens(nn.Module):
    """Integers in."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.head = (
            nn.Embedding(9, D),
            nn.BatchNorm1d(D),
            nn.Linear(D, K),
        )

    def forward(self, tokens):
        return self.head(self.norm(self.embedding(tokens).transpose(1, 2)).relu().mean(2))


def test_integers_are_flipped_for_the_trial():
    tokens = torch.arange(48).view(8, 6) % 9
    tokens[:, 0] = torch.arange(8)
    torch.manual_seed(0)
    model = bnuq.convert(Tokens()).eval()
    bnuq.collect(model, [tokens, tokens.flip(0), tokens.flip(1), tokens % 4], 4, progress=False)
    for rows in (8, 1):
        assert_right_or_refused(model, tokens[:rows])
    samples(model, tokens)
    assert way(model) == "folded"


def test_an_input_that_tells_nothing_is_not_taken_for_a_proof():
    tokens = torch.full((4, 6), 5)
    torch.manual_seed(0)
    model = bnuq.convert(Tokens()).eval()
    batches = [torch.randint(9, (8, 6)) for _ in range(4)]
    bnuq.collect(model, batches, 4, progress=False)
    expected = samples(model, tokens, strategy="loop")
    torch.testing.assert_close(samples(model, tokens), expected, rtol=1e-5, atol=1e-5)
    assert not model_cache._CACHES[model].plans
    with pytest.raises(ValueError, match="does not fold: the input has too few different rows"):
        samples(model, tokens, strategy="folded")
    samples(model, batches[0])
    assert way(model) == "folded"


def test_outputs_that_tell_nothing_are_not_taken_for_a_proof():
    model = prepared(Gated, ROWS)
    with torch.no_grad():
        model.head.weight.zero_()
    samples(model, ROWS[:6])
    assert not model_cache._CACHES[model].plans
    nan = ROWS[:6].clone()
    nan[:3] = float("nan")
    model = prepared(Gated, ROWS)
    expected = samples(model, nan, strategy="loop")
    actual = samples(model, nan)
    assert actual[:, :3].isnan().all() and not model_cache._CACHES[model].plans
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_outputs_of_one_number_a_row_fold():
    model = prepared(Gated, ROWS)
    options = {"likelihood": "gaussian", "num_samples": 5, "seed": 1, "keep_samples": True}
    folded, loop = (
        bnuq.predict(model, ROWS[:6], strategy=s, output_fn=lambda o: o[:, 0], **options)
        for s in ("folded", "loop")
    )
    assert folded.samples.shape == (5, 6)
    torch.testing.assert_close(folded.samples, loop.samples, rtol=1e-5, atol=1e-6)


def test_one_row_of_nan_stays_one_row():
    model = prepared(Counting, ROWS)
    x = ROWS[:6].clone()
    x[5] = float("nan")
    out = samples(model, x)
    assert way(model) == "folded"
    assert out[:, 5].isnan().all() and out[:, :5].isfinite().all()


def test_a_forward_that_remembers_leaves_its_state_as_the_loop_does():
    for cls, name in ((MemoryBank, "memory"), (QueueInPlace, "queue")):
        model = prepared(cls, ROWS)
        loop = copy.deepcopy(model)
        for x in (ROWS[:6], ROWS[6:12]):
            actual, expected = samples(model, x), samples(loop, x, strategy="loop")
            torch.testing.assert_close(actual, expected)
            torch.testing.assert_close(getattr(model, name), getattr(loop, name))


def draw_of(model, num_samples):
    bank = model.norm_a.bank
    return make_sampler("test", "bank", bank, None, torch.device("cpu")).draw(0, 0, num_samples)


def test_a_pass_holds_each_call_to_what_the_trial_saw():
    model = prepared(Gated, ROWS)
    layers, draw = {"norm_a": model.norm_a}, draw_of(model, 3)

    def call(rows, shared, seen):
        active = ReplicaPass(layers, draw, {"norm_a": rows}, dict(shared), op="test")
        with running(active):
            out = model.norm_a(ROWS[:seen])
        return out.shape[0], active.shared

    assert call(4, {}, 4) == (12, {"norm_a": True})
    assert call(4, {}, 12) == (12, {"norm_a": False})
    for rows, shared, seen in ((4, {"norm_a": False}, 4), (4, {"norm_a": True}, 12), (4, {}, 8)):
        with pytest.raises(DoesNotFold, match=f"norm_a saw {seen} rows"):
            call(rows, shared, seen)
    with (
        pytest.raises(DoesNotFold, match="norm_a saw 4 rows instead of None"),
        running(ReplicaPass(layers, draw, {}, op="test")),
    ):
        model.norm_a(ROWS[:4])


@pytest.mark.parametrize("sampler", ["bank", "normal", "lognormal"])
def test_the_replicas_of_a_trial_differ_in_every_statistic(sampler):
    model = prepared(Gated, ROWS)
    drawn = make_sampler("test", sampler, model.norm_a.bank, None, torch.device("cpu")).draw(
        0, 0, 1
    )
    one, other, both = probe_draws(drawn)
    assert (one.num_samples, other.num_samples, both.num_samples) == (1, 1, 2)
    assert [d.snapshot.tolist() for d in (one, other, both)] == [[0], [1], [0, 1]]
    for key, (mean, var) in both.tables.items():
        assert ((mean[1] - mean[0]).abs() > 0.4 * var[0].sqrt()).all()
        assert (var[1] > 1.4 * var[0]).all()
        if sampler == "bank":
            row = drawn.snapshot[0]
            assert torch.equal(mean[0], model.norm_a.bank.mean[key][row])


@pytest.mark.parametrize("rows, values", [(2, 1), (1, 6), (5, 6)])
def test_probe_inputs_are_three_different_rows(rows, values):
    for x in (
        torch.randn(rows, values),
        torch.zeros(rows, values),
        torch.ones(rows, values).half(),
    ):
        probe, made_up = probe_inputs("test", x)
        assert not made_up
        assert (
            probe.shape == (3, values) and probe.dtype == x.dtype and len(probe.unique(dim=0)) == 3
        )
    x, y = torch.randn(5, 2), torch.arange(10).view(5, 2)
    (first, (second, third, number)), made_up = probe_inputs("test", (x, (y, torch.ones(7), 3)))
    assert not made_up
    apart = [0, 4, 2]
    assert torch.equal(first, x[apart]) and torch.equal(second, y[apart])
    assert len(third) == 7 and number == 3


def test_another_output_than_the_plans_does_not_fold():
    model = prepared(Gated, ROWS)
    samples(model, ROWS[:6])
    modules = list(model.modules())
    record = model_cache.cache_of(model, modules)
    plan = next(iter(record.plans.values()))
    layers = {"norm_a": model.norm_a, "norm_b": model.norm_b}
    sampler = make_sampler("test", "bank", model.norm_a.bank, None, torch.device("cpu"))
    folder = Folding(Forward(model, layers, sampler, 0, None, record), modules, 0, ROWS[:6])
    assert folder.run(plan, 0, 6).shape == (6, 6, K)
    for shape in ((6, K + 1), (3, K)):
        with pytest.raises(DoesNotFold, match="6 replicas have outputs"):
            folder.run(plan._replace(shape=shape), 0, 6)


class Plain(Norms):
    def forward(self, x):
        return self.head(self.second(self.first(x)))


def test_plans_are_bounded(monkeypatch):
    monkeypatch.setattr(folding, "_MOST", 3)
    model = prepared(Plain, ROWS)
    for rows in range(3, 9):
        samples(model, ROWS[:rows])
    assert len(model_cache._CACHES[model].plans) <= 3


def test_a_proof_moves_no_generator():
    class Draws(Plain):
        def forward(self, x):
            torch.rand(1)
            return super().forward(x)

    model, states = prepared(Draws, ROWS), []
    for _ in range(2):  # the first time with the trial and the comparison
        samples(model, ROWS[:6])
        states.append(torch.get_rng_state())
    assert way(model) == "loop" and torch.equal(*states)


def test_a_trial_without_memory_says_nothing_of_the_next():
    model, left = prepared(Plain, ROWS), [1]

    def full(module, args):
        if len(args[0]) == 6 and left:  # two replicas of the trial's three rows
            left.pop()
            raise torch.OutOfMemoryError("full")

    model.b.register_forward_pre_hook(full)
    for rows in (4, 5):
        samples(model, ROWS[:rows])
    assert way(model) == "folded"


@pytest.mark.parametrize("left", [30, 45, 55, 65])
def test_a_deep_caller_leaves_no_verdict(left):
    def deep(calls, function):
        return deep(calls - 1, function) if calls else function()

    def predicted(**options):
        return bnuq.predict(model, x, likelihood="categorical", num_samples=4, seed=0, **options)

    model, x = (
        bnuq.convert(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))).eval(),
        torch.randn(5, 6),
    )
    model.register_forward_hook(lambda *args: None)  # no chain
    bnuq.collect(model, list(torch.randn(4, 16, 6)), 4, progress=False)
    depth = sum(1 for _ in traceback.walk_stack(None))
    with contextlib.suppress(RecursionError):
        deep(sys.getrecursionlimit() - depth - left, predicted)
    predicted(strategy="folded")
