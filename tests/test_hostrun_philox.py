"""The CUDA source of philox_normal and snapshot_indices, run on the CPU."""

import numpy as np
import pytest
import torch
from hostrun import build
from hostrun.calls import Kernels

from bnuq_ext import ops, reference

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"host run: {build.missing()}")

SEEDS = [(0, 0), (-1, 5), (2**62 + 99, 2**40)]
SHAPES = [(3, 1), (2, 19), (1, 2100), (2, 5, 7), (1, 33, 40), (3, 16, 16)]


@pytest.fixture(params=[0, 1, 2], ids=lambda order: f"order{order}")
def kernels(request):
    return Kernels(build.load(), request.param)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("key, first", SEEDS)
def test_normals_are_the_references_and_the_cpus(kernels, key, first, shape):
    tag = "weight" if len(shape) == 3 else "spread"
    seed = ops.new_seed(key, first)
    actual = kernels.philox_normal(seed.numpy(), 2**32 - 1, shape, ops.philox.TAGS[tag])
    normals = reference.weight_normals if len(shape) == 3 else reference.vector_normals
    # Another word would be off by about 1.
    expected = normals(key, first, 2**32 - 1, tag, shape).numpy()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=5e-6)
    on_cpu = ops.philox_normal(seed, 2**32 - 1, shape, tag=tag).numpy()
    np.testing.assert_allclose(actual, on_cpu, rtol=0, atol=2e-6)


@pytest.mark.parametrize("num_snapshots", [1, 2, 3, 64, 1000])
@pytest.mark.parametrize("key, first", SEEDS)
def test_snapshots_are_the_references_and_the_cpus(kernels, key, first, num_snapshots):
    seed = ops.new_seed(key, first)
    actual = kernels.snapshot_indices(seed.numpy(), num_snapshots, 300)
    expected = reference.snapshot_indices(key, first, num_snapshots, 300)
    np.testing.assert_array_equal(actual, expected.numpy())
    assert torch.equal(torch.from_numpy(actual), ops.snapshot_indices(seed, num_snapshots, 300))
