"""What a first forward installs in its model goes in once, wherever the model remembers that; what
each one changes is as the loop leaves it."""

import pytest
import torch
from installing import (
    FIRST,
    INSTALL,
    KEY,
    STRUCTURAL,
    Net,
    bank,
    bayesian,
    data,
    first_by_attribute,
    halve,
    merge,
    stochastic,
)
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter

import bnuq_ext as bnuq


@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST)
@pytest.mark.parametrize("install", INSTALL.values(), ids=INSTALL)
def test_predictions_are_those_of_the_loop_and_installed_once(install, first):
    options = {"likelihood": "gaussian", "keep_samples": True, **KEY}
    model, other = stochastic(install, first), stochastic(install, first)
    expected = bnuq.predict(other, data()[3], strategy="loop", **options).samples
    for _ in range(3):
        samples = bnuq.predict(model, data()[3], **options).samples
        torch.testing.assert_close(samples, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(data()[3]), other(data()[3]))
    assert [*map(str, model.modules())] == [*map(str, other.modules())]
    assert len(model.norm._forward_hooks) == len(other.norm._forward_hooks) <= 1


@pytest.mark.parametrize("when", ["always", "in train()"])
@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST)
@pytest.mark.parametrize("install", INSTALL.values(), ids=INSTALL)
def test_losses_are_those_of_a_model_that_was_called_before(install, first, when):
    batch, y = data()[3], torch.arange(8) % 3
    model, other = bayesian(install, when, first).train(), bayesian(install, when, first).train()
    other(batch)
    for step in range(3):
        loss, expected = (
            bnuq.elbo_loss(net, batch, y, batch_weight=0.1, seed=step, num_samples=3)
            for net in (model, other)
        )
        torch.testing.assert_close(loss.nll, expected.nll, rtol=1e-4, atol=1e-5)
    assert len(model.norm._forward_hooks) == len(other.norm._forward_hooks) <= 1
    assert model.state_dict().keys() == other.state_dict().keys()


@pytest.mark.parametrize("first", [*FIRST.values()][:3], ids=[*FIRST][:3])
@pytest.mark.parametrize("install", INSTALL.values(), ids=INSTALL)
def test_bodies_of_replicas_too(install, first):
    model, other = stochastic(install, first), stochastic(install, first)
    options = {"likelihood": "gaussian", "keep_samples": True, **KEY}
    expected = bnuq.predict(other, data()[3], strategy="loop", **options).samples
    for _ in range(2):
        with bnuq.replicas(model, **KEY):
            samples = model(data()[3]).view(4, 8, 3)
        torch.testing.assert_close(samples, expected, rtol=1e-4, atol=1e-5)


def test_a_weight_that_is_merged_for_predictions_alone_is_not_merged_by_a_trial():
    """A trial of `elbo_loss` is in eval()."""
    model = bayesian(merge).train()
    model.first = lambda net: not net.training and first_by_attribute(net)
    before, y = {n: p.clone() for n, p in model.named_parameters()}, torch.arange(8) % 3
    for step in range(3):
        bnuq.elbo_loss(model, data()[3], y, batch_weight=0.1, seed=step, num_samples=3)
    assert not model.installed
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def momentum(weight):
    return 0.9 * weight.data + 0.1


FOLLOW = {
    "in place": lambda layer: layer.weight.data.lerp_(torch.ones(3, 8), 0.1),
    "other memory": lambda layer: setattr(layer.weight, "data", momentum(layer.weight)),
    "another parameter": lambda layer: setattr(
        layer, "weight", nn.Parameter(momentum(layer.weight), requires_grad=False)
    ),
    "as a vector": lambda layer: nn.utils.vector_to_parameters(
        momentum(layer.weight).flatten(), [layer.weight]
    ),
}


class Taught(Net):
    """Has a teacher, as in MoCo and BYOL, that moves at every forward in train()."""

    def __init__(self, follow, evaluating):
        super().__init__(lambda net: None)
        self.teacher, self.follow = nn.Linear(8, 3).requires_grad_(False), follow
        self.evaluating = evaluating

    def train(self, mode=True):
        super().train(mode)
        self.teacher.train(mode and not self.evaluating)
        return self

    def forward(self, x):
        if self.training:
            self.follow(self.teacher)
        return super().forward(x) + self.teacher(torch.ones(8))


