"""A linear layer whose Gaussian weights are sampled inside the op, forward and backward."""

import torch
from torch import Tensor

from . import formulas
from .checks import (
    acc_dtype,
    check_dtype,
    check_floating,
    check_num_samples,
    check_parameter,
    check_seed,
    check_stream,
    refuse,
)
from .modes import is_differentiated, is_eager, lacks_rule, past_autocast, past_autograd
from .philox import seed_tensor

# Overloads: a packet takes 3 us a call to find its only one.
forward_op = torch.ops.bnuq.bayes_linear.default
backward_op = torch.ops.bnuq.bayes_linear_backward.default


def bayes_linear(
    x: Tensor,
    mu: Tensor,
    rho: Tensor,
    bias_mu: Tensor | None = None,
    bias_rho: Tensor | None = None,
    *,
    seed: int | Tensor,
    stream: int,
    num_samples: int,
) -> Tensor:
    """A linear layer with T draws of its Gaussian weights, none of which is kept.

        y[t] = x[t] @ (mu + softplus(rho) * eps[t])^T + bias_mu + softplus(bias_rho) * eps_bias[t]

    eps is `philox_normal(seed, stream, (T, O, I))`, eps_bias `philox_normal(seed, stream, (T, O),
    tag="bias")`; both are made again in the backward. Of T*O*I numbers no more than 64 MiB are
    held at a time, or one replica's.

    Args:
        x: (N, I), shared by the replicas, or (T, N, I); float32, float64, float16 or bfloat16.
        mu, rho: (O, I), the weights' means and their spreads before the softplus; float32,
            or float64 for float64 x.
        bias_mu, bias_rho: (O,), or both None.
        seed: (2,) int64, key and first replica, on x's device; or an integer, as `new_seed` of it.
        stream: number of the stochastic layer; at least 0, below 2^32.
        num_samples: T; at least 1.

    Returns:
        (T, N, O) in the dtype of x. Sums and gradients are float32 (float64 for float64).
        Deterministic, on the CPU for one number of threads. Gradients with respect to x, mu, rho,
        bias_mu and bias_rho. On CUDA, with more than 2^19 weights or 512 rows and x not in float64,
        the noise of an output is off by about 2^-11 of its own size, 2^-8 for bfloat16 x; if x is
        not bfloat16, by more where all x of a row, or all sigma of an output, are below 2^-25 of
        the largest ones of the call.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, device, value or dtype.
        RuntimeError: on CUDA, I or O above 65535 * 64.

    Source: Blundell et al., Weight Uncertainty in Neural Networks (2015), section 3.
    """
    _check(x, mu, rho, bias_mu, bias_rho, seed, stream, num_samples)
    args = (x, mu, rho, bias_mu, bias_rho, seed_tensor(seed, x.device), stream, num_samples)
    if lacks_rule(*args[:5]):
        with past_autocast(x.device):
            return formulas.bayes_linear(*args)
    if not is_eager():
        return forward_op(*args)
    if torch.is_grad_enabled():
        return _Eager.apply(*args)
    with past_autograd():
        return forward_op(*args)


def bayes_linear_rows(x: Tensor, *weights, seed: Tensor, stream: int, num_samples: int) -> Tensor:
    """`bayes_linear` for a layer, (T*N, O): in one node of autograd."""
    if is_eager() and torch.is_grad_enabled() and not lacks_rule(x, *weights):
        _check(x, *weights, seed, stream, num_samples)
        return _EagerRows.apply(x, *weights, seed.contiguous(), stream, num_samples)
    y = bayes_linear(x, *weights, seed=seed, stream=stream, num_samples=num_samples)
    return shaped(y, (num_samples * x.shape[-2], y.shape[-1]))


