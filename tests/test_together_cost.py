"""Training steps with T samples as one batch: proven in full once,
then held to one sample run alone."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from training import (
    Attention,
    D,
    K,
    N,
    Net,
    Residual,
    T,
    assert_right,
    counted,
    data,
    gate,
    gradients,
    of_the_loop,
    proofs,
    step,
    ways,
)

import bnuq_ext as bnuq
from bnuq_ext import chain as chains
from bnuq_ext import vi
from bnuq_ext.proof.training import TrainingFolding


@pytest.mark.parametrize("num_samples", [3, 5])
def test_a_step_costs_one_sample_more(num_samples, monkeypatch):
    made, model = proofs(monkeypatch), Net(middle=Residual())
    rows, chosen = counted(model), []
    choose = TrainingFolding.chosen
    monkeypatch.setattr(
        TrainingFolding, "chosen", lambda *args: chosen.append(choose(*args)) or chosen[-1]
    )
    for i in range(num_samples + 1):
        gradients(model, i, num_samples)
        if i > 0:
            assert rows == [N, num_samples * N]
        rows.clear()
        gradients(model, i, num_samples)  # nothing has changed
        assert rows == [num_samples * N]
        rows.clear()
        step(model)
    assert len(made) == 1 and set(chosen) == set(range(1, num_samples))
    assert_right(model)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "middle", nn.Sequential(m.middle, Residual())),
        lambda m: m.middle.register_forward_hook(lambda module, args, out: 2 * out) and None,
        lambda m: m.eval(),
        lambda m: m.middle.eval(),
        lambda m: setattr(m, "mix", lambda h: 2 * h),
        lambda m: setattr(m.last, "bias_mu", nn.Parameter(m.last.bias_mu.detach().clone())),
    ],
)
def test_another_structure_is_proven_in_full(change, monkeypatch):
    made, model = proofs(monkeypatch), Net(middle=Residual())
    for i in range(2):
        gradients(model, i)
        step(model)
    assert len(made) == 1
    change(model)
    for i in range(2):
        gradients(model, i)
        step(model)
    assert len(made) == 2
    assert_right(model)


def test_other_shapes_are_proven_in_full(monkeypatch):
    made, model = proofs(monkeypatch), Net(middle=Residual())
    for i, rows in enumerate((N, 5, N, 5)):
        gradients(model, i, rows=rows)
        step(model)
    assert len(made) == 2
    seen = counted(model)
    gradients(
        model, 4, num_samples=5
    )  # the hook: a proof; then another number of samples: a run of them
    step(model)
    seen.clear()
    gradients(model, 5, num_samples=4)
    assert seen == [N, 4 * N, 4 * N]
    assert len(made) == 3
    assert_right(model)


def test_two_samples_go_one_after_another(monkeypatch):
    """No trial and no sample run alone: nothing is read back from a GPU."""
    made, model = proofs(monkeypatch), Net(middle=Residual())
    seen = counted(model)
    for i in range(2):
        gradients(model, i, num_samples=2)
        step(model)
    assert seen == [N] * 4 and not made
    assert_right(model, 2, 2)


def test_images_go_through_a_chain_together(monkeypatch):
    """Flattened there, and normalised row by row: no trial, and no sample alone."""
    made, options = proofs(monkeypatch), dict(dtype=torch.float64)
    hidden = bnuq.BayesLinear(D, 9, **options), nn.LayerNorm(9, **options), nn.ReLU()
    model = nn.Sequential(nn.Flatten(), *hidden, bnuq.BayesLinear(9, K, **options))
    (x, y), rows = data(), []
    monkeypatch.setattr(
        chains,
        "bayes_linear_chain",
        lambda x, *args, run=chains.bayes_linear_chain, **noise: (
            rows.append(x[..., 0].numel()) or run(x, *args, **noise)
        ),
    )
    terms = dict(num_samples=2, batch_weight=0.1, seed=3)
    out = bnuq.elbo_loss(model, x.view(N, 1, 2, D // 2), y, **terms)
    assert rows == [N, 2 * N] and not made
    torch.testing.assert_close(out, bnuq.elbo_loss(model[1:], x, y, **terms))
    monkeypatch.setattr(vi, "is_chain", lambda *args: False)
    monkeypatch.setattr(vi, "_together", lambda *args: None)
    torch.testing.assert_close(out, bnuq.elbo_loss(model, x.view(N, 1, 2, D // 2), y, **terms))


def test_another_model_in_each_step_is_not_proven_for_ever(monkeypatch):
    """A training loop that counts its steps in the model."""
    made, model = proofs(monkeypatch), Net(middle=Residual())
    rows, counts = counted(model), []
    for i in range(5):
        model.global_step = i
        rows.clear()
        gradients(model, i)
        counts.append(len(rows))
        step(model)
    assert len(made) == 2 and counts[2:] == [T] * 3
    for i in range(2):  # at rest it is proven again
        gradients(model, i)
        step(model)
    assert len(made) == 3
    rows.clear()
    gradients(model, 7)
    assert rows == [N, T * N]
    assert_right(model)


def test_many_batches_with_one_model_of_many_are_proven(monkeypatch):
    """Gradients accumulated between changes, or an evaluation in each of several settings."""
    made, model = proofs(monkeypatch), Net(middle=Residual())
    rows = counted(model)
    for i in range(4):
        model.setting = i
        for _ in range(8):
            rows.clear()
            gradients(model, i)
        assert rows == [T * N]
        step(model)
    assert len(made) == 4
    assert_right(model)


def test_dropout_draws_what_it_draws_in_a_chain(monkeypatch):
    """The comparison is made without it: T samples and one alone,
    then the T of the step with their masks."""
    # A chain's layers would add the divergence's gradients in another order.
    monkeypatch.setattr(chains, "_joins", lambda layer, x: False)
    model = Net(middle=nn.Dropout(0.5))
    chain = nn.Sequential(model.first, nn.Tanh(), model.middle, model.last)
    rows = counted(model)
    for i in range(3):
        torch.manual_seed(5)
        expected, state = gradients(chain, i), torch.get_rng_state()
        torch.manual_seed(5)
        rows.clear()
        actual = gradients(model, i)
        assert torch.equal(state, torch.get_rng_state())
        assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
        assert i == 0 or rows == [N, T * N, T * N]
        step(model)


def test_dropout_that_is_always_on_draws_once_in_a_step():
    """In eval too: the comparison puts torch's generator back."""
    model = Net(mix=lambda h: nn.functional.dropout(h, 1e-14, training=True))
    torch.manual_seed(5)
    torch.empty(T * N, 9, dtype=torch.float64).bernoulli_(0.5)
    expected = torch.get_rng_state()
    for i in range(3):
        torch.manual_seed(5)
        gradients(model, i)
        assert torch.equal(torch.get_rng_state(), expected)
        step(model)
    assert ways(model) == {"folded"}


