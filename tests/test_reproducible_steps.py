"""Steps from a checkpoint, in a new model object, whatever the old one has been through."""

import copy

import pytest
import torch
from torch import nn
from training import Net, Residual, gate, gradients, proofs, step, ways

import bnuq_ext as bnuq
from bnuq_ext import model_cache
from bnuq_ext.proof.agreement import are_unused


class Dropped(nn.Module):
    """Not a chain of layers: its samples need a proof to go together."""

    def __init__(self):
        super().__init__()
        self.a, self.b = bnuq.BayesLinear(6, 8), bnuq.BayesLinear(8, 3)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return self.b(self.drop(torch.relu(self.a(self.drop(x)))))


class Noisy(Dropped):
    """Learns the noise of its likelihood."""

    def __init__(self):
        super().__init__()
        self.log_std = nn.Parameter(torch.zeros(()))


class Idle(Dropped):
    """Has a head that is not called."""

    def __init__(self):
        super().__init__()
        self.idle = bnuq.BayesLinear(8, 5)


class Frozen(Idle):
    """Its head is not to be trained either."""

    def __init__(self):
        super().__init__()
        self.idle.requires_grad_(False)


class Counted(Dropped):
    """Its steps are counted in it, which makes it another model in each."""

    steps = 0


class InTraining(Idle):
    """Calls one layer in train() alone."""

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        h = torch.relu(self.a(self.drop(x)))
        return self.b(self.drop(h)) + 0.1 * self.idle(h)[:, :3]


def make_optimizer(model):
    return torch.optim.Adam(model.parameters(), 0.01)


def train(model, optimizer, sizes):
    """The losses of steps on the first rows of the data."""
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(9, 6, generator=generator), torch.randn(9, 3, generator=generator)
    losses = []
    for n in sizes:
        optimizer.zero_grad()
        std = model.log_std.exp() if hasattr(model, "log_std") else 1.0
        options = {"likelihood": "gaussian", "noise_std": std, "dataset_size": 90}
        loss = bnuq.elbo_loss(model, x[:n], y[:n], num_samples=4, **options).loss
        loss.backward()
        optimizer.step()
        if isinstance(model, Counted):
            model.steps += 1
        losses.append(loss.item())
    return losses


def resumed_and_not(cls, before, after):
    """Losses of steps after a checkpoint by the model that was saved, and by a new one."""
    torch.manual_seed(0)
    model = cls()
    optimizer = make_optimizer(model)
    train(model, optimizer, before)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
    going_on = train(model, optimizer, after)
    fresh = cls()
    optimizer = make_optimizer(fresh)
    fresh.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    torch.set_rng_state(saved[2])
    return going_on, train(fresh, optimizer, after)


@pytest.mark.parametrize("before", [1, 4])
@pytest.mark.parametrize("cls", [Dropped, Noisy, Idle, Frozen, InTraining])
def test_steps_from_a_checkpoint_of_a_model_with_dropout(cls, before):
    going_on, resumed = resumed_and_not(cls, [9] * before, [9] * 8)
    assert going_on == resumed


@pytest.mark.parametrize(
    "cls, before, after", [(Dropped, [4, 9], [5, 7, 6, 8] * 2), (Counted, [9] * 4, [9] * 6)]
)
def test_a_run_repeats_where_torch_is_told_to_be_deterministic(cls, before, after):
    torch.use_deterministic_algorithms(True)
    try:
        going_on, resumed = resumed_and_not(cls, before, after)
    finally:
        torch.use_deterministic_algorithms(False)
    assert going_on == resumed


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_what_no_proof_stands_for_is_not_proven_in_every_step(monkeypatch):
    """Where torch is told to be deterministic."""
    made, model = proofs(monkeypatch), scripted()
    torch.use_deterministic_algorithms(True)
    try:
        for i in range(12):
            gradients(model, i)
            step(model)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(made) <= 2


def test_every_size_is_proven_at_first_sight_where_torch_is_told_to_be_deterministic(monkeypatch):
    made, model = proofs(monkeypatch), Dropped()
    optimizer = make_optimizer(model)
    train(model, optimizer, [4, 9, 5])
    assert len(made) == 2
    torch.use_deterministic_algorithms(True)
    try:
        train(model, optimizer, [6, 7])
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(made) == 4


def idle():
    model = Net(middle=Residual())
    model.idle = gate(0.0)
    return model


def idle_head():
    """With a bias of zeros."""
    model = Net(middle=Residual())
    model.idle = bnuq.BayesLinear(8, 5)
    nn.init.zeros_(model.idle.bias_mu)
    return model


def open_gate():
    model = idle()
    model.idle.data.fill_(1.0)
    return model


def frozen():
    """Training does not move it."""
    model = idle()
    model.idle.requires_grad_(False)
    return model


def scripted():
    """The parameters of TorchScript are given to no function of torch in Python."""
    middle = Residual()
    middle.inner = torch.jit.script(middle.inner)
    return Net(middle=middle)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(
    "make, count", [(idle, 2), (idle_head, 1), (open_gate, 1), (frozen, 1), (scripted, 2)]
)
def test_a_parameter_that_is_not_met_leaves_doubt_unless_it_is_seen_to_be_unused(
    make, count, monkeypatch
):
    made, model = proofs(monkeypatch), make()
    for i in range(2):
        gradients(model, i)
        step(model)
    assert len(made) == count and ways(model) == ({"folded"} if count == 1 else set())


def test_what_an_output_depends_on():
    a, b, x = gate(1.0), gate(2.0), torch.ones(3, dtype=torch.float64)
    seen = []
    b.register_hook(seen.append)
    assert are_unused([a], b * x) and are_unused([a, b], x)
    assert not are_unused([a, b], b * x) and not are_unused([b], b * x)
    assert seen == [] and b.grad is None


@torch.no_grad()
def test_without_gradients_samples_go_together_too():
    """No proof then says anything of other values of the parameters."""
    model, x, y = Dropped().eval(), torch.randn(9, 6), torch.randn(9, 3)
    torch.use_deterministic_algorithms(True)
    try:
        bnuq.elbo_loss(model, x, y, num_samples=3, likelihood="gaussian", batch_weight=0.1)
    finally:
        torch.use_deterministic_algorithms(False)
    assert {plan.way for plan in model_cache._CACHES[model].plans.values()} == {"folded"}
