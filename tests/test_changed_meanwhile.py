"""What is known of a model is of the state that it was found in, which a forward may leave."""

import copy
import sys

import pytest
import torch
from torch import nn
from training import D as WIDE
from training import N, Net, Residual, assert_right, data, gradients, loop, step

import bnuq_ext as bnuq
from bnuq_ext.wrappers import waits_for_others

D, M = 5, 6
GENERATOR = torch.Generator().manual_seed(0)
BATCHES = [torch.randn(M, D, generator=GENERATOR).double() for _ in range(6)]


class Body(nn.Module):
    """Its rows meet once `mixed` says so."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.outer = nn.Linear(D, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.mixed = False

    def forward(self, x):
        h = self.norm(self.inner(x[:, :D])).relu()
        return self.outer(h * (h - h.mean(0)) if self.mixed else h)


class Remembering(Body):
    """A large batch changes it for good."""

    def forward(self, x):
        self.mixed = self.mixed or len(x) > 30
        return super().forward(x)


class Hooked(Body):
    """A batch of six columns hooks a layer, one of seven takes the hook off."""

    def forward(self, x):
        hooks = self.outer._forward_hooks
        if x.shape[1] == D + 1 and not hooks:
            self.outer.register_forward_hook(lambda module, args, y: y * (y - y.mean(0)))
        elif x.shape[1] == D + 2:
            hooks.clear()
        return super().forward(x)


class Head(nn.Module):
    """Of a body that it has in common with others."""

    def __init__(self, body, mixed=None):
        super().__init__()
        self.body, self.mixed = body, mixed

    def forward(self, x):
        if self.mixed is not None:
            self.body.mixed = self.mixed
        return self.body(x)


def by_loop(plain, norm, bank, snapshots, batches):
    """Each batch through the original, with one snapshot's statistics after another."""
    (name,), outputs = bank.mean, []
    for x in batches:
        replicas = []
        for snapshot in snapshots:
            norm.running_mean.copy_(bank.mean[name][snapshot])
            norm.running_var.copy_(bank.var[name][snapshot])
            replicas.append(plain(x).detach())
        outputs.append(torch.stack(replicas))
    return torch.cat(outputs, 1)


def options(**others):
    fixed = {"likelihood": "gaussian", "num_samples": 5, "seed": 0, "keep_samples": True}
    return fixed | others


@pytest.mark.parametrize("strategy", ["auto", "loop"])
@pytest.mark.parametrize(
    "make, shapes",
    [
        (Remembering, [(4, D), (40, D), (4, D), (40, D)]),
        (Hooked, [(4, D), (4, D + 1), (4, D), (4, D + 2), (4, D)]),
    ],
    ids=["flag", "hook"],
)
def test_batches_of_a_loader_that_change_the_model(make, shapes, strategy):
    plain = make().double().eval()
    model = bnuq.convert(plain)
    bank = bnuq.collect(model, BATCHES, progress=False)
    batches = [torch.randn(*shape).double() for shape in shapes]
    pred = bnuq.predict(model, batches, **options(strategy=strategy))
    expected = by_loop(plain, plain.norm, bank, pred.snapshots, batches)
    torch.testing.assert_close(pred.samples, expected)
    alone = [bnuq.predict(model, x, **options(strategy=strategy)).samples for x in batches]
    expected = by_loop(plain, plain.norm, bank, pred.snapshots, batches)
    torch.testing.assert_close(torch.cat(alone, 1), expected)


def test_members_of_an_ensemble_that_share_a_module():
    body = bnuq.convert(Body().double().eval())
    members = Head(body, True), Head(body)
    bnuq.attach(members[1], bnuq.collect(members[0], BATCHES, progress=False))
    body.mixed, x = False, torch.randn(4, D).double()
    bnuq.predict(members[1], x, **options())  # folds, while nothing is mixed
    given = {"sampler": "bank", **options()}
    expected = bnuq.ensemble(copy.deepcopy(members), x, strategy="loop", **given).samples
    torch.testing.assert_close(bnuq.ensemble(members, x, **given).samples, expected)


class Observed(nn.Module):
    """Centres by an average of its inputs, of `least` rows and more, from when a buffer says so, as
    observers of torch.ao do."""

    def __init__(self, least=0):
        super().__init__()
        self.least = least
        self.register_buffer("enabled", torch.zeros(1, dtype=torch.uint8))
        self.register_buffer("average", torch.zeros(WIDE, dtype=torch.float64))
        self.net = Net(middle=Residual())

    def forward(self, x):
        if self.enabled[0] == 1 and len(x) >= self.least:
            self.average.mul_(0.5).add_(0.5 * x.detach().mean(0))
        return self.net(x - self.average)


def test_a_loss_of_a_model_that_begins_to_keep_state():
    model = Observed().train()
    for seed in range(5):
        if seed == 2:
            model.enabled[0] = 1
        alone = copy.deepcopy(model)
        assert_right(model, seed)
        loop(alone, seed)
        torch.testing.assert_close(model.average, alone.average)
        step(model)
    assert model.average.any()


def test_a_loss_of_a_model_that_begins_to_keep_state_with_large_batches():
    model = Observed(least=N).train()
    for seed in range(8):
        if seed == 4:
            model.enabled[0] = 1
        rows, alone = (N - 3, N)[seed % 2], copy.deepcopy(model)
        found, expected = (f(m, seed, rows=rows) for f, m in ((gradients, model), (loop, alone)))
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(model.average, alone.average)
        step(model)
    assert model.average.any()


def test_replicas_of_a_model_that_begins_to_keep_state():
    """Its average is as with one call in each body."""
    model, (x, _) = Observed().eval(), data()
    for body in range(3):
        if body == 2:
            model.enabled[0] = 1
        with bnuq.replicas(model, 3, seed=0):
            if body < 2:
                assert len(model(x)) == 3 * len(x)
            else:
                with pytest.raises(ValueError, match="its forward changes the model's state"):
                    model(x)
        step(model)
    assert not model.average.any()


def test_while_another_thread_imports_what_shards(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", object())
    assert not waits_for_others([nn.Linear(2, 2)])
