"""The scores of regression against scoringrules, properscoring, scipy and quadrature."""

import math

import numpy as np
import properscoring
import pytest
import scoringrules
import torch
from normals import draw
from scipy import integrate, stats

from bnuq_ext import metrics


def problem(rows=40, replicas=7):
    """Means, standard deviations of 0.1 to 3, targets up to 20 of them off, samples."""
    mean, y = draw(rows), draw(rows, seed=1) + 2 * (torch.arange(rows) % 2)
    std = torch.linspace(math.log(0.1), math.log(3), rows, dtype=torch.float64).exp()
    return mean, std, y, mean + std * draw(replicas, rows, seed=2)


def assert_close(actual, expected):
    expected = torch.as_tensor(np.asarray(expected))
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-13)


def test_gaussian_crps_matches_two_packages():
    mean, std, y, _ = problem()
    actual = metrics.gaussian_crps(mean, std, y, reduction="none")
    numbers = (y.numpy(), mean.numpy(), std.numpy())
    assert_close(actual, scoringrules.crps_normal(*numbers))
    assert_close(actual, properscoring.crps_gaussian(*numbers))
    assert metrics.gaussian_crps(mean, std, y).item() == pytest.approx(actual.mean().item())


@pytest.mark.parametrize("y", [-30.0, 0.4, 2.0])
def test_gaussian_crps_is_its_integral(y):
    below, _ = integrate.quad(lambda v: stats.norm.cdf(v, 0.5, 0.8) ** 2, -40, y, points=[0.5])
    above, _ = integrate.quad(lambda v: stats.norm.sf(v, 0.5, 0.8) ** 2, y, 40, points=[0.5])
    actual = metrics.gaussian_crps(torch.tensor([0.5]).double(), 0.8, torch.tensor([y]).double())
    assert actual.item() == pytest.approx(below + above, rel=1e-7)


def test_gaussian_crps_without_spread_is_the_absolute_error():
    mean, y = torch.tensor([1.0, 2.0, -1.0]), torch.tensor([1.0, 5.0, -1e30])
    actual = metrics.gaussian_crps(mean, 0.0, y, reduction="none")
    torch.testing.assert_close(actual, (y.double() - mean.double()).abs(), rtol=0, atol=0)
    actual = metrics.gaussian_crps(mean, torch.tensor([1e-300] * 3).double(), y, reduction="none")
    torch.testing.assert_close(actual, (y.double() - mean.double()).abs())


def test_gaussian_crps_has_gradients_without_spread():
    """Those of the absolute error, and by the spread -1 / sqrt(pi), whatever the error."""
    y = torch.tensor([1.0, 5.0, -1e30, 2.0]).double()
    mean = torch.tensor([1.0, 2.0, -1.0, 3.0]).double().requires_grad_()
    std = torch.zeros(4).double().requires_grad_()
    by_mean, by_std = torch.autograd.grad(
        metrics.gaussian_crps(mean, std, y, reduction="none").sum(), (mean, std)
    )
    assert by_mean.tolist() == [0.0, -1.0, 1.0, 1.0]
    torch.testing.assert_close(by_std[1:], torch.full_like(by_std[1:], -(math.pi**-0.5)))
    assert by_std.isfinite().all()


@pytest.mark.parametrize("replicas", [2, 3, 50])
def test_ensemble_crps_matches_two_packages(replicas):
    _, _, y, samples = problem(replicas=replicas)
    fair = metrics.ensemble_crps(samples, y, reduction="none")
    biased = metrics.ensemble_crps(samples, y, "biased", reduction="none")
    numbers = (y.numpy(), samples.numpy().T)
    assert_close(fair, scoringrules.crps_ensemble(*numbers, estimator="fair"))
    assert_close(biased, scoringrules.crps_ensemble(*numbers, estimator="nrg"))
    assert_close(biased, properscoring.crps_ensemble(*numbers))
    assert metrics.ensemble_crps(samples, y).item() == pytest.approx(fair.mean().item())


def test_ensemble_crps_far_from_0_keeps_its_digits():
    _, _, y, samples = problem(replicas=50)
    far, far_y = samples + 1e8, y + 1e8
    actual = metrics.ensemble_crps(far, far_y, reduction="none")
    near = metrics.ensemble_crps(far - 1e8, far_y - 1e8, reduction="none")
    torch.testing.assert_close(actual, near, rtol=0, atol=1e-12)


def test_ensemble_crps_of_one_replica_is_the_absolute_error():
    _, _, y, samples = problem(replicas=1)
    actual = metrics.ensemble_crps(samples, y, "biased", reduction="none")
    torch.testing.assert_close(actual, (samples[0] - y).abs(), rtol=0, atol=0)


