"""Bounds, fitted variances and the t-test against scipy and searches of another kind."""

import math

import pytest
import torch
from normals import draw
from scipy import optimize, stats

from bnuq_ext import metrics
from bnuq_ext.metrics.fits import _least


def search(loss, bounds):
    """The least value over a logarithm, by scipy, from the best of 2,000 points."""
    grid = torch.linspace(*bounds, 2000).tolist()
    best = min(grid, key=loss)
    step = grid[1] - grid[0]
    found = optimize.minimize_scalar(
        loss, bounds=(best - step, best + step), method="bounded", options={"xatol": 1e-9}
    )
    return math.exp(found.x)


def noise_loss(samples, y, score):
    """The mean score, the less the better, as a function of the noise's log variance."""
    var, mean = torch.var_mean(samples, 0, correction=0)

    def loss(log_var):
        if score == "pll":
            return -metrics.gaussian_pll(samples, y, math.exp(log_var)).item()
        return metrics.gaussian_crps(mean, (var + math.exp(log_var)).sqrt(), y).item()

    return loss


MEAN, Y = draw(30), draw(30, seed=1)


def test_best_crps_is_the_least_over_all_spreads():
    stds = torch.linspace(math.log(1e-4), math.log(30), 4001).exp().tolist()
    scores = [metrics.gaussian_crps(MEAN, std, Y, reduction="none") for std in stds]
    actual = metrics.best_crps(MEAN, Y, reduction="none")
    torch.testing.assert_close(actual, torch.stack(scores).min(0).values, rtol=1e-5, atol=0)
    torch.testing.assert_close(actual, 0.594904 * (MEAN - Y).abs(), rtol=1e-6, atol=0)
    assert metrics.best_crps(MEAN, Y).item() == pytest.approx(actual.mean().item())


def test_best_pll_is_the_highest_over_all_variances():
    variances = torch.linspace(math.log(1e-6), math.log(100), 4001).exp().tolist()
    scores = [metrics.gaussian_pll(MEAN[None], Y, v, reduction="none") for v in variances]
    actual = metrics.best_pll(MEAN, Y, reduction="none")
    torch.testing.assert_close(actual, torch.stack(scores).max(0).values, rtol=0, atol=1e-5)
    assert metrics.best_pll(MEAN, Y).item() == pytest.approx(actual.mean().item())


def test_best_scores_of_several_outputs():
    pll = metrics.best_pll(MEAN.view(10, 3), Y.view(10, 3), reduction="none")
    torch.testing.assert_close(pll, metrics.best_pll(MEAN, Y, reduction="none").view(10, 3).sum(1))
    crps = metrics.best_crps(MEAN.view(10, 3), Y.view(10, 3), reduction="none")
    torch.testing.assert_close(
        crps, metrics.best_crps(MEAN, Y, reduction="none").view(10, 3).mean(1)
    )


def test_best_pll_of_an_exact_hit_is_infinite_or_held():
    mean, y = torch.tensor([1.0, 2.0, math.nan]), torch.tensor([1.0, 2.1, 0.0])
    assert metrics.best_pll(mean, y, reduction="none")[0].item() == math.inf
    held = metrics.best_pll(mean, y, min_var=0.04, reduction="none")
    expected = stats.norm.logpdf(y.double(), mean.double(), 0.2)
    torch.testing.assert_close(held, torch.from_numpy(expected), equal_nan=True)


@pytest.mark.parametrize("shape", ["normal", "heavy", "mixed"])
def test_constant_variance_of_the_crps_matches_scipy(shape):
    error = {"normal": draw(200), "heavy": draw(200) ** 5, "mixed": draw(200).round()}[shape]
    zero = torch.zeros_like(error)
    expected = search(
        lambda v: metrics.gaussian_crps(zero, math.exp(v / 2), error).item(), (-20, 15)
    )
    actual = metrics.fit_constant_variance(zero, error)
    assert actual == pytest.approx(expected, rel=1e-5)
    # The slope of the score in std is 0 there, which places the optimum better than its value does.
    slope = torch.exp(-error.square() / (2 * actual)).mean().item()
    assert slope == pytest.approx(0.5**0.5, rel=1e-12)


