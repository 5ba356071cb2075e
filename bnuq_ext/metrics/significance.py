"""The mean of the runs of an experiment, its standard error, and whether it differs from 0."""

import math

from torch import Tensor

from ..ops.checks import refuse
from .arguments import take_numbers

SIGNS = {"better": "+", "worse": "-", "level": "="}  # of `compare`, in a table


def t_test(values: Tensor | list[float]) -> tuple[float, float]:
    """Student's t-test of one sample against a mean of 0, two-sided.

    t = mean / (s / sqrt(R)) with s² of 1 / (R - 1), and p = P(|T| >= |t|) for R - 1 degrees of
    freedom, also far out with full relative accuracy (Teye et al. 2018, appendix 1.7, over 25
    runs).

    Args:
        values: (R,) one value per run, R at least 2.

    Returns:
        (t, p); t infinite and p = 0 if all values are one that is not 0, both nan if all are 0 or
        one is nan.
    """
    values = take_numbers("t_test", "values", values)
    if values.dim() != 1 or len(values) < 2:
        refuse("t_test", "values", "have shape (R,) with R of at least 2", list(values.shape))
    largest = values.abs().max()
    if 0 < largest < math.inf:
        # Their squares may be too large or too small; by a power of two none is rounded.
        values = values / 2.0 ** (math.frexp(largest)[1] - 1)
    # Equal values may have a standard deviation of rounding's size.
    std = values.std() if (values != values[0]).any() else values.new_zeros(())
    t = (values.mean() / (std / len(values) ** 0.5)).item()
    freedom = len(values) - 1
    if not math.isfinite(t):
        return t, math.nan if math.isnan(t) else 0.0
    far = t * t / (freedom + t * t)
    return t, _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t), far)


def mean_and_error(values) -> tuple[float, float]:
    """Mean and standard error, std / sqrt(n) with 1/(n - 1); the error of a single value is nan."""
    values = [float(value) for value in values]
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return mean, math.nan
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)


def agrees(mean: float, error: float, other: float = 0.0, other_error: float = 0.0) -> bool | None:
    """Whether two means differ by at most two standard errors of their difference;
    None if unknown."""
    if math.isnan(error) or math.isnan(other_error):
        return None
    return abs(mean - other) <= 2 * math.hypot(error, other_error)


def compare(ours: list[float], theirs: list[float], more_is_better: bool) -> str | None:
    """Whether ours are "better", "worse" or "level", a mean paired difference within two standard
    errors; None for one pair, which has no standard error."""
    sign = 1 if more_is_better else -1
    differences = [sign * (a - b) for a, b in zip(ours, theirs, strict=True)]
    mean, error = mean_and_error(differences)
    same = agrees(mean, error)
    if same is None:
        return None
    return "level" if same else "better" if mean > 0 else "worse"


def _incomplete_beta(a: float, b: float, x: float, rest: float) -> float:
    """I_x(a, b) by the continued fraction of DLMF 8.17.22; rest = 1 - x, with its own digits."""
    if x == 0 or rest == 0:
        return float(rest == 0)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, rest, x)
    fraction = 1.0
    for m in range(500, 0, -1):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m - 1) * (a + b + m - 1) * x / ((a + 2 * m - 2) * (a + 2 * m - 1))
        fraction = 1 + odd / (1 + even / fraction)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(log_front + a * math.log(x) + b * math.log(rest)) / (a * fraction)
