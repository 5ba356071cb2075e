"""The ways of bayes_linear on CUDA (csrc/cuda/linear_ways.cu), for tests and benchmarks."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

WAYS = ("by size", "direct", "sampled", "fused", "batched")


@contextmanager
def going(way: str, chunk_bytes: int = 0) -> Iterator[None]:
    """All calls of all threads take one way, batched for fused with many rows, direct for float64;
    with chunks of that size unless it is 0."""
    torch.ops.bnuq.ask_bayes_linear_way(WAYS.index(way), chunk_bytes)
    try:
        yield
    finally:
        torch.ops.bnuq.ask_bayes_linear_way(0, 0)


def way_of(x: Tensor, mu: Tensor) -> str:
    """The way that a call with these takes on CUDA, wherever they are."""
    return WAYS[torch.ops.bnuq.bayes_linear_way(x, mu)]
