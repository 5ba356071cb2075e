"""Batch norm with the statistics of T replicas, residual and activation fused."""

import torch
from torch import Tensor

from . import formulas
from .batch_norm_checks import (
    FAMILIES,
    LEAST_SPREAD,
    check_activations,
    check_bank,
    check_channels,
    check_fitted,
    check_input,
    check_out,
    prepare,
    slope_of,
    wants_grad,
)
from .checks import acc_dtype, check_device
from .modes import lacks_rule, mark_written, past_autograd
from .philox import philox_normal, seed_tensor

_bnuq = torch.ops.bnuq
_OPS = {  # with a result of their own, and with one that is given
    "batch_norm_bank": (_bnuq.batch_norm_bank.default, _bnuq.batch_norm_bank_out.default),
    "batch_norm_fitted": (_bnuq.batch_norm_fitted.default, _bnuq.batch_norm_fitted_out.default),
}


def batch_norm_bank(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    seed: int | Tensor | None = None,
    snapshot: Tensor | None = None,
    *,
    num_samples: int | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    activation: str = "none",
    slope: float = 0.01,
    shared: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Batch norm of T replicas, each with a stored snapshot s_t of the statistics.

        y[t] = act((x[t] - mean[s_t]) * weight / sqrt(var[s_t] + eps) + bias + residual[t])

    Args:
        x: (N, C, *) with `shared`, else (T*N, C, *), replica-major; float32, float64, float16 or
            bfloat16.
        mean: (B, C), the snapshots' means.
        var: (B, C), the snapshots' biased variances.
        seed: (2,) int64, key and first replica, on x's device, or an integer, as `new_seed` of it:
            s_t is as in `snapshot_indices`. Or give `snapshot`.
        snapshot: (T,) int64 in [0, B); checked on the CPU. On CUDA, and where torch traces or
            transforms the call, another value yields NaN.
        num_samples: T; at least 1. Needed with `seed`; with `snapshot` it is its length.
        weight, bias: (C,), or None for 1 and 0.
        eps: added to the variance; finite, not negative.
        residual: like x, added before the activation; shared where x is.
        activation: "none", "relu" or "leaky_relu".
        slope: of leaky_relu below zero; positive.
        shared: one x for all replicas.
        out: like the result; receives it: x or the residual itself, where that has its shape, or in
            memory that overlaps neither. No gradients then.

    Returns:
        (T*N, C, *) in the dtype and memory format of x (channels_last stays that). Statistics and
        arithmetic are float32 (float64 for float64). Deterministic. Gradients with respect to x,
        mean, var, weight, bias and residual.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, device, value or dtype.

    Source: Teye et al., Bayesian Uncertainty Estimation for Batch Normalized Deep Networks (2018),
    Algorithm 1.
    """
    op = "batch_norm_bank"
    num_samples = check_bank(op, x, mean, var, seed, snapshot, num_samples)
    check_input(op, x, num_samples, weight, bias, eps, residual, shared)
    negative_slope = slope_of(op, activation, slope)
    acc = acc_dtype(x.dtype)
    mean, var, weight, bias = (prepare(t, acc) for t in (mean, var, weight, bias))
    seed = None if seed is None else seed_tensor(seed, x.device)
    args = (x, mean, var, seed, prepare(snapshot, torch.int64), num_samples, weight, bias, residual)
    args += (eps, negative_slope, shared)
    if out is not None:
        needs_grad = wants_grad(x, mean, var, weight, bias, residual)
        check_out(op, out, x, num_samples, residual, shared, needs_grad)
    return _run(op, args, out)


def batch_norm_snapshots(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    snapshot: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    shared: bool,
    activation: str = "none",
    out: Tensor | None = None,
) -> Tensor:
    """`batch_norm_bank` without checks of the statistics, the snapshots and `out`,
    which are this package's own."""
    acc = mean.dtype
    if x.dtype is not acc or x.dim() < 2 or x.shape[1] != mean.shape[1] or x.device != mean.device:
        check_activations("batch_norm_bank", x)
        check_channels("batch_norm_bank", x, "mean", mean)
        check_device("batch_norm_bank", "mean", mean, x.device)
        acc = acc_dtype(x.dtype)
        mean, var = prepare(mean, acc), prepare(var, acc)
    T, weight, bias = snapshot.shape[0], prepare(weight, acc), prepare(bias, acc)
    slope = slope_of("batch_norm_bank", activation, 0.0)
    args = (x, mean, var, None, snapshot, T, weight, bias, None, eps, slope, shared)
    return _run("batch_norm_bank", args, out)


def batch_norm_fitted(
    x: Tensor,
    params: Tensor,
    seed: int | Tensor,
    stream: int,
    num_samples: int,
    family: str,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    activation: str = "none",
    slope: float = 0.01,
    shared: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Batch norm of T replicas, each with statistics drawn from fitted distributions.

        y[t] = act((x[t] - mean[t]) * weight / sqrt(spread[t]^2 + eps) + bias + residual[t])
        mean[t, c] = params[0, c] + params[1, c] * z_mean
        spread[t, c] = exp(params[2, c] + params[3, c] * z_spread)  for "lognormal"
        spread[t, c] = max(params[2, c] + params[3, c] * z_spread, params[2, c] / 8)  for "normal"

    z_mean and z_spread are `philox_normal(seed, stream, (T, C))` of the tags "mean" and "spread".

    Args:
        params: (4, C): mean and std of the batch mean; mean and std of the spread, or of its
            logarithm.
        seed: (2,) int64, key and first replica, on x's device; or an integer, as `new_seed` of it.
        stream: number of the stochastic layer; at least 0, below 2^32.
        num_samples: T; at least 1.
        family: "normal" or "lognormal", of the spread.

    The others, the result and the errors are those of `batch_norm_bank`. Gradients with respect to
    x, params, weight, bias and residual.

    Source: Atanov et al., Uncertainty Estimation via Stochastic Batch Normalization (2019), for
    "lognormal"; Teye et al. (2018) for "normal".
    """
    op = "batch_norm_fitted"
    check_fitted(op, x, params, seed, stream, num_samples, family)
    check_input(op, x, num_samples, weight, bias, eps, residual, shared)
    negative_slope = slope_of(op, activation, slope)
    acc = acc_dtype(x.dtype)
    params, weight, bias = (prepare(t, acc) for t in (params, weight, bias))
    args = (x, params, seed_tensor(seed, x.device), stream, FAMILIES[family], num_samples)
    args += (weight, bias, residual, eps, negative_slope, shared)
    if out is not None:
        needs_grad = wants_grad(x, params, weight, bias, residual)
        check_out(op, out, x, num_samples, residual, shared, needs_grad)
    return _run(op, args, out)


def _run(op: str, args: tuple, out: Tensor | None) -> Tensor:
    """The op's result, in `out` if that is given."""
    if lacks_rule(*args):
        y = _by_formula(op, *args)
        return y if out is None else out.copy_(y)
    fresh, into = _OPS[op]
    with past_autograd():
        if out is None:
            return fresh(*args)
        into(out, *args)
    mark_written(out)
    return out


def _by_formula(
    op, x, a, b, c, d, num_samples, weight, bias, residual, eps, slope, shared
) -> Tensor:
    moments = moments_of(op, a, b, c, d, num_samples)
    return formulas.batch_norm(x, *moments, weight, bias, residual, eps, slope, shared)


def moments_of(op: str, a, b, c, d, num_samples: int) -> tuple[Tensor, Tensor]:
    """Mean and variance (T, C) of the replicas, by an op's arguments of where they come from."""
    if op == "batch_norm_fitted":
        return fitted_moments(a, b, c, d, num_samples)
    snapshot = snapshots_of(a, c, d, num_samples)
    return formulas.rows_of(a, snapshot), formulas.rows_of(b, snapshot)


def snapshots_of(mean: Tensor, seed: Tensor | None, snapshot: Tensor | None, num_samples: int):
    """The snapshots (T,) that are given, or drawn of those in `mean` (B, C)."""
    if snapshot is not None:
        return snapshot
    return torch.ops.bnuq.snapshot_indices(seed, mean.shape[0], num_samples)


def fitted_statistics(
    params: Tensor, seed: Tensor, stream: int, num_samples: int, family: str
) -> tuple[Tensor, Tensor]:
    """Mean and variance (T, C) of the replicas of `batch_norm_fitted`."""
    return fitted_moments(params, seed, stream, FAMILIES[family], num_samples)


def fitted_moments(
    params: Tensor, seed: Tensor, stream: int, family: int, num_samples: int
) -> tuple[Tensor, Tensor]:
    """`fitted_statistics` with the family's number."""
    z_mean, z_spread = fitted_noise(params, seed, stream, num_samples)
    return params[0] + params[1] * z_mean, fitted_spread(params, z_spread, family).square()


def fitted_spread(params: Tensor, z_spread: Tensor, family: int) -> Tensor:
    """The spread (T, C) of `batch_norm_fitted`."""
    drawn = params[2] + params[3] * z_spread
    if family == FAMILIES["lognormal"]:
        return drawn.exp()
    return torch.maximum(drawn, params[2] * LEAST_SPREAD)


def fitted_noise(
    params: Tensor, seed: Tensor, stream: int, num_samples: int
) -> tuple[Tensor, Tensor]:
    """z_mean and z_spread (T, C) of `batch_norm_fitted`, in the dtype of params."""
    shape = (num_samples, params.shape[1])
    z_mean = philox_normal(seed, stream, shape, tag="mean")
    z_spread = philox_normal(seed, stream, shape, tag="spread")
    return z_mean.to(params.dtype), z_spread.to(params.dtype)