@pytest.mark.parametrize("follow", FOLLOW.values(), ids=FOLLOW)
@pytest.mark.parametrize("evaluating", [True, False])
def test_a_teacher_that_follows_each_forward_follows_those_of_the_loop(evaluating, follow):
    torch.manual_seed(0)
    net = Taught(follow, evaluating)
    net.norm, y = nn.LayerNorm(8), torch.arange(8) % 3
    model = bnuq.to_bayesian(net, lambda name, layer: name == "head", rho_init=-2.0).train()
    before = model.teacher.weight.clone()
    for step in range(3):
        bnuq.elbo_loss(model, data()[3], y, batch_weight=0.1, seed=step, num_samples=4)
    expected = 1 + (before - 1) * 0.9**12
    torch.testing.assert_close(model.teacher.weight, expected, rtol=1e-5, atol=1e-6)
    with bnuq.replicas(model, **KEY):
        model(data()[3])
    expected = 1 + (before - 1) * 0.9**13
    torch.testing.assert_close(model.teacher.weight, expected, rtol=1e-5, atol=1e-6)


def hook_if_there_is_none(net) -> bool:
    net.calls += 1
    return not net.norm._forward_hooks


def first_by_attribute_of_calls(net) -> bool:
    net.calls += 1
    return first_by_attribute(net)


def every_second(net) -> bool:
    net.calls += 1
    return net.calls % 2 == 0


BOTH = {
    "a hook that shows itself, and a count": (INSTALL["a hook"], hook_if_there_is_none),
    "a hook by an attribute, and a count": (INSTALL["a hook"], first_by_attribute_of_calls),
    "a weight by an attribute, and a count": (merge, first_by_attribute_of_calls),
    "a weight at every second call": (merge, every_second),
    "another weight at every second call": (halve, every_second),
}


@pytest.mark.parametrize(("change", "first"), BOTH.values(), ids=BOTH)
def test_what_comes_once_beside_what_comes_each_time_is_as_in_the_loop(change, first):
    model, other = stochastic(change, first), stochastic(change, first)
    options = {"likelihood": "gaussian", "keep_samples": True, **KEY}
    for _ in range(3):
        samples = bnuq.predict(model, data()[3], **options).samples
        expected = bnuq.predict(other, data()[3], strategy="loop", **options).samples
        torch.testing.assert_close(samples, expected, rtol=1e-4, atol=1e-5)
    assert model.calls == other.calls == 12
    assert torch.equal(model.body.weight, other.body.weight)
    assert len(model.norm._forward_hooks) == len(other.norm._forward_hooks)


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_an_interrupt_in_a_trial_leaves_a_model_as_it_was(failing):
    model = stochastic(merge, every_second)
    before, forward = model.body.weight.clone(), Net.forward

    def interrupted(x):
        output = forward(model, x)
        if model.calls == failing:
            raise KeyboardInterrupt
        return output

    model.forward = interrupted
    with pytest.raises(KeyboardInterrupt):
        bnuq.predict(model, data()[3], likelihood="gaussian", **KEY)
    loop = failing == 3  # two forwards have told that it changes
    assert torch.equal(model.body.weight, before + loop) and model.calls == (3 if loop else 0)


def test_a_forward_that_draws_numbers_draws_what_it_draws_in_the_loop():
    model, other = (
        stochastic(lambda net: net.register_buffer("offset", torch.ones(3))) for _ in "ab"
    )
    for net in (model, other):
        net.norm.register_forward_hook(lambda m, args, y: y + 0.1 * torch.randn_like(y))
    options = {"likelihood": "gaussian", "keep_samples": True, **KEY}
    for _ in range(2):
        found = []
        for strategy, net in (("auto", model), ("loop", other)):
            torch.manual_seed(7)
            found.append(bnuq.predict(net, data()[3], strategy=strategy, **options).samples)
        torch.testing.assert_close(*found)


def test_a_model_that_changes_at_every_forward_is_as_the_loop_leaves_it():
    model, other = stochastic(lambda net: None), stochastic(lambda net: None)
    for net in (model, other):
        net.first = lambda net: setattr(net, "calls", net.calls + 1)
    for strategy, net in (("auto", model), ("loop", other)):
        bnuq.predict(net, data()[3], likelihood="gaussian", strategy=strategy, **KEY)
    assert model.calls == other.calls == 4


