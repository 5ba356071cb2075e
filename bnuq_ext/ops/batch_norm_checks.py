"""Argument checks of the batch-norm ops; cheap, for they run once a layer."""

import math
from operator import mul

import torch
from torch import Tensor

from .checks import (
    check_device,
    check_dtype,
    check_flags,
    check_num_samples,
    check_one_of,
    check_parameter,
    check_positive_scalar,
    check_scalar,
    check_seed,
    check_shape,
    check_stream,
    check_tensor,
    refuse,
)
from .modes import has_values

ACTIVATIONS = ("none", "relu", "leaky_relu")
FAMILIES = {"normal": 0, "lognormal": 1}
LEAST_SPREAD = 1 / 8  # of its mean: what a normal spread is held above


def prepare(value: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A parameter as the kernels take it: contiguous, in `dtype`."""
    if value is None or (value.dtype is dtype and value.is_contiguous()):
        return value
    return value.to(dtype).contiguous()


def result_format(x: Tensor) -> torch.memory_format:
    """channels_last where x is that and not contiguous, else contiguous."""
    if not x.is_contiguous():
        if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
            return torch.channels_last
        if x.dim() == 5 and x.is_contiguous(memory_format=torch.channels_last_3d):
            return torch.channels_last_3d
    return torch.contiguous_format


def wants_grad(*tensors) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def slope_of(op: str, activation: str, slope: float) -> float:
    """The activation as one number: its slope below zero."""
    if activation == "none":
        return 1.0
    if activation == "relu":
        return 0.0
    check_one_of(op, "activation", activation, ACTIVATIONS)
    check_positive_scalar(op, "slope", slope)
    return float(slope)


def check_activations(op: str, x: Tensor) -> None:
    check_dtype(op, "x", x)
    if x.dim() < 2:
        refuse(op, "x", "have at least 2 dimensions (N, C, *)", list(x.shape))


def check_channels(op: str, x: Tensor, name: str, statistics: Tensor) -> None:
    if x.shape[1] != statistics.shape[1]:
        refuse(op, "x", f"have the {statistics.shape[1]} channels of {name}", x.shape[1])


def check_snapshot(op: str, snapshot: Tensor, num_snapshots: int, device) -> None:
    check_tensor(op, "snapshot", snapshot)
    if snapshot.dtype != torch.int64:
        refuse(op, "snapshot", "be int64", snapshot.dtype, TypeError)
    if snapshot.dim() != 1:
        refuse(op, "snapshot", "have 1 dimension", list(snapshot.shape))
    check_device(op, "snapshot", snapshot, device)
    if device.type != "cpu" or not has_values(snapshot):
        return
    values = snapshot.tolist()
    if values and not (0 <= min(values) and max(values) < num_snapshots):
        got = next(value for value in values if not 0 <= value < num_snapshots)
        refuse(op, "snapshot", f"lie in [0, {num_snapshots})", got)


def check_bank(op, x, mean, var, seed, snapshot, num_samples) -> int:
    """Checks x and where its statistics come from; T."""
    check_activations(op, x)
    device = x.device
    check_tensor(op, "mean", mean)
    if mean.dim() != 2:
        refuse(op, "mean", "have shape (B, C)", list(mean.shape))
    num_snapshots = mean.shape[0]
    if num_snapshots < 1:
        refuse(op, "mean", "hold at least 1 snapshot", list(mean.shape))
    if num_snapshots >= 2**31:  # their permutation is of 32-bit numbers
        refuse(op, "mean", "hold fewer than 2^31 snapshots", list(mean.shape))
    check_channels(op, x, "mean", mean)
    check_parameter(op, "mean", mean, mean.shape, device)
    check_parameter(op, "var", var, mean.shape, device)
    if (seed is None) == (snapshot is None):
        got = "neither" if seed is None else "both"
        refuse(op, "seed or snapshot", "be given, and not both", got)
    if snapshot is None:
        check_seed(op, seed, device)
        check_num_samples(op, num_samples)
        return num_samples
    check_snapshot(op, snapshot, num_snapshots, device)
    length = snapshot.shape[0]
    if num_samples is not None and num_samples != length:
        refuse(op, "num_samples", f"be the length of snapshot {length}", num_samples)
    if length < 1:
        refuse(op, "snapshot", "hold at least 1 replica", length)
    return length


def check_fitted(op, x, params, seed, stream, num_samples, family) -> None:
    """Checks x and where its statistics come from."""
    check_activations(op, x)
    if isinstance(params, Tensor) and params.dim() == 2 and len(params) == 4:
        check_channels(op, x, "params", params)
    check_parameter(op, "params", params, (4, x.shape[1]), x.device)
    check_seed(op, seed, x.device)
    check_stream(op, stream)
    check_num_samples(op, num_samples)
    check_one_of(op, "family", family, FAMILIES)


def check_input(op, x, num_samples, weight, bias, eps, residual, shared) -> None:
    """Checks what both ops take besides the statistics."""
    check_flags(op, shared=shared)
    if not shared and x.shape[0] % num_samples != 0:
        refuse(op, "x", f"have a multiple of {num_samples} rows", list(x.shape))
    check_scalar(op, "eps", eps)
    if not eps >= 0:
        refuse(op, "eps", "not be negative", eps)
    if eps == math.inf:
        refuse(op, "eps", "be finite", eps)
    device, per_channel = x.device, (x.shape[1],)
    if weight is not None:
        check_parameter(op, "weight", weight, per_channel, device)
    if bias is not None:
        check_parameter(op, "bias", bias, per_channel, device)
    if residual is not None:
        check_tensor(op, "residual", residual)
        if residual.dtype != x.dtype:
            refuse(op, "residual", f"have the dtype of x {x.dtype}", residual.dtype, TypeError)
        check_shape(op, "residual", residual, x.shape)
        check_device(op, "residual", residual, device)


def check_out(op, out, x, num_samples, residual, shared, needs_grad) -> None:
    """Checks a tensor that is to receive the result."""
    check_tensor(op, "out", out)
    if needs_grad or out.requires_grad:
        refuse(op, "out", "be None where gradients are needed", "a tensor")
    if out.dtype != x.dtype:
        refuse(op, "out", f"have the dtype of x {x.dtype}", out.dtype, TypeError)
    check_shape(op, "out", out, (x.shape[0] * (num_samples if shared else 1), *x.shape[1:]))
    check_device(op, "out", out, x.device)
    if not out.is_contiguous(memory_format=result_format(x)):
        refuse(op, "out", "have the memory format of the result", f"strides {out.stride()}")
    if not (has_values(out) and has_values(x)) or out.numel() == 0:
        return
    begin, end = _extent(out)
    for name, source in (("x", x), ("residual", residual)):
        if source is None:
            continue
        first, past = _extent(source)
        if first < end and begin < past and not _same(out, source, shared):
            refuse(op, "out", f"be {name} itself or not overlap it", "overlapping memory")


def _same(out: Tensor, source: Tensor, shared: bool) -> bool:
    if out.data_ptr() != source.data_ptr() or out.stride() != source.stride():
        return False
    return not shared or out.shape == source.shape


def _extent(t: Tensor) -> tuple[int, int]:
    """First and past-the-end address of a tensor that is not empty."""
    first, strides = t.data_ptr(), t.stride()
    last = sum(map(mul, t.shape, strides)) - sum(strides)
    return first, first + (last + 1) * t.element_size()
