"""bayes_linear of 16-bit activations on the CPU, whose replicas go in groups through float32."""

import pytest
import torch
from one_link import bayes_linear_kl

from benchmarks.memory import peak_extra_bytes
from bnuq_ext import ops

SEED = torch.tensor([7, 3])
# Rows, features in and out, replicas: three groups, the last one smaller.
SIZES = {"many rows": (64, 300, 40, 120), "few rows": (2, 2500, 8, 500)}


def make(rows, features, outputs, replicas, shared, dtype):
    generator = torch.Generator().manual_seed(rows)
    shape = (rows, features) if shared else (replicas, rows, features)
    x = torch.randn(shape, generator=generator).to(dtype)
    weights = torch.randn(2, outputs, features, generator=generator) / features**0.5
    bias = torch.randn(2, outputs, generator=generator)
    return [t.requires_grad_() for t in (x, weights[0].clone(), weights[1] - 2, *bias.clone())]


def run(inputs, replicas):
    return ops.bayes_linear(*inputs, seed=SEED, stream=1, num_samples=replicas)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SIZES)
def test_groups_are_the_replicas_together(name, dtype, shared):
    *sizes, replicas = SIZES[name]
    inputs = make(*sizes, replicas, shared, dtype)
    whole = [t.detach().float().requires_grad_() for t in inputs]
    y, expected = run(inputs, replicas), run(whole, replicas)
    assert y.dtype == dtype and torch.equal(y, expected.to(dtype))
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = torch.autograd.grad(y, inputs, grad)
    right = torch.autograd.grad(expected, whole, grad.float())
    assert found[0].dtype == dtype
    rounding = 2**-8 if dtype == torch.bfloat16 else 2**-10
    scale = right[0].abs().max()
    assert (found[0].float() - right[0]).abs().max() <= rounding * scale
    for actual, wanted in zip(found[1:], right[1:], strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max())


def with_kl(inputs, replicas):
    options = dict(seed=SEED, stream=1, num_samples=replicas, prior_std=0.5)
    return bayes_linear_kl(*inputs, **options)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shared", [True, False])
# The last group of the first has one replica, each of the second, and all of the third go together.
@pytest.mark.parametrize("sizes", [(64, 300, 8, 109), (8, 70000, 16, 3), (8, 30, 16, 3)], ids=str)
def test_the_divergence_is_one_for_all_groups(sizes, shared, biased):
    *sizes, replicas = sizes
    inputs = make(*sizes, replicas, shared, torch.bfloat16)[: 5 if biased else 3]
    whole = [t.detach().float().requires_grad_() for t in inputs]
    (y, kl), (expected, right_kl) = with_kl(inputs, replicas), with_kl(whole, replicas)
    assert torch.equal(y, expected.to(torch.bfloat16))
    torch.testing.assert_close(kl, right_kl)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = torch.autograd.grad((y, kl), inputs, (grad, torch.tensor(3.0)))
    right = torch.autograd.grad((expected, right_kl), whole, (grad.float(), torch.tensor(3.0)))
    for actual, wanted in zip(found[1:], right[1:], strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max())
    scale = right[0].abs().max()
    assert (found[0].float() - right[0]).abs().max() <= 2**-8 * scale


def held(inputs, replicas):
    """Bytes that a forward and backward hold at most, beyond x, the outputs and the gradients."""
    outputs = []

    def step():
        y = run(inputs, replicas)
        y.backward(torch.ones_like(y))
        outputs.append(y)

    return peak_extra_bytes(step) - 2 * outputs[0].nbytes - sum(t.nbytes for t in inputs)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", SIZES)
def test_holds_no_more_for_more_replicas(name, shared):
    """One more float32 copy of y, from T replicas to twice as many, would be 1.2 MB of many rows and
    32 KB of few."""
    *sizes, replicas = SIZES[name]
    once, twice = (
        held(make(*sizes, count, shared, torch.bfloat16), count)
        for count in (replicas, 2 * replicas)
    )
    assert twice <= once + 4096