@pytest.mark.parametrize("change", [halve, merge], ids=["another parameter", "in place"])
def test_parameters_that_change_at_every_forward_are_as_the_loop_leaves_them(change):
    model, other = stochastic(change), stochastic(change)
    options = {"likelihood": "gaussian", "keep_samples": True, **KEY}
    for net in (model, other):
        net.first = lambda net: True
    for _ in range(3):
        samples = bnuq.predict(model, data()[3], **options).samples
        expected = bnuq.predict(other, data()[3], strategy="loop", **options).samples
        torch.testing.assert_close(samples, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(model.body.weight, other.body.weight)


class Frozen(Net):
    """Has a train() of its own."""

    def train(self, mode=True):
        return super().train(mode)


@pytest.mark.filterwarnings("ignore:in train.. with a train.. or eval.. of its own")
@pytest.mark.parametrize("strategy", ["auto", "loop"])
@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST)
@pytest.mark.parametrize("install", STRUCTURAL.values(), ids=STRUCTURAL)
def test_in_train_with_a_train_of_its_own(install, first, strategy):
    torch.manual_seed(0)
    model = bnuq.convert(Frozen(install, first=first))
    bnuq.attach(model, bank())
    model.train().norm.eval()
    expected = bnuq.predict(
        stochastic(install), data()[3], likelihood="gaussian", strategy="loop", **KEY
    )
    for _ in range(2):
        pred = bnuq.predict(model, data()[3], likelihood="gaussian", strategy=strategy, **KEY)
        torch.testing.assert_close(pred.mean, expected.mean, rtol=1e-4, atol=1e-5)
        assert model.training and len(model.norm._forward_hooks) <= 1


@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST)
def test_lazy_layers_are_what_a_first_call_makes_of_them(first):
    model, other = (stochastic(lambda net: None, first) for _ in range(2))
    for net in (model, other):
        net.head = nn.Sequential(nn.LazyLinear(3), nn.LazyInstanceNorm1d(affine=True))
    options = {"likelihood": "gaussian", **KEY}
    torch.manual_seed(0)
    expected = bnuq.predict(other, data()[3][None], strategy="loop", **options)
    drawn = torch.randn(3)
    torch.manual_seed(0)
    for _ in range(2):
        pred = bnuq.predict(model, data()[3][None], **options)
        torch.testing.assert_close(pred.mean, expected.mean)
    assert torch.equal(torch.randn(3), drawn)
    assert repr(model.head) == repr(other.head) and model.head[0].in_features == 8
    assert not model.head[0]._forward_pre_hooks


class Counting(LazyModuleMixin, nn.Module):
    """Adds the number of its calls."""

    def __init__(self):
        super().__init__()
        self.weight, self.calls = UninitializedParameter(), []
        self.register_buffer("total", torch.zeros(()))

    def initialize_parameters(self, x):
        if self.has_uninitialized_params():
            self.weight.materialize((3, x.shape[-1]))
            nn.init.normal_(self.weight)

    def forward(self, x):
        self.calls.append(1)
        self.total += 1
        return x @ self.weight.T + len(self.calls) + self.total


@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST)
def test_a_lazy_layer_that_counts_its_calls(first):
    found = []
    for strategy in ("auto", "loop"):
        model = stochastic(lambda net: None, first)
        model.head, options = Counting(), {"likelihood": "gaussian", **KEY}
        torch.manual_seed(0)
        pred = bnuq.predict(model, data()[3], strategy=strategy, keep_samples=True, **options)
        found.append((pred.samples, model.head.total, torch.randn(3)))
    for auto, loop in zip(*found, strict=True):
        torch.testing.assert_close(auto, loop)
    assert found[0][1] == KEY["num_samples"]


class Normed(nn.Module):
    """Counts its calls."""

    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(6, 8), norm, bnuq.BayesLinear(8, 3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.head(self.norm(self.body(x)).relu())


def test_lazy_batch_norm_in_a_training_step():
    x, y = data()[3], torch.arange(8) % 3
    lazy, plain = Normed(nn.LazyBatchNorm1d()), Normed(nn.BatchNorm1d(8))
    for net in (lazy, plain):
        net.losses = [
            bnuq.elbo_loss(net, x, y, num_samples=3, dataset_size=9, seed=0).loss.item()
            for _ in range(2)
        ]
    assert lazy.losses == plain.losses and lazy.calls == plain.calls == 6
    for name, buffer in plain.norm.named_buffers():
        torch.testing.assert_close(getattr(lazy.norm, name), buffer)
