"""predictive_statistics against the same in PyTorch."""

import pytest
import torch

from bnuq_ext import ops, reference

from .timing import DEVICES, FULL, compare, record

# (T, N, K, *)
SHAPES = [(100, 1000, 10)]
if FULL:
    SHAPES += [(1, 64, 10), (10, 64, 10), (20, 16, 10), (20, 256, 1000), (100, 64, 1000)]
    SHAPES += [(20, 4, 21, 65, 63), (10, 33, 7)]
DTYPES = [torch.float32, torch.bfloat16] if FULL else [torch.float32]


def eager(logits):
    log_p = logits.log_softmax(2)
    p = log_p.exp()
    mean = p.mean(0)
    entropy = -torch.xlogy(mean, mean).sum(1)
    return mean, p.var(0, correction=0), entropy, -(p * log_p).sum(2).mean(0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.no_grad()
def test_predictive_statistics(shape, dtype, device, benchmark):
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(shape, generator=generator)).to(device, dtype)
    actual = ops.predictive_statistics(logits)
    expected = reference.predictive_statistics(logits.double())
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-4, atol=1e-5)

    copy = logits.clone()
    cases = {
        "ours": lambda: ops.predictive_statistics(logits),
        "eager": lambda: eager(logits.float()),  # the results are float32
        "copy_": lambda: copy.copy_(logits),
    }
    times = compare(cases, seconds=2, device=device)
    record(
        benchmark,
        f"predictive_statistics {'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}",
        times,
        moved=logits.nbytes,
        copied=2 * logits.nbytes,
        target={"eager": 3.0} if shape[0] > 1 else {},
    )
    benchmark.pedantic(cases["ours"], rounds=3)
