"""Fakes and gradients of the batch-norm ops.

With g = act'(y) * grad_y the backward op returns grad_x, grad_residual and, per replica and
channel, sums[0] = sum g and sums[1] = sum g * (x - mean) * rstd. From them
    grad_bias = sum_t sums[0],                 grad_weight = sum_t sums[1],
    grad_mean[t] = -weight * rstd * sums[0],   grad_var[t] = -weight * rstd^2 / 2 * sums[1].
"""

import math

import torch

from . import formulas
from .batch_norm import fitted_noise, fitted_spread, moments_of, snapshots_of
from .batch_norm_checks import FAMILIES, LEAST_SPREAD, result_format
from .checks import acc_dtype
from .modes import is_differentiated

_BACKWARDS = {
    "batch_norm_bank": torch.ops.bnuq.batch_norm_bank_backward,
    "batch_norm_fitted": torch.ops.bnuq.batch_norm_fitted_backward,
}


def _empty_rows(x, rows, memory_format):
    return x.new_empty((rows, *x.shape[1:])).contiguous(memory_format=memory_format)


# Where the statistics come from is said by as many arguments in both ops, a to d.
@torch.library.register_fake("bnuq::batch_norm_bank")
@torch.library.register_fake("bnuq::batch_norm_fitted")
def _(x, a, b, c, d, num_samples, weight, bias, residual, eps, slope, shared):
    return _empty_rows(x, x.shape[0] * (num_samples if shared else 1), result_format(x))


@torch.library.register_fake("bnuq::batch_norm_bank_out")
@torch.library.register_fake("bnuq::batch_norm_fitted_out")
def _(*args):
    return None


@torch.library.register_fake("bnuq::batch_norm_bank_backward")
@torch.library.register_fake("bnuq::batch_norm_fitted_backward")
def _(grad_y, x, y, a, b, c, d, num_samples, weight, eps, slope, shared, *needs):
    need_x, need_residual, need_sums = needs
    rows = grad_y.shape[0] // num_samples if shared else grad_y.shape[0]
    memory_format = result_format(grad_y if y is None else y)
    like_x = [
        _empty_rows(grad_y, rows, memory_format) if need else grad_y.new_empty((0,))
        for need in (need_x, need_residual)
    ]
    shape = (2, num_samples, grad_y.shape[1]) if need_sums else (0,)
    return *like_x, grad_y.new_empty(shape, dtype=acc_dtype(grad_y.dtype))


def _save(ctx, x, output, others, needs_sums, slope):
    """Saves x only for the sums and the output only for the activation."""
    ctx.save_for_backward(x if needs_sums else None, output if slope != 1 else None, *others)


def _all_grads(needs, grad_x, source, sums, grad_residual):
    """In the order of the op's arguments; `source`: by a to d."""
    return (
        grad_x if needs[0] else None,
        *source,
        None,
        sums[1].sum(0) if needs[6] else None,
        sums[0].sum(0) if needs[7] else None,
        grad_residual if needs[8] else None,
        *(None, None, None),
    )


def _moment_grads(sums, weight, var, eps):
    """Gradients with respect to each replica's mean and variance, both (T, C)."""
    rstd = (var + eps).rsqrt()
    scale = rstd if weight is None else rstd * weight
    return -scale * sums[0], -0.5 * scale * rstd * sums[1]


def _parts(ctx, op, grad_y, x, y, source, num_samples, *others):
    """grad_x, grad_residual and the sums: of the backward op, or in torch's operations."""
    if is_differentiated(grad_y):
        moments = moments_of(op, *source, num_samples)
        return _differentiable_parts(grad_y, x, y, *moments, *others)
    needs = ctx.needs_input_grad
    asked = needs[0], needs[8], ctx.needs_sums
    return _BACKWARDS[op](grad_y, x, y, *source, num_samples, *others, *asked)


def _differentiable_parts(grad_y, x, y, mean, var, weight, eps, slope, shared):
    """From the statistics (T, C)."""
    T, dims = mean.shape[0], grad_y.dim()
    rstd = (var + eps).rsqrt()

    def of_replicas(grad):
        return (grad.sum(0) if shared else grad.reshape(grad_y.shape)).to(grad_y.dtype)

    g = formulas.replicas_of(grad_y, T)
    if slope != 1:
        below = formulas.replicas_of(y, T) <= 0
        g = g.masked_fill(below, 0.0) if slope == 0 else torch.where(below, slope * g, g)
    scale = rstd if weight is None else rstd * weight
    sums = None
    if x is not None:
        centred = formulas.replicas_of(x, 1 if shared else T) - formulas.per_channel(mean, dims)
        normed = centred * formulas.per_channel(rstd, dims)
        others = [1, *range(3, dims + 1)]
        sums = torch.stack([g.sum(others), (g * normed).sum(others)])
    return of_replicas(g * formulas.per_channel(scale, dims)), of_replicas(g), sums