@pytest.mark.parametrize("idle", [False, True])
def test_a_model_that_changes_itself_goes_one_after_another(idle):
    """Power iteration in train(): the samples of the loop change it T times,
    and nothing else does."""
    parametrizations = nn.utils.parametrizations
    linear = parametrizations.spectral_norm(nn.Linear(9, 9, dtype=torch.float64))
    model = Net(middle=linear)
    model.idle = gate(0.0) if idle else None  # with such a parameter no folded plan stands
    for i in range(3):
        before = {name: b.clone() for name, b in model.named_buffers()}
        actual = gradients(model, i)
        after = {name: b.clone() for name, b in model.named_buffers()}
        with torch.no_grad():
            for name, b in model.named_buffers():
                b.copy_(before[name])
        expected = of_the_loop(copy.deepcopy(model), i)
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-12)
        with torch.no_grad():
            for name, b in model.named_buffers():
                b.copy_(after[name])
        step(model)
    assert ways(model) == {"loop"}


def test_without_gradients_nothing_stands(monkeypatch):
    """The gate has no gradient to be wrong."""
    made, model, (x, y) = proofs(monkeypatch), Net(middle=Attention()), data()
    for i in range(2):
        with torch.no_grad():
            bnuq.elbo_loss(model, x, y, num_samples=T, batch_weight=0.1, seed=i)
            model.first.weight_mu += 0.01
    assert len(made) == 2 and ways(model) == set()


