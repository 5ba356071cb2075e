"""bayes_linear on CUDA: products with sigma * eps in a fused kernel, those with mu by torch.

    y[t] = x[t] @ mu^T + bias[t] + x[t] @ (sigma * eps[t])^T

The first product keeps the precision of torch's float32 one. The second has 16-bit operands and float32 sums:
float16 (11 bits), scaled by powers of two to its range, for float32 and float16 x; bfloat16 (8 bits) for
bfloat16 x. So the noise of an output is off by about 2^-11 (2^-8) of its own size over sqrt(I).
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import linear_products as products
from .linear_products import Noise

# Above, the fused kernel would make each weight's noise more than twice.
MOST_FUSED_ROWS = 256

_ops = torch.ops.bnuq


def half_operand(v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(v / scale in 16 bits, rows padded to 16 columns; scale, a power of two).

    The largest |v| / scale lies in [2^13, 2^14) for float16; bfloat16 has the range of
    float32 and scale 1.
    """
    scale = power_of_two(v.abs().amax(), 14, dtype) if v.numel() else v.new_ones(())
    return pad((v / scale).to(dtype), (0, -v.shape[-1] % 16)).contiguous(), scale


def power_of_two(largest: Tensor, exponent: int, dtype: torch.dtype) -> Tensor:
    """The scale that brings `largest` to below 2^exponent; 1 where there is none, and for bfloat16."""
    one = torch.ones_like(largest)
    if dtype == torch.bfloat16:
        return one
    scale = torch.ldexp(one, torch.frexp(largest).exponent - exponent)
    return torch.where(largest.isfinite() & (largest > 0), scale, one)


def pack(rho: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """sigma in fragment order over its scale: times eps, at most 5.1, it stays below 65504."""
    scale = (
        power_of_two(products.spread(rho.amax()), 12, dtype) if rho.numel() else rho.new_ones(())
    )
    return _ops.pack_sigma(rho.contiguous(), scale, rho.new_empty(0, dtype=dtype)), scale


def _is_fused(x: Tensor) -> bool:
    return x.dtype != torch.float64 and x.shape[-2] <= MOST_FUSED_ROWS


def _half_of(x: Tensor) -> torch.dtype:
    return torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float16


def _forward(x, mu, rho, bias_mu, bias_rho, seed, stream, num_samples):
    noise, xs = Noise(seed, stream, num_samples), products.replicas(x)
    bias = products.sample_bias(bias_mu, bias_rho, noise)
    if not _is_fused(x):
        sigma = products.spread(rho).contiguous()
        return products.forward(xs, mu.contiguous(), sigma, bias, noise).to(x.dtype)
    base = (xs @ mu.t()).contiguous()
    operand, scale = half_operand(xs, _half_of(x))
    sigma, sigma_scale = pack(rho, _half_of(x))
    return _ops.bayes_forward(operand, sigma, base, bias, scale, sigma_scale, *noise).to(x.dtype)


def _backward(
    grad_y, x, mu, rho, bias_rho, seed, stream, num_samples, need_x, need_weight, need_bias
):
    noise, xs = Noise(seed, stream, num_samples), products.replicas(x)
    grad_y = grad_y.to(mu.dtype).contiguous()
    if _is_fused(x):
        grads = _fused_backward(grad_y, xs, mu, rho, noise, _half_of(x), need_x, need_weight)
    else:
        sigma = products.spread(rho).contiguous()
        grads = products.backward(grad_y, xs, mu.contiguous(), sigma, noise, need_x, need_weight)
    if need_weight:
        grads[2].mul_(torch.sigmoid(rho))
    bias_grads = products.grad_bias(grad_y, bias_rho, noise) if need_bias else None
    return products.pack_grads(x, rho, *grads, bias_grads)


def _fused_backward(grad_y, xs, mu, rho, noise, half, need_x, need_weight):
    grad_x = grad_mu = grad_sigma = None
    summed = grad_y.sum(0, keepdim=True) if len(xs) == 1 else grad_y  # for the products with mu
    operand, scale = half_operand(grad_y, half)
    if need_weight:
        grad_mu = summed.flatten(0, 1).t() @ xs.flatten(0, 1)
        x_operand, x_scale = half_operand(xs, half)
        grad_sigma = _ops.bayes_grad_sigma(
            operand, x_operand, scale, x_scale, noise.seed, noise.stream, *mu.shape
        )
    if need_x:
        grad_x = (summed @ mu).contiguous()
        sigma, sigma_scale = pack(rho, half)
        _ops.bayes_grad_x_(grad_x, operand, sigma, scale, sigma_scale, noise.seed, noise.stream)
    return grad_x, grad_mu, grad_sigma


_LIBRARY = torch.library.Library("bnuq", "IMPL")
_LIBRARY.impl("bayes_linear", _forward, "CUDA")
_LIBRARY.impl("bayes_linear_backward", _backward, "CUDA")
