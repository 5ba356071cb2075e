"""What bayes_linear has in common on CPU and CUDA: the bias; and the CPU's products by torch.

For many rows a replica, one replica's weights at a time go into a buffer of (O, I) that torch's matrix
product reads.
"""

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


def sample_bias(bias_mu: Tensor | None, bias_rho: Tensor | None, noise: Noise) -> Tensor | None:
    """(T, O), or None without a bias."""
    if bias_mu is None:
        return None
    return _ops.sample_bias(bias_mu.contiguous(), bias_rho.contiguous(), *noise)


def grad_bias(grad_y: Tensor, bias_rho: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """Gradients by bias_mu and bias_rho of grad_y (T, N, O)."""
    by_replica = grad_y.sum(1)
    eps = noise.bias(by_replica.shape[1]).to(grad_y.dtype)
    return by_replica.sum(0), (by_replica * eps).sum(0) * torch.sigmoid(bias_rho)


def forward(xs: Tensor, mu: Tensor, rho: Tensor, bias: Tensor | None, noise: Noise) -> Tensor:
    """(T, N, O) of xs (T or 1, N, I), bias (T, O)."""
    if noise.num_samples == 1:
        weight = _ops.sample_posterior(mu, rho, noise.seed, noise.stream)
        return _product(xs[0], weight, bias)[None]
    sigma, weight = _ops.spread(rho), torch.empty_like(mu)[None]
    y = xs.new_empty((noise.num_samples, xs.shape[1], mu.shape[0]))
    for t in range(noise.num_samples):
        _ops.sample_weights_(weight, mu, sigma, noise.seed, noise.stream, t)
        _product(xs[t % len(xs)], weight[0], None if bias is None else bias[t], out=y[t])
    return y


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def backward(
    grad_y: Tensor,
    xs: Tensor,
    mu: Tensor,
    rho: Tensor,
    noise: Noise,
    need_x: bool,
    need_weight: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients by xs (T or 1, N, I), mu and rho; None for what is not needed."""
    if len(grad_y) == 1:
        return _backward_once(grad_y[0], xs[0], mu, rho, noise, need_x, need_weight)
    empty = mu.new_empty(0)
    sigma = _ops.spread(rho) if need_x else empty
    grad_x = torch.empty_like(xs) if need_x else None
    weight = torch.empty_like(mu)[None] if need_x else empty
    if need_weight:
        grad_mu, grad_sigma, grad_weight = (torch.empty_like(mu) for _ in range(3))
    for t in range(len(grad_y)):
        k = t % len(xs)
        if need_weight:
            # The first replica's product lies where the sum over replicas is wanted, and starts the other.
            product, total = (grad_weight, grad_mu) if t else (grad_mu, empty)
            torch.mm(grad_y[t].t(), xs[k], out=product)
            _ops.weight_backward_(
                weight, total, grad_sigma, product, mu, sigma, noise.seed, noise.stream, t
            )
        elif need_x:
            _ops.sample_weights_(weight, mu, sigma, noise.seed, noise.stream, t)
        if need_x and t < len(xs):
            torch.mm(grad_y[t], weight[0], out=grad_x[k])
        elif need_x:
            grad_x[k].addmm_(grad_y[t], weight[0])
    if not need_weight:
        return grad_x, None, None
    _ops.spread_backward_(grad_sigma, rho)
    return grad_x, grad_mu, grad_sigma


def _backward_once(grad_y, x, mu, rho, noise, need_x, need_weight):
    """`backward` of one replica, which needs no sigma in memory."""
    grad_mu = grad_rho = None
    if need_weight:
        grad_mu = torch.mm(grad_y.t(), x)
        weight, grad_rho = _ops.sample_posterior_backward(
            grad_mu, mu, rho, noise.seed, noise.stream, need_x
        )
    elif need_x:
        weight = _ops.sample_posterior(mu, rho, noise.seed, noise.stream)
    return torch.mm(grad_y, weight)[None] if need_x else None, grad_mu, grad_rho


def pack_grads(x, rho, grad_x, grad_mu, grad_rho, bias_grads) -> tuple[Tensor, ...]:
    """The results of bayes_linear_backward: in the shapes and dtypes of its inputs, empty for None."""
    none = rho.new_empty(0)
    if grad_x is not None:
        grad_x = (grad_x if x.dim() == 3 else grad_x.sum(0)).to(x.dtype)
    return (
        x.new_empty(0) if grad_x is None else grad_x,
        none if grad_mu is None else grad_mu,
        none if grad_rho is None else grad_rho,
        *((none, none) if bias_grads is None else bias_grads),
    )
