"""Training steps with T samples as one batch: rows that meet are found, however well they hide."""

import warnings

import pytest
import torch
from coupled import next_rows
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import (
    Attention,
    N,
    Net,
    Residual,
    T,
    assert_right,
    counted,
    data,
    gate,
    gradients,
    narrow,
    of_the_loop,
    proofs,
    step,
    ways,
    ways_after,
)

import bnuq_ext as bnuq
from bnuq_ext.passes import DoesNotFold, Undecided
from bnuq_ext.proof.agreement import check_informative, check_replica
from bnuq_ext.proof.moved import Moved


def centred_if_many(h):
    return h - h.mean(0) if len(h) > 3 * N else h


def test_more_samples_in_the_same_state_are_compared_themselves():
    model = Net(mix=centred_if_many)
    for num_samples in (3, 10):
        assert_right(model, 0, num_samples)
    assert ways(model) == {"loop"}


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


COUPLED = [
    lambda: Attention(),
    lambda: Attention(1e-6, (9,)),
    lambda: SquaredGate(),
    lambda: SquaredGate(1e-3),
    lambda: nn.Sequential(nn.Linear(9, 9, dtype=torch.float64), Attention(), nn.Tanh()),
]


@pytest.mark.parametrize("num_samples", [3, 10])
@pytest.mark.parametrize("mix", COUPLED)
def test_a_gate_at_zero_hides_nothing(mix, num_samples):
    """The outputs of the first step couple no rows, but the gate's gradient does:
    it goes one by one at once."""
    model = Net(middle=mix())
    for i in range(4):
        assert_right(model, i, num_samples)
        step(model)
    assert ways(model) == {"loop"}


@pytest.mark.usefixtures("by_values_alone")
@pytest.mark.parametrize("drop", [0.0, 1e-14])
@pytest.mark.parametrize("cls", [LateGate, Branch])
def test_what_couples_later_is_found_in_the_very_step(cls, drop, monkeypatch):
    """No trial in the first step shows it, for here the parameters are hardly moved. Dropout that
    drops nothing sends the comparison to eval."""
    monkeypatch.setattr("bnuq_ext.proof.moved._away_from_zero", lambda p: p.detach() * 1.01)
    model = Net(middle=nn.Sequential(cls(), nn.Dropout(drop)))
    found = []
    for i in range(6):
        assert_right(model, i)
        found += [list(ways(model))]
        step(model)
        with torch.no_grad():
            model.middle[0].gate += 0.02
    assert found == [["folded"]] * 3 + [["loop"]] * 3


class LateNeighbours(LateGate):
    """Rows of a sample meet those of the next one; the last sample has none."""

    def forward(self, h):
        return h + self.weight() * nn.functional.pad(h, (0, 0, 0, N))[N:]


@pytest.mark.usefixtures("by_values_alone")
def test_the_sample_that_is_run_alone_is_not_always_the_last(monkeypatch):
    monkeypatch.setattr("bnuq_ext.proof.moved._away_from_zero", lambda p: p.detach() * 1.01)
    model = Net(middle=LateNeighbours())
    assert ways_after(model, 0) == {"folded"}
    with torch.no_grad():
        model.middle.gate += 0.1
    assert ways_after(model, 1) == {"loop"}


class LateIfMany(LateGate):
    """The rows of more than three samples meet."""

    def forward(self, h):
        return h - self.weight() * h.mean(0) * (len(h) > 3 * N)


@pytest.mark.usefixtures("by_values_alone")
@pytest.mark.parametrize("drop", [0.0, 1e-14])
def test_one_number_of_samples_says_nothing_of_another_in_a_new_state(drop, monkeypatch):
    monkeypatch.setattr("bnuq_ext.proof.moved._away_from_zero", lambda p: p.detach() * 1.01)
    model = Net(middle=nn.Sequential(LateIfMany(), nn.Dropout(drop)))
    for opened in (0.0, 0.1):
        with torch.no_grad():
            model.middle[0].gate.fill_(opened)
        for num_samples in (3, 10):
            assert_right(model, 0, num_samples)
            assert ways(model) == {"loop" if opened and num_samples > 3 else "folded"}


class Bypass(Net):
    """The input goes round the first layer, where its rows are not those of the samples."""

    def forward(self, x):
        return self.last(self.first(x).tanh() + x.sum(1, keepdim=True))


@pytest.mark.parametrize("drop", [0.0, 1e-14])
def test_an_input_whose_rows_are_repeated_for_the_samples(drop):
    model = nn.Sequential(Bypass(), nn.Dropout(drop))
    for i in range(4):
        assert ways_after(model, i) == {"expanded"}


class Scaled(Net):
    def __init__(self):
        super().__init__()
        self.scale = gate(0.0)

    def forward(self, x):
        return self.scale * super().forward(x)


def test_what_could_not_be_told_does_not_stand():
    """Outputs of zero tell no sample from another; those of later parameters do."""
    model = Scaled()
    assert ways_after(model, 0) == set()
    with torch.no_grad():
        model.scale.fill_(1)
    assert ways_after(model, 1) == {"folded"}


def test_a_branch_on_values_goes_one_after_another():
    for seed in range(5):
        model = Net(mix=lambda h: h if h.sum() > 0 else -h)
        assert ways_after(model, seed) == {"loop"}


def test_a_scripted_part():
    model, (x, y) = Net(middle=nn.Linear(9, 9, dtype=torch.float64)), data()
    options = dict(num_samples=T, batch_weight=0.1, seed=0)
    expected = bnuq.elbo_loss(model, x, y, **options).loss
    with warnings.catch_warnings():  # of newer torch: deprecated
        warnings.simplefilter("ignore")
        model.middle = torch.jit.script(model.middle)
    torch.testing.assert_close(bnuq.elbo_loss(model, x, y, **options).loss, expected)


