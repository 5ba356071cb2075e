"""How the scores take in their arguments: checked, in float64, on one device."""

from numbers import Real

import numpy as np
import torch
from torch import Tensor

from ..inputs import as_rows_of
from ..ops.checks import check_floating, check_number, check_one_of, check_shape, refuse

# How far beyond 0 and 1 a probability may lie: more than the rounding of any dtype.
SLACK = 1e-2


def take_logits(op: str, name: str, logits: Tensor, *, replicas: bool = False) -> Tensor:
    """Logits or probabilities (N, K, *), of `replicas` (T, N, K, *)."""
    check_floating(op, name, logits)
    form, class_dim = ("(T, N, K)", 2) if replicas else ("(N, K)", 1)
    if logits.dim() <= class_dim:
        refuse(op, name, f"have shape {form}", list(logits.shape))
    if logits.shape[class_dim] == 0:
        refuse(op, name, f"have shape {form} with K > 0", list(logits.shape))
    return logits.double()


def take_probs(op: str, probs: Tensor, *, replicas: bool = False) -> Tensor:
    """`take_logits` of probabilities, which lie in [0, 1] and sum to 1, or are nan;
    what rounding made negative is 0."""
    probs = take_logits(op, "probs", probs, replicas=replicas)
    outside = (probs < -SLACK) | (probs > 1 + SLACK)
    if outside.any():
        refuse(op, "probs", "lie in [0, 1]", probs[outside][0].item())
    check_sums(op, probs, replicas=replicas)
    return torch.where(probs < 0, 0.0, probs)  # clamp would stop the gradient at 0


def check_sums(op: str, probs, *, replicas: bool = False) -> None:
    """Of a tensor or an array of probabilities; nan passes."""
    form, class_dim = ("(T, N, K, *)", 2) if replicas else ("(N, K, *)", 1)
    sums = probs.sum(class_dim)
    others = abs(sums - 1) > SLACK
    if others.any():
        refuse(op, "probs", f"have shape {form} and sum to 1 over K", sums[others][0].item())


def take_replicas(op: str, probs: Tensor) -> Tensor:
    """`take_probs` of at least one replica."""
    probs = take_probs(op, probs, replicas=True)
    if len(probs) == 0:
        refuse(op, "probs", "have shape (T, N, K) with T > 0", list(probs.shape))
    return probs


def take_numbers(op: str, name: str, values) -> Tensor:
    """A number, a list of them or a tensor, as float64."""
    try:
        if not is_complex(values):
            device = values.device if isinstance(values, Tensor) else "cpu"
            return torch.as_tensor(values, dtype=torch.float64, device=device)
    except OverflowError:
        refuse(op, name, "fit into floats", "larger numbers")
    except (TypeError, ValueError, RuntimeError):
        refuse(op, name, "be numbers or a tensor", repr(values), TypeError)
    refuse(op, name, "be real numbers", repr(values), TypeError)


def is_complex(values) -> bool:
    """Of numbers, a list of them, an array or a tensor: a cast would drop the imaginary part."""
    return values.is_complex() if isinstance(values, Tensor) else np.iscomplexobj(values)


def take_labels(op: str, y: Tensor, probs: Tensor) -> Tensor:
    """The labels (N, *) of probabilities or logits (N, K, *), as int64 on their device."""
    if not _has_integers(y):
        got = y.dtype if isinstance(y, Tensor) else type(y).__name__
        refuse(op, "y", "be a tensor of integer labels", got, TypeError)
    check_shape(op, "y", y, (probs.shape[0], *probs.shape[2:]))
    y = y.to(probs.device, torch.int64)
    if y.numel() and not 0 <= int(y.min()) <= int(y.max()) < probs.shape[1]:
        found = [int(y.min()), int(y.max())]
        hint = " (evaluate leaves its ignore_index out)" if {-100, 255} & {*found} else ""
        refuse(op, "y", f"lie in [0, {probs.shape[1]}){hint}", found)
    return y


def label_log_probs(samples: Tensor, y: Tensor) -> Tensor:
    """log p of labels (N, *) by each replica, (T, N, *), of logits (T, N, K, *)."""
    y = y.unsqueeze(1)
    # One replica after another: in float64 all logits at once may not fit.
    of_each = [logits.double().log_softmax(1).gather(1, y).squeeze(1) for logits in samples]
    return torch.stack(of_each)


def take_means(op: str, mean: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Predictive means (N, *), or one (), and targets of their shape."""
    check_floating(op, "mean", mean)
    return mean.double(), take_targets(op, y, mean)


def take_samples(op: str, samples: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (T, N, *), or (T,) of one row, of at least one replica,
    and targets of one's shape."""
    check_floating(op, "samples", samples)
    if samples.dim() == 0 or len(samples) == 0:
        refuse(op, "samples", "have shape (T, N, *) with T > 0", list(samples.shape))
    return samples.double(), take_targets(op, y, samples[0])


def take_targets(op: str, y: Tensor, mean: Tensor) -> Tensor:
    """Targets as float64 in the shape of the means, where (N,) and (N, 1) are the same."""
    check_real(op, "y", y)
    y = as_rows_of(y, mean.shape)
    check_shape(op, "y", y, mean.shape)
    return y.to(mean.device, torch.float64)


def take_scale(op: str, name: str, value: float | Tensor, target: Tensor) -> Tensor:
    """A standard deviation or variance, as a number or a tensor that fits the targets."""
    if isinstance(value, bool) or not isinstance(value, (Real, Tensor)):
        refuse(op, name, "be a number or a tensor", type(value).__name__, TypeError)
    if isinstance(value, Real):
        check_number(op, name, value)
    if is_complex(value):
        refuse(op, name, "be real numbers", value.dtype, TypeError)
    value = torch.as_tensor(value, dtype=torch.float64, device=target.device)
    value = as_rows_of(value, target.shape)
    try:
        return value.expand(target.shape)
    except RuntimeError:
        refuse(op, name, f"broadcast to the shape {list(target.shape)} of y", list(value.shape))


def check_fittable(op: str, name: str, values: Tensor) -> None:
    """Refuses what has no row, and nan and infinity, which an optimum would silently follow."""
    if values.numel() == 0:
        refuse(op, name, "have rows", list(values.shape))
    if not values.isfinite().all():
        refuse(op, name, "be finite", f"{int((~values.isfinite()).sum())} values that are not")


def per_row(values: Tensor, dim: int = 1) -> Tensor:
    """The outputs of a row as one last dimension: (N, D) of (N, *), also without rows."""
    return values.flatten(dim) if values.dim() > dim else values.unsqueeze(-1)


def reduce(op: str, values: Tensor, reduction: str) -> Tensor:
    check_one_of(op, "reduction", reduction, ("mean", "none"))
    return values.mean() if reduction == "mean" else values


def check_real(op: str, name: str, values) -> None:
    if not _has_integers(values):
        check_floating(op, name, values)


def _has_integers(y) -> bool:
    return isinstance(y, Tensor) and torch.can_cast(y.dtype, torch.int64) and y.dtype != torch.bool
