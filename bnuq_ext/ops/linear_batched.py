"""bayes_linear by batched products of torch's: the weights of a chunk of replicas lie in memory.

The chunk stays in a GPU's second-level cache: no weight is read from device memory.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .. import _library  # noqa: F401
from .linear_parts import Noise

CHUNK_BYTES = 32 << 20

_ops = torch.ops.bnuq


def chunks(num_samples: int, like: Tensor, features: int) -> Iterator[tuple[slice, Tensor]]:
    """(replicas, room for their weights in the dtype and device of `like`, (R, O * I)) of each chunk."""
    most = max(1, CHUNK_BYTES // max(1, features * like.element_size()))
    room = like.new_empty((min(most, num_samples), features))
    for start in range(0, num_samples, most):
        stop = min(start + most, num_samples)
        yield slice(start, stop), room[: stop - start]


def rows_of(v: Tensor, replicas: slice) -> Tensor:
    """v[replicas], or one v for all of them."""
    return v[replicas] if len(v) > 1 else v.expand(replicas.stop - replicas.start, -1, -1)


def forward(xs: Tensor, mu: Tensor, sigma: Tensor, bias: Tensor | None, noise: Noise) -> Tensor:
    """(T, N, O) of xs (T or 1, N, I), bias (T, O); in the precision of xs."""
    y = xs.new_empty((noise.num_samples, xs.shape[1], mu.shape[0]))
    for replicas, room in chunks(noise.num_samples, mu, mu.numel()):
        weight = room.view(len(room), *mu.shape)
        _ops.sample_weights_(weight, mu, sigma, noise.seed, noise.stream, replicas.start)
        x, weight = rows_of(xs, replicas), weight.transpose(1, 2)
        if bias is None:
            torch.bmm(x, weight, out=y[replicas])
        else:
            torch.baddbmm(bias[replicas, None], x, weight, out=y[replicas])
    return y


def backward(
    grad_y: Tensor,
    xs: Tensor,
    mu: Tensor,
    sigma: Tensor,
    noise: Noise,
    need_x: bool,
    need_weight: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients by xs (T or 1, N, I), mu and sigma; None for what is not needed."""
    grad_x = torch.zeros_like(xs) if need_x else None
    grad_mu, grad_sigma = (torch.zeros_like(mu) if need_weight else None for _ in range(2))
    zero, one = torch.zeros_like(mu), torch.ones_like(mu)
    for replicas, room in chunks(noise.num_samples, mu, mu.numel()):
        eps = room.view(len(room), *mu.shape)
        _ops.sample_weights_(eps, zero, one, noise.seed, noise.stream, replicas.start)
        grad = grad_y[replicas]
        if need_weight:
            by_weight = torch.bmm(grad.transpose(1, 2), rows_of(xs, replicas))
            grad_mu += by_weight.sum(0)
            grad_sigma += by_weight.mul_(eps).sum(0)
        if need_x:
            weight = eps.mul_(sigma).add_(mu)
            _add_(grad_x, replicas, torch.bmm(grad, weight))
    return grad_x, grad_mu, grad_sigma


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
    """out += scale * v @ (sigma * eps)^T, forward, or scale * v @ (sigma * eps), with 16-bit operands.

    Args:
        out: (T, N, O) forward; (T or 1, N, I) else, 1 for the sum over the replicas.
        v: (T or 1, N, padded I) forward; (T, N, padded O) else; 16 bits.
        sigma: what `pack_sigma` made, in the dtype of v.
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


def float_product(a: Tensor, b: Tensor) -> Tensor:
    """(R, N, M) in float32 of 16-bit matrices."""
    return torch.bmm(a, b, out_dtype=torch.float32)


def _add_(out: Tensor, replicas: slice, product: Tensor, scale: Tensor | None = None) -> None:
    """out[replicas] += scale * product; where out has one replica for all, their sum."""
    if len(out) == 1:
        replicas, product = slice(0, 1), product.sum(0, keepdim=True)
    if scale is None:
        out[replicas].add_(product)
    else:
        out[replicas].addcmul_(product, scale)
