"""The share of the divergence that a batch carries: kl_weight, and rows over dataset_size."""

import math

import pytest
import torch
from torch import nn

import bnuq_ext as bnuq


@pytest.mark.parametrize("scheme", ["uniform", "geometric"])
@pytest.mark.parametrize("num_batches", [1, 2, 5, 128, 1024, 100_000])
def test_kl_weights_sum_to_one(scheme, num_batches):
    weights = [bnuq.kl_weight(i, num_batches, scheme) for i in range(num_batches)]
    assert all(math.isfinite(w) and w >= 0 for w in weights)
    assert math.fsum(weights) == pytest.approx(1.0, rel=1e-12)


def test_kl_weight_is_the_papers():
    M = 7
    for i in range(M):
        paper = 2 ** (M - (i + 1)) / (2**M - 1)
        assert bnuq.kl_weight(i, M, scheme="geometric") == pytest.approx(paper, rel=1e-14)
    assert bnuq.kl_weight(3, M) == 1 / M


def test_geometric_weights_underflow_where_the_docstring_says():
    assert "is exactly 0 from i = 1074 on" in bnuq.kl_weight.__doc__
    weights = [bnuq.kl_weight(i, 2000, "geometric") for i in (1073, 1074, 1999)]
    assert weights[0] > 0 and weights[1:] == [0, 0]


@pytest.mark.parametrize(
    "args,error,message",
    [
        ((3, 3), ValueError, r"i must lie in \[0, 3\), got 3"),
        ((-1, 3), ValueError, r"i must lie in \[0, 3\), got -1"),
        ((-(2**70), 3), ValueError, r"i must lie in \[0, 3\), got -1180591620717411303424"),
        ((0, 0), ValueError, "num_batches must be at least 1, got 0"),
        ((0.5, 3), TypeError, "i must be an integer, got 0.5"),
        ((0, 3, "linear"), ValueError, "scheme must be one of uniform, geometric, got 'linear'"),
    ],
)
def test_kl_weight_rejects(args, error, message):
    with pytest.raises(error, match=f"kl_weight: {message}"):
        bnuq.kl_weight(*args)


class OfSequences(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = bnuq.BayesLinear(5, 3)

    def forward(self, mask, x):
        return self.layer(x.mean(0)) + mask.mean()


@pytest.mark.parametrize("num_samples", [1, 3])
def test_rows_are_those_of_the_targets(num_samples):
    """The first dimension of an input may be that of a sequence, or of a mask."""
    model, options = OfSequences(), dict(num_samples=num_samples, seed=0)
    x, y = torch.randn(4, 8, 5), torch.arange(8) % 3
    for inputs in ((torch.ones(2, 2), x), {"mask": torch.ones(2, 2), "x": x}):
        mean = bnuq.elbo_loss(model, inputs, y, dataset_size=80, **options)
        total = bnuq.elbo_loss(model, inputs, y, batch_weight=0.1, reduction="sum", **options)
        torch.testing.assert_close(mean.loss, total.loss / 8)
        torch.testing.assert_close(mean.nll, total.nll / 8)


def test_no_rows():
    model = nn.Sequential(bnuq.BayesLinear(6, 4))
    elbo = bnuq.elbo_loss(model, torch.zeros(0, 6), torch.zeros(0).long(), batch_weight=0.1)
    assert elbo.nll == 0 and elbo.loss == 0.1 * elbo.kl
