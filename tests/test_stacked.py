"""Training in a stack: against the same network trained alone by autograd, in float64."""

import copy
import re

import numpy as np
import pytest
import torch
from torch import nn

from bnuq_ext.protocols.stacked import Network, Stack, Training, networks_at_once, plain_network

BATCH_NORM = [Network(3, 0.0), Network(4, 1e-2), Network(5, 1e-1)]
DROPOUT = [Network(3, 0.0, 0.3), Network(4, 1e-2, 0.05), Network(5, 1e-2, 0.0)]
Q, H, M, N = 4, 7, 6, 27


def data(num_networks):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_networks, N, Q, generator=generator)
    return x, x[..., 0] * x[..., 1] + 0.1 * torch.randn(num_networks, N, generator=generator)


def masks_of(rng, rate):
    u = torch.from_numpy(rng.random((Q + 2 * H, M), dtype=np.float32))
    return [m.T.double() for m in ((u >= rate).float() / (1 - rate)).split([Q, H, H])]


def outputs(net: nn.Sequential, x, masks):
    """The plain network with given dropout."""
    masks = iter(masks or ())
    for module in net:
        x = x * next(masks) if isinstance(module, nn.Dropout) else module(x)
    return x.squeeze(1)


def train_alone(network: Network, start: nn.Sequential, rng, x, y, epochs) -> nn.Sequential:
    """Autograd and torch.optim.Adam on one network; the rows and masks that its generator gives."""
    net = copy.deepcopy(start).double().train()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(epochs):
        for rows in torch.from_numpy(rng.permutation(N)).split(M)[: N // M]:
            masks = None if network.dropout is None else masks_of(rng, network.dropout)
            optimizer.zero_grad()
            error = outputs(net, x[rows].double(), masks) - y[rows].double()
            weights = sum(m.weight.square().sum() for m in net if isinstance(m, nn.Linear))
            (error.square().mean() / 2 + network.weight_decay / 2 * weights).backward()
            optimizer.step()
    return net


def weights(net):
    return {name: value.double() for name, value in net.named_parameters()}


@pytest.mark.parametrize("networks", [BATCH_NORM, DROPOUT], ids=["batch norm", "dropout"])
def test_each_is_the_network_trained_alone(networks):
    stack, (x, y) = Stack(networks, Q, H), data(3)
    starts = [stack.network(s, x[s]) for s in range(3)]
    generators = copy.deepcopy(stack.generators)
    Training(stack, x, y, M).run(10)
    for s, network in enumerate(networks):
        alone = train_alone(network, starts[s], generators[s], x[s], y[s], 10)
        found, before = weights(stack.network(s, x[s])), weights(starts[s])
        for name, expected in weights(alone).items():
            # Forty steps of 0.001: the difference is far below what training changed.
            torch.testing.assert_close(found[name], expected, rtol=0, atol=2e-5, msg=name)
            assert ".bias" in name or (expected - before[name]).abs().max() > 5e-3


@pytest.mark.parametrize("num_rows, steps", [(2 * M, 2), (2 * M + 1, 2), (M, 1)])
def test_an_epoch_has_every_whole_batch(num_rows, steps, monkeypatch):
    stack, (x, y) = Stack(BATCH_NORM, Q, H), data(3)
    training, seen = Training(stack, x[:, :num_rows], y[:, :num_rows], M), []
    monkeypatch.setattr(training, "_step", lambda x, y: seen.append((x, y)))
    training.run(1)
    assert len(seen) == steps
    for s in range(3):
        rows = torch.cat([batch[s] for batch, _ in seen])
        assert len(rows.unique(dim=0)) == steps * M  # each once


@pytest.mark.parametrize("networks", [BATCH_NORM, DROPOUT], ids=["batch norm", "dropout"])
def test_company_makes_no_difference(networks):
    x, y = data(3)
    together = Stack(networks, Q, H)
    Training(together, x, y, M).run(5)
    for s in range(3):
        single = Stack(networks[s : s + 1], Q, H)
        training = Training(single, x[s : s + 1], y[s : s + 1], M)
        training.run(2)
        training.run(3)
        for name, parameter in together.parameters.items():
            torch.testing.assert_close(parameter[s], single.parameters[name][0], rtol=0, atol=1e-5)


def test_initial_weights():
    stack = Stack([Network(seed, 0.0) for seed in range(40)], 10, 50)
    first = stack.parameters["weight1"]
    # Of a normal cut at two standard deviations: 0.8796; 100,000 draws, five standard errors.
    assert abs(first.std().item() / 0.1 - 0.87963) < 5 * 0.88 / (2 * first.numel()) ** 0.5
    assert abs(first.mean().item()) < 5 * 0.088 / first.numel() ** 0.5
    assert 0.199 < first.abs().max().item() <= 0.2
    assert (stack.parameters["scale0"] == 1).all() and (stack.parameters["shift2"] == 0).all()
    assert not torch.equal(first[0], first[1])


def test_statistics_are_those_of_the_rows():
    stack, (x, y) = Stack(BATCH_NORM, Q, H), data(3)
    Training(stack, x, y, M).run(3)
    net, mean, second = stack.network(1, x[1]), None, None
    for module in copy.deepcopy(net).double():
        before = x[1].double() if mean is None else mean
        if isinstance(module, nn.BatchNorm1d):
            torch.testing.assert_close(module.running_mean, before.mean(0), rtol=1e-5, atol=1e-5)
            variance = before.var(0, correction=0)
            torch.testing.assert_close(module.running_var, variance, rtol=1e-4, atol=1e-6)
            z = (before - before.mean(0)) / (variance + 1e-10).sqrt()
            mean = second = z * module.weight + module.bias
        else:
            mean = module(before)
    assert second is not None and not net.training
    torch.testing.assert_close(net(x[1]).double(), mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("networks", [BATCH_NORM, DROPOUT], ids=["batch norm", "dropout"])
def test_predictions_are_those_of_the_networks(networks):
    stack, (x, y) = Stack(networks, Q, H), data(3)
    Training(stack, x, y, M).run(2)
    query = torch.randn(3, 5, Q)
    expected = [stack.network(s, x[s])(query[s]).squeeze(1) for s in range(3)]
    actual = stack.predict(query, x)
    torch.testing.assert_close(actual, torch.stack(expected).detach(), rtol=1e-4, atol=1e-5)
    assert actual.shape == (3, 5)


def test_a_stack_fits_a_core():
    assert networks_at_once(32, 50) == 81 and networks_at_once(1024, 100) == 4


def test_plain_network():
    kinds = [type(m).__name__ for m in plain_network(3, 2, 0.5)]
    assert kinds == ["Dropout", "Linear", "ReLU"] * 2 + ["Dropout", "Linear"]
    first = plain_network(3, 2)
    assert [type(m).__name__ for m in first] == ["Linear", "BatchNorm1d", "ReLU"] * 2 + ["Linear"]
    assert first[0].bias is None and first[6].bias is not None and first[1].eps == 1e-10


def test_rejects():
    def refuses(call, message):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            call()

    x, y = data(3)
    mixed = [Network(0, 0.0), Network(0, 0.0, 0.1)]
    refuses(lambda: Stack([], Q, H), "Stack: networks must hold a network, got 0")
    message = "Stack: networks must all have dropout or none, got [None, 0.1]"
    refuses(lambda: Stack(mixed, Q, H), message)
    stack = Stack(BATCH_NORM, Q, H)
    message = "Training: batch_size must be at most the 27 rows, got 28"
    refuses(lambda: Training(stack, x, y, 28), message)
    refuses(
        lambda: Training(stack, x, y[:, :5], M), "Training: y must have shape [3, 27], got [3, 5]"
    )
