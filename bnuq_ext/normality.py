"""`statistics_normality`: are a network's batch statistics Gaussian,
and as wide as the theory says?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .bank import Bank
from .batches import as_dataset, fetcher, find_source
from .collect import gather
from .inputs import Data, call, device_of, move, split_batch
from .interrupts import leaving_nothing_behind
from .nn import require_stochastic_layers
from .ops.checks import acc_dtype, check_flags, check_floating, check_integer, refuse
from .passes import Pass, running
from .progress import progress_bar
from .restore import evaluating, seed_torch, without_gradients
from .samplers import check_key, key_of_body
from .state import generators_in, modules_of
from .statistics_kl import (
    StatisticsGaussian,
    finite_population_correction,
    gaussian_of_moments,
    observed_statistics,
)
from .untraced import untraced
from .wrappers import check_unwrapped

OP = "statistics_normality"
LEVEL = 0.05  # below which p rejects
_NULL_SAMPLES = 20_000


class LayerNormality(NamedTuple):
    """The statistics of one batch-norm call, (C,) by channel, float64;
    nan where a statistic is constant.

    Attributes:
        analytic: `analytic_statistics` of the layer's inputs over the data.
        observed: mean and variance over the batches.
        mean_p, std_p: p-values of `lilliefors` for mu_B and sigma_B.
        analytic_correlation, correlation: of mu_B and sigma_B, in theory and over the batches.
    """

    analytic: StatisticsGaussian
    observed: StatisticsGaussian
    mean_p: Tensor
    std_p: Tensor
    analytic_correlation: Tensor
    correlation: Tensor

    @property
    def mean_ratio(self) -> Tensor:
        """(C,) analytic over observed variance of mu_B: 1 where the theory holds."""
        return self.analytic.mean_var / self.observed.mean_var

    @property
    def std_ratio(self) -> Tensor:
        """(C,) the same of sigma_B."""
        return self.analytic.std_var / self.observed.std_var


@dataclass(frozen=True, eq=False)
class StatisticsNormality:
    """What `statistics_normality` found; shown as a table.

    Attributes:
        batch_size: M.
        dataset_size: N.
        bank: the statistics of the batches, not attached.
        layers: LayerNormality by the bank's keys, in the order of the calls.
    """

    batch_size: int
    dataset_size: int
    bank: Bank
    layers: dict[str, LayerNormality]

    def __repr__(self) -> str:
        width = max(5, *map(len, self.layers))
        lines = [
            f"{len(self.bank)} batches of {self.batch_size} out of {self.dataset_size} rows; medians over channels",
            f"{'layer':<{width}}  variance, analytic / observed  not normal (p < {LEVEL})  correlation",
            f"{'':<{width}}    of the mean    of the std       mean     std           mean, std",
        ]
        for name, layer in self.layers.items():
            ratios = [r.nanmedian().item() for r in (layer.mean_ratio, layer.std_ratio)]
            shares = [(p < LEVEL).double().mean().item() for p in (layer.mean_p, layer.std_p)]
            correlation = layer.correlation.abs().nanmedian().item()
            lines.append(
                f"{name:<{width}}  {ratios[0]:13.3g} {ratios[1]:13.3g} {shares[0]:10.0%} {shares[1]:7.0%}"
                f" {correlation:19.2f}"
            )
        return "\n".join(lines)


@untraced
@leaving_nothing_behind
def statistics_normality(
    model: nn.Module,
    data: Data,
    batch_size: int,
    *,
    num_batches: int = 256,
    seed: int | None = None,
    rows_at_a_time: int = 256,
    progress: bool = True,
) -> StatisticsNormality:
    """Puts the Gaussian model of the batch statistics to the test, layer by layer.

    Theory (`analytic_statistics`): mu_B and sigma_B are normal, with variances that follow from the
    moments of the layer's inputs over the data. Observed: the statistics of random batches, drawn
    without replacement and independently of each other, each batch normalised by its own statistics
    in the layers before, as in training. The theory's variances hold for layers with no batch norm
    before them. Behind one that of mu_B is 10 to 90 times too large: the batch has mean 0 and
    variance 1 there, so whatever is linear in z and z^2 has no noise. Of the variance of relu(z)
    for normal z, 0.341, that is all but 0.011, a factor of 30.

    The moments over the data are taken with the batches' mean statistics in the layers before.
    Model, bank, flags and generators are left as found.

    Args:
        model: converted by `convert`; with a bank or without.
        data: a map-style data set of inputs, see `collect`, or (x, y);
            a DataLoader stands for its data set.
        batch_size: M, from 2 to N - 1.
        num_batches: B; at least 8. An observed variance has a relative standard error
            of sqrt(2 / (B - 1)).
        seed: of the draws; None draws it from torch's generator.
        rows_at_a_time: inputs that go through the model together for the moments.
        progress: show a bar on stderr; where that is no terminal, a line a minute.

    Returns:
        StatisticsNormality.

    Raises:
        ValueError, TypeError: an argument is refused, or the model is not converted, or wrapped for
            several devices.

    Source: Teye et al. (2018), section 3.1, Figure 3 and appendix 1.3, 1.9; Lilliefors (1967)
    for the test.
    """
    layers = require_stochastic_layers(OP, model)
    check_unwrapped(OP, model)
    batch_size = check_integer(OP, "batch_size", batch_size, 2)
    data = as_dataset(OP, "data", data)
    source = find_source(OP, data, batch_size)
    N = len(data)
    if batch_size == N:
        refuse(OP, "batch_size", f"be less than the data's {N} rows", batch_size)
    num_batches = check_integer(OP, "num_batches", num_batches, 8)
    rows_at_a_time = check_integer(OP, "rows_at_a_time", rows_at_a_time, 1)
    check_key(OP, seed)
    check_flags(OP, progress=progress)
    device = device_of(model.modules())
    own = *source.generators, *generators_in(modules_of(model))
    with key_of_body(seed, *own) as key:
        seed_torch(key)
        bank, _ = gather(OP, model, source, num_batches, device=device, progress=progress)
        fetch, starts = fetcher(data), range(0, N, rows_at_a_time)
        with evaluating(modules_of(model)), without_gradients():
            moments = _MomentsPass(layers, bank, device)
            with running(moments):
                for start in progress_bar(starts, OP, shown=progress):
                    rows = list(range(start, min(start + rows_at_a_time, N)))
                    moments.calls.clear()
                    call(model, move(split_batch(OP, fetch(rows))[0], device))
    factor = finite_population_correction(OP, batch_size, N) / batch_size
    observed = observed_statistics(bank)
    found = {n: _judge(bank, n, observed[n], moments.sums[n], factor) for n in bank.names}
    return StatisticsNormality(batch_size, N, bank, found)


class _MomentsPass(Pass):
    """Normalises with a bank's mean statistics, and sums up the moments
    of what the layers are given."""

    def __init__(self, layers: dict[str, nn.Module], bank: Bank, device):
        super().__init__(layers)
        self.mean = {name: mean.double().mean(0).to(device) for name, mean in bank.mean.items()}
        self.var = {name: var.double().mean(0).to(device) for name, var in bank.var.items()}
        self.sums = {name: _RowSums(mean) for name, mean in self.mean.items()}

    def normalise(self, layer: nn.Module, x: Tensor, key: str, stream: int) -> Tensor:
        if key not in self.sums:
            refuse(
                OP, "model", "make the same calls for every batch", f"an additional one, {key!r}"
            )
        self.sums[key].add(x)
        weight, bias, eps = layer.affine_parameters()
        dtype = acc_dtype(x.dtype)
        mean, var = self.mean[key].to(dtype), self.var[key].to(dtype)
        return layer.finish(F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps))


class _RowSums:
    """Sums over rows of a, q, a^2, q^2 and a q, with a and q the means over a row's positions
    of d and d^2.

    d = h - centre; with a centre near the mean nothing cancels.
    """

    def __init__(self, centre: Tensor):
        self.centre, self.count = centre, 0
        self.sums = centre.new_zeros(5, len(centre))

    def add(self, x: Tensor) -> None:
        d = x.double().unsqueeze(-1).flatten(2) - self.centre[:, None]
        a, q = d.mean(2), d.square().mean(2)
        self.sums += torch.stack([t.sum(0) for t in (a, q, a.square(), q.square(), a * q)])
        self.count += len(x)

    def moments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Mean and variance of h, Var(a), Var(c) and Cov(a, c); see `analytic_statistics`."""
        a, q, aa, qq, aq = (self.sums / self.count).cpu()
        # c = q - 2 a' (mean of a) + ..., for h - m = d - (mean of a).
        var_a, var_q, cov = aa - a * a, qq - q * q, aq - a * q
        var_c = var_q - 4 * a * cov + 4 * a.square() * var_a
        return self.centre.cpu() + a, q - a * a, var_a, var_c.clamp_min(0), cov - 2 * a * var_a


