"""A fused Triton affine: what a user of Triton would write instead of our CUDA kernel
(GPU only)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .yardsticks import BatchedAffine


@triton.jit
def affine_kernel(
    x, scale, shift, residual, y, size, x_size, C, S,
    FUSED: tl.constexpr, INT64: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = x * scale[t, c] + shift[t, c] over the elements of replica t,
    a block of them a program."""
    t = tl.program_id(1)
    i = tl.program_id(0).to(tl.int64) * BLOCK if INT64 else tl.program_id(0) * BLOCK
    i += tl.arange(0, BLOCK)
    inside = i < size
    row = t * C + (i // S) % C  # S = 1 for channels_last
    start = t.to(tl.int64) * size
    value = tl.load(x + t.to(tl.int64) * x_size + i, inside).to(tl.float32)
    value = value * tl.load(scale + row, inside) + tl.load(shift + row, inside)
    if FUSED:
        added = tl.load(residual + t.to(tl.int64) * x_size + i, inside).to(tl.float32)
        value = tl.maximum(value + added, 0.0)
    tl.store(y + start + i, value.to(y.dtype.element_ty), inside)


def affine(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    shared: bool,
    residual: Tensor | None = None,
    out: Tensor | None = None,
):
    """x * scale[t] + shift[t], or relu of that plus a residual like x; (N, C, *) shared or
    (T*N, C, *) -> (T*N, C, *), which `out` is for if it is given."""
    num_samples, channels = scale.shape
    last = x.dim() > 2 and not x.is_contiguous()  # channels_last, or the strides are not supported
    layout = (
        {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
        if last
        else torch.contiguous_format
    )
    if not x.is_contiguous(memory_format=layout):
        raise ValueError("affine: x must be contiguous or channels_last")
    size = x.numel() if shared else x.numel() // num_samples
    rows = x.shape[0] * num_samples if shared else x.shape[0]
    shape, like = (rows, *x.shape[1:]), {"dtype": x.dtype, "device": x.device}
    y = torch.empty(shape, memory_format=layout, **like) if out is None else out
    positions = 1 if last else x[0, 0].numel()
    block = 2048
    affine_kernel[(triton.cdiv(size, block), num_samples)](
        x, scale, shift, y if residual is None else residual, y, size, 0 if shared else size,
        channels, positions, residual is not None, size > 2**31 - 2 * block, block,
    )  # fmt: skip
    return y


class TritonAffine(BatchedAffine):
    """`BatchedAffine` by the Triton kernel."""

    def forward(self, x: Tensor) -> Tensor:
        shared = x.shape[0] == self.rows and len(self.scale) > 1
        return affine(x, self.scale, self.shift, shared)
