"""The definition of MCBN: a replica is the original model in eval with a snapshot
in its buffers."""

import copy

import pytest
import torch
from drawn import fitted_moments
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

import bnuq_ext as bnuq
from bnuq_ext import ops

T, M = 7, 12


class Residual(nn.Module):
    """Its blocks add what bypasses a stochastic layer; batch norm comes first in each."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8) for _ in range(4)])
        self.convs = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(4)])
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = x + conv(norm(x).relu())
        return self.head(x.mean((2, 3)))


def mlp():
    hidden = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 9, bias=False)]
    return nn.Sequential(*hidden, nn.BatchNorm1d(9, affine=False), nn.ReLU(), nn.Linear(9, 4))


def depthwise():
    return nn.Sequential(
        nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(),
        nn.Conv2d(8, 8, 3, groups=8, stride=2, bias=False), nn.BatchNorm2d(8, eps=1e-3), nn.ReLU6(),
        nn.Conv2d(8, 12, 1, bias=False), nn.BatchNorm2d(12),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4),
    )  # fmt: skip


def conv1d():
    return nn.Sequential(
        nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.ELU(), nn.Conv1d(8, 6, 3), nn.BatchNorm1d(6),
        nn.Flatten(), nn.Linear(6 * 8, 3),
    )  # fmt: skip


def conv3d():
    return nn.Sequential(
        nn.Conv3d(2, 6, 3, padding=1), nn.BatchNorm3d(6), nn.ReLU(),
        nn.Conv3d(6, 4, 3), nn.BatchNorm3d(4), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


MODELS = {
    "mlp": (mlp, (6,)),
    "residual": (Residual, (3, 8, 8)),
    "depthwise": (depthwise, (3, 9, 9)),
    "conv1d": (conv1d, (4, 12)),
    "conv3d": (conv3d, (2, 4, 5, 6)),
}


def make(name):
    """The original, the converted model with a bank, and inputs."""
    build, shape = MODELS[name]
    torch.manual_seed(0)
    original, data = build(), torch.randn(20 * M, *shape) * 2 + 0.5
    for layer in original.modules():
        if getattr(layer, "affine", False):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias)
    model = bnuq.convert(original)
    bnuq.collect(model, torch.utils.data.TensorDataset(data), T, batch_size=M, progress=False)
    return original.eval(), model, data[: 2 * T + 1]


def with_snapshot(original, bank, snapshot):
    """The original model with one snapshot as its running statistics."""
    model = copy.deepcopy(original)
    for name in bank.mean:
        layer = model.get_submodule(name)
        layer.running_mean.copy_(bank.mean[name][snapshot])
        layer.running_var.copy_(bank.var[name][snapshot])
    return model


@pytest.mark.parametrize("strategy", ["auto", "loop"])
@pytest.mark.parametrize("name", MODELS)
def test_a_replica_is_the_original_with_the_snapshot_in_its_buffers(name, strategy):
    original, model, x = make(name)
    pred = bnuq.predict(
        model,
        x,
        likelihood="categorical",
        num_samples=T,
        seed=1,
        strategy=strategy,
        keep_samples=True,
    )
    bank = next(m.bank for m in model.modules() if hasattr(m, "bank"))
    assert sorted(pred.snapshots.tolist()) == list(range(T))
    for sample, snapshot in zip(pred.samples, pred.snapshots, strict=True):
        with torch.no_grad():
            expected = with_snapshot(original, bank, snapshot)(x)
        torch.testing.assert_close(sample, expected, rtol=1e-5, atol=1e-5)
    p = pred.samples.double().softmax(2)
    torch.testing.assert_close(pred.mean.double(), p.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pred.variance.double(), p.var(0, correction=0), rtol=1e-4, atol=1e-7)


def fitted_bank(bank, family, first):
    """The statistics of T replicas from `first` on, as snapshots: the formulas,
    fed with the noise of each layer."""
    mean, var, seed = {}, {}, ops.new_seed(1, first)
    for layer, name in enumerate(bank.mean):
        m, spread = bank.mean[name].double(), bank.var[name].double().sqrt()
        if family == "joint":
            z = ops.philox_normal(seed, 0, (T, len(bank)), tag="joint").double()
            drawn = [
                table.mean(0) + z @ (table - table.mean(0)) / (len(bank) - 1) ** 0.5
                for table in (m, spread.log())
            ]
            mean[name], var[name] = drawn[0], (2 * drawn[1]).exp()
            continue
        spread = spread.log() if family == "lognormal" else spread
        params = torch.stack([m.mean(0), m.std(0), spread.mean(0), spread.std(0)])
        mean[name], var[name] = fitted_moments(params, seed, layer << 16, T, family)
    return bnuq.Bank(mean, var, 2, batch_size=M)


@pytest.mark.parametrize("strategy", ["auto", "loop"])
@pytest.mark.parametrize("family", ["joint", "lognormal", "normal"])
@pytest.mark.parametrize("name", MODELS)
def test_a_replica_is_the_original_with_drawn_statistics_in_its_buffers(name, family, strategy):
    original, model, x = make(name)
    options = dict(num_samples=T, seed=1, first_replica=5, strategy=strategy, keep_samples=True)
    pred = bnuq.predict(model, x, likelihood="gaussian", sampler=family, **options)
    bank = next(m.bank for m in model.modules() if hasattr(m, "bank"))
    drawn = fitted_bank(bank, family, first=5)
    for t, sample in enumerate(pred.samples):
        with torch.no_grad():
            expected = with_snapshot(original.double(), drawn, t)(x.double())
        torch.testing.assert_close(sample.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_network_of_16_bits_keeps_its_statistics_in_float32(dtype):
    original, model, x = make("mlp")
    options = dict(likelihood="gaussian", num_samples=T, seed=1, keep_samples=True)
    samples = bnuq.predict(model.to(dtype), x.to(dtype), **options)
    bank = model[1].bank
    for sample, snapshot in zip(samples.samples, samples.snapshots, strict=True):
        with torch.no_grad():
            expected = with_snapshot(original, bank, snapshot)(x)
        off = (sample.float() - expected).abs().max() / expected.abs().max()
        assert sample.dtype == dtype and off < 16 * torch.finfo(dtype).eps


def test_replicas_equal_vmap_over_stacked_statistics():
    original, model, x = make("depthwise")
    pred = bnuq.predict(
        model, x, likelihood="gaussian", num_samples=T, seed=2, keep_samples=True, noise_var=0.5
    )
    bank = model[1].bank
    models = [with_snapshot(original, bank, s) for s in pred.snapshots]
    state = stack_module_state(models)
    with torch.no_grad():
        expected = vmap(lambda p, b: functional_call(original, (p, b), (x,)))(*state)
    torch.testing.assert_close(pred.samples, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pred.mean, expected.mean(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pred.variance, expected.var(0, correction=0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(pred.total_variance, pred.variance + 0.5)
