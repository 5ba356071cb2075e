"""bayes_linear on the CPU: for few rows a replica one pass over the noise, else products by torch."""

import torch

from . import linear_products as products
from .linear_products import Noise

# Up to this many rows a replica, a dot product per row beats writing the weights out for a GEMM.
FEW_ROWS = 4

_ops = torch.ops.bnuq


def _forward(x, mu, rho, bias_mu, bias_rho, seed, stream, num_samples):
    noise = Noise(seed, stream, num_samples)
    xs, mu, rho = products.replicas(x), mu.contiguous(), rho.contiguous()
    bias = products.sample_bias(bias_mu, bias_rho, noise)
    if xs.shape[1] > FEW_ROWS:
        return products.forward(xs, mu, rho, bias, noise).to(x.dtype)
    y = _ops.bayes_rows(xs, mu, _ops.spread(rho), *noise)
    return (y if bias is None else y.add_(bias[:, None])).to(x.dtype)


def _backward(
    grad_y, x, mu, rho, bias_rho, seed, stream, num_samples, need_x, need_weight, need_bias
):
    noise = Noise(seed, stream, num_samples)
    xs, mu, rho = products.replicas(x), mu.contiguous(), rho.contiguous()
    grad_y = grad_y.to(mu.dtype).contiguous()
    backward = products.backward if xs.shape[1] > FEW_ROWS else _few_rows_backward
    grads = backward(grad_y, xs, mu, rho, noise, need_x, need_weight)
    bias_grads = products.grad_bias(grad_y, bias_rho, noise) if need_bias else None
    return products.pack_grads(x, rho, *grads, bias_grads)


def _few_rows_backward(grad_y, xs, mu, rho, noise, need_x, need_weight):
    grad_x = grad_mu = grad_rho = None
    if need_weight:
        grad_mu, grad_rho = _ops.bayes_rows_grad_weight(grad_y, xs, noise.seed, noise.stream)
        _ops.spread_backward_(grad_rho, rho)
    if need_x:
        grad_x = _ops.bayes_rows_grad_x(grad_y, mu, _ops.spread(rho), noise.seed, noise.stream)
    return grad_x, grad_mu, grad_rho


_LIBRARY = torch.library.Library("bnuq", "IMPL")
_LIBRARY.impl("bayes_linear", _forward, "CPU")
_LIBRARY.impl("bayes_linear_backward", _backward, "CPU")
