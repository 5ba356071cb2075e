import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import bnuq_ext as bnuq
from bnuq_ext.nn import StochasticBatchNorm1d, StochasticBatchNorm2d
from bnuq_ext.passes import Pass, running


class Double(Pass):
    def normalise(self, layer, x, key, stream):
        return layer.finish(2 * x)


@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4), (5, 3, 4, 2), (1, 3, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_batch_statistics_are_mean_and_biased_variance(shape, dtype):
    x = torch.randn(shape, dtype=torch.float64).add(3).to(dtype)
    mean, var, count = StochasticBatchNorm1d(3).batch_statistics(x)
    rows = x.double().movedim(1, 0).reshape(3, -1)
    expected = rows.mean(1)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    assert mean.dtype == var.dtype == acc
    assert count == rows.shape[1]
    rtol = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(mean.double(), expected, rtol=rtol, atol=rtol)
    biased = (rows - expected[:, None]).square().mean(1)
    torch.testing.assert_close(var.double(), biased, rtol=rtol, atol=rtol)


def test_affine_parameters():
    layer = StochasticBatchNorm2d(3, eps=0.25)
    weight, bias, eps = layer.affine_parameters()
    assert weight is layer.weight and bias is layer.bias and eps == 0.25
    assert StochasticBatchNorm2d(3, affine=False).affine_parameters() == (None, None, 1e-5)


def test_affine_parameters_of_a_pruned_layer():
    """Its weight is no parameter then."""
    layer = StochasticBatchNorm2d(4)
    layer.weight.data.copy_(torch.arange(1.0, 5))
    prune.l1_unstructured(layer, "weight", 2)
    assert layer.affine_parameters()[0].tolist() == [0, 0, 3, 4]


def test_a_pass_sees_its_layers_only_and_checks_dimensions():
    layer, other = StochasticBatchNorm1d(3).eval(), StochasticBatchNorm1d(3).eval()
    x = torch.randn(4, 3)
    with running(Double({"a": layer})):
        assert torch.equal(layer(x), 2 * x)
        assert torch.equal(other(x), other.plain_forward(x))
        with pytest.raises(ValueError, match="expected 2D or 3D input"):
            layer(x[:, :, None, None])
    assert torch.equal(layer(x), layer.plain_forward(x))


def test_models_that_share_a_bank_are_refused_as_one():
    """Their layers have the same names there."""
    first, second = (bnuq.convert(nn.Sequential(nn.BatchNorm1d(3)).eval()) for _ in range(2))
    bank = bnuq.collect(first, torch.randn(8, 6, 3).unbind(), num_batches=8, progress=False)
    bnuq.attach(second, bank)
    both = nn.Sequential(first, nn.ReLU(), second)
    with pytest.raises(ValueError) as caught:
        bnuq.predict(both, torch.randn(4, 3), likelihood="gaussian", num_samples=3, seed=0)
    requirement = "model must have statistics of its own in each layer, got the same in two"
    assert str(caught.value) == f"predict: {requirement}; run bnuq_ext.collect on the whole model"
    for model in (first, second):
        bnuq.predict(model, torch.randn(4, 3), likelihood="gaussian", num_samples=3, seed=0)
