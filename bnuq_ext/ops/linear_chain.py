"""Bayesian linear layers one after another, and their divergence, in one node."""

from typing import NamedTuple

import torch
from torch import Tensor

from . import formulas
from .linear import backward_op, check_call, check_posterior, forward_op, shaped
from .modes import are_batched, is_differentiated, lacks_rule, past_autograd

_op = torch.ops.bnuq.bayes_linear_kl.default
_backward_op = torch.ops.bnuq.bayes_linear_kl_backward.default
_divergence_op = torch.ops.bnuq.gaussian_kl_sum.default
_divergence_backward_op = torch.ops.bnuq.gaussian_kl_sum_backward.default


class Link(NamedTuple):
    """A layer of a chain.

    Attributes:
        posterior: mu and rho of the weights, and of the bias if there is one.
        prior_std: of the Gaussian prior over all of them.
        stream: see `ops.bayes_linear`.
        rectified: whether ReLU follows.
    """

    posterior: tuple[Tensor, ...]
    prior_std: float
    stream: int
    rectified: bool = False


def bayes_linear_chain(
    x: Tensor, links: list[Link], *, seed: Tensor, num_samples: int
) -> tuple[Tensor, Tensor]:
    """`bayes_linear` of every link in turn, (T*N, O), and the sum of `gaussian_kl` of their weights
    and biases.

    A node of autograd takes as long as a small layer. On the CPU the divergence's gradients are
    added where the layer's lie: in memory of their own they take as long to write and to add as to
    compute. On CUDA one launch makes those of all links, and one adds them.

    Args:
        x: as `ops.bayes_linear` takes it; with several links in the dtype of the weights.
        links: at least one.
        seed, num_samples: as `ops.bayes_linear` takes them.
    """
    features = x.shape[-1]
    check_call(x, seed, num_samples)
    for link in links:
        check_posterior(x, features, *link.posterior, stream=link.stream)
        features = link.posterior[0].shape[0]
    tensors = [p.contiguous() for link in links for p in link.posterior]
    if lacks_rule(x, *tensors):
        return _formula(x, links, seed, num_samples)
    return _Chain.apply(links, num_samples, x, seed.contiguous(), *tensors)


