"""bayes_linear on CUDA, in one of three ways.

    y[t] = x[t] @ mu^T + bias[t] + x[t] @ (sigma * eps[t])^T

Fused: the first product is torch's, in its float32 precision. The second is a kernel's, or torch's
with many rows, with 16-bit operands and float32 sums: float16 (11 bits), scaled by powers of two to
its range, for float32 and float16 x; bfloat16 (8 bits) for bfloat16 x. So the noise of an output is
off by about 2^-11 (2^-8) of its own size.

Direct: one kernel for all of it, two for the gradients, in the precision of the weights. For
float64, and for few rows of few weights, whose price are launches.

Sampled: the weights of a chunk of replicas in memory, and float32 products of torch's. For more
rows of not many weights, whose price are launches too.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from . import linear_batched as batched
from . import linear_parts as parts
from . import linear_sampled as sampled
from .linear_parts import Noise
from .modes import past_autocast

# The fused kernel makes a weight's noise once for 128 rows. With so many it takes 2.5 times its noise
# (measured on an H200), by counting as long as writing the noise for a product of torch's.
MOST_FUSED_ROWS = 128

# Measured beside an H200: before the GPU has its launches a call takes 33 us the direct way, 63 the
# sampled and 96 the fused one. For a few replicas of so many rows and weights that is most of it; a
# hundred the fused way makes in half the sampled one's time. T has no say: a replica alone is what it
# is among others.
MOST_DIRECT_ROWS = 8
MOST_DIRECT_WEIGHTS = 3 * 2**16
MOST_SAMPLED_ROWS, MOST_SAMPLED_WEIGHTS = 512, 2**19

_ops = torch.ops.bnuq


def way_of(x: Tensor, mu: Tensor) -> str:
    """The way that a call takes: "direct", "sampled" or "fused"."""
    rows, weights = x.shape[-2], mu.numel()
    if x.dtype == torch.float64 or (rows <= MOST_DIRECT_ROWS and weights <= MOST_DIRECT_WEIGHTS):
        return "direct"
    few = rows <= MOST_SAMPLED_ROWS and weights <= MOST_SAMPLED_WEIGHTS
    return "sampled" if few else "fused"


def goes_fused(operand: Tensor) -> bool:
    """Whether the product of 16-bit rows (T or 1, N, *) and noise takes the fused kernel."""
    return operand.shape[1] <= MOST_FUSED_ROWS or not batched.keeps_float_sums(operand.dtype)


def _past_autocast(kernel: Callable) -> Callable:
    @functools.wraps(kernel)
    def run(x, *args):
        with past_autocast(x.device):
            return kernel(x, *args)

    return run


@_past_autocast
def _forward(x, mu, rho, bias_mu, bias_rho, seed, stream, num_samples):
    noise, xs = Noise(seed, stream, num_samples), parts.replicas(x)
    way = way_of(x, mu)
    if way == "direct":
        weights = parts.contiguous(mu, rho, bias_mu, bias_rho)
        return _ops.bayes_direct(xs, *weights, *noise).to(x.dtype)
    if way == "sampled":
        return sampled.forward(xs, mu, rho, bias_mu, bias_rho, noise).to(x.dtype)
    base = torch.mm(xs.flatten(0, 1), mu.t()).unflatten(0, xs.shape[:2])
    made = _ops.bayes_operands(None, xs, rho.contiguous(), x.dtype == torch.bfloat16)
    _, _, operand, scale, sigma, sigma_scale = made
    if goes_fused(operand):
        biases = parts.contiguous(bias_mu, bias_rho)
        y = _ops.bayes_forward(operand, sigma, base, *biases, scale, sigma_scale, *noise)
    else:
        bias = parts.sample_bias(bias_mu, bias_rho, noise)
        y = base if bias is None else base + bias[:, None]
        y = y if len(y) == num_samples else y.repeat(num_samples, 1, 1)
        batched.add_noise_product_(
            y, operand, sigma, scale * sigma_scale, noise, len(mu), operand.shape[2], forward=True
        )
    return y.to(x.dtype)


@_past_autocast
def _backward(
    grad_y, x, mu, rho, bias_rho, seed, stream, num_samples, need_x, need_weight, need_bias
):
    noise, xs = Noise(seed, stream, num_samples), parts.replicas(x)
    grad_y = grad_y.to(mu.dtype).contiguous()
    way = way_of(x, mu)
    if way == "direct":
        weights = parts.contiguous(mu, rho, bias_rho)
        grad_x, grad_mu, grad_rho, *bias_grads = _ops.bayes_direct_backward(
            grad_y, xs, *weights, seed, stream, need_x, need_weight, need_bias
        )
        grads = grad_x if need_x else None, grad_mu, grad_rho
        return parts.pack_grads(x, rho, *grads, bias_grads)
    if way == "sampled":
        given = grad_y, xs, mu, rho, bias_rho, noise, need_x, need_weight, need_bias
        return parts.pack_grads(x, rho, *sampled.backward(*given))
    grad_x = grad_mu = grad_rho = bias_grads = None
    if need_x or need_weight:
        grad_x, grad_mu, grad_rho = _fused_backward(
            grad_y, xs, mu, rho, noise, x.dtype == torch.bfloat16, need_x, need_weight
        )
    if need_bias:
        bias_grads = parts.grad_bias(grad_y, bias_rho, noise)
    return parts.pack_grads(x, rho, grad_x, grad_mu, grad_rho, bias_grads)


def _fused_backward(grad_y, xs, mu, rho, noise, bfloat16, need_x, need_weight):
    grad_x = grad_mu = grad_rho = None
    rho = rho.contiguous()
    # For the products with mu, whose x may be that of all replicas.
    summed = grad_y if len(xs) == len(grad_y) else grad_y.sum(0, keepdim=True)
    operand, scale, x_operand, x_scale, sigma, sigma_scale = _ops.bayes_operands(
        grad_y, xs if need_weight else None, rho if need_x else None, bfloat16
    )
    if need_weight:
        grad_mu = summed.flatten(0, 1).t() @ xs.flatten(0, 1)
        grad_rho = _ops.bayes_grad_rho(
            operand, x_operand, rho, scale, x_scale, noise.seed, noise.stream
        )
    if need_x:
        grad_x = torch.mm(summed.flatten(0, 1), mu).unflatten(0, summed.shape[:2])
        if goes_fused(operand):
            _ops.bayes_grad_x_(grad_x, operand, sigma, scale, sigma_scale, noise.seed, noise.stream)
        else:
            inputs = -(-mu.shape[1] // 16) * 16
            batched.add_noise_product_(
                grad_x, operand, sigma, scale * sigma_scale, noise, len(mu), inputs, forward=False
            )
    return grad_x, grad_mu, grad_rho


_LIBRARY = torch.library.Library("bnuq", "IMPL")
_LIBRARY.impl("bayes_linear", _forward, "CUDA")
_LIBRARY.impl("bayes_linear_backward", _backward, "CUDA")