def test_without_gradients_eval_says_nothing_of_training(monkeypatch):
    model, (x, y) = Net(), data()
    model.mix = lambda h: h - h.mean(0) if model.training else h
    options = dict(num_samples=T, batch_weight=0.1, seed=0)
    with torch.no_grad():
        bnuq.elbo_loss(model.eval(), x, y, **options)
        actual = bnuq.elbo_loss(model.train(), x, y, **options)
        monkeypatch.setattr(vi, "_together", lambda *args: None)
        torch.testing.assert_close(actual, bnuq.elbo_loss(model, x, y, **options))


def test_replicas_stand_too(monkeypatch):
    made, model, (x, _) = proofs(monkeypatch), Net(middle=Residual()), data()
    rows = counted(model)
    for i in range(3):
        model.zero_grad()
        rows.clear()
        with bnuq.replicas(model, T, seed=i):
            model(x).square().sum().backward()
        assert i == 0 or rows == [N, T * N, T * N]
        step(model, 1e-3)
    assert len(made) == 1
    gated = Net(middle=Attention())
    for grad in (True, False):
        with torch.set_grad_enabled(grad), bnuq.replicas(gated, T):
            with pytest.raises(ValueError, match="same folded as one by one"):
                gated(x)


def test_a_tuple_and_a_dict_stand_too():
    class Two(Net):
        def forward(self, x, scale):
            return super().forward(x * scale)

    (x, y), model = data(), Two(middle=Residual())
    scale = torch.linspace(0.5, 1.5, N, dtype=torch.float64)[:, None]
    for inputs in ((x, scale), {"x": x, "scale": scale}):
        rows = counted(model)
        for i in range(3):
            model.zero_grad()
            rows.clear()
            loss = bnuq.elbo_loss(model, inputs, y, num_samples=T, batch_weight=0.1, seed=i).loss
            loss.backward()
            step(model)
        assert rows == [N, T * N]


def test_threads_share_what_has_been_proven():
    """Eight at a time, in each state of the parameters; flags and outcome as if alone."""
    model, (x, y) = Net(middle=Residual()), data()

    def losses(run):
        options = dict(num_samples=T, batch_weight=0.1)
        return list(run(lambda s: bnuq.elbo_loss(model, x, y, seed=s, **options).loss, range(8)))

    with ThreadPoolExecutor(8) as pool:
        for i in range(3):
            for a, e in zip(losses(pool.map), losses(map), strict=True):
                torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-12)
            assert all(m.training for m in model.modules())
            gradients(model, i)
            step(model)


def test_memory_that_ended_once_says_nothing_of_the_next_step():
    model, left = Net(middle=Residual()), [1]

    def full(module, args):
        if len(args[0]) == T * N and left:
            left.pop()
            raise torch.OutOfMemoryError("full")

    model.middle.register_forward_pre_hook(full)
    for seed in range(2):
        gradients(model, seed)
        step(model)
    assert ways(model) == {"folded"}


def test_shapes_that_always_differ_are_not_proven_each(monkeypatch):
    """Sequences: two at first sight, then those that have had twenty forwards."""
    made, model = proofs(monkeypatch), Net(middle=Residual())
    rows = counted(model)
    for i, size in enumerate((3, 4, *range(5, 12))):
        rows.clear()
        gradients(model, i, rows=size)
        assert i < 2 or rows == [size] * T
        step(model)
    assert len(made) == 2
    for i in range(7):
        rows.clear()
        gradients(model, i, rows=7)
        step(model)
    assert len(made) == 3 and rows == [7, T * 7]
    gradients(model, 0, rows=3)  # still stands
    assert len(made) == 3
    rows.clear()
    gradients(model, 0, rows=13, num_samples=21)  # cost as much one after another
    assert len(made) == 4 and rows[-1] == 21 * 13
    assert_right(model)


def test_evaluations_without_gradients_are_not_proven_each(monkeypatch):
    made, model, (x, y) = proofs(monkeypatch), Net(middle=Residual()), data()
    for i in range(12):
        with torch.no_grad():
            bnuq.elbo_loss(model, x, y, num_samples=T, batch_weight=0.1, seed=i)
        gradients(model, i, num_samples=2)
        step(model)
    assert len(made) == 3
