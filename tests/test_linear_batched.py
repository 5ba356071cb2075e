"""The parts of bayes_linear on CUDA that are plain PyTorch, on the CPU."""

import torch

from bnuq_ext.ops import linear_batched


def test_a_chunk_is_all_that_is_held():
    like, sizes = torch.empty(0, dtype=torch.float16), []
    for replicas, room in linear_batched.chunks(100, like, 1 << 20):
        assert room.shape == (replicas.stop - replicas.start, 1 << 20)
        sizes.append(room.untyped_storage().nbytes())
    assert set(sizes) == {linear_batched.CHUNK_BYTES} and len(sizes) == 7
