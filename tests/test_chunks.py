"""How many replicas go through a model at a time."""

import pytest
import torch
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext import chunks
from bnuq_ext.chunks import chunk_of


def test_a_chunk_counts_what_torch_keeps_of_a_gpu_as_free(monkeypatch):
    """After a training that has filled it."""
    GB = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GB // 16, 80 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * GB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: GB)
    largest = 8 * 2**20
    assert chunk_of(largest, "auto", 1000, torch.device("cuda")) == (GB + GB // 16) // 16 // largest
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * GB)
    assert chunk_of(largest, "auto", 1000, torch.device("cuda")) == 1


def stochastic(*layers, features=6):
    torch.manual_seed(0)
    model = bnuq.convert(nn.Sequential(*layers))
    bnuq.collect(model, list(torch.randn(4, 32, features)), 4, progress=False)
    return model


DECODER = [nn.Unflatten(1, (8, 1, 1)), nn.Upsample(scale_factor=32), nn.Conv2d(8, 1, 3)]
NARROW = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU()]
MODELS = {
    "decoder": (lambda: stochastic(*NARROW, *DECODER), 16 * 8 * 32 * 32 * 4),
    "head": (lambda: stochastic(*NARROW, nn.Linear(8, 5000)), 16 * 5000 * 4),
    "Bayesian head": (lambda: nn.Sequential(bnuq.BayesLinear(6, 5000)), 16 * 5000 * 4),
}


@pytest.mark.parametrize("name", MODELS)
def test_activations_behind_the_stochastic_layers_bound_a_chunk_too(name, monkeypatch):
    build, largest = MODELS[name]
    model, rows = build(), []
    bnuq.predict(model, torch.randn(16, 6), likelihood="gaussian", num_samples=2, seed=0)
    model[-1].register_forward_hook(lambda layer, args, output: rows.append(len(output)))
    monkeypatch.setattr(chunks, "CPU_BYTES", 3 * largest // 8)
    bnuq.predict(model, torch.randn(16, 6), likelihood="gaussian", num_samples=12, seed=0)
    assert max(rows) == 3 * 16


def test_what_output_fn_makes_bounds_a_chunk_too(monkeypatch):
    model, rows, x = stochastic(*NARROW), [], torch.randn(16, 6)

    def widen(output):
        rows.append(len(output))
        return output.repeat(1, 1000)

    options = dict(likelihood="gaussian", seed=0, output_fn=widen)
    monkeypatch.setattr(chunks, "CPU_BYTES", 3 * 16 * 8000 * 4 // 8)
    bnuq.predict(model, x, num_samples=12, **options)
    assert max(rows) == 3 * 16


def test_activations_before_the_stochastic_layers_bound_no_chunk(monkeypatch):
    """The replicas share them, and a smaller chunk would make them more often."""
    model, rows = stochastic(nn.Linear(6, 5000), nn.ReLU(), nn.Linear(5000, 6), *NARROW), []
    x, options = torch.randn(16, 6), dict(likelihood="gaussian", num_samples=12, seed=0)
    bnuq.predict(model, x, **options)
    model[-1].register_forward_hook(lambda layer, args, output: rows.append(len(output)))
    monkeypatch.setattr(chunks, "CPU_BYTES", 12 * 16 * 8 * 4)
    bnuq.predict(model, x, **options)
    assert max(rows) == 12 * 16


class Skips(nn.Module):
    """Its input goes round the stochastic layer: replicas go together with their inputs T times over."""

    def __init__(self, *stem):
        super().__init__()
        self.stem, self.norm = nn.Sequential(*stem), nn.BatchNorm1d(6)

    def forward(self, x):
        h = self.stem(x)
        return h + self.norm(h)


@pytest.mark.parametrize("width", ["stem", "input"])
def test_activations_before_them_bound_a_chunk_of_expanded_inputs(width, monkeypatch):
    """There each replica has its own."""
    wide = 16 * 5000 * 4
    features, stem = 6, [nn.Linear(6, 5000), nn.ReLU(), nn.Linear(5000, 6)]
    if width == "input":
        features, stem = 5000, [nn.Linear(5000, 6)]
    model, rows = stochastic(Skips(*stem), features=features), []
    x, options = torch.randn(16, features), dict(likelihood="gaussian", num_samples=12, seed=0)
    expected = bnuq.predict(model, x, strategy="loop", **options)
    bnuq.predict(model, x, **options)
    model.register_forward_hook(lambda layer, args, output: rows.append(len(output)))
    monkeypatch.setattr(chunks, "CPU_BYTES", 3 * wide // 8)
    actual = bnuq.predict(model, x, **options)
    assert max(rows) == 3 * 16
    torch.testing.assert_close(actual.mean, expected.mean, rtol=1e-5, atol=1e-6)