def test_fair_crps_is_unbiased_and_the_other_is_not():
    # 20,000 ensembles of 3 standard normals at y = 0.3: z of the mean against the closed form,
    # alpha 6e-5 at 4 standard errors; a bias of 1.5 % of the score is seen with a power of 0.9.
    samples, y = draw(3, 20_000), torch.full((20_000,), 0.3, dtype=torch.float64)
    exact = metrics.gaussian_crps(torch.zeros_like(y), 1.0, y).item()
    for estimator, biased in (("fair", False), ("biased", True)):
        values = metrics.ensemble_crps(samples, y, estimator, reduction="none")
        z = (values.mean() - exact) / (values.std() / len(values) ** 0.5)
        assert (abs(z) > 4) == biased


@pytest.mark.parametrize("noise_var", [0.01, 1.0, 300.0])
def test_gaussian_pll_matches_scipy(noise_var):
    _, _, y, samples = problem()
    density = stats.norm.pdf(y.numpy(), samples.numpy(), noise_var**0.5).mean(0)
    actual = metrics.gaussian_pll(samples, y, noise_var, reduction="none")
    seen = density > 1e-300
    assert seen.sum() >= 30
    assert_close(actual[torch.from_numpy(seen)], np.log(density[seen]))
    assert metrics.gaussian_pll(samples, y, noise_var).item() == pytest.approx(actual.mean().item())


def test_gaussian_pll_far_in_the_tail_is_finite():
    samples, y = torch.tensor([[0.0], [1.0]]), torch.tensor([1e4])
    expected = -0.5 * 9999.0**2 * 1e3 - math.log(2) - 0.5 * math.log(2 * math.pi / 1e3)
    assert metrics.gaussian_pll(samples, y, 1e-3).item() == pytest.approx(expected, rel=1e-12)


def test_gaussian_pll_of_several_outputs_is_their_joint_density():
    samples, y = draw(5, 6, 3), draw(6, 3, seed=1)
    noise = torch.tensor([0.5, 1.0, 2.0])
    joint = [stats.multivariate_normal(cov=np.diag(noise)).pdf(y - replica) for replica in samples]
    actual = metrics.gaussian_pll(samples, y, noise, reduction="none")
    assert_close(actual, np.log(np.mean(joint, 0)))


def test_gaussian_pll_with_noise_of_each_row():
    samples, y = draw(5, 4), draw(4, seed=1)
    noise = torch.tensor([0.5, 1.0, 2.0, 4.0])
    rows = [metrics.gaussian_pll(samples[:, n : n + 1], y[n : n + 1], noise[n]) for n in range(4)]
    actual = metrics.gaussian_pll(samples, y, noise, reduction="none")
    torch.testing.assert_close(actual, torch.stack(rows))


def test_gaussian_nll_is_scipys_density_and_the_pll_of_one_replica():
    mean, std, y, _ = problem()
    actual = metrics.gaussian_nll(mean, std, y, reduction="none")
    assert_close(actual, -stats.norm.logpdf(y, mean, std))
    one = metrics.gaussian_pll(mean[None], y, std.square(), reduction="none")
    torch.testing.assert_close(actual, -one)


def test_gaussian_nll_without_spread_is_infinite():
    mean, y = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 5.0])
    assert metrics.gaussian_nll(mean, 0.0, y, reduction="none").tolist() == [-math.inf, math.inf]


def test_rmse_matches_numpy():
    mean, y = draw(20, 3), draw(20, 3, seed=1)
    squared = (mean - y).numpy() ** 2
    assert metrics.rmse(mean, y).item() == pytest.approx(np.sqrt(squared.mean()), rel=1e-12)
    assert_close(metrics.rmse(mean, y, reduction="none"), np.sqrt(squared.mean(1)))
    flat = metrics.rmse(mean[:, 0], y[:, 0], reduction="none")
    torch.testing.assert_close(flat, (mean - y)[:, 0].abs())


def test_ranked_scores_of_several_outputs_are_means():
    mean, y, samples = draw(6, 3), draw(6, 3, seed=1), draw(5, 6, 3, seed=2)
    flat = metrics.gaussian_crps(mean.flatten(), 0.7, y.flatten(), reduction="none")
    actual = metrics.gaussian_crps(mean, 0.7, y, reduction="none")
    torch.testing.assert_close(actual, flat.view(6, 3).mean(1))
    flat = metrics.ensemble_crps(samples.flatten(1), y.flatten(), reduction="none")
    actual = metrics.ensemble_crps(samples, y, reduction="none")
    torch.testing.assert_close(actual, flat.view(6, 3).mean(1))


