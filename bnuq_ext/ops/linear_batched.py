"""bayes_linear by batched products of torch's: the weights of a chunk of replicas lie in memory.

The chunk stays in a GPU's second-level cache: no weight is read from device memory.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .linear_parts import Noise

CHUNK_BYTES = 32 << 20

_ops = torch.ops.bnuq


def chunks(num_samples: int, like: Tensor, features: int) -> Iterator[tuple[slice, Tensor]]:
    """(replicas, room for their weights in the dtype and device of `like`, (R, O * I))
    of each chunk."""
    most = max(1, CHUNK_BYTES // max(1, features * like.element_size()))
    room = like.new_empty((min(most, num_samples), features))
    for start in range(0, num_samples, most):
        stop = min(start + most, num_samples)
        yield slice(start, stop), room[: stop - start]


def rows_of(v: Tensor, replicas: slice) -> Tensor:
    """v[replicas], or one v for all of them."""
    return v[replicas] if len(v) > 1 else v.expand(replicas.stop - replicas.start, -1, -1)


def add_noise_product_(
    out: Tensor,
    v: Tensor,
    sigma: Tensor,
    scale: Tensor,
    noise: Noise,
    num_outputs: int,
    padded_inputs: int,
    forward: bool,
) -> None:
    """out += scale * v @ (sigma * eps)^T, forward, or scale * v @ (sigma * eps),
    with 16-bit operands.

    Args:
        out: (T, N, O) forward; (T or 1, N, I) else, 1 for the sum over the replicas.
        v: (T or 1, N, padded I) forward; (T, N, padded O) else; 16 bits.
        sigma: what `bayes_operands` made, in the dtype of v.
        scale: of v times that of sigma.
        num_outputs, padded_inputs: O, and I padded to 16.
    """
    for replicas, room in chunks(noise.num_samples, v, num_outputs * padded_inputs):
        weight = room.view(len(room), num_outputs, padded_inputs)
        _ops.sample_noise_(weight, sigma, noise.seed, noise.stream, replicas.start)
        rows = rows_of(v, replicas)
        if forward:
            product = float_product(rows, weight.transpose(1, 2))
        else:
            product = float_product(rows[..., :num_outputs], weight)[..., : out.shape[2]]
        _add_(out, replicas, product, scale)


def keeps_float_sums(dtype: torch.dtype) -> bool:
    """Whether torch makes `float_product` of a dtype: it refuses where float16 may have float16
    sums."""
    return dtype != torch.float16 or not torch.backends.cuda.matmul.allow_fp16_accumulation


def float_product(a: Tensor, b: Tensor) -> Tensor:
    """(R, N, M) in float32 of 16-bit matrices."""
    return torch.bmm(a, b, out_dtype=torch.float32)


def _add_(out: Tensor, replicas: slice, product: Tensor, scale: Tensor) -> None:
    """out[replicas] += scale * product; where out has one replica for all, their sum."""
    if len(out) == 1:
        replicas, product = slice(0, 1), product.sum(0, keepdim=True)
    out[replicas].addcmul_(product, scale)