def _formula(x, links: list[Link], seed, num_samples):
    divergence = 0.0
    for posterior, prior_std, stream, rectified in links:
        padded = *posterior, *(None,) * (4 - len(posterior))
        x = formulas.bayes_linear(x, *padded, seed, stream, num_samples)
        x = x.relu() if rectified else x
        stds = [prior_std] * (len(posterior) // 2)
        divergence = divergence + formulas.gaussian_kl_sum(posterior, stds)
    return x.flatten(0, 1), divergence


def _has_fused_op(x: Tensor) -> bool:
    """Whether there is an op for a layer with its divergence."""
    return x.device.type == "cpu"


class _Chain(torch.autograd.Function):
    """Of (y, kl), of which either may have no gradient, by x and by mu and rho in turns."""

    @staticmethod
    def forward(ctx, links, num_samples, x, seed, *tensors):
        ctx.set_materialize_grads(False)
        ctx.num_samples, ctx.links, end = num_samples, [], 0
        rows, kept, divergence = x.shape[-2], [x], None
        forward = _fused_forward if _has_fused_op(x) else _layer_forward
        with past_autograd():
            for link in links:
                begin, end = end, end + len(link.posterior)
                ctx.links.append((begin, end, link.prior_std, link.stream, link.rectified))
                mu, rho = tensors[begin:end:2], tensors[begin + 1 : end : 2]
                noise = seed, link.stream, num_samples
                y, kl = forward(kept[-1], mu, rho, noise, link.prior_std)
                if link.rectified:
                    y.relu_()
                kept.append(y.view(num_samples, rows, y.shape[1]))
                divergence = kl if divergence is None else divergence + kl
            if divergence is None:
                divergence = _divergence_op(tensors[::2], tensors[1::2], _stds(ctx.links))
        if links[-1].rectified:
            kept[-1] = y  # an output, and not a view of one, is what may be kept
        else:
            kept.pop()
        ctx.save_for_backward(seed, *tensors, *kept)
        return y, divergence

    @staticmethod
    def backward(ctx, grad_y, grad_kl):
        _, _, need_x, _, *needs = ctx.needs_input_grad
        if grad_y is None and grad_kl is None:
            return (None,) * (4 + len(needs))
        if is_differentiated(grad_y, grad_kl) or are_batched(grad_y, grad_kl):
            by_x, *grads = _differentiable_grads(ctx, (grad_y, grad_kl), (need_x, *needs))
        else:
            with past_autograd():
                by_x, grads = _grads(ctx, grad_y, grad_kl, need_x, needs)
        return None, None, by_x, None, *grads


def _differentiable_grads(ctx, grads, needs):
    """As `_grads`, from the inputs: what is kept between the links is apart from any graph."""
    seed, *saved = ctx.saved_tensors
    tensors, x = saved[: len(needs) - 1], saved[len(needs) - 1]

    def formula(x, *tensors):
        links = [Link(tensors[begin:end], *rest) for begin, end, *rest in ctx.links]
        return _formula(x, links, seed, ctx.num_samples)

    return formulas.gradients_by(formula, (x, *tensors), grads, needs)


def _grads(ctx, grad_y, grad_kl, need_x: bool, needs: list[bool]):
    """By x, and by all tensors."""
    seed, *saved = ctx.saved_tensors
    tensors, kept = saved[: len(needs)], saved[len(needs) :]
    if grad_y is None:
        return None, _divergence_grads(ctx, grad_kl, tensors)
    fused = grad_kl is not None and _has_fused_op(grad_y)
    grads = []
    for number in reversed(range(len(ctx.links))):
        begin, end, prior_std, stream, rectified = ctx.links[number]
        if rectified:
            grad_y = torch.ops.aten.threshold_backward.default(grad_y, kept[number + 1], 0)
        by_weight, by_bias = any(needs[begin : begin + 2]), any(needs[begin + 2 : end])
        asked = need_x or any(needs[:begin]), by_weight, by_bias
        given = kept[number], tensors[begin:end:2], tensors[begin + 1 : end : 2]
        noise = seed, stream, ctx.num_samples
        if fused:
            grad_y, *found = _backward_op(grad_y, grad_kl, *given, *noise, prior_std, *asked)
        else:
            grad_y, *found = _layer_backward(grad_y, *given, noise, asked)
        grads[:0] = found[: end - begin]
        if not asked[0]:  # nor has what comes before any
            grad_y, grads = None, [None] * begin + grads
            break
    if grad_kl is not None and not fused and any(needs):
        _add(grads, _divergence_grads(ctx, grad_kl, tensors))
    return grad_y, grads


def _divergence_grads(ctx, grad_kl, tensors):
    return _divergence_backward_op(grad_kl, tensors[::2], tensors[1::2], _stds(ctx.links))


def _stds(links) -> list[float]:
    """Of the prior, for each pair of tensors."""
    return [std for begin, end, std, *_ in links for _ in range(begin, end, 2)]


def _add(grads, others) -> None:
    """In place, to those that are there."""
    pairs = [(g, o) for g, o in zip(grads, others, strict=True) if g is not None and g.numel()]
    torch._foreach_add_([g for g, _ in pairs], [o for _, o in pairs])


def _fused_forward(x, mu, rho, noise, prior_std):
    return _op(x, mu, rho, *noise, prior_std)


def _layer_forward(x, mu, rho, noise, prior_std):
    """Without its divergence."""
    bias = (mu[1], rho[1]) if len(mu) > 1 else (None, None)
    y = forward_op(x, mu[0], rho[0], *bias, *noise)
    return shaped(y, (y.shape[0] * y.shape[1], y.shape[2])), None


def _layer_backward(grad_y, x, mu, rho, noise, asked):
    bias_rho = rho[1] if len(rho) > 1 else None
    grad_y = grad_y.reshape(noise[-1], x.shape[-2], mu[0].shape[0])
    return backward_op(grad_y, x, mu[0], rho[0], bias_rho, *noise, *asked)
