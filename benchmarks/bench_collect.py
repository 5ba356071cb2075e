"""Statistics of mini-batches: a layer's, and a bank of whole networks."""

import copy

import pytest
import torch

import bnuq_ext as bnuq
from bnuq_ext.ops.channel_moments import by_torch, channel_moments

from .models import mlp, resnet18
from .timing import FULL, compare, record

pytestmark = pytest.mark.filterwarnings("default")

SHAPES = [((32, 64, 56, 56), False), ((32, 64, 56, 56), True), ((100, 10_000), False)]
NETWORKS = {
    "MLP 784-4x256-10": (mlp, (64, 784)),
    "ResNet-18 32x32": (resnet18, (32, 3, 32, 32)),
}


@pytest.mark.skipif(not FULL, reason="not in the short form")
@pytest.mark.parametrize("shape,channels_last", SHAPES, ids=str)
def test_channel_moments(benchmark, shape, channels_last):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 3
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    cases = {"ours": lambda: channel_moments(x), "var_mean": lambda: by_torch(x)}
    torch.testing.assert_close(cases["ours"](), cases["var_mean"]())
    times = compare(cases, rounds=25, seconds=4)
    name = "x".join(map(str, shape)) + " channels_last" * channels_last
    moved = x.numel() * x.element_size()
    record(benchmark, f"channel_moments {name}", times, moved, target={"var_mean": 3.0})
    benchmark.pedantic(cases["ours"], rounds=3)


@pytest.mark.skipif(not FULL, reason="not in the short form")
@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_collect(benchmark, name):
    """Beside the same batches' forwards in train(), which move the running statistics."""
    build, shape = NETWORKS[name]
    torch.manual_seed(0)
    plain = build()
    model, batches = bnuq.convert(plain), list(torch.randn(8, *shape))

    def in_train():
        for batch in batches:
            trained(batch)

    def ours():
        return bnuq.collect(model, batches, num_batches=len(batches), progress=False)

    trained, bank = copy.deepcopy(plain).train(), ours()
    layer = next(k for k, m in trained.named_modules() if k in bank.mean)
    trained.get_submodule(layer).momentum = None  # the mean over the batches
    in_train()
    found = trained.get_submodule(layer).running_mean
    torch.testing.assert_close(bank.mean[layer].mean(0), found, rtol=1e-4, atol=1e-5)
    times = compare({"ours": ours, "train()": in_train}, rounds=25, sample_ms=20, seconds=12)
    record(benchmark, f"collect, {name}, 8 batches of {shape[0]}", times)
    benchmark.pedantic(ours, rounds=1)
