"""Forty lines of Triton that sample the weights inside the product (GPU only)."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["seed"])
def bayes_kernel(
    x, mu, sigma, bias, y, seed, N, O, I: tl.constexpr, x_stride,  # noqa: E741
    ROWS: tl.constexpr, OUT: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A tile of y[t] = x[t] @ (mu + sigma * randn)^T + bias:
    every tile of rows draws the weights again."""
    t = tl.program_id(2)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o = tl.program_id(1) * OUT + tl.arange(0, OUT)
    total = tl.zeros((ROWS, OUT), tl.float32)
    for start in range(0, I, DEPTH):
        i = start + tl.arange(0, DEPTH)
        rows = x + t.to(tl.int64) * x_stride + n[:, None] * I + i[None, :]
        a = tl.load(rows, (n[:, None] < N) & (i[None, :] < I), 0.0)
        inside = (i[:, None] < I) & (o[None, :] < O)
        at = o[None, :] * I + i[:, None]
        eps = tl.randn(seed + t, at)
        w = tl.load(mu + at, inside, 0.0) + tl.load(sigma + at, inside, 0.0) * eps
        total += tl.dot(a.to(tl.float16), w.to(tl.float16))
    total += tl.load(bias + o, o < O, 0.0)[None, :]
    place = (t.to(tl.int64) * N + n[:, None]) * O + o[None, :]
    tl.store(y + place, total, (n[:, None] < N) & (o[None, :] < O))


def bayes_linear(x: Tensor, mu: Tensor, sigma: Tensor, bias: Tensor, T: int) -> Tensor:
    """(T, N, O) of x (N, I) or (T, N, I); the bias is not sampled."""
    N, (O, I) = x.shape[-2], mu.shape  # noqa: E741
    y = x.new_empty(T, N, O)
    rows = max(16, min(128, triton.next_power_of_2(N)))
    grid = (triton.cdiv(N, rows), triton.cdiv(O, 64), T)
    stride = 0 if x.dim() == 2 else N * I
    seed = int(torch.randint(2**31, ()))
    bayes_kernel[grid](x, mu, sigma, bias, y, seed, N, O, I, stride, rows, 64, 32)
    return y