def test_constant_variance_of_the_pll_is_the_mean_squared_error():
    actual = metrics.fit_constant_variance(MEAN, Y, "pll")
    expected = search(lambda v: -metrics.gaussian_pll(MEAN[None], Y, math.exp(v)).item(), (-10, 10))
    assert actual == pytest.approx(expected, rel=1e-5)
    assert actual == pytest.approx((MEAN - Y).square().mean().item(), rel=1e-12)


def test_constant_variance_of_few_errors():
    # 29 % of exp(-1 / (2 v)) and 71 % of 1 exceed 1 / sqrt(2) for any v > 0.
    error = torch.tensor([0.0] * 71 + [1.0] * 29)
    assert metrics.fit_constant_variance(torch.zeros(100), error) == 0
    error[70] = 1
    few = metrics.fit_constant_variance(torch.zeros(100), error)
    assert 0.7 + 0.3 * math.exp(-1 / (2 * few)) == pytest.approx(0.5**0.5, rel=1e-12)
    assert metrics.fit_constant_variance(MEAN, MEAN, "pll") == 0


def test_equal_errors_want_the_best_variance_of_each():
    mean, y = torch.zeros(7), torch.tensor([2.0, -2.0, 2.0, 2.0, -2.0, -2.0, 2.0])
    expected = 4 / math.log(2)
    assert metrics.fit_constant_variance(mean, y) == pytest.approx(expected, rel=1e-12)
    actual = metrics.fit_noise_variance(mean.expand(3, -1), y)
    assert actual == pytest.approx(expected, rel=1e-6)


def test_constant_variance_far_below_the_mean_squared_error():
    # Of exp(-e² / (2 v)) with v near the smaller e², what the larger errors add is below 1e-300.
    error = torch.tensor([1e-4] * 75 + [1.0] * 25, dtype=torch.float64)
    actual = metrics.fit_constant_variance(torch.zeros(100), error)
    assert actual == pytest.approx(1e-8 / (2 * math.log(0.75 * 2**0.5)), rel=1e-12, abs=0)


@pytest.mark.parametrize("unit", [1e-8, 1e8])
def test_fits_follow_the_unit(unit):
    samples = MEAN + 0.3 * draw(5, 30, seed=2)
    for score in ("crps", "pll"):
        one = metrics.fit_constant_variance(MEAN, Y, score)
        assert metrics.fit_constant_variance(unit * MEAN, unit * Y, score) == pytest.approx(
            unit**2 * one, rel=1e-9, abs=0
        )
        one = metrics.fit_noise_variance(samples, Y, score)
        assert metrics.fit_noise_variance(unit * samples, unit * Y, score) == pytest.approx(
            unit**2 * one, rel=1e-5, abs=0
        )


@pytest.mark.parametrize("score", ["crps", "pll"])
@pytest.mark.parametrize("outputs", [(), (2,)], ids=["N", "ND"])
def test_noise_matches_scipy(score, outputs):
    center = draw(60, *outputs)
    samples = center + 0.5 * draw(8, 60, *outputs, seed=1)
    y = center + 0.8 * draw(60, *outputs, seed=2)
    expected = search(noise_loss(samples, y, score), (-10, 5))
    actual = metrics.fit_noise_variance(samples, y, score)
    assert actual == pytest.approx(expected, rel=1e-5)
    assert 0.1 < actual < 1


@pytest.mark.parametrize("score", ["crps", "pll"])
def test_one_exact_hit_is_not_all_of_them(score):
    samples, y = torch.stack([MEAN - 0.2, MEAN + 0.2]), torch.cat([MEAN[:1], Y[1:]])
    y[0] = torch.var_mean(samples, 0)[1][0]
    expected = search(noise_loss(samples, y, score), (-10, 5))
    assert metrics.fit_noise_variance(samples, y, score) == pytest.approx(expected, rel=1e-5)