def _judge(
    bank: Bank, name: str, observed: StatisticsGaussian, sums: _RowSums, factor: float
) -> LayerNormality:
    *moments, cov = sums.moments()
    mean, std = bank.mean[name].double(), bank.var[name].double().sqrt()
    together = ((mean - observed.mean) * (std - observed.std)).sum(0) / (len(bank) - 1)
    return LayerNormality(
        analytic=gaussian_of_moments(*moments, factor),
        observed=observed,
        mean_p=lilliefors(mean)[1],
        std_p=lilliefors(std)[1],
        analytic_correlation=cov / (moments[2] * moments[3]).sqrt(),
        correlation=together / (observed.mean_var * observed.std_var).sqrt(),
    )


def lilliefors(values: Tensor) -> tuple[Tensor, Tensor]:
    """Kolmogorov-Smirnov test of normality with mean and variance unknown, column by column.

        D = sup over z of |share of (v - mean) / std that is at most z - Phi(z)|, std by 1/(n-1)

    The p-value is that of fitted parameters: (1 + number of D* >= D) / (1 + 20,000) over that many
    simulated normal samples of the same size, the same ones in every call. (Tables for known
    parameters would hardly ever reject.) Its standard error is at most 0.0035.

    Args:
        values: (n, C), n at least 4; floating, finite.

    Returns:
        D and p, each (C,) float64; nan for a column of equal values.

    Source: Lilliefors, On the Kolmogorov-Smirnov Test for Normality with Mean
    and Variance Unknown (1967).
    """
    check_floating("lilliefors", "values", values)
    if values.dim() != 2 or len(values) < 4:
        refuse("lilliefors", "values", "have shape (n, C) with n at least 4", list(values.shape))
    distance = _distance(values.detach().double().cpu())
    null = _null_distances(len(values))
    at_least = len(null) - torch.searchsorted(null, distance, side="left")
    p = (1 + at_least).double() / (1 + len(null))
    return distance, torch.where(distance.isnan(), math.nan, p)


def _distance(values: Tensor) -> Tensor:
    n = len(values)
    std = values.std(0)
    # Equal values may have a standard deviation of rounding's size.
    constant = values.amax(0) == values.amin(0)
    phi = torch.special.ndtr(((values - values.mean(0)) / std).sort(0).values)
    steps = torch.arange(n + 1, dtype=values.dtype, device=values.device)[:, None] / n
    distance = torch.maximum((steps[1:] - phi).amax(0), (phi - steps[:-1]).amax(0))
    return torch.where(constant, math.nan, distance)


@lru_cache(maxsize=16)
def _null_distances(n: int) -> Tensor:
    """Ascending D of 20,000 normal samples of size n."""
    generator = torch.Generator().manual_seed(0)
    block = max(1, 2**20 // n)
    sizes = [min(block, _NULL_SAMPLES - k) for k in range(0, _NULL_SAMPLES, block)]
    options = dict(generator=generator, dtype=torch.float64, device="cpu")
    draws = (torch.randn(n, size, **options) for size in sizes)
    return torch.cat([_distance(sample) for sample in draws]).sort().values
