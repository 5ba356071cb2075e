"""Training steps with T samples as one batch: proven in full once, then held to one sample run alone."""

import copy
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext import folding, known, vi
from bnuq_ext.moved import Moved
from bnuq_ext.probe import check_replica
from bnuq_ext.replicas import DoesNotFold, Undecided

D, K, N, T = 6, 4, 8, 3


class Net(nn.Module):
    """Two Bayesian layers with `mix` between them."""

    def __init__(self, mix=lambda h: h, rho_init=-2.0, middle=None):
        super().__init__()
        torch.manual_seed(0)
        options = dict(rho_init=rho_init, dtype=torch.float64)
        self.first, self.last = bnuq.BayesLinear(D, 9, **options), bnuq.BayesLinear(9, K, **options)
        self.middle = nn.Identity() if middle is None else middle
        self.mix = mix

    def forward(self, x):
        return self.last(self.mix(self.middle(self.first(x).tanh())))


def gate(value, size=()):
    return nn.Parameter(torch.full(size, value, dtype=torch.float64))


class Attention(nn.Module):
    """ReZero: attention over the rows of the batch, behind a gate at zero."""

    def __init__(self, value=0.0, size=()):
        super().__init__()
        self.gate = gate(value, size)

    def weight(self):
        return self.gate

    def forward(self, h):
        return h + self.weight() * ((h @ h.T).softmax(1) @ h)


class SquaredGate(Attention):
    """Its gradient is 0 where the gate is."""

    def weight(self):
        return self.gate.square()


class LateGate(Attention):
    """Shut, in value and gradient, until the gate passes a threshold."""

    def weight(self):
        return (self.gate - 0.05).relu()


class Branch(Attention):
    """Control flow that depends on the value of a parameter."""

    def forward(self, h):
        return super().forward(h) if self.gate > 0.05 else h * (1 + self.gate)


def data(rows=N):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, D, generator=generator, dtype=torch.float64)
    return x, torch.randint(K, (rows,), generator=generator)


def gradients(model, seed, num_samples=T, rows=N):
    """The loss and its gradients, which are left in the model."""
    x, y = data(rows)
    model.zero_grad()
    options = dict(num_samples=num_samples, batch_weight=0.1, seed=seed)
    loss = bnuq.elbo_loss(model, x, y, **options).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def of_the_loop(model, *args, **options):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(vi, "_together", lambda *args: None)
        return gradients(copy.deepcopy(model), *args, **options)


def step(model, size=0.1):
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= size * p.grad


def proofs(monkeypatch):
    """What is appended to at each full proof."""
    made, make = [], folding.Folding._make
    monkeypatch.setattr(folding.Folding, "_make", lambda *args: made.append(1) or make(*args))
    return made


def ways(model):
    return {plan.way for plan in known._KNOWN[model].standing.values()}


COUPLED = [
    lambda: Attention(),
    lambda: Attention(1e-6, (9,)),
    lambda: SquaredGate(),
    lambda: SquaredGate(1e-3),
    lambda: nn.Sequential(nn.Linear(9, 9, dtype=torch.float64), Attention(), nn.Tanh()),
]


@pytest.mark.parametrize("num_samples", [2, 3, 10])
@pytest.mark.parametrize("mix", COUPLED)
def test_a_gate_at_zero_hides_nothing(mix, num_samples):
    """The outputs of the first step couple no rows, but the gate's gradient does: it goes one by one at once."""
    model = Net(middle=mix())
    for i in range(4):
        expected = of_the_loop(model, i, num_samples)
        for a, e in zip(gradients(model, i, num_samples), expected, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-12)
        step(model)
    assert ways(model) == {"loop"}


@pytest.mark.parametrize("drop", [0.0, 1e-14])
@pytest.mark.parametrize("cls", [LateGate, Branch])
def test_what_couples_later_is_found_in_the_very_step(cls, drop, monkeypatch):
    """No trial in the first step shows it, for here the parameters are hardly moved. Dropout that drops nothing
    sends the comparison to eval."""
    monkeypatch.setattr("bnuq_ext.moved._away_from_zero", lambda p: p.detach() * 1.01)
    model = Net(middle=nn.Sequential(cls(), nn.Dropout(drop)))
    found = []
    for i in range(6):
        expected = of_the_loop(model, i)
        for a, e in zip(gradients(model, i), expected, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-12)
        found += [list(ways(model))]
        step(model)
        with torch.no_grad():
            model.middle[0].gate += 0.02
    assert found == [["folded"]] * 3 + [["loop"]] * 3


