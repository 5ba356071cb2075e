"""The CUDA source of the divergences, run on the CPU."""

import numpy as np
import pytest
import torch
from hostrun import build
from hostrun.bayes import STREAM, Ops
from hostrun.calls import check_guards, fresh

from bnuq_ext import ops

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"host run: {build.missing()}")


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (4100,), (17, 33), (64, 80), (512, 530)], ids=str)
def test_divergences_match_the_cpu(order, shape, dtype):
    kernels = Ops(order)
    generator = torch.Generator().manual_seed(4)
    mu = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
    rho = (2 * torch.randn(shape, generator=generator) - 3).to(dtype).requires_grad_()
    storage, seed, T = (np.float64 if dtype == torch.float64 else np.float32), ops.new_seed(6), 3
    grad = torch.full((), 1.5, dtype=dtype)
    mixture = dict(pi=0.3, std1=1.0, std2=0.05)
    O, I = shape if len(shape) == 2 else (1, shape[0])  # noqa: E741
    common = dict(mu=mu, rho=rho, seed=seed, grad=grad, T=T, O=O, I=I, matrix=len(shape) == 2)
    common |= mixture | dict(prior_std=0.7)
    for name, expected in (
        ("gaussian_kl", ops.gaussian_kl(mu, rho, 0.7)),
        ("mixture_kl", ops.mixture_kl(mu, rho, seed, STREAM, T, **mixture)),
    ):
        partial = np.full(1024, np.nan)
        actual = kernels.run(name, dtype, fresh((), storage), partial=partial, **common)
        torch.testing.assert_close(actual, expected.detach(), rtol=1e-5, atol=1e-5)
        grads = [fresh(shape, storage) for _ in range(2)]
        for array_ in grads:
            array_[...] = 0
        kernels.run(name + "_backward", dtype, grads[0], out2=grads[1], **common)
        wanted = torch.autograd.grad(1.5 * expected, (mu, rho))
        for a, e in zip(grads, wanted, strict=True):
            scale = float(e.abs().max())
            torch.testing.assert_close(torch.from_numpy(a), e, rtol=1e-4, atol=1e-5 * scale)


def test_a_divergence_of_more_weights_than_the_grid_has_threads():
    """Eight a thread: the last hundred are in its second turn."""
    size, seed, made = 8 * 1024 * 256 + 100, ops.new_seed(6), Ops(1)
    mu, rho = (torch.full((size,), value, requires_grad=True) for value in (0.5, -3.0))
    mixture = dict(pi=0.3, std1=1.0, std2=0.05)
    expected = ops.mixture_kl(mu, rho, seed, STREAM, 1, **mixture)
    common = dict(mu=mu, rho=rho, seed=seed, T=1, O=1, I=size, grad=torch.ones(())) | mixture
    partial = fresh((1024,), np.float64)
    actual = made.run("mixture_kl", mu.dtype, fresh((), np.float32), partial=partial, **common)
    check_guards(partial)
    torch.testing.assert_close(actual, expected.detach(), rtol=1e-6, atol=0)
    grads = [fresh((size,), np.float32) for _ in range(2)]
    for array_ in grads:
        array_[...] = 0
    made.run("mixture_kl_backward", mu.dtype, grads[0], out2=grads[1], **common)
    for a, e in zip(grads, torch.autograd.grad(expected, (mu, rho)), strict=True):
        torch.testing.assert_close(torch.from_numpy(a)[-200:], e[-200:], rtol=1e-4, atol=1e-4)
