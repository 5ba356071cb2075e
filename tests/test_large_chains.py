"""Predictions of chains with large tensors: in place, and with products by another library."""

import pytest
import torch
from test_chain_folding import MODELS, D, N, mlp, predicted, prepared
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext import chain_folding
from bnuq_ext.ops.linear import linear


@pytest.mark.parametrize("size", [(0, 3, 2), (1, 1, 1), (129, 7, 33), (1500, 784, 10)], ids=str)
@pytest.mark.parametrize("bias", ["none", "contiguous", "strided", "expanded"])
def test_ordinary_linear(size, bias):
    N, I, O = size  # noqa: E741
    x, weight = torch.randn(I, N).t(), torch.randn(2 * O, I)[::2]
    kinds = {"contiguous": (O,), "strided": (2 * O,), "expanded": (1,)}
    bias = (
        torch.randn(*kinds[bias])[:: 1 + (bias == "strided")].expand(O) if bias in kinds else None
    )
    with torch.no_grad():
        y = linear(x, weight, bias)
    expected = torch.nn.functional.linear(
        *(t if t is None else t.double() for t in (x, weight, bias))
    )
    assert y.dtype == torch.float32 and y.is_contiguous()
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-5 * I**0.5)
    with pytest.raises(RuntimeError, match="linear: x must have the features of weight"):
        linear(torch.randn(2, I + 1), weight, bias)


def transposed(layer):
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return layer


LAYERS = {
    "MLP": lambda: mlp(nn.Linear(9, 9), nn.BatchNorm1d(9), nn.ReLU(), width=9),
    "wide": lambda: mlp(nn.Linear(99, 65), nn.BatchNorm1d(65), nn.Linear(65, 99), width=99),
    "no bias": lambda: mlp(nn.Linear(9, 9, bias=False), nn.BatchNorm1d(9)),
    "a transpose": lambda: mlp(transposed(nn.Linear(9, 9)), nn.BatchNorm1d(9)),
}


@pytest.fixture
def large(monkeypatch):
    """As if every tensor were large; how many products `ops.linear.linear` took."""
    taken = []

    def counted(*args):
        taken.append(args)
        return linear(*args)

    monkeypatch.setattr(chain_folding, "_LARGE", 0)
    monkeypatch.setattr(chain_folding, "linear", counted)
    return taken


@pytest.mark.parametrize("sampler", ["bank", "normal"])
@pytest.mark.parametrize("name", [*LAYERS, *MODELS])
def test_large_tensors(name, sampler, no_trials, large):
    if name in MODELS:
        model, x = prepared(name)
    else:
        torch.manual_seed(1)
        model, x = bnuq.convert(LAYERS[name](), inplace=True), torch.randn(N, D)
        bnuq.collect(model, [torch.randn(8, D) for _ in range(6)], num_batches=6, progress=False)
    given = x.clone()
    pred, loop = (predicted(model, x, sampler=sampler, strategy=s) for s in ("auto", "loop"))
    torch.testing.assert_close(pred.samples, loop.samples, rtol=1e-5, atol=1e-5)
    assert loop.variance.max() > 0 and torch.equal(x, given)
    layers = [m for m in model.modules() if type(m) is nn.Linear and type(m.weight) is nn.Parameter]
    assert len(large) == 2 * len(layers)  # once to learn the sizes
    large.clear()
    with torch.autocast("cpu"):
        pred, loop = (predicted(model, x, sampler=sampler, strategy=s) for s in ("auto", "loop"))
    torch.testing.assert_close(pred.samples, loop.samples, rtol=3e-2, atol=3e-2)
    assert not large


def test_large_tensors_in_float64(large):
    model, x = prepared("deep")
    pred, loop = (predicted(model.double(), x.double(), strategy=s) for s in ("auto", "loop"))
    torch.testing.assert_close(pred.samples, loop.samples, rtol=1e-12, atol=1e-12)
    assert not large
