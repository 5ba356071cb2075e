"""Divergence of a Gaussian posterior over weights from its prior, in nats."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from . import formulas
from .checks import (
    check_device,
    check_floating,
    check_fraction_value,
    check_num_samples,
    check_positive_scalar,
    check_scalar,
    check_seed,
    check_shape,
    check_stream,
    refuse,
)
from .modes import are_batched, is_differentiated, lacks_rule, past_autograd
from .philox import seed_tensor


def gaussian_kl(mu: Tensor, rho: Tensor, prior_std: float = 1.0) -> Tensor:
    """KL(N(mu, sigma^2) || N(0, prior_std^2)) with sigma = softplus(rho), summed over the weights.

        sum of log(prior_std / sigma) + (sigma^2 + mu^2) / (2 prior_std^2) - 1/2

    Args:
        mu: (*) posterior means; float32 or float64. sigma^2 + mu^2 must be finite in the dtype.
        rho: (*) posterior spreads before the softplus; like mu. Safe for every float; -inf marks a
            weight that is pruned and counts nothing.
        prior_std: standard deviation of the prior; positive,
            with 1 / prior_std^2 finite in the dtype of mu.

    Returns:
        () the divergence in nats, in the dtype of mu. Deterministic.
        Gradients with respect to mu, rho.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, device, value or dtype.
    """
    _check_posterior("gaussian_kl", mu, rho)
    _check_std("gaussian_kl", "prior_std", prior_std, mu.dtype)
    if lacks_rule(mu, rho):
        return formulas.gaussian_kl(mu, rho, prior_std)
    # An op of its own beside the sum: torch.vmap runs none that takes lists of tensors.
    return torch.ops.bnuq.gaussian_kl(mu.contiguous(), rho.contiguous(), prior_std)


def gaussian_kl_sum(
    parameters: list[tuple[Tensor, Tensor, float]], value: Tensor | None = None
) -> Tensor:
    """The sum of `gaussian_kl` of all (mu, rho, prior_std),
    in dtype and on the device of the first.

    With the value, which is then known, for parameters of one dtype on one device.
    """
    given = [t for mu, rho, _ in parameters for t in (mu, rho)]
    if torch._C._are_functorch_transforms_active() or lacks_rule(*given):
        return total(gaussian_kl(*one) for one in parameters)
    for std, dtype in {(std, mu.dtype) for mu, _, std in parameters}:
        _check_std("gaussian_kl", "prior_std", std, dtype)
    groups = {}
    for mu, rho, std in parameters:
        stds, tensors = groups.setdefault((mu.device, mu.dtype), ([], []))
        stds.append(std)
        tensors += mu.contiguous(), rho.contiguous()
    return total(_GaussianSum.apply(value, stds, *tensors) for stds, tensors in groups.values())


def total(terms: Iterable[Tensor]) -> Tensor:
    """The sum of scalars, in dtype and on the device of the first."""
    first, *others = terms
    for other in others:
        alike = other.dtype == first.dtype and other.device == first.device
        first = first + (other if alike else other.to(first))
    return first


class _GaussianSum(torch.autograd.Function):
    """One node for all layers of a device and dtype:
    a node of its own costs each more than its arithmetic."""

    @staticmethod
    def forward(ctx, value, stds, *tensors):
        ctx.stds = stds
        ctx.save_for_backward(*tensors)
        if value is not None:
            return value.clone()
        return torch.ops.bnuq.gaussian_kl_sum(tensors[::2], tensors[1::2], stds)

    @staticmethod
    def backward(ctx, grad):
        tensors = ctx.saved_tensors
        if is_differentiated(grad) or are_batched(grad):
            needs = ctx.needs_input_grad[2:]
            return None, None, *formulas.gradients_by(
                lambda *tensors: formulas.gaussian_kl_sum(tensors, ctx.stds),
                tensors, (grad,), needs,
            )  # fmt: skip
        args = grad, tensors[::2], tensors[1::2], ctx.stds
        with past_autograd():
            return None, None, *torch.ops.bnuq.gaussian_kl_sum_backward(*args)


def mixture_kl(
    mu: Tensor,
    rho: Tensor,
    seed: int | Tensor,
    stream: int,
    num_samples: int = 1,
    *,
    pi: float = 0.5,
    std1: float = 1.0,
    std2: float = math.exp(-6),
) -> Tensor:
    """Monte Carlo divergence from a scale mixture, over the very weights of `bayes_linear`.

        mean over t of sum of log q(w_t) - log p(w_t),  w_t = mu + softplus(rho) * eps[t],
        p = pi N(0, std1^2) + (1 - pi) N(0, std2^2), its logarithm by log-add-exp

    eps is `philox_normal` of the seed and stream: for mu of shape (O, I) the weights' noise, for
    (O,) that of the tag "bias".

    Args:
        mu, rho: (O, I) or (O,) as in `gaussian_kl`.
        seed: (2,) int64, key and first replica, on mu's device; or an integer, as `new_seed` of it.
        stream: number of the stochastic layer; at least 0, below 2^32.
        num_samples: T; at least 1.
        pi: weight of the first component, in [0, 1].
        std1, std2: standard deviations of the components; positive,
            with 1 / std^2 finite in the dtype of mu.

    Returns:
        () the divergence in nats, in the dtype of mu. Deterministic.
        Gradients with respect to mu, rho.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, device, value or dtype.

    Source: Blundell et al., Weight Uncertainty in Neural Networks (2015), equations 2 and 7.
    """
    op = "mixture_kl"
    _check_posterior(op, mu, rho)
    if mu.dim() not in (1, 2):
        refuse(op, "mu", "have shape (O, I) or (O,)", list(mu.shape))
    check_seed(op, seed, mu.device)
    check_stream(op, stream)
    check_num_samples(op, num_samples)
    check_scalar(op, "pi", pi)
    check_fraction_value(op, "pi", pi)
    _check_std(op, "std1", std1, mu.dtype)
    _check_std(op, "std2", std2, mu.dtype)
    args = seed_tensor(seed, mu.device), stream, num_samples, pi, std1, std2
    if lacks_rule(mu, rho):
        return formulas.mixture_kl(mu, rho, *args)
    return torch.ops.bnuq.mixture_kl(mu.contiguous(), rho.contiguous(), *args)


def _check_std(op: str, name: str, std: float, dtype: torch.dtype) -> None:
    check_positive_scalar(op, name, std)
    least = torch.finfo(dtype).max ** -0.5  # 1 / std^2 is infinite from there on
    if std <= least:
        refuse(op, name, f"be above {least:.3g} for {dtype}", std)


def _check_posterior(op: str, mu: Tensor, rho: Tensor) -> None:
    check_floating(op, "mu", mu)
    check_floating(op, "rho", rho)
    if mu.dtype not in (torch.float32, torch.float64):
        refuse(op, "mu", "be float32 or float64", mu.dtype, TypeError)
    if rho.dtype != mu.dtype:
        refuse(op, "rho", f"be {mu.dtype}", rho.dtype, TypeError)
    check_shape(op, "rho", rho, mu.shape)
    check_device(op, "rho", rho, mu.device)


@torch.library.register_fake("bnuq::gaussian_kl")
@torch.library.register_fake("bnuq::mixture_kl")
def _(mu, *others):
    return mu.new_empty(())


@torch.library.register_fake("bnuq::gaussian_kl_backward")
@torch.library.register_fake("bnuq::mixture_kl_backward")
def _(grad, mu, rho, *others):
    return torch.empty_like(mu), torch.empty_like(rho)


@torch.library.register_fake("bnuq::gaussian_kl_sum")
def _(mu, rho, prior_std):
    return mu[0].new_empty(())


@torch.library.register_fake("bnuq::gaussian_kl_sum_backward")
def _(grad, mu, rho, prior_std):
    return [torch.empty_like(t) for pair in zip(mu, rho, strict=True) for t in pair]


def _setup_gaussian(ctx, inputs, output):
    mu, rho, ctx.prior_std = inputs
    ctx.save_for_backward(mu, rho)


def _backward_gaussian(ctx, grad):
    if is_differentiated(grad):
        return *_differentiable_grads(ctx, formulas.gaussian_kl, grad, ctx.prior_std), None
    with past_autograd():
        grads = torch.ops.bnuq.gaussian_kl_backward(grad, *ctx.saved_tensors, ctx.prior_std)
    return *grads, None


def _setup_mixture(ctx, inputs, output):
    mu, rho, seed, *ctx.rest = inputs
    ctx.save_for_backward(mu, rho, seed)


def _backward_mixture(ctx, grad):
    mu, rho, seed = ctx.saved_tensors
    if is_differentiated(grad):
        grads = _differentiable_grads(ctx, formulas.mixture_kl, grad, seed, *ctx.rest)
    else:
        with past_autograd():
            grads = torch.ops.bnuq.mixture_kl_backward(grad, mu, rho, seed, *ctx.rest)
    return *grads, None, None, None, None, None, None


def _differentiable_grads(ctx, divergence, grad, *args):
    def formula(mu, rho):
        return divergence(mu, rho, *args)

    return formulas.gradients_by(formula, ctx.saved_tensors[:2], (grad,), ctx.needs_input_grad[:2])


torch.library.register_autograd(
    "bnuq::gaussian_kl", _backward_gaussian, setup_context=_setup_gaussian
)
torch.library.register_autograd("bnuq::mixture_kl", _backward_mixture, setup_context=_setup_mixture)