def test_noise_of_a_mixture_whose_means_are_all_exact():
    samples, y = torch.tensor([[0.0, 0.0], [1.0, 2.0]]), torch.tensor([0.5, 1.0])
    expected = search(noise_loss(samples, y, "pll"), (-10, 5))
    assert expected > 0.5
    assert metrics.fit_noise_variance(samples, y, "pll") == pytest.approx(expected, rel=1e-5)
    assert metrics.fit_noise_variance(samples, y, "crps") == 0
    assert metrics.fit_noise_variance(torch.stack([y, y]), y, "pll") == 0


def test_noise_of_a_mixture_may_be_far_above_the_error_of_its_mean():
    """Replicas at -1 and 1 about targets near 0: a mixture without the spread is no density
    of these."""
    samples = torch.tensor([[-1.0], [1.0]]).expand(2, 6).double()
    y = torch.tensor([0.1, -0.1, 0.05, -0.05, 0.02, 0.1]).double()
    expected = search(lambda v: -metrics.gaussian_pll(samples, y, math.exp(v)).item(), (-8, 3))
    assert expected > 50 * y.square().max()
    assert metrics.fit_noise_variance(samples, y, "pll") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("place", torch.linspace(-5, 5, 21).tolist())
def test_a_dip_of_a_third_of_a_decade_to_each_side_is_found(place):
    def loss(x):
        return 0.01 * abs(x) - max(0.0, 1 - abs(x - place) / 0.75)

    assert _least(loss, -12, 12) == pytest.approx(place, abs=1e-6)


def test_noise_of_replicas_that_agree_is_the_constant_variance():
    for samples in (MEAN.expand(4, -1), MEAN[None]):
        actual = metrics.fit_noise_variance(samples, Y)
        assert actual == pytest.approx(metrics.fit_constant_variance(MEAN, Y), rel=1e-6)


def test_noise_of_replicas_that_spread_enough_is_the_least():
    samples = MEAN + 20 * draw(50, 30, seed=2)
    mse = (samples.mean(0) - Y).square().mean().item()
    assert metrics.fit_noise_variance(samples, Y) == pytest.approx(1e-6 * mse, rel=1e-6)
    assert metrics.fit_noise_variance(MEAN.expand(4, -1), MEAN) == 0


@pytest.mark.parametrize("sure, unsure", [(4, 3), (1, 2)])
def test_noise_finds_the_deeper_of_two_optima(sure, unsure):
    # Points with a tiny error on which the replicas agree want no noise; those with an error of 3
    # beside a spread of 1 want much, and their slope wins again where the noise is large.
    samples = torch.tensor([[0.0, -1.0], [0.0, 1.0]]).repeat_interleave(
        torch.tensor([sure, unsure]), 1
    )
    y = torch.tensor([0.01] * sure + [3.0] * unsure)
    var, mean = torch.var_mean(samples.double(), 0, correction=0)
    variances = torch.linspace(-14, 5, 400).exp().tolist()
    values = [metrics.gaussian_crps(mean, (var + v).sqrt(), y).item() for v in variances]
    middle = range(1, len(values) - 1)
    optima = [variances[i] for i in middle if values[i - 1] > values[i] < values[i + 1]]
    assert len(optima) == 2
    deeper = optima[0 if sure > unsure else 1]
    assert metrics.fit_noise_variance(samples, y) == pytest.approx(deeper, rel=0.06)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 25, 26, 1000, 1_000_000])
@pytest.mark.parametrize("shift", [0.0, 0.01, 0.4, 3.0, 40.0])
def test_t_test_matches_scipy(size, shift):
    values = draw(size, seed=size) + shift
    expected = stats.ttest_1samp(values, 0.0)
    t, p = metrics.t_test(values)
    assert t == pytest.approx(expected.statistic, rel=1e-10)
    assert p == pytest.approx(expected.pvalue, rel=1e-8, abs=1e-300)
    assert metrics.t_test(values.tolist()) == (t, p)


