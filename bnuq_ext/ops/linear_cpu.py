"""bayes_linear on the CPU: for few rows a replica one pass over the noise, else products by torch."""

import torch

from . import linear_products as products
from .linear_products import Noise

# Up to this many rows a replica, a dot product per row beats writing the weights out for a GEMM.
FEW_ROWS = 4

_ops = torch.ops.bnuq


def _forward(x, mu, rho, bias_mu, bias_rho, seed, stream, num_samples):
    noise = Noise(seed, stream, num_samples)
    xs, mu, sigma = products.replicas(x), mu.contiguous(), _ops.spread(rho.contiguous())
    bias = products.sample_bias(bias_mu, bias_rho, noise)
    if xs.shape[1] > FEW_ROWS:
        return products.forward(xs, mu, sigma, bias, noise).to(x.dtype)
    y = _ops.bayes_rows(xs, mu, sigma, *noise)
    return (y if bias is None else y.add_(bias[:, None])).to(x.dtype)


def _backward(
    grad_y, x, mu, rho, bias_rho, seed, stream, num_samples, need_x, need_weight, need_bias
):
    noise = Noise(seed, stream, num_samples)
    xs, mu = products.replicas(x), mu.contiguous()
    sigma = _ops.spread(rho.contiguous()) if need_x else rho.new_empty(0)
    grad_y = grad_y.to(mu.dtype).contiguous()
    if xs.shape[1] > FEW_ROWS:
        grads = products.backward(grad_y, xs, mu, sigma, noise, need_x, need_weight)
    else:
        grads = _few_rows_backward(grad_y, xs, mu, sigma, noise, need_x, need_weight)
    if need_weight:
        _ops.spread_backward_(grads[2], rho.contiguous())
    bias_grads = products.grad_bias(grad_y, bias_rho, noise) if need_bias else None
    return products.pack_grads(x, rho, *grads, bias_grads)


def _few_rows_backward(grad_y, xs, mu, sigma, noise, need_x, need_weight):
    grad_x = grad_mu = grad_sigma = None
    if need_weight:
        grad_mu, grad_sigma = _ops.bayes_rows_grad_weight(grad_y, xs, noise.seed, noise.stream)
    if need_x:
        grad_x = _ops.bayes_rows_grad_x(grad_y, mu, sigma, noise.seed, noise.stream)
    return grad_x, grad_mu, grad_sigma


_LIBRARY = torch.library.Library("bnuq", "IMPL")
_LIBRARY.impl("bayes_linear", _forward, "CPU")
_LIBRARY.impl("bayes_linear_backward", _backward, "CPU")
