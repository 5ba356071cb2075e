"""Integers as seeds of the ops: what `new_seed` of them gives; and what is taken for no number."""

import re

import numpy as np
import pytest
import torch

from bnuq_ext import ops

G = torch.Generator().manual_seed(0)
X, MU, RHO = torch.randn(4, 6, generator=G), torch.randn(5, 6, generator=G), torch.zeros(5, 6)
MEAN, VAR = torch.randn(7, 6, generator=G), torch.rand(7, 6, generator=G)

CALLS = {
    "philox_normal": lambda seed: ops.philox_normal(seed, 1, (3, 5, 6)),
    "snapshot_indices": lambda seed: ops.snapshot_indices(seed, 7, 20),
    "bayes_linear": lambda seed: ops.bayes_linear(X, MU, RHO, seed=seed, stream=2, num_samples=3),
    "mixture_kl": lambda seed: ops.mixture_kl(MU, RHO, seed, 2, 3),
    "batch_norm_bank": lambda seed: ops.batch_norm_bank(
        X, MEAN, VAR, seed, num_samples=3, shared=True
    ),
    "batch_norm_fitted": lambda seed: ops.batch_norm_fitted(
        X, VAR[:4], seed, 2, 3, "normal", shared=True
    ),
}


@pytest.mark.parametrize("seed", [5, -(2**63), 2**63 - 1, np.int64(5)], ids=repr)
@pytest.mark.parametrize("op", CALLS)
def test_an_integer_is_the_key(op, seed):
    actual = CALLS[op](seed)
    assert torch.equal(actual, CALLS[op](ops.new_seed(int(seed))))
    assert op == "batch_norm_bank" or not torch.equal(actual, CALLS[op](ops.new_seed(6)))


@pytest.mark.parametrize("op", CALLS)
def test_an_integer_in_a_compiled_call(op):
    compiled = torch.compile(CALLS[op], fullgraph=True, backend="aot_eager")
    for seed in (5, 6):
        torch.testing.assert_close(compiled(seed), CALLS[op](seed), rtol=0, atol=0)


def test_gradients_by_an_integer():
    mu = MU.clone().requires_grad_()
    for seed in (5, ops.new_seed(5)):
        y = ops.bayes_linear(X, mu, RHO, seed=seed, stream=2, num_samples=3)
        (grad,) = torch.autograd.grad(y.square().sum(), mu)
        if isinstance(seed, int):
            expected = grad
    assert torch.equal(grad, expected) and grad.abs().sum() > 0


BEYOND = "seed must lie in [-2^63, 2^63), got 9223372036854775808"
ARRAY, KIND = np.zeros(3), "must be an integer or a tensor, got"
REFUSED = [
    (2**63, ValueError, BEYOND),
    (True, TypeError, f"seed {KIND} bool"),
    (int, TypeError, f"seed {KIND} type"),
    (ARRAY.astype(int), TypeError, f"seed {KIND} ndarray"),
    (None, TypeError, f"seed {KIND} NoneType"),
]


@pytest.mark.parametrize("op", [op for op in CALLS if op != "batch_norm_bank"])
@pytest.mark.parametrize("seed, error, text", REFUSED, ids=[text for *_, text in REFUSED])
def test_other_seeds_are_refused(op, seed, error, text):
    with pytest.raises(error, match=f"^{op}: {re.escape(text)}$"):
        CALLS[op](seed)


ROWS = "got array([0, 0, 0])"
NO_NUMBERS = [
    (lambda: ops.new_seed(int), "new_seed: seed must be an integer, got <class 'int'>"),
    (lambda: ops.new_seed(ARRAY.astype(int)), f"new_seed: seed must be an integer, {ROWS}"),
    (
        lambda: ops.snapshot_indices(0, 7, ARRAY.astype(int)),
        f"snapshot_indices: num_samples must be an integer, {ROWS}",
    ),
    (
        lambda: ops.philox_normal(0, int, (2, 3)),
        "philox_normal: stream must be an integer, got <class 'int'>",
    ),
    (
        lambda: ops.philox_normal(0, 0, torch.zeros(2, 2)),
        f"philox_normal: shape must be a tuple of integers, got {torch.zeros(2, 2)!r}",
    ),
    (
        lambda: ops.batch_norm_bank(X, MEAN, VAR, 0, num_samples=3, shared=True, eps=ARRAY),
        "batch_norm_bank: eps must be a number, got ndarray",
    ),
    (
        lambda: ops.batch_norm_bank(X, MEAN, VAR, 0, num_samples=3, shared=True, eps=float),
        "batch_norm_bank: eps must be a number, got type",
    ),
]


@pytest.mark.parametrize("call, text", NO_NUMBERS, ids=[text for _, text in NO_NUMBERS])
def test_classes_and_arrays_are_no_numbers(call, text):
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        call()


def test_an_array_is_no_name():
    text = "philox_normal: tag must be one of .*, got array"
    with pytest.raises(ValueError, match=text):
        ops.philox_normal(0, 0, (2, 3), tag=ARRAY)
