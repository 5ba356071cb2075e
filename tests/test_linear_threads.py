"""bayes_linear from several threads at once: each has its own memory for a replica's weights."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from bnuq_ext import ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_threads_at_once(dtype):
    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype)

    generator = torch.Generator().manual_seed(0)
    x, mu, rho = draw(16, 512), draw(384, 512), draw(384, 512)

    def run(stream):
        return ops.bayes_linear(x, mu, rho, seed=seed, stream=stream, num_samples=5)

    seed = ops.new_seed(1)
    alone = [run(stream) for stream in range(16)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(run, list(range(16)) * 4))
    assert all(torch.equal(y, alone[i % 16]) for i, y in enumerate(together))