def test_a_branch_on_values_goes_one_after_another():
    for seed in range(5):
        model = Net(mix=lambda h: h if h.sum() > 0 else -h)
        assert ways_after(model, seed) == {"loop"}


def test_a_scripted_part():
    model, (x, y) = Net(middle=nn.Linear(9, 9, dtype=torch.float64)), data()
    options = dict(num_samples=T, batch_weight=0.1, seed=0)
    expected = bnuq.elbo_loss(model, x, y, **options).loss
    with warnings.catch_warnings(action="ignore"):  # of newer torch: deprecated
        model.middle = torch.jit.script(model.middle)
    torch.testing.assert_close(bnuq.elbo_loss(model, x, y, **options).loss, expected)


def test_a_buffer_that_couples_later_is_found():
    model = Net(middle=nn.Module())
    model.middle.register_buffer("share", torch.zeros((), dtype=torch.float64))
    model.middle.forward = lambda h: h - model.middle.share * h.mean(0)
    for i, share in enumerate((0.0, 0.0, 1e-3, 0.5)):
        model.middle.share.fill_(share)
        assert ways_after(model, i) == ({"folded"} if share == 0 else {"loop"})


def ways_after(model, seed):
    expected = of_the_loop(model, seed)
    for a, e in zip(gradients(model, seed), expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-12)
    step(model)
    return ways(model)


class CenteredInTraining(nn.Module):
    def forward(self, h):
        return h - h.mean(0) if self.training else h


def test_rows_that_meet_in_training_only():
    model = Net(middle=CenteredInTraining())
    assert ways_after(model, 0) == {"loop"}
    model.eval()
    assert ways_after(model, 1) == {"loop", "folded"}
    model.train()
    assert ways_after(model, 2) == {"loop", "folded"}