@pytest.mark.parametrize("t", [1e-7, 1e5, 1e9])
def test_t_test_far_out_keeps_its_digits(t):
    values = stats.zscore(draw(5), ddof=1) + t / 5**0.5
    expected = 2 * stats.t.sf(metrics.t_test(values)[0], 4)
    assert metrics.t_test(values)[1] == pytest.approx(expected, rel=1e-10, abs=0)


@pytest.mark.parametrize("mean, error, p", [(-56.39, 14.27, 5.94e-4), (5.75, 0.52, 6.71e-11)])
def test_t_test_gives_the_printed_p_values(mean, error, p):
    # Teye et al. 2018, appendix table 4: 25 runs with this mean and standard error, both rounded.
    values = stats.zscore(draw(25), ddof=1) * (error * 5) + mean
    assert metrics.t_test(values)[1] == pytest.approx(p, rel=0.15)


@pytest.mark.parametrize("size", [1e-310, 1e-200, 1e200, 1e308])
def test_t_test_of_values_whose_squares_leave_the_range(size):
    t, p = metrics.t_test([0.5 * size, size])
    assert t == pytest.approx(3, rel=1e-12) and p == pytest.approx(0.204832764699, rel=1e-9)


def test_t_test_of_equal_values():
    assert metrics.t_test([2.0, 2.0, 2.0]) == (math.inf, 0.0)
    assert metrics.t_test([-2.0, -2.0]) == (-math.inf, 0.0)
    assert metrics.t_test([0.1, 0.1, 0.1]) == (math.inf, 0.0)  # their mean rounds
    assert metrics.t_test([math.inf, math.inf]) == (math.inf, 0.0)
    assert metrics.t_test([-1.0, 1.0]) == (0.0, 1.0)
    for values in ([0.0, 0.0], [1.0, math.nan]):
        assert all(math.isnan(value) for value in metrics.t_test(values))


def test_normalised_score():
    assert metrics.normalised_score(0.9, 1.0, 0.5).item() == pytest.approx(20)
    assert metrics.normalised_score(-3.0, -2.5, -2.0).item() == pytest.approx(-100)
    runs = metrics.normalised_score(torch.tensor([1.0, 0.5]), torch.ones(2), 0.5)
    assert runs.tolist() == [0, 100] and runs.dtype == torch.float64
    assert math.isnan(metrics.normalised_score(1.0, 1.0, 1.0).item())


def test_constant_and_best_span_the_normalised_score():
    std = metrics.fit_constant_variance(MEAN, Y) ** 0.5
    constant, best = metrics.gaussian_crps(MEAN, std, Y), metrics.best_crps(MEAN, Y)
    others = [metrics.gaussian_crps(MEAN, s, Y) for s in (0.5 * std, 2 * std)]
    assert all(metrics.normalised_score(other, constant, best) < 0 for other in others)
    own = (Y - MEAN).abs() / math.log(2) ** 0.5
    reached = metrics.gaussian_crps(MEAN, own, Y)
    assert metrics.normalised_score(reached, constant, best).item() == pytest.approx(100)