SCORES = {
    "rmse": lambda samples, y, var, **k: metrics.rmse(samples[0], y, **k),
    "gaussian_nll": lambda samples, y, var, **k: metrics.gaussian_nll(samples[0], var, y, **k),
    "gaussian_crps": lambda samples, y, var, **k: metrics.gaussian_crps(samples[0], var, y, **k),
    "gaussian_pll": lambda samples, y, var, **k: metrics.gaussian_pll(samples, y, var, **k),
    "ensemble_crps": lambda samples, y, var, **k: metrics.ensemble_crps(samples, y, **k),
    "best_pll": lambda samples, y, var, **k: metrics.best_pll(samples[0], y, **k),
    "best_crps": lambda samples, y, var, **k: metrics.best_crps(samples[0], y, **k),
}


@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
def test_one_output_is_one_column_and_a_row_may_stand_alone(score):
    samples, y, var = draw(5, 6), draw(6, seed=1), 0.5 + torch.arange(6)
    expected = score(samples, y, var, reduction="none")
    assert expected.shape == (6,)
    column = score(samples[..., None], y, var[:, None], reduction="none")
    torch.testing.assert_close(column, expected)
    column = score(samples, y[:, None], var, reduction="none")
    torch.testing.assert_close(column, expected)
    columns = score(samples[..., None], y[:, None], var)
    torch.testing.assert_close(columns, score(samples, y, var))
    for reduction in ("none", "mean"):
        alone = score(samples[:, 2], y[2], var[2], reduction=reduction)
        torch.testing.assert_close(alone, expected[2])


@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
def test_outputs_of_more_dimensions_are_outputs(score):
    samples, y, var = draw(5, 6, 2, 3), draw(6, 2, 3, seed=1), 0.5 + draw(6, 2, 3, seed=2).square()
    flat = score(samples.flatten(2), y.flatten(1), var.flatten(1), reduction="none")
    torch.testing.assert_close(score(samples, y, var, reduction="none"), flat)


def test_nan_stays_in_its_row():
    mean, y = torch.tensor([math.nan, 1.0]), torch.tensor([0.0, 0.5])
    samples = torch.stack([mean, torch.tensor([0.0, 2.0])])
    for values in (
        metrics.rmse(mean, y, reduction="none"),
        metrics.gaussian_crps(mean, 1.0, y, reduction="none"),
        metrics.gaussian_crps(y, torch.tensor([math.nan, 1.0]), y, reduction="none"),
        metrics.gaussian_nll(mean, 1.0, y, reduction="none"),
        metrics.ensemble_crps(samples, y, reduction="none"),
        metrics.gaussian_pll(samples, y, 1.0, reduction="none"),
    ):
        assert values.isnan().tolist() == [True, False]


def test_no_rows_have_no_mean():
    empty = torch.zeros(0)
    for score in (metrics.rmse, metrics.best_crps, metrics.best_pll):
        assert score(empty, empty).isnan() and score(empty, empty, reduction="none").shape == (0,)
    for score in (metrics.gaussian_crps, metrics.gaussian_nll):
        assert score(empty, 1.0, empty, reduction="none").shape == (0,)
    samples = torch.zeros(2, 0, 3)
    assert metrics.ensemble_crps(samples, samples[0], reduction="none").shape == (0,)
    assert metrics.gaussian_pll(samples, samples[0], 1.0, reduction="none").shape == (0,)


def test_low_precision_is_computed_in_double():
    mean, std, y, samples = (value.bfloat16() for value in problem())
    wide = metrics.gaussian_crps(mean.double(), std.double(), y.double())
    assert metrics.gaussian_crps(mean, std, y).item() == wide.item()
    wide = metrics.gaussian_pll(samples.double(), y.double(), 0.1)
    assert metrics.gaussian_pll(samples, y, 0.1).item() == wide.item()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_targets_may_be_counts(dtype):
    mean, std, y, samples = problem()
    counts = y.abs().mul(10).round()
    for score, *given in (
        (metrics.rmse, mean),
        (metrics.gaussian_nll, mean, std),
        (metrics.gaussian_crps, mean, std),
        (metrics.ensemble_crps, samples),
    ):
        assert score(*given, counts.to(dtype)).item() == score(*given, counts).item()