class Residual(nn.Module):
    """Treats rows one by one, but is no chain."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(9, 9, dtype=torch.float64)

    def forward(self, h):
        return h + self.inner(h).relu()


def counted(model):
    """Rows of each forward."""
    rows = []
    model.register_forward_hook(lambda module, args, output: rows.append(len(output)))
    return rows


@pytest.mark.parametrize("num_samples", [2, 5])
def test_a_step_costs_one_sample_more(num_samples, monkeypatch):
    made, model = proofs(monkeypatch), Net(middle=Residual())
    rows, chosen = counted(model), []
    choose = folding.Folding.chosen
    monkeypatch.setattr(
        folding.Folding, "chosen", lambda *args: chosen.append(choose(*args)) or chosen[-1]
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
    assert len(made) == 1 and set(chosen) == set(range(num_samples))
    assert_right(model)


def assert_right(model):
    for a, e in zip(gradients(model, 9), of_the_loop(model, 9), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-12)


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
    gradients(model, 5, num_samples=2)
    assert seen == [2 * N, N, 2 * N]
    assert len(made) == 3
    assert_right(model)


def test_dropout_draws_what_it_draws_in_a_chain():
    """The comparison is made in eval: T samples and one alone, then the T of the step with their masks."""
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
        assert i == 0 or rows == [T * N, N, T * N]
        step(model)


def test_a_model_that_changes_itself_goes_one_after_another():
    """Power iteration in train(): the samples of the loop change it T times, and nothing else does."""
    parametrizations = nn.utils.parametrizations
    linear = parametrizations.spectral_norm(nn.Linear(9, 9, dtype=torch.float64))
    model = Net(middle=linear)
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


def narrow(model):
    with torch.no_grad():
        for layer in (model.first, model.last):
            layer.weight_rho.fill_(-30)
            layer.bias_rho.fill_(-30)


@pytest.mark.parametrize("at", [0, 1])
def test_samples_that_hardly_differ_are_compared_in_eval(at, monkeypatch):
    """With a wider posterior; the step in which they turn out to goes through the loop."""
    made, model = proofs(monkeypatch), Net(middle=Residual())
    rows = counted(model)
    for i in range(4):
        if i >= at:
            narrow(model)
        expected = of_the_loop(model, i)
        rows.clear()
        for a, e in zip(gradients(model, i), expected, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-12)
        if i > at:
            assert rows == [T * N, N, T * N]
        elif i == 1:
            assert rows == [N, T * N] + [N] * T
        step(model)
    assert len(made) == 1


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("share", [1e-5, 0.1])
def test_samples_that_hardly_differ_hide_nothing(at, share):
    """That the mean of all samples' rows is taken for that of one's own shows in no output of the step."""
    model = Net(middle=nn.Module())
    model.middle.register_buffer("share", torch.zeros((), dtype=torch.float64))
    model.middle.forward = lambda h: h - model.middle.share * h.mean(0)
    for i in range(4):
        if i >= at:
            narrow(model)
        model.middle.share.fill_(share if i > at else 0)
        assert ways_after(model, i) == ({"loop"} if i > at else {"folded"})


def test_without_gradients_nothing_stands(monkeypatch):
    """The gate has no gradient to be wrong."""
    made, model, (x, y) = proofs(monkeypatch), Net(middle=Attention()), data()
    for i in range(2):
        with torch.no_grad():
            bnuq.elbo_loss(model, x, y, num_samples=T, batch_weight=0.1, seed=i)
            model.first.weight_mu += 0.01
    assert len(made) == 2 and ways(model) == set()


def test_replicas_stand_too(monkeypatch):
    made, model, (x, _) = proofs(monkeypatch), Net(middle=Residual()), data()
    rows = counted(model)
    for i in range(3):
        model.zero_grad()
        rows.clear()
        with bnuq.replicas(model, T, seed=i):
            model(x).square().sum().backward()
        assert i == 0 or rows == [T * N, N, T * N]
        step(model, 1e-3)
    assert len(made) == 1
    gated = Net(middle=Attention())
    with bnuq.replicas(gated, T), pytest.raises(ValueError, match="same folded as one by one"):
        gated(x)
    with torch.no_grad(), bnuq.replicas(gated, T):
        assert len(gated(x)) == T * N


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


class Halved(nn.Module):
    def forward(self, h):
        return h[: len(h) // 2].repeat(2, 1) if self.training else h


class FirstRows(Net):
    def forward(self, x):
        return super().forward(x)[:N] if self.training else super().forward(x)


@pytest.mark.parametrize("make", [lambda: Net(middle=Halved()), FirstRows])
def test_rows_that_go_otherwise_in_training(make):
    """No trial in eval sees it: one after another, and no error from inside."""
    model = make()
    assert ways_after(model, 0) == {"loop"}
    assert ways_after(model, 1) == {"loop"}


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


# ---- Moved and check_replica --------------------------------------------------------------------


def test_moved_parameters():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 3), nn.Linear(3, 3))
    nn.init.zeros_(model[1].weight)
    model[1].bias = model[0].bias  # shared
    before = [p.detach().clone() for p in model.parameters()]
    seen = {}
    with torch.no_grad(), Moved(list(model.modules())) as moved:
        assert not moved.complete
        model(torch.randn(2, 16))
        for name, p in model.named_parameters():
            seen[name] = p + 0
    assert moved.complete
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    for name, p in model.named_parameters():
        assert (seen[name].abs() > p.abs()).all() and (seen[name] * p >= 0).all()
    assert seen["1.weight"].abs().max() > 0.1


def test_a_parameter_that_is_not_met_leaves_doubt(monkeypatch):
    made, model = proofs(monkeypatch), Net(middle=Residual())
    model.idle = gate(0.0)
    for i in range(2):
        gradients(model, i)
        step(model)
    assert len(made) == 2 and ways(model) == set()


def test_a_replica_among_others():
    outputs = torch.arange(6.0).view(3, 2)
    check_replica(outputs, 1, outputs[1] + 1e-5, 1e-4)
    with pytest.raises(DoesNotFold, match="differs from that"):
        check_replica(outputs, 1, outputs[1] + 1e-2, 1e-4)
    with pytest.raises(Undecided, match="nearly the same"):
        check_replica(outputs * 1e-4 + 1, 1, outputs[1] * 1e-4 + 1, 1e-4)
    nan = outputs.clone()
    nan[1] = float("nan")
    with pytest.raises(Undecided, match="nearly the same"):
        check_replica(nan, 1, nan[1], 1e-4)
