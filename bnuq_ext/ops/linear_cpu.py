"""bayes_linear on the CPU: weights sampled into memory that stays in the cache, products by torch.

Few rows a replica are one pass over the noise in C++; for more, one replica's weights at a time go into
a buffer of (O, I), which torch's matrix product reads.
"""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .. import _library  # noqa: F401

# Up to this many rows a replica, a dot product per row beats writing the weights out for a GEMM.
FEW_ROWS = 4
BIAS_TAG = 1

_ops = torch.ops.bnuq


def _spread(rho: Tensor) -> Tensor:
    return softplus(rho, threshold=40.0)


def _replicas(x: Tensor, num_samples: int) -> Tensor:
    """(T, N, I) for an x of every replica, (1, N, I) for a shared one; in the accumulation dtype."""
    x = x if x.dim() == 3 else x[None]
    return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32).contiguous()


def _bias(bias_mu: Tensor, bias_rho: Tensor, seed: Tensor, stream: int, num_samples: int) -> Tensor:
    eps = _ops.philox_normal(seed, stream, BIAS_TAG, (num_samples, bias_mu.shape[0]))
    return torch.addcmul(bias_mu, _spread(bias_rho), eps.to(bias_mu.dtype))  # (T, O)


def _forward(x, mu, rho, bias_mu, bias_rho, seed, stream, num_samples):
    xs, mu, sigma = _replicas(x, num_samples), mu.contiguous(), _spread(rho).contiguous()
    bias = None
    if bias_mu is not None:
        bias = _bias(bias_mu, bias_rho, seed, stream, num_samples)
    if xs.shape[1] <= FEW_ROWS:
        y = _ops.bayes_rows(xs, mu, sigma, seed, stream, num_samples)
        if bias is not None:
            y += bias[:, None]
        return y.to(x.dtype)
    y = xs.new_empty((num_samples, xs.shape[1], mu.shape[0]))
    weight = torch.empty_like(mu)[None]
    for t in range(num_samples):
        _ops.sample_weights_(weight, mu, sigma, seed, stream, t)
        if bias is None:
            torch.mm(xs[t % len(xs)], weight[0].t(), out=y[t])
        else:
            torch.addmm(bias[t], xs[t % len(xs)], weight[0].t(), out=y[t])
    return y.to(x.dtype)


def _backward(
    grad_y, x, mu, rho, bias_rho, seed, stream, num_samples, need_x, need_weight, need_bias
):
    xs, mu, sigma = _replicas(x, num_samples), mu.contiguous(), _spread(rho).contiguous()
    grad_y = grad_y.to(mu.dtype).contiguous()
    none = mu.new_empty(0)
    grad_x = grad_mu = grad_sigma = none
    if xs.shape[1] <= FEW_ROWS:
        if need_weight:
            grad_mu, grad_sigma = _ops.bayes_rows_grad_weight(grad_y, xs, seed, stream)
        if need_x:
            grad_x = _ops.bayes_rows_grad_x(grad_y, mu, sigma, seed, stream)
            grad_x = grad_x if x.dim() == 3 else grad_x.sum(0)
    else:
        grad_x, grad_mu, grad_sigma = _products(
            grad_y, xs, mu, sigma, seed, stream, need_x, need_weight
        )
        grad_x = grad_x[0] if need_x and x.dim() == 2 else grad_x
    grad_rho = grad_sigma * torch.sigmoid(rho) if need_weight else none
    grad_bias_mu = grad_bias_rho = none
    if need_bias:
        by_replica = grad_y.sum(1)  # (T, O)
        eps = _ops.philox_normal(seed, stream, BIAS_TAG, tuple(by_replica.shape))
        grad_bias_mu = by_replica.sum(0)
        if bias_rho is not None:
            grad_bias_rho = (by_replica * eps.to(mu.dtype)).sum(0) * torch.sigmoid(bias_rho)
    return grad_x.to(x.dtype), grad_mu, grad_rho, grad_bias_mu, grad_bias_rho


def _products(grad_y, xs, mu, sigma, seed, stream, need_x, need_weight):
    none, shared = mu.new_empty(0), len(xs) == 1
    grad_x = torch.zeros_like(xs) if need_x else none
    weight = torch.empty_like(mu)[None] if need_x else none
    grad_mu, grad_sigma, grad_weight = (
        (torch.zeros_like(mu), torch.zeros_like(mu), torch.empty_like(mu))
        if need_weight
        else (none, none, none)
    )
    for t in range(len(grad_y)):
        x = xs[0 if shared else t]
        if need_weight:
            torch.mm(grad_y[t].t(), x, out=grad_weight)
            _ops.weight_backward_(
                weight, grad_mu, grad_sigma, grad_weight, mu, sigma, seed, stream, t
            )
        elif need_x:
            _ops.sample_weights_(weight, mu, sigma, seed, stream, t)
        if need_x:
            grad_x[0 if shared else t].addmm_(grad_y[t], weight[0])
    return grad_x, grad_mu, grad_sigma


_LIBRARY = torch.library.Library("bnuq", "IMPL")
_LIBRARY.impl("bayes_linear", _forward, "CPU")
_LIBRARY.impl("bayes_linear_backward", _backward, "CPU")