BAD = torch.tensor([0.0, math.inf])
FAR = torch.full((2, 3), 1e200, dtype=torch.float64)
REFUSED = [
    (
        lambda: metrics.best_pll(MEAN, Y, min_var=-1.0),
        "best_pll: min_var must not be negative, got -1.0",
    ),
    (
        lambda: metrics.best_pll(MEAN, Y, min_var=math.nan),
        "best_pll: min_var must not be negative, got nan",
    ),
    (lambda: metrics.best_crps(MEAN, Y[:2]), "best_crps: y must have shape [30], got [2]"),
    (
        lambda: metrics.fit_constant_variance(MEAN, Y, "nll"),
        "fit_constant_variance: score must be one of crps, pll, got 'nll'",
    ),
    (
        lambda: metrics.fit_constant_variance(MEAN[:0], Y[:0]),
        "fit_constant_variance: mean must have rows, got [0]",
    ),
    (
        lambda: metrics.fit_constant_variance(BAD, Y[:2]),
        "fit_constant_variance: mean must be finite, got 1 values that are not",
    ),
    (
        lambda: metrics.fit_constant_variance(MEAN[:2], BAD),
        "fit_constant_variance: y must be finite, got 1 values that are not",
    ),
    (
        lambda: metrics.fit_noise_variance(MEAN, Y),
        "fit_noise_variance: y must have shape [], got [30]",
    ),
    (
        lambda: metrics.fit_noise_variance(MEAN[None], Y, "rmse"),
        "fit_noise_variance: score must be one of crps, pll, got 'rmse'",
    ),
    (
        lambda: metrics.fit_noise_variance(MEAN[None, :0], Y[:0]),
        "fit_noise_variance: samples must have rows, got [1, 0]",
    ),
    (
        lambda: metrics.fit_noise_variance(BAD[None], MEAN[:2]),
        "fit_noise_variance: samples must be finite, got 1 values that are not",
    ),
    (
        lambda: metrics.fit_noise_variance(MEAN[None, :2], BAD),
        "fit_noise_variance: y must be finite, got 1 values that are not",
    ),
    *(
        (
            lambda score=score, far=far: metrics.fit_noise_variance(far, Y[:3], score),
            "fit_noise_variance: samples must have squared distances from y of a finite sum, "
            "got distances of up to 1e+200",
        )
        for score in ("crps", "pll")
        for far in (FAR, FAR * torch.tensor([[1.0], [-1.0]]))
    ),
    (
        lambda: metrics.t_test([1.0, 10**400]),
        "t_test: values must fit into floats, got larger numbers",
    ),
    (
        lambda: metrics.normalised_score(torch.ones(2), torch.ones(3), 1.0),
        "normalised_score: score must fit constant and best, got shapes [[2], [3], []]",
    ),
    (
        lambda: metrics.t_test([1.0]),
        "t_test: values must have shape (R,) with R of at least 2, got [1]",
    ),
    (
        lambda: metrics.t_test(torch.ones(3, 2)),
        "t_test: values must have shape (R,) with R of at least 2, got [3, 2]",
    ),
]

NO_NUMBERS = [
    (lambda: metrics.t_test("one"), "t_test: values must be numbers or a tensor, got 'one'"),
    (
        lambda: metrics.normalised_score(1.0, None, 2.0),
        "normalised_score: constant must be numbers or a tensor, got None",
    ),
    (lambda: metrics.best_pll(MEAN, Y, min_var="0"), "best_pll: min_var must be a number, got '0'"),
]


@pytest.mark.parametrize("call, message", NO_NUMBERS, ids=[r[1][:30] for r in NO_NUMBERS])
def test_rejects_what_is_no_number(call, message):
    with pytest.raises(TypeError) as caught:
        call()
    assert str(caught.value) == message


@pytest.mark.parametrize("call, message", REFUSED, ids=[r[1][:60] for r in REFUSED])
def test_rejects(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == message


def test_t_test_of_far_less_than_a_standard_error():
    t, p = metrics.t_test([1.001, -1.0])
    assert p == pytest.approx(1 - 2 / math.pi * math.atan(t), rel=1e-9)  # one degree of freedom


def test_t_test_of_values_close_to_each_other():
    t, p = metrics.t_test([1e8 - 1, 1e8, 1e8 + 1])
    assert t == pytest.approx(1e8 * 3**0.5, rel=1e-15)
    assert p == pytest.approx(1 / (3e16 + 1), rel=1e-12, abs=0)  # 1 - t / sqrt(t² + 2), t large
