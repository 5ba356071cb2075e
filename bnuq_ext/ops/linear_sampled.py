"""bayes_linear on CUDA by float32 products of torch's with the weights themselves, a chunk of
replicas in memory at a time."""

import torch
from torch import Tensor

from . import linear_parts as parts
from .linear_batched import chunks, rows_of
from .linear_parts import Noise

_ops = torch.ops.bnuq


def forward(
    xs: Tensor,
    mu: Tensor,
    rho: Tensor,
    bias_mu: Tensor | None,
    bias_rho: Tensor | None,
    noise: Noise,
) -> Tensor:
    """y (T, N, O) of xs (T or 1, N, I)."""
    y = xs.new_empty((noise.num_samples, xs.shape[1], len(mu)))
    weights = parts.contiguous(mu, rho, bias_mu, bias_rho)
    for replicas, room in chunks(noise.num_samples, mu, mu.numel()):
        weight, out = room.view(len(room), *mu.shape), y[replicas]
        biased = None if bias_mu is None else out
        _ops.sample_weights_(weight, biased, *weights, noise.seed, noise.stream, replicas.start)
        # beta = 0 reads nothing: there may be NaN.
        out.baddbmm_(rows_of(xs, replicas), weight.transpose(1, 2), beta=0 if biased is None else 1)
    return y


def backward(
    grad_y: Tensor,
    xs: Tensor,
    mu: Tensor,
    rho: Tensor,
    bias_rho: Tensor | None,
    noise: Noise,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple:
    """Gradients by xs, mu and rho, and a pair of those by the bias, of grad_y (T, N, O);
    None for those that are not needed."""
    if need_bias and not need_weight:
        grads = backward(grad_y, xs, mu, rho, None, noise, need_x, False, False)
        return *grads[:3], parts.grad_bias(grad_y, bias_rho, noise)
    grad_x = xs.new_empty(xs.shape) if need_x else None
    like = [mu, mu] if need_weight else [None] * 2
    like += [bias_rho, bias_rho] if need_bias else [None] * 2
    grads = [v if v is None else v.new_empty(v.shape) for v in like]
    mu, rho, bias_rho = parts.contiguous(mu, rho, bias_rho)
    for replicas, room in chunks(len(grad_y), mu, mu.numel()):
        weight, grad = room.view(len(room), *mu.shape), grad_y[replicas]
        place = noise.seed, noise.stream, replicas.start
        if need_x:
            _ops.sample_weights_(weight, None, mu, rho, None, None, *place)
            _add_grad_x(grad_x, replicas, grad, weight)
        if need_weight:
            torch.bmm(grad.transpose(1, 2), rows_of(xs, replicas), out=weight)
            _ops.reduce_grads_(*grads, weight, grad, rho, bias_rho, *place)
    return grad_x, *grads[:2], grads[2:] if need_bias else None


def _add_grad_x(grad_x: Tensor, replicas: slice, grad: Tensor, weight: Tensor) -> None:
    """grad (R, N, O) @ weight (R, O, I) into grad_x[replicas], or, where all share x,
    added up into grad_x[0], which the first replicas write."""
    if len(grad_x) > 1:
        torch.bmm(grad, weight, out=grad_x[replicas])
        return
    rows, weight = grad.transpose(0, 1).flatten(1), weight.flatten(0, 1)
    if replicas.start == 0:
        torch.mm(rows, weight, out=grad_x[0])
    else:
        grad_x[0].addmm_(rows, weight)