def shaped(y: Tensor, shape: tuple[int, ...]) -> Tensor:
    """y, which nobody else has, of another shape; no view: of one, `fully_shard` loses its hook at
    the first write in place (an activation's), and the backward reads weights
    that have been freed."""
    return y if y.shape == shape else torch.ops.aten._unsafe_view(y, shape)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` of float32 (N, I) on the CPU, without a graph, by the library that is faster on its
    processor: torch asks MKL, which leaves the AVX-512 of other makers' processors alone."""
    with past_autograd():
        return torch.ops.bnuq.linear.default(x, weight, bias)


def _check(x, mu, rho, bias_mu, bias_rho, seed, stream, num_samples) -> None:
    check_call(x, seed, num_samples)
    check_posterior(x, x.shape[-1], mu, rho, bias_mu, bias_rho, stream=stream)


def check_call(x, seed, num_samples) -> None:
    """Checks what `bayes_linear` is given besides the weights."""
    op = "bayes_linear"
    check_dtype(op, "x", x)
    if x.dim() not in (2, 3):
        refuse(op, "x", "have shape (N, I) or (T, N, I)", list(x.shape))
    check_num_samples(op, num_samples)
    if x.dim() == 3 and x.shape[0] != num_samples:
        refuse(op, "x", f"hold {num_samples} replicas", x.shape[0])
    check_seed(op, seed, x.device)


def check_posterior(x, features, mu, rho, bias_mu=None, bias_rho=None, *, stream) -> None:
    """Checks weights that `bayes_linear` is given for activations like x, with `features`."""
    op = "bayes_linear"
    check_floating(op, "mu", mu)
    if mu.dim() != 2:
        refuse(op, "mu", "have shape (O, I)", list(mu.shape))
    if features != mu.shape[1]:
        refuse(op, "x", f"have {mu.shape[1]} features", features)
    if (bias_mu is None) != (bias_rho is None):
        missing = "bias_mu" if bias_mu is None else "bias_rho"
        refuse(op, missing, "be given with its other half", None)
    acc = acc_dtype(x.dtype)
    weights = (("mu", mu, mu.shape), ("rho", rho, mu.shape))
    biases = (("bias_mu", bias_mu, mu.shape[:1]), ("bias_rho", bias_rho, mu.shape[:1]))
    for name, value, shape in weights if bias_mu is None else weights + biases:
        check_parameter(op, name, value, shape, x.device)
        if value.dtype != acc:
            refuse(op, name, f"be {acc} for x in {x.dtype}", value.dtype, TypeError)
    check_stream(op, stream)


@torch.library.register_fake("bnuq::bayes_linear")
def _(x, mu, rho, bias_mu, bias_rho, seed, stream, num_samples):
    return x.new_empty((num_samples, x.shape[-2], mu.shape[0]))


@torch.library.register_fake("bnuq::bayes_linear_backward")
def _fake_backward(
    grad_y, x, mu, rho, bias_rho, seed, stream, num_samples, need_x, need_weight, need_bias
):
    def made(like, needed):
        return like.new_empty(like.shape if needed else (0,))

    bias = rho.new_empty(rho.shape[:1])
    return (
        made(x, need_x),
        made(mu, need_weight),
        made(rho, need_weight),
        made(bias, need_bias),
        made(bias, need_bias),
    )


@torch.library.register_fake("bnuq::bayes_linear_kl")
def _(x, mu, rho, seed, stream, num_samples, prior_std):
    return x.new_empty((num_samples * x.shape[-2], mu[0].shape[0])), mu[0].new_empty(())


@torch.library.register_fake("bnuq::bayes_linear_kl_backward")
def _(grad_y, grad_kl, x, mu, rho, seed, stream, T, prior_std, need_x, need_weight, need_bias):
    given = x, mu[0], rho[0], None, seed, stream, T, need_x, need_weight, need_bias
    return _fake_backward(grad_y, *given)


def _setup_context(ctx, inputs, output):
    x, mu, rho, bias_mu, bias_rho, seed, ctx.stream, ctx.num_samples = inputs
    ctx.save_for_backward(x, mu, rho, bias_rho, seed)


def _backward(ctx, grad_y):
    if is_differentiated(grad_y):
        return *_differentiable_grads(ctx, grad_y), None, None, None
    x, mu, rho, bias_rho, seed = ctx.saved_tensors
    need_x, need_mu, need_rho, need_bias_mu, need_bias_rho, *_ = ctx.needs_input_grad
    need_weight, need_bias = need_mu or need_rho, need_bias_mu or need_bias_rho
    needed = need_x, need_weight, need_bias
    with past_autograd():
        grads = backward_op(
            grad_y, x, mu, rho, bias_rho, seed, ctx.stream, ctx.num_samples, *needed
        )
    grads = [g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)]
    return *grads, None, None, None


def _differentiable_grads(ctx, grad_y):
    x, mu, rho, bias_rho, seed = ctx.saved_tensors
    # The result is linear in bias_mu, of which nothing is saved.
    bias_mu = None if bias_rho is None else torch.zeros_like(bias_rho, requires_grad=True)
    noise = seed, ctx.stream, ctx.num_samples
    return formulas.gradients_by(
        lambda *tensors: formulas.bayes_linear(*tensors, *noise),
        (x, mu, rho, bias_mu, bias_rho), (grad_y,), ctx.needs_input_grad[:5],
    )  # fmt: skip


class _Eager(torch.autograd.Function):
    """The registered rule with less Python around it: a tenth of a millisecond a call."""

    @staticmethod
    def forward(ctx, *args):
        with past_autograd():  # there is no grad mode in here
            y = forward_op(*args)
        _setup_context(ctx, args, y)
        return y

    backward = staticmethod(_backward)


class _EagerRows(_Eager):
    """The same, of folded replicas."""

    @staticmethod
    def forward(ctx, *args):
        y = _Eager.forward(ctx, *args)
        return shaped(y, (y.shape[0] * y.shape[1], y.shape[2]))

    @staticmethod
    def backward(ctx, grad_y):
        rows = grad_y.shape[0] // ctx.num_samples
        return _backward(ctx, grad_y.reshape(ctx.num_samples, rows, grad_y.shape[1]))


torch.library.register_autograd("bnuq::bayes_linear", _backward, setup_context=_setup_context)
