"""The CUDA source of predictive_statistics, its accumulation and its backward, run on the CPU."""

import numpy as np
import pytest
import torch
from hostrun import build
from hostrun.calls import Kernels, acc_of, state_shapes
from test_hostrun_batch_norm import ORDERS, all_dtypes, bits, tensor

from bnuq_ext import ops, reference

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"host run: {build.missing()}")

# (T, N, K, S), by who shares a position.
SHAPES = [
    (1, 1, 1, 1),
    (3, 5, 3, 1),  # a thread
    (3, 2, 8, 9),
    (4, 37, 10, 1),  # a few lanes
    (2, 3, 200, 1),  # a warp
    (3, 2, 10, 20),  # a column of the block
    (2, 1, 140, 17),
    (3, 2, 300, 1),  # a block
    (2, 1, 600, 3),
    (3, 2, 4100, 1),  # a block, the state in memory
    (2, 1, 4097, 2),
    (40, 2, 5, 3),  # replicas side by side: by a thread each
    (9, 3, 10, 1),  # by a few lanes
    (17, 1, 250, 1),  # by a warp
    (9, 1, 300, 1),  # by a block's part
    (8, 2, 1000, 1),
]
all_shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.fixture
def kernels():
    return Kernels(build.load())


def make_logits(shape, dtype, seed=0):
    random = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(shape, generator=random)).to(getattr(torch, dtype))


def torch_from(arrays):
    return [torch.from_numpy(array.copy()) for array in arrays]


@all_dtypes
@all_shapes
def test_matches_reference_in_every_order(kernels, dtype, shape, assert_close):
    logits = make_logits(shape, dtype)
    results = []
    for kernels.order in ORDERS:
        results.append(kernels.predictive(dtype, bits(logits)))
    for actual, expected in zip(
        torch_from(results[0]), reference.predictive_statistics(logits.double()), strict=True
    ):
        assert_close(actual, expected)
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(other, results[0], strict=True))


@all_shapes
def test_is_the_cpus(kernels, shape, assert_close):
    logits = make_logits(shape, "float32")
    on_cpu = ops.predictive_statistics(logits)
    for actual, expected in zip(
        torch_from(kernels.predictive("float32", bits(logits))), on_cpu, strict=True
    ):
        assert_close(actual, expected)


@all_shapes
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_give_the_same_bits(kernels, dtype, shape):
    logits = torch.cat([make_logits(shape, dtype, seed) for seed in range(4)])
    mean, variance, _, expected_entropy = kernels.predictive(dtype, bits(logits))
    rest = len(logits) - 1
    for kernels.order, sizes in enumerate([[1] * len(logits), [rest, 1], [1, rest]]):
        if 0 in sizes:
            continue
        state = [np.full(s, np.nan, acc_of(dtype)) for s in state_shapes(logits)]  # not read
        count = 0
        for size in sizes:
            chunk = bits(logits[count : count + size])
            state = kernels.predictive_accumulate(dtype, chunk, state, count)
            count += size
        total = acc_of(dtype)(count)
        assert np.array_equal(state[0], mean) and np.array_equal(state[1] / total, variance)
        assert np.array_equal(state[2], expected_entropy)


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_certain_and_broken_logits(kernels, shape):
    logits = make_logits(shape, "float32")
    logits[:, :, 0], logits[:, :, 1:] = 0, -np.inf
    mean, variance, entropy, expected = kernels.predictive("float32", bits(logits))
    assert (mean[:, 0] == 1).all() and (mean[:, 1:] == 0).all()
    assert (variance == 0).all() and (entropy == 0).all() and (expected == 0).all()

    logits = make_logits(shape, "float32")
    logits[-1, 0, -1, -1] = np.nan
    results = kernels.predictive("float32", bits(logits))
    assert all(np.isnan(r[0, ..., -1]).all() for r in results)
    if shape[3] > 1:
        assert all(np.isfinite(r[0, ..., 0]).all() for r in results)


@all_dtypes
@all_shapes
def test_gradients_in_every_order(kernels, dtype, shape, assert_close):
    logits = make_logits(shape, dtype)
    wide = logits.double().clone().requires_grad_()
    outputs = reference.predictive_statistics(wide)
    acc = getattr(torch, np.dtype(acc_of(dtype)).name)
    random = torch.Generator().manual_seed(1)
    grads = [torch.randn(o.shape, generator=random).to(acc) for o in outputs]
    (expected,) = torch.autograd.grad(outputs, wide, [g.double() for g in grads])
    mean = kernels.predictive(dtype, bits(logits))[0]
    results = []
    for kernels.order in ORDERS:
        grad = kernels.predictive_backward(dtype, bits(logits), mean, [bits(g) for g in grads])
        results.append(grad)
    assert_close(tensor(results[0], dtype), expected)
    assert all(np.array_equal(other, results[0]) for other in results[1:])


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[5], SHAPES[7], SHAPES[9]], ids=str)
def test_gradients_of_one_output(kernels, shape, which, assert_close):
    logits = make_logits(shape, "float32").double().requires_grad_()
    outputs = reference.predictive_statistics(logits)
    grad = torch.randn(outputs[which].shape, generator=torch.Generator().manual_seed(1))
    (expected,) = torch.autograd.grad(outputs[which], logits, grad.double())
    grads = [bits(grad) if i == which else None for i in range(4)]
    narrow = bits(logits.detach().float())
    mean = kernels.predictive("float32", narrow)[0]
    actual = kernels.predictive_backward("float32", narrow, mean, grads)
    assert_close(tensor(actual, "float32"), expected)


@pytest.mark.parametrize("shape", [SHAPES[1], (3, 2, 4100, 1)], ids=str)
def test_gradients_where_classes_are_impossible(kernels, shape):
    logits = make_logits(shape, "float32")
    logits[:, :, 1::2] = -np.inf
    results = kernels.predictive("float32", bits(logits))
    ones = [np.ones_like(r) for r in results]
    grad = kernels.predictive_backward("float32", bits(logits), results[0], ones)
    assert np.isfinite(grad).all() and not grad[:, :, 1::2].any()
