"""The parts of bayes_linear on CUDA around its products: biases, the packing of results."""

from typing import NamedTuple

import torch
from torch import Tensor

from .checks import acc_dtype

_ops = torch.ops.bnuq


class Noise(NamedTuple):
    """Where the noise of a call comes from."""

    seed: Tensor
    stream: int
    num_samples: int


def replicas(x: Tensor) -> Tensor:
    """(T, N, I) for an x of every replica, (1, N, I) for a shared one;
    in the accumulation dtype."""
    x = x if x.dim() == 3 else x[None]
    return x.to(acc_dtype(x.dtype)).contiguous()


def contiguous(*weights: Tensor | None) -> list[Tensor | None]:
    return [w if w is None else w.contiguous() for w in weights]


def sample_bias(bias_mu: Tensor | None, bias_rho: Tensor | None, noise: Noise) -> Tensor | None:
    """(T, O): what a layer without inputs returns for one row. None without a bias."""
    if bias_mu is None:
        return None
    none = _no_inputs(bias_mu)
    return _ops.bayes_direct(*none, *contiguous(bias_mu, bias_rho), *noise)[:, 0]


def grad_bias(grad_y: Tensor, bias_rho: Tensor, noise: Noise) -> tuple[Tensor, ...]:
    """Gradients by bias_mu and bias_rho of grad_y (T, N, O)."""
    summed, needed = grad_y.sum(1, keepdim=True), (False, False, True)
    given = *_no_inputs(bias_rho), bias_rho.contiguous(), noise.seed, noise.stream
    return _ops.bayes_direct_backward(summed, *given, *needed)[3:]


def _no_inputs(bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x, mu and rho of a layer with this bias and no inputs."""
    none = bias.new_empty(len(bias), 0)
    return bias.new_empty(1, 1, 0), none, none


def pack_grads(x, rho, grad_x, grad_mu, grad_rho, bias_grads) -> tuple[Tensor, ...]:
    """The results of bayes_linear_backward: in the shapes and dtypes of its inputs,
    empty for None."""
    if grad_x is not None:
        if x.dim() == 2:
            grad_x = grad_x[0] if len(grad_x) == 1 else grad_x.sum(0)
        grad_x = grad_x.to(x.dtype)
    return (
        x.new_empty(0) if grad_x is None else grad_x,
        # Each its own: results of an op may not share memory.
        rho.new_empty(0) if grad_mu is None else grad_mu,
        rho.new_empty(0) if grad_rho is None else grad_rho,
        *((rho.new_empty(0), rho.new_empty(0)) if bias_grads is None else bias_grads),
    )
