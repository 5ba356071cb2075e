"""The parts of bayes_linear on CUDA that are plain PyTorch: spreads, biases, the packing of results."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .. import _library  # noqa: F401
from .checks import acc_dtype
from .philox import TAGS

_ops = torch.ops.bnuq


class Noise(NamedTuple):
    """Where the noise of a call comes from."""

    seed: Tensor
    stream: int
    num_samples: int

    def bias(self, features: int) -> Tensor:
        shape = (self.num_samples, features)
        return _ops.philox_normal(self.seed, self.stream, TAGS["bias"], shape)


def spread(rho: Tensor) -> Tensor:
    return softplus(rho, threshold=40.0)


def replicas(x: Tensor) -> Tensor:
    """(T, N, I) for an x of every replica, (1, N, I) for a shared one; in the accumulation dtype."""
    x = x if x.dim() == 3 else x[None]
    return x.to(acc_dtype(x.dtype)).contiguous()


def contiguous(*weights: Tensor | None) -> list[Tensor | None]:
    return [w if w is None else w.contiguous() for w in weights]


def sample_bias(bias_mu: Tensor | None, bias_rho: Tensor | None, noise: Noise) -> Tensor | None:
    """(T, O), or None without a bias."""
    if bias_mu is None:
        return None
    return _ops.sample_bias(*contiguous(bias_mu, bias_rho), *noise)


def grad_bias(grad_y: Tensor, bias_rho: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """Gradients by bias_mu and bias_rho of grad_y (T, N, O)."""
    by_replica = grad_y.sum(1)
    eps = noise.bias(by_replica.shape[1]).to(grad_y.dtype)
    return by_replica.sum(0), (by_replica * eps).sum(0) * torch.sigmoid(bias_rho)


def pack_grads(x, rho, grad_x, grad_mu, grad_rho, bias_grads) -> tuple[Tensor, ...]:
    """The results of bayes_linear_backward: in the shapes and dtypes of its inputs, empty for None."""
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
