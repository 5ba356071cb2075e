"""gaussian_kl and mixture_kl refuse in the house form."""

import math

import pytest
import torch
from torch import nn

from bnuq_ext import ops

ZERO = torch.zeros(3)
REJECTED = [
    (dict(mu=ZERO.long()), TypeError, "mu must be a floating-point tensor"),
    (dict(mu=ZERO.half()), TypeError, "mu must be float32 or float64, got torch.float16"),
    (dict(rho=ZERO.double()), TypeError, "rho must be torch.float32, got torch.float64"),
    (dict(rho=torch.zeros(4)), ValueError, r"rho must have shape \[3\], got \[4\]"),
    (dict(rho=torch.zeros(3, device="meta")), ValueError, "rho must be on cpu, got meta"),
]
REJECTED_GAUSSIAN = [
    (dict(prior_std=0.0), ValueError, "prior_std must be positive, got 0.0"),
    (dict(prior_std=torch.ones(())), TypeError, "prior_std must be a number, got Tensor"),
    (dict(prior_std=math.inf), ValueError, "prior_std must be finite, got inf"),
    (dict(prior_std="1"), TypeError, "prior_std must be a number, got str"),
]
REJECTED_MIXTURE = [
    (dict(mu=ZERO[0], rho=ZERO[0]), ValueError, "mu must have shape"),
    (dict(mu=torch.zeros(1, 1, 3), rho=torch.zeros(1, 1, 3)), ValueError, "mu must have shape"),
    (dict(num_samples=0), ValueError, "num_samples must be at least 1, got 0"),
    (dict(num_samples=1.5), TypeError, "num_samples must be an integer, got 1.5"),
    (dict(stream=-1), ValueError, r"stream must lie in \[0, 2\^32\), got -1"),
    (dict(stream=2**32), ValueError, r"stream must lie in \[0, 2\^32\), got 4294967296"),
    (dict(pi=1.5), ValueError, r"pi must lie in \[0, 1\], got 1.5"),
    (dict(pi=torch.ones(())), TypeError, "pi must be a number, got Tensor"),
    (dict(pi=None), TypeError, "pi must be a number, got NoneType"),
    (dict(std1=nn.Parameter(torch.ones(()))), TypeError, "std1 must be a number, got Parameter"),
    (dict(std1=math.inf), ValueError, "std1 must be finite, got inf"),
    (dict(std2=-1.0), ValueError, "std2 must be positive, got -1.0"),
    (dict(std2=3e-20), ValueError, "std2 must be above 5.42e-20 for torch.float32, got 3e-20"),
    (dict(mu=ZERO.double(), rho=ZERO.double(), std2=7e-155), ValueError, "std2 must be above 7.46"),
    (dict(seed=ZERO), TypeError, "seed must be int64"),
]


@pytest.mark.parametrize("change,error,message", REJECTED + REJECTED_GAUSSIAN)
def test_gaussian_rejects(change, error, message):
    with pytest.raises(error, match=f"gaussian_kl: {message}"):
        ops.gaussian_kl(**(dict(mu=ZERO, rho=ZERO, prior_std=1.0) | change))


@pytest.mark.parametrize("change,error,message", REJECTED + REJECTED_MIXTURE)
def test_mixture_rejects(change, error, message):
    arguments = dict(mu=ZERO, rho=ZERO, seed=ops.new_seed(0), stream=0, num_samples=1)
    with pytest.raises(error, match=f"mixture_kl: {message}"):
        ops.mixture_kl(**(arguments | change))