def test_a_buffer_that_couples_later_is_found():
    model = Net(middle=nn.Module())
    model.middle.register_buffer("share", torch.zeros((), dtype=torch.float64))
    model.middle.forward = lambda h: h - model.middle.share * next_rows(h)
    for i, share in enumerate((0.0, 0.0, 1e-3, 0.5)):
        model.middle.share.fill_(share)
        assert ways_after(model, i) == ({"folded"} if share == 0 else {"loop"})


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


def test_an_idle_parameter_does_not_hide_that_rows_meet_in_training_only():
    model = Net(middle=CenteredInTraining())
    model.idle = gate(0.0)
    assert ways_after(model, 0) == {"loop"}


@pytest.mark.parametrize("at", [0, 1])
def test_samples_that_hardly_differ_are_compared_apart(at, monkeypatch):
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
            assert rows == [N, T * N, T * N]
        elif i == 1:
            assert rows == [N, T * N] + [N] * T
        step(model)
    assert len(made) == 1


@pytest.mark.usefixtures("by_values_alone")
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("share", [1e-5, 0.1])
def test_samples_that_hardly_differ_hide_nothing(at, share):
    """That the mean of all samples' rows is taken for that of one's own shows in no output
    of the step."""
    model = Net(middle=nn.Module())
    model.middle.register_buffer("share", torch.zeros((), dtype=torch.float64))
    model.middle.forward = lambda h: h - model.middle.share * h.mean(0)
    for i in range(4):
        if i >= at:
            narrow(model)
        model.middle.share.fill_(share if i > at else 0)
        assert ways_after(model, i) == ({"loop"} if i > at else {"folded"})


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


def only_in_training(h):
    raise RuntimeError("not in eval")


def its_gradient(h):
    z = h.detach().requires_grad_()
    return h + torch.autograd.grad((z**3).sum(), z)[0]


def with_a_hook(h):
    h.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    return h


class InTraining(nn.Module):
    """Something else in train() and eval(); with `calls`, a count of those in train()."""

    def __init__(self, train, evaluate=lambda h: h):
        super().__init__()
        self.train_fn, self.eval_fn = train, evaluate
        self.register_buffer("calls", None)

    def forward(self, h):
        if not self.training:
            return self.eval_fn(h)
        if self.calls is not None:
            self.calls += 1
        return self.train_fn(h)


NEEDS = {
    "training": lambda: InTraining(lambda h: h, only_in_training),
    "gradients": lambda: InTraining(its_gradient, its_gradient),
    "gradients in training": lambda: InTraining(its_gradient),
    "a hook": lambda: InTraining(with_a_hook, with_a_hook),
    "a hook in training": lambda: InTraining(with_a_hook),
    "its number of rows": lambda: InTraining(lambda h: h.view(N, 9) ** 2, lambda h: h**2),
}


@pytest.mark.parametrize("make", NEEDS.values(), ids=NEEDS)
@pytest.mark.parametrize("counts", [True, False])
def test_a_model_that_bears_no_trial_goes_one_after_another(make, counts):
    model = Net(middle=make())
    if counts:
        model.middle.calls = torch.zeros(())
    for seed in range(3):
        ways = ways_after(model, seed)
        # What a forward changes once says nothing of the next.
        assert ways == {"loop"} or (seed == 0 and counts and ways == set())
    assert not counts or model.middle.calls == 3 * T


def test_what_fails_in_every_way_raises_what_the_model_raises():
    model = Net(middle=InTraining(only_in_training, only_in_training))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="^not in eval$"):
            gradients(model, 0)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_warning_of_the_trial_is_no_error_of_the_step(use_reentrant):
    inner = nn.Linear(9, 9, dtype=torch.float64)  # torch warns of a checkpoint without gradients
    model = Net(mix=lambda h: checkpoint(inner, h, use_reentrant=use_reentrant))
    assert ways_after(model, 0) == {"loop" if use_reentrant else "folded"}


def test_moved_parameters():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 3), nn.Linear(3, 3))
    nn.init.zeros_(model[1].weight)
    model[1].bias = model[0].bias  # shared
    before = [p.detach().clone() for p in model.parameters()]
    seen = {}
    with torch.no_grad(), Moved(list(model.modules())) as moved:
        assert len(moved.unmet()) == 3
        model(torch.randn(2, 16))
        for name, p in model.named_parameters():
            seen[name] = p + 0
    assert moved.unmet() == []
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    for name, p in model.named_parameters():
        assert (seen[name].abs() > p.abs()).all() and (seen[name] * p >= 0).all()
    assert seen["1.weight"].abs().max() > 0.1


def test_a_parameter_that_is_given_by_name_is_moved_too():
    layer = nn.Linear(3, 2)
    with torch.no_grad(), Moved([layer]) as moved:
        y = nn.functional.linear(torch.zeros(1, 3), layer.weight, bias=layer.bias)
    assert moved.unmet() == [] and (y.abs() > layer.bias.abs()).all()


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


def test_replicas_and_rows_that_differ():
    outputs = torch.arange(24.0).view(2, 3, 4)
    check_informative(outputs, 1e-4)
    same_replicas, same_rows, two_rows = outputs.clone(), outputs.clone(), outputs.clone()
    same_replicas[1] = same_replicas[0]
    same_rows[:] = same_rows[:, :1]
    two_rows[:, 2] = two_rows[:, 1]
    for same in (same_replicas, same_rows, two_rows):
        with pytest.raises(Undecided, match="do not tell replicas and rows apart"):
            check_informative(same, 1e-4)