MEAN, SAMPLES = torch.zeros(3), torch.zeros(2, 3)
REFUSED = [
    (lambda: metrics.rmse([0.0], MEAN), "rmse: mean must be a tensor, got list"),
    (
        lambda: metrics.rmse(MEAN, MEAN > 0),
        "rmse: y must be a floating-point tensor, got torch.bool",
    ),
    (
        lambda: metrics.rmse(MEAN, MEAN.cfloat()),
        "rmse: y must be a floating-point tensor, got torch.complex64",
    ),
    (lambda: metrics.rmse(MEAN[None], MEAN), "rmse: y must have shape [1, 3], got [3]"),
    (lambda: metrics.rmse(MEAN, MEAN[:1]), "rmse: y must have shape [3], got [1]"),
    (
        lambda: metrics.rmse(MEAN[:, None, None], MEAN),
        "rmse: y must have shape [3, 1, 1], got [3]",
    ),
    (
        lambda: metrics.rmse(MEAN, MEAN, reduction="sum"),
        "rmse: reduction must be one of mean, none, got 'sum'",
    ),
    (
        lambda: metrics.gaussian_crps(MEAN, "1", MEAN),
        "gaussian_crps: std must be a number or a tensor, got str",
    ),
    (
        lambda: metrics.gaussian_crps(MEAN, torch.ones(2), MEAN),
        "gaussian_crps: std must broadcast to the shape [3] of y, got [2]",
    ),
    (
        lambda: metrics.gaussian_crps(MEAN, -1.0, MEAN),
        "gaussian_crps: std must not be negative, got -1.0",
    ),
    (
        lambda: metrics.gaussian_nll(MEAN, torch.tensor([1.0, -2.0, 1.0]), MEAN),
        "gaussian_nll: std must not be negative, got -2.0",
    ),
    (
        lambda: metrics.gaussian_pll(MEAN, MEAN, 1.0),
        "gaussian_pll: y must have shape [], got [3]",
    ),
    (
        lambda: metrics.gaussian_pll(MEAN[0], MEAN, 1.0),
        "gaussian_pll: samples must have shape (T, N, *) with T > 0, got []",
    ),
    (
        lambda: metrics.gaussian_pll(SAMPLES[:0], MEAN, 1.0),
        "gaussian_pll: samples must have shape (T, N, *) with T > 0, got [0, 3]",
    ),
    (
        lambda: metrics.gaussian_pll(SAMPLES, MEAN[:2], 1.0),
        "gaussian_pll: y must have shape [3], got [2]",
    ),
    (
        lambda: metrics.gaussian_pll(SAMPLES, MEAN, 0),
        "gaussian_pll: noise_var must be finite and positive, got 0",
    ),
    (
        lambda: metrics.gaussian_pll(SAMPLES, MEAN, math.nan),
        "gaussian_pll: noise_var must be finite and positive, got nan",
    ),
    (
        lambda: metrics.gaussian_pll(SAMPLES, MEAN, torch.tensor(math.inf)),
        "gaussian_pll: noise_var must be finite and positive, got inf",
    ),
    (
        lambda: metrics.gaussian_pll(SAMPLES, MEAN, 10**400),
        "gaussian_pll: noise_var must fit into a float, got a larger number",
    ),
    (
        lambda: metrics.gaussian_crps(MEAN, 10**400, MEAN),
        "gaussian_crps: std must fit into a float, got a larger number",
    ),
    (
        lambda: metrics.gaussian_pll(SAMPLES, MEAN, None),
        "gaussian_pll: noise_var must be a number or a tensor, got NoneType",
    ),
    (
        lambda: metrics.gaussian_pll(SAMPLES, MEAN, torch.tensor(1 + 5j)),
        "gaussian_pll: noise_var must be real numbers, got torch.complex64",
    ),
    (
        lambda: metrics.t_test([1 + 1j, 2]),
        "t_test: values must be real numbers, got [(1+1j), 2]",
    ),
    (
        lambda: metrics.ensemble_crps(SAMPLES[:1], MEAN),
        'ensemble_crps: samples must have at least 2 replicas with estimator "fair", got 1',
    ),
    (
        lambda: metrics.ensemble_crps(SAMPLES, MEAN, "pwm"),
        "ensemble_crps: estimator must be one of fair, biased, got 'pwm'",
    ),
]


@pytest.mark.parametrize("call, message", REFUSED, ids=[r[1][:50] for r in REFUSED])
def test_rejects(call, message):
    typed = ("got list", "floating-point", "a number or a tensor", "real numbers")
    with pytest.raises(TypeError if any(t in message for t in typed) else ValueError) as caught:
        call()
    assert str(caught.value) == message
