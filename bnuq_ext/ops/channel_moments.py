"""Mean and variance of channels."""

import torch
from torch import Tensor

from .checks import acc_dtype
from .modes import has_values, past_autograd


def channel_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel over everything else, added up in float64.

    On a CPU `torch.var_mean` takes 3 to 40 times as long.

    Args:
        x: (N, C, *), float32, float64, float16 or bfloat16.

    Returns:
        mean (C,), variance (C,), float32 (float64 for float64); of equal numbers it is 0.
        Differentiable.
    """
    own_kernel = x.device.type == "cpu" and type(x) is Tensor and x.numel() and has_values(x)
    if own_kernel and not (x.requires_grad and torch.is_grad_enabled()):
        with past_autograd():
            return torch.ops.bnuq.channel_moments.default(x)
    others = [d for d in range(x.dim()) if d != 1]
    var, mean = torch.var_mean(x.to(acc_dtype(x.dtype)), others, correction=0)
    return mean, var
