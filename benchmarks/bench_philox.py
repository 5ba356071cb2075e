"""philox_normal against torch.randn."""

import pytest
import torch

from bnuq_ext import ops, reference

from .timing import DEVICES, FULL, compare, record


@pytest.mark.skipif(not FULL, reason="not in the short form")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(20, 256), (16, 1 << 18), (4, 1024, 1024)], ids=str)
def test_philox_normal(shape, device, benchmark):
    seed = ops.new_seed(3, 0, device)
    draw = reference.vector_normals if len(shape) == 2 else reference.weight_normals
    small = (1, *(min(n, 40) for n in shape[1:]))
    tag = "mean" if len(shape) == 2 else "weight"
    actual = ops.philox_normal(seed, 1, small).double().cpu()
    # Near 0 a GPU's approximate logarithm shows; another word would be off by about 1.
    atol = 1e-5 if device == "cpu" else 2e-3
    torch.testing.assert_close(actual, draw(3, 0, 1, tag, small), rtol=0, atol=atol)

    cases = {
        "ours": lambda: ops.philox_normal(seed, 1, shape),
        "randn": lambda: torch.randn(shape, device=device),
    }
    times = compare(cases, seconds=2, device=device)
    name = f"philox_normal {'x'.join(map(str, shape))}"
    record(benchmark, name, times, moved=4 * torch.Size(shape).numel())
    benchmark.pedantic(cases["ours"], rounds=3)
