"""The ops in torch's operations, for what their kernels have no rule for: derivatives of
derivatives, forward-mode ones and those of torch.func.

Arguments are those of the registered ops; intermediate results are held for all T replicas.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from .checks import acc_dtype
from .modes import without_autocast
from .philox import TAGS

TINY_RHO = -40.0  # softplus(rho) is exp(rho) to the last bit below it


def sigma_of(rho: Tensor) -> Tensor:
    """softplus(rho), the standard deviations of weights."""
    return functional.softplus(rho, threshold=40.0)


def log_sigma_of(rho: Tensor) -> Tensor:
    """Their logarithm, where they themselves underflow too."""
    tiny = rho < TINY_RHO
    return torch.where(tiny, rho, sigma_of(rho.masked_fill(tiny, TINY_RHO)).log())


def gradients_by(formula, tensors, grads, needs) -> list[Tensor | None]:
    """Gradients that can be differentiated again, where gradients are on.

    Args:
        formula: takes the tensors; its result, or a tuple of results.
        tensors: by which it is differentiated; an entry may be None.
        grads: by the results; None for one that has none.
        needs: of each of `tensors`, whether its gradient is wanted.
    """
    twice = torch.is_grad_enabled()
    with torch.enable_grad(), without_autocast():
        # Views: one of the tensors may come from another, whose gradient is not to hold its share.
        views = [t if t is None else t.view_as(t) for t in tensors]
        results = formula(*views)
        results = results if isinstance(results, tuple) else (results,)
        pairs = zip(results, grads, strict=True)
        pairs = [(y, grad) for y, grad in pairs if grad is not None and y.requires_grad]
        wanted = [view for view, need in zip(views, needs, strict=True) if need]
        options = dict(create_graph=twice, allow_unused=True)
        ends, starts = zip(*pairs, strict=True) if pairs else ((), ())
        found = iter(torch.autograd.grad(ends, wanted, starts, **options))
    return [next(found) if need else None for need in needs]


def batch_norm(x, mean, var, weight, bias, residual, eps, slope, shared) -> Tensor:
    """With the statistics (T, C) of each replica."""
    T, dims = 1 if shared else len(mean), x.dim()
    scale = (var + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    y = (replicas_of(x, T) - per_channel(mean, dims)) * per_channel(scale, dims)
    if bias is not None:
        y = y + per_channel(bias, dims)
    if residual is not None:
        y = y + replicas_of(residual, T)
    return activated(y, slope).flatten(0, 1).to(x.dtype)


def per_channel(value: Tensor, dims: int) -> Tensor:
    """(T, 1, C, 1, ...) of (T, C), for activations of `dims` dimensions in replicas."""
    return value.unflatten(-1, (1, value.shape[-1], *(1,) * (dims - 2)))


def activated(z: Tensor, slope: float) -> Tensor:
    """z, and slope * z below 0."""
    return z.relu() if slope == 0 else functional.leaky_relu(z, slope)


def replicas_of(x: Tensor, T: int) -> Tensor:
    """(T, N, C, *) of (T*N, C, *), in the dtype of the arithmetic."""
    return x.to(acc_dtype(x.dtype)).reshape(T, x.shape[0] // T, *x.shape[1:])


def rows_of(table: Tensor, index: Tensor) -> Tensor:
    """(T, C) of (B, C); NaN for what is outside of it."""
    found = table[index.clamp(0, table.shape[0] - 1)]
    outside = (index < 0) | (index >= table.shape[0])
    return found.masked_fill(outside[:, None], math.nan)


def bayes_linear(x, mu, rho, bias_mu, bias_rho, seed, stream, num_samples) -> Tensor:
    y = x.to(mu.dtype) @ _drawn(mu, rho, seed, stream, num_samples).mT
    if bias_mu is not None:
        y = y + _drawn(bias_mu, bias_rho, seed, stream, num_samples)[:, None]
    return y.to(x.dtype)


def gaussian_kl(mu, rho, prior_std) -> Tensor:
    ratio = (sigma_of(rho).square() + mu.square()) / prior_std**2
    terms = math.log(prior_std) - log_sigma_of(rho) + (ratio - 1) / 2
    return _summed(terms, rho)


def gaussian_kl_sum(posteriors: Sequence[Tensor], prior_std: Sequence[float]) -> Tensor:
    """Of mu and rho in turns."""
    given = zip(posteriors[::2], posteriors[1::2], prior_std, strict=True)
    return sum(gaussian_kl(*one) for one in given)


def mixture_kl(mu, rho, seed, stream, num_samples, pi, std1, std2) -> Tensor:
    eps = _noise(mu, seed, stream, num_samples)
    half_square = (mu + sigma_of(rho) * eps).square() / 2
    # The 1/2 log(2 pi) of q and p cancel.
    log_q = -log_sigma_of(rho) - eps.square() / 2
    components = [
        math.log(share / std) - half_square / std**2
        for share, std in ((pi, std1), (1 - pi, std2))
        if share > 0
    ]
    return _summed((log_q - _logaddexp(*components)).mean(0), rho)


def _logaddexp(a: Tensor, b: Tensor | None = None) -> Tensor:
    """torch.logaddexp, whose second derivative is NaN where one term is far smaller."""
    return a if b is None else torch.maximum(a, b) + functional.softplus(-(a - b).abs())


def _summed(terms: Tensor, rho: Tensor) -> Tensor:
    """The sum, in which a weight that is pruned counts nothing."""
    return terms.masked_fill(rho == -math.inf, 0.0).sum()


def _drawn(mu, rho, seed, stream, num_samples) -> Tensor:
    return mu + sigma_of(rho) * _noise(mu, seed, stream, num_samples)


def _noise(mu: Tensor, seed: Tensor, stream: int, num_samples: int) -> Tensor:
    """(T, O, I) of weights, (T, O) of a bias."""
    tag = TAGS["weight" if mu.dim() == 2 else "bias"]
    shape = (num_samples, *mu.shape)
    return torch.ops.bnuq.philox_normal(seed, stream, tag, shape).to(mu.dtype)


def predictive_statistics(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    p = logits.to(acc_dtype(logits.dtype)).softmax(2)
    mean = p.mean(0)
    variance = (p - mean).square().mean(0)
    return mean, variance, _entropy(mean, 1), _entropy(p, 2).mean(0)


def _entropy(p: Tensor, dim: int) -> Tensor:
    """Of classes with p = 0 neither value nor gradient."""
    return -(p * torch.where(p > 0, p, 1.0).log()).sum(dim)
