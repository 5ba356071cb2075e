"""How the scores take in their arguments: checked, in float64, on one device."""

from numbers import Real

import torch
from torch import Tensor

from ..ops.checks import check_floating, check_shape, refuse


def take_probs(op: str, probs: Tensor, form: str) -> Tensor:
    """Probabilities or logits with at least the dimensions that `form` names."""
    check_floating(op, "probs", probs)
    if probs.dim() < form.count(",") + 1:
        refuse(op, "probs", f"have shape {form}", list(probs.shape))
    return probs.double()


def take_labels(op: str, y: Tensor, probs: Tensor) -> Tensor:
    """The labels (N, *) of probabilities or logits (N, K, *), as int64 on their device."""
    if not isinstance(y, Tensor) or y.is_floating_point() or y.dtype == torch.bool:
        refuse(op, "y", "be a tensor of integer labels", getattr(y, "dtype", type(y)), TypeError)
    check_shape(op, "y", y, (probs.shape[0], *probs.shape[2:]))
    if y.numel() and not 0 <= int(y.min()) <= int(y.max()) < probs.shape[1]:
        refuse(op, "y", f"lie in [0, {probs.shape[1]})", [int(y.min()), int(y.max())])
    return y.to(probs.device, torch.int64)


def take_means(op: str, mean: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Predictive means (N,) or (N, D) and targets of their shape."""
    check_floating(op, "mean", mean)
    check_floating(op, "y", y)
    if mean.dim() not in (1, 2):
        refuse(op, "mean", "have shape (N,) or (N, D)", list(mean.shape))
    check_shape(op, "y", y, mean.shape)
    return mean.double(), y.to(mean.device, torch.float64)


def take_samples(op: str, samples: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (T, N) or (T, N, D) of at least one replica, and targets of the shape of one."""
    check_floating(op, "samples", samples)
    check_floating(op, "y", y)
    if samples.dim() not in (2, 3) or len(samples) == 0:
        refuse(op, "samples", "have shape (T, N) or (T, N, D) with T > 0", list(samples.shape))
    check_shape(op, "y", y, samples.shape[1:])
    return samples.double(), y.to(samples.device, torch.float64)


def take_scale(op: str, name: str, value: float | Tensor, target: Tensor) -> Tensor:
    """A standard deviation or variance, as a number or a tensor that fits the targets."""
    if isinstance(value, bool) or not isinstance(value, (Real, Tensor)):
        refuse(op, name, "be a number or a tensor", type(value).__name__, TypeError)
    value = torch.as_tensor(value, dtype=torch.float64, device=target.device)
    try:
        return value.expand(target.shape)
    except RuntimeError:
        refuse(op, name, f"broadcast to the shape {list(target.shape)} of y", list(value.shape))


def check_choice(op: str, name: str, value, choices: tuple[str, str]) -> None:
    if value not in choices:
        refuse(op, name, f'be "{choices[0]}" or "{choices[1]}"', repr(value))


def check_fittable(op: str, name: str, values: Tensor) -> None:
    """Refuses what has no row, and nan and infinity, which an optimum would silently follow."""
    if values.numel() == 0:
        refuse(op, name, "have rows", list(values.shape))
    if not values.isfinite().all():
        refuse(op, name, "be finite", f"{int((~values.isfinite()).sum())} values that are not")


def per_row(values: Tensor, dim: int = 1) -> Tensor:
    """The outputs of a row as one last dimension: (N, D) of (N,) or (N, D), also without rows."""
    return values.unsqueeze(-1).flatten(dim)


def reduce(op: str, values: Tensor, reduction: str) -> Tensor:
    check_choice(op, "reduction", reduction, ("mean", "none"))
    return values.mean() if reduction == "mean" else values
