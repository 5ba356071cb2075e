"""The statistics of batch norm as random variables: their Gaussians,
the divergence of these, a prior."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from numbers import Real
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .bank import Bank
from .metrics.arguments import is_complex
from .ops.checks import (
    acc_dtype,
    broadcasts,
    check_floating,
    check_integer,
    check_number,
    check_shape,
    check_tensor,
    refuse,
)
from .ops.modes import has_values


class StatisticsGaussian(NamedTuple):
    """Independent Gaussians over a layer's batch statistics, mu_B ~ N(mean, mean_var),
    sigma_B ~ N(std, std_var).

    sigma_B is the standard deviation of a channel in a batch (from the biased variance). Each entry
    has shape (C,); one of a prior may be a number, or a tensor that broadcasts to (C,).
    """

    mean: Tensor
    mean_var: Tensor
    std: Tensor
    std_var: Tensor


def statistics_kl(
    q: StatisticsGaussian | Mapping[str, StatisticsGaussian],
    prior: StatisticsGaussian | Mapping[str, StatisticsGaussian],
) -> Tensor:
    """Divergence of the statistics' distribution from a prior,
    factorised over units and over {mu_B, sigma_B}.

        KL = sum of ln(s_p / s_q) + (s_q^2 + (m_q - m_p)^2) / (2 s_p^2) - 1/2,     N(m, s^2) each

    A prior of infinite variance is improper: its infinite constant ln s_p is dropped, which leaves
    -ln s_q - 1/2. The gradient, (s_q s_q' + m_q m_q' - m_p m_q') / s_p^2 - s_q' / s_q,
    is then still the exact one.

    As a regulariser of a training loss that is a mean over rows: add KL / (N tau), N the rows of
    the training data, tau the precision of gaussian noise (1 / noise_var) or 1 for classes.

    Args:
        q: of one layer, or of several by name; variances that are not negative.
            A variance of 0 has an infinite divergence.
        prior: one for all layers, or one for each by the names of q; positive variances,
            infinite ones too.

    Returns:
        (), in nats, differentiable by the entries of q and of prior.

    Raises:
        TypeError: q or prior of another type. ValueError: other names in prior than in q, a
            variance of prior that is not positive, or one of q that is negative
            (which is not looked for on a GPU).

    Source: Teye et al., Bayesian Uncertainty Estimation for Batch Normalized Deep Networks (2018),
        appendix 1.2 and 1.4, equations 3, 4 and 7.
    """
    if isinstance(q, StatisticsGaussian):
        q = {"": q}
    priors = _priors(q, prior)
    return torch.stack([channel_kl(q[name], priors[name]).sum() for name in q]).sum()


def channel_kl(q: StatisticsGaussian, prior: StatisticsGaussian) -> Tensor:
    """`statistics_kl` of one layer by channel, (C,)."""
    return _kl(q.mean, q.mean_var, prior.mean, prior.mean_var) + _kl(
        q.std, q.std_var, prior.std, prior.std_var
    )


def check_statistics_prior(op: str, prior) -> None:
    """Checks the prior of a layer."""
    if not isinstance(prior, StatisticsGaussian):
        refuse(op, "prior", "be a StatisticsGaussian", type(prior).__name__, TypeError)
    for name, value in prior._asdict().items():
        known = isinstance(value, (Real, Tensor, np.ndarray)) and not isinstance(value, bool)
        if not known or is_complex(value):
            requirement = "be a number or a tensor of them"
            refuse(op, f"prior.{name}", requirement, type(value).__name__, TypeError)
    for name in ("mean_var", "std_var"):
        value = getattr(prior, name)
        value = torch.as_tensor(value, device=getattr(value, "device", "cpu"))
        if not bool((value > 0).all()):
            refuse(op, f"prior.{name}", "be positive", value.tolist())


def _priors(q, prior) -> dict[str, StatisticsGaussian]:
    op = "statistics_kl"
    if not isinstance(q, Mapping) or not q:
        requirement = "be a StatisticsGaussian or a dict of at least one"
        refuse(op, "q", requirement, type(q).__name__ if q else "an empty one", TypeError)
    if not isinstance(prior, Mapping):
        prior = dict.fromkeys(q, prior)
    if prior.keys() != q.keys():
        refuse(op, "prior", f"have the names of q {list(q)}", list(prior))
    for name in q:
        check_statistics_prior(op, prior[name])
        if not isinstance(q[name], StatisticsGaussian):
            got = type(q[name]).__name__
            refuse(op, f"q[{name!r}]", "be a StatisticsGaussian", got, TypeError)
        _check_variances(op, name, q[name])
        check_fit(op, q[name], prior[name])
    return prior


def _check_variances(op: str, name: str, q: StatisticsGaussian) -> None:
    place = f"q[{name!r}]" if name else "q"
    for field, value in q._asdict().items():
        check_tensor(op, f"{place}.{field}", value)
        check_shape(op, f"{place}.{field}", value, tuple(q.mean.shape))
    for field in ("mean_var", "std_var"):
        value = getattr(q, field)
        # On a GPU a step of training would wait for it.
        if has_values(value) and value.device.type == "cpu" and (value < 0).any():
            refuse(op, f"{place}.{field}", "not be negative", value.min().item())


def check_fit(op: str, q: StatisticsGaussian, prior: StatisticsGaussian) -> None:
    """Each entry of the prior is a number or broadcasts to q's."""
    for field, value, own in zip(prior._fields, prior, q, strict=True):
        shape = tuple(getattr(value, "shape", ()))
        if not broadcasts(shape, own.shape):
            refuse(op, f"prior.{field}", f"broadcast to {list(own.shape)}", list(shape))


def _kl(q_mean: Tensor, q_var: Tensor, mean, var) -> Tensor:
    mean, var = (p if isinstance(p, Tensor) else q_mean.new_tensor(p) for p in (mean, var))
    log_var = torch.where(var.isinf(), 0.0, var.log())
    quadratic = (q_var + (q_mean - mean).square()) / var
    return (log_var - q_var.log() + quadratic - 1) / 2


def implied_prior(l2: float, dataset_size: int, tau: float = 1.0) -> StatisticsGaussian:
    """The prior over batch statistics that training with weight decay implies.

        p(mu_B) = N(0, infinity),   p(sigma_B) = N(0, 1 / (2 N tau l2))  (mean, variance)

    so that KL' = N tau (l2 ||W||^2)' by a layer's weights W. Teye et al. derive it for batch norm
    on every layer without scale and shift, inputs of a layer that are uncorrelated with variance 1,
    and large N and M, where the terms -s_q' / s_q of the divergence are neglected.

    Args:
        l2: factor of ||W||^2 in the loss, which is a mean over the rows of a batch: half the
            `weight_decay` of torch's SGD (of Adam too, not of AdamW); positive.
        dataset_size: N, rows of the training data; at least 1.
        tau: precision of the gaussian noise, 1 / noise_var, where the loss is half the squared
            error without it; 1 for classes; positive.

    Returns:
        StatisticsGaussian of () float64 tensors, for every layer.

    Raises:
        ValueError, TypeError: an argument out of range.

    Source: Teye et al. (2018), section 3.3 and appendix 1.4.
    """
    op = "implied_prior"
    for name, value in (("l2", l2), ("tau", tau)):
        if not (isinstance(value, Tensor) and value.numel() == 1):
            check_number(op, name, value)
        if not 0 < value < inf:
            refuse(op, name, "be positive and finite", value)
    l2, tau = (v.double() if isinstance(v, Tensor) else float(v) for v in (l2, tau))
    dataset_size = check_integer(op, "dataset_size", dataset_size, 1)
    check_number(op, "dataset_size", dataset_size)
    std_var = 1 / (2.0 * dataset_size * tau * l2)
    options = {"dtype": torch.float64, "device": getattr(std_var, "device", "cpu")}
    entries = 0.0, inf, 0.0, std_var
    return StatisticsGaussian(*(torch.as_tensor(e, **options).squeeze() for e in entries))


def analytic_statistics(
    x: Tensor, batch_size: int, dataset_size: int | None = None
) -> StatisticsGaussian:
    """The Gaussians of the statistics of random batches, from the inputs of a batch-norm layer.

        mu_B ~ N(m, f Var(a) / M),    sigma_B ~ N(s, f Var(c) / (4 s^2 M)),    f = (N - M) / (N - 1)

    with m and s^2 mean and variance of a channel, a and c the means of (h - m) and (h - m)^2 over a
    row's positions, to first order in 1/M: for M of 30 or more, as Teye et al. have it (at M = 10
    and squares of uniform inputs the variance of sigma_B was a fifth larger). For a layer on
    vectors a row is one value h, so Var(a) = s^2 and Var(c) = E(h - m)^4 - s^4, which are the
    formulas of Teye et al.; f is the share that is left by drawing without replacement. Behind
    another batch norm they are too wide, since the batch has normalised itself there:
    see `statistics_normality`.

    Args:
        x: (rows, C, *) inputs of the layer, of the whole data or of a sample of it; floating.
        batch_size: M; at least 1.
        dataset_size: N; at least M. None for M small against N, f = 1.

    Returns:
        StatisticsGaussian of (C,) tensors, float32 (float64 for float64), differentiable by x. A
        channel that is constant has variances of 0.

    Raises:
        ValueError, TypeError: an argument out of range.

    Source: Teye et al. (2018), appendix 1.3; the row as the unit and f follow by the same argument.
    """
    op = "analytic_statistics"
    check_floating(op, "x", x)
    if x.dim() < 2 or x.numel() == 0:
        refuse(op, "x", "have shape (rows, C, *) and values", list(x.shape))
    factor = finite_population_correction(op, batch_size, dataset_size)
    h = x.to(acc_dtype(x.dtype)).unsqueeze(-1).flatten(2)
    mean = h.mean((0, 2))
    # The mean of equal values is rounded, and they would deviate from it.
    most, least = h.detach().amax((0, 2)), h.detach().amin((0, 2))
    centre = mean + torch.where(most == least, most - mean.detach(), 0.0)
    deviation = h - centre[:, None]
    a, c = deviation.mean(2), deviation.square().mean(2)
    var = c.mean(0)
    moments = mean, var, a.square().mean(0), (c - var).square().mean(0)
    return gaussian_of_moments(*moments, factor / batch_size)


def finite_population_correction(op: str, batch_size: int, dataset_size: int | None) -> float:
    """f of `analytic_statistics`; checks both."""
    batch_size = check_integer(op, "batch_size", batch_size, 1)
    if dataset_size is None:
        return 1.0
    dataset_size = check_integer(op, "dataset_size", dataset_size, batch_size)
    return (dataset_size - batch_size) / max(dataset_size - 1, 1)


def gaussian_of_moments(
    mean: Tensor, var: Tensor, var_a: Tensor, var_c: Tensor, factor: float
) -> StatisticsGaussian:
    """`analytic_statistics` of a layer's moments (C,); factor is f / M."""
    # A square root's slope at 0 and the quotient would make NaN of a constant channel's gradient.
    constant = var == 0
    alive = torch.where(constant, 1.0, var)
    std = torch.where(constant, 0.0, alive.sqrt())
    std_var = torch.where(constant, 0.0, var_c / (4 * alive))
    return StatisticsGaussian(mean, var_a * factor, std, std_var * factor)


def observed_statistics(bank: Bank) -> dict[str, StatisticsGaussian]:
    """Mean and variance, with 1/(B-1), of mu_B and sigma_B over a bank's snapshots,
    by call; float64.

    A single snapshot has variances of 0.
    """
    found, correction = {}, min(len(bank) - 1, 1)
    for name, mean in bank.mean.items():
        both = mean.double(), bank.var[name].double().sqrt()
        moments = (m for v in both for m in (v.mean(0), v.var(0, correction=correction)))
        found[name] = StatisticsGaussian(*moments)
    return found