def _setup_bank(ctx, inputs, output):
    x, mean, var, seed, snapshot, num_samples, weight, bias, residual, eps, slope, shared = inputs
    ctx.scalars = (num_samples, eps, slope, shared)
    needs = ctx.needs_input_grad
    ctx.needs_sums = needs[1] or needs[2] or needs[6] or needs[7]
    _save(ctx, x, output, (mean, var, seed, snapshot, weight), ctx.needs_sums, slope)


def _backward_bank(ctx, grad_y):
    x, y, mean, var, seed, snapshot, weight = ctx.saved_tensors
    num_samples, eps, slope, shared = ctx.scalars
    needs = ctx.needs_input_grad
    grad_x, grad_residual, sums = _parts(
        ctx, "batch_norm_bank", grad_y, x, y, (mean, var, seed, snapshot), num_samples, weight,
        eps, slope, shared,
    )  # fmt: skip
    grad_mean = grad_var = None
    if needs[1] or needs[2]:
        grad_mean, grad_var = _bank_grads(sums, mean, var, seed, snapshot, num_samples, weight, eps)
    source = grad_mean if needs[1] else None, grad_var if needs[2] else None, None, None
    return _all_grads(needs, grad_x, source, sums, grad_residual)


def _bank_grads(sums, mean, var, seed, snapshot, num_samples, weight, eps):
    """Gradients with respect to the snapshots, both (B, C): a one-hot product adds up the replicas.

    In float64: autocast and TF32 round the factors of a float32 product.
    """
    num_snapshots = mean.shape[0]
    snapshot = snapshots_of(mean, seed, snapshot, num_samples)
    drawn_var = var[snapshot.clamp(0, num_snapshots - 1)]
    per_replica = _moment_grads(sums, weight, drawn_var, eps)
    one_hot = (torch.arange(num_snapshots, device=mean.device)[:, None] == snapshot).double()
    return tuple(_summed(one_hot, grad.double()).to(mean.dtype) for grad in per_replica)


def _summed(one_hot, grad):
    """The product, in which 0 times what is not finite is 0."""
    bad = ~grad.isfinite()
    return (one_hot @ grad.masked_fill(bad, 0.0)).masked_fill(one_hot @ bad.double() > 0, math.nan)


def _setup_fitted(ctx, inputs, output):
    x, params, seed, stream, family, num_samples, weight, bias, residual, eps, slope, shared = (
        inputs
    )
    ctx.scalars = (stream, family, num_samples, eps, slope, shared)
    needs = ctx.needs_input_grad
    ctx.needs_sums = needs[1] or needs[6] or needs[7]
    _save(ctx, x, output, (params, seed, weight), ctx.needs_sums, slope)


def _backward_fitted(ctx, grad_y):
    x, y, params, seed, weight = ctx.saved_tensors
    stream, family, num_samples, eps, slope, shared = ctx.scalars
    needs = ctx.needs_input_grad
    grad_x, grad_residual, sums = _parts(
        ctx, "batch_norm_fitted", grad_y, x, y, (params, seed, stream, family), num_samples,
        weight, eps, slope, shared,
    )  # fmt: skip
    grad_params = None
    if needs[1]:
        grad_params = _params_grad(sums, params, seed, stream, family, num_samples, weight, eps)
    return _all_grads(needs, grad_x, (grad_params, None, None, None), sums, grad_residual)


def _params_grad(sums, params, seed, stream, family, num_samples, weight, eps):
    """Gradient with respect to params (4, C), through the noise drawn again."""
    z_mean, z_spread = fitted_noise(params, seed, stream, num_samples)
    spread = fitted_spread(params, z_spread, family)
    if family == FAMILIES["lognormal"]:
        d_centre, d_std = spread, spread * z_spread
    else:
        free = spread != params[2] * LEAST_SPREAD
        d_centre, d_std = torch.where(free, 1.0, LEAST_SPREAD), torch.where(free, z_spread, 0.0)
    grad_mean, grad_var = _moment_grads(sums, weight, spread.square(), eps)
    grad_spread = 2 * spread * grad_var
    rows = (grad_mean, grad_mean * z_mean, grad_spread * d_centre, grad_spread * d_std)
    return torch.stack([row.sum(0) for row in rows])


torch.library.register_autograd("bnuq::batch_norm_bank", _backward_bank, setup_context=_setup_bank)
torch.library.register_autograd(
    "bnuq::batch_norm_fitted", _backward_fitted, setup_context=_setup_fitted
)
