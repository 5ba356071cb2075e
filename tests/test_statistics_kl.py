"""The divergence of the batch statistics, judged by torch.distributions,
quadrature and simulated batches."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from torch import nn
from torch.distributions import Normal, kl_divergence

import bnuq_ext as bnuq
from bnuq_ext import StatisticsGaussian
from bnuq_ext.statistics_kl import observed_statistics


def density(seed=0, channels=5):
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(4, channels, generator=generator, dtype=torch.float64)
    mean, mean_var, std, std_var = draws
    entries = 2 * mean - 1, mean_var + 0.1, std + 0.5, std_var + 0.05
    return StatisticsGaussian(*(e.clone().requires_grad_() for e in entries))


def expected_kl(q, p):
    return sum(
        kl_divergence(Normal(a, b.sqrt()), Normal(c, d.sqrt())).sum()
        for a, b, c, d in ((*q[:2], *p[:2]), (*q[2:], *p[2:]))
    )


def test_is_the_divergence_of_independent_normals():
    q, p = density(0), density(1)
    actual, expected = bnuq.statistics_kl(q, p), expected_kl(q, p)
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=0)
    ours, theirs = (torch.autograd.grad(v, [*q, *p]) for v in (actual, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_layers_add_up_and_share_a_prior():
    q = {"a": density(0, 3), "b": density(1, 7)}
    p = StatisticsGaussian(0.1, 2.0, torch.tensor(0.4), torch.ones(1))
    full = StatisticsGaussian(*(torch.as_tensor(e).double() for e in p))
    expected = expected_kl(q["a"], full) + expected_kl(q["b"], full)
    other = p._replace(mean=0.7, std_var=3.0)
    wide = StatisticsGaussian(*(torch.as_tensor(e).double() for e in other))
    torch.testing.assert_close(bnuq.statistics_kl(q, p), expected)
    expected = expected_kl(q["a"], wide) + expected_kl(q["b"], full)
    torch.testing.assert_close(bnuq.statistics_kl(q, {"b": p, "a": other}), expected)


def test_is_the_integral():
    q = StatisticsGaussian(*(torch.tensor([v]).double() for v in (0.3, 0.04, 1.1, 0.09)))
    p = StatisticsGaussian(0.0, 4.0, 0.2, 0.5)

    def integral(m, v, pm, pv):
        def integrand(w):
            log_q = -0.5 * (w - m) ** 2 / v - 0.5 * math.log(2 * math.pi * v)
            log_p = -0.5 * (w - pm) ** 2 / pv - 0.5 * math.log(2 * math.pi * pv)
            return math.exp(log_q) * (log_q - log_p)

        return quad(integrand, m - 12 * v**0.5, m + 12 * v**0.5, epsabs=1e-12)[0]

    expected = integral(0.3, 0.04, 0.0, 4.0) + integral(1.1, 0.09, 0.2, 0.5)
    assert abs(bnuq.statistics_kl(q, p).item() - expected) < 1e-7


def test_is_exactly_nothing_from_itself():
    q = StatisticsGaussian(*torch.rand(4, 1000, dtype=torch.float64))
    assert bnuq.statistics_kl(q, q).item() == 0


def test_infinite_variance_drops_a_constant_and_keeps_the_gradient():
    """Against a prior of variance 1e12: the same gradient,
    and a value that is ln 1e6 a channel less."""
    q = density(2, 4)
    p = density(3, 4)
    wide = p._replace(mean=torch.zeros(4), mean_var=torch.full((4,), 1e12).double())
    improper = wide._replace(mean_var=torch.full((4,), math.inf))
    ours, theirs = bnuq.statistics_kl(q, improper), bnuq.statistics_kl(q, wide)
    torch.testing.assert_close(theirs - ours, torch.tensor(4 * math.log(1e6)).double())
    grads = (torch.autograd.grad(v, list(q)) for v in (ours, theirs))
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


def test_no_variance_is_infinitely_far_and_float32_stays():
    zero, one = torch.zeros(2), torch.ones(2)
    assert (
        bnuq.statistics_kl(StatisticsGaussian(zero, zero, one, one), bnuq.implied_prior(1e-4, 10))
        == math.inf
    )
    value = bnuq.statistics_kl(
        StatisticsGaussian(zero, one, one, one), bnuq.implied_prior(torch.tensor(1e-4), 10)
    )
    assert value.dtype == torch.float32
    assert math.isclose(value, -1 + 2 * 0.5 * (math.log(500) + 2 / 500 - 1), rel_tol=1e-6)


def test_gradient_is_equation_7():
    """KL' = (s_q s_q' + m_q m_q' - m_p m_q') / s_p^2 - s_q' / s_q for moments
    that depend on a weight."""
    w = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    m, s = (1.3 * w.sin(), 0.9 * w.cos()), (0.5 + w.square(), 0.2 + w)  # of mu_B and sigma_B
    p = StatisticsGaussian(0.4, 0.25, -0.3, 1.7)
    q = StatisticsGaussian(*(e[None] for e in (m[0], s[0] ** 2, m[1], s[1] ** 2)))
    (actual,) = torch.autograd.grad(bnuq.statistics_kl(q, p), w)
    at = w.item()
    slopes = (1.3 * math.cos(at), 2 * at), (-0.9 * math.sin(at), 1.0)
    moments = (m[0].item(), s[0].item()), (m[1].item(), s[1].item())
    expected = sum(
        (sq * ds + mq * dm - mp * dm) / var - ds / sq
        for (mq, sq), (dm, ds), mp, var in zip(
            moments, slopes, (0.4, -0.3), (0.25, 1.7), strict=True
        )
    )
    assert math.isclose(actual.item(), expected, rel_tol=1e-12)


def test_implied_prior_is_weight_decay():
    """KL' = 2 N tau l2 W for uncorrelated inputs, up to the -s_q' / s_q
    that the source neglects."""
    N, tau, l2, M = 40_000, 3.0, 1e-3, 10_000
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 4, generator=generator, dtype=torch.float64)
    x = x - x.mean(0)
    x = (
        x @ torch.linalg.inv(torch.linalg.cholesky(x.T @ x / N)).T
    )  # exactly uncorrelated, variance 1
    W = torch.randn(3, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    q = bnuq.analytic_statistics(x @ W.T, M)
    (actual,) = torch.autograd.grad(bnuq.statistics_kl(q, bnuq.implied_prior(l2, N, tau)), W)
    q = bnuq.analytic_statistics(x @ W.T, M)
    (neglected,) = torch.autograd.grad(-0.5 * (q.mean_var.log() + q.std_var.log()).sum(), W)
    torch.testing.assert_close(actual - neglected, 2 * N * tau * l2 * W.detach(), rtol=1e-3, atol=0)


def test_implied_prior_has_the_printed_variances():
    prior = bnuq.implied_prior(0.5e-4, 1000, tau=20.0)
    assert [float(e) for e in prior] == [0.0, math.inf, 0.0, pytest.approx(0.5)]
    assert all(e.dtype == torch.float64 for e in prior)


def test_implied_prior_of_small_floats():
    for make in (np.float16, np.float32, lambda v: torch.tensor(v, dtype=torch.float16)):
        l2, tau = make(1e-4), make(3.0)
        expected = 1 / (2.0 * 60_000 * float(tau) * float(l2))
        assert float(bnuq.implied_prior(l2, 60_000, tau).std_var) == pytest.approx(
            expected, rel=1e-15
        )


def skewed(shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).double().log().neg()


def test_analytic_is_teyes_formula_for_vectors():
    x, M = skewed((1000, 3)), 50
    m, s = x.mean(0), x.std(0, correction=0)
    fourth = (x - m).pow(4).mean(0)
    expected = m, s**2 / M, s, (fourth - s**4) / (4 * s**2 * M)
    torch.testing.assert_close(tuple(bnuq.analytic_statistics(x, M)), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("M", [40, 150, 400])
def test_analytic_matches_simulated_batches_of_images(M):
    """20,000 batches of M of 500 rows: variances within 5 standard errors (5 %)
    and the expansion's O(1/M)."""
    generator = torch.Generator().manual_seed(0)
    shared, own = torch.rand(500, 2, 7, generator=generator).double().square().split([1, 6], 2)
    x = shared + 0.5 * own  # positions of a row hang together
    gaussian = bnuq.analytic_statistics(x, M, 500)
    rows = torch.rand(20_000, 500, generator=generator).argsort(1)[:, :M]
    sums, squares = x.mean(2), x.square().mean(2)
    mean = torch.stack([sums[r].mean(0) for r in rows])
    std = (torch.stack([squares[r].mean(0) for r in rows]) - mean.square()).sqrt()
    torch.testing.assert_close(gaussian.mean_var, mean.var(0), rtol=0.05, atol=0)
    torch.testing.assert_close(gaussian.std_var, std.var(0), rtol=0.05 + 2 / M, atol=0)
    torch.testing.assert_close(gaussian.mean, mean.mean(0), rtol=1e-2, atol=0)


def test_the_variance_of_a_mean_is_exactly_that_of_all_batches_there_are():
    x, M = skewed((6, 2)), 2
    means = torch.stack([x[list(rows)].mean(0) for rows in itertools.combinations(range(6), M)])
    actual, wide = bnuq.analytic_statistics(x, M, 6), bnuq.analytic_statistics(x, M)
    torch.testing.assert_close(actual.mean_var, means.var(0, correction=0), rtol=1e-12, atol=0)
    torch.testing.assert_close(actual.std_var, wide.std_var * (6 - 2) / (6 - 1), rtol=1e-12, atol=0)


def test_analytic_vanishes_for_all_rows_and_for_constant_channels():
    x = skewed((30, 2))
    x[:, 1] = 4.0
    gaussian = bnuq.analytic_statistics(x, 30, 30)
    assert gaussian.mean_var.tolist() == gaussian.std_var.tolist() == [0.0, 0.0]
    x = x.requires_grad_()
    gaussian = bnuq.analytic_statistics(x, 5)
    (gradient,) = torch.autograd.grad(sum(e.sum() for e in gaussian), x)
    assert gradient.isfinite().all() and gaussian.std.tolist()[1] == gaussian.std_var[1] == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(100, 3), (7, 3, 33)])
def test_analytic_of_a_constant_whose_mean_is_rounded(shape, dtype):
    x = skewed(shape).to(dtype)
    x[:, 1], x[:, 2] = 0.1, 1e30 / 3
    x = x.requires_grad_()
    gaussian = bnuq.analytic_statistics(x, 8, 200)
    for moment in gaussian[1:]:
        assert moment[0] > 0 and moment[1:].tolist() == [0, 0]
    torch.testing.assert_close(gaussian.mean[1:].to(dtype), x[0].reshape(3, -1)[1:, 0])
    (gradient,) = torch.autograd.grad(sum(e.sum() for e in gaussian), x)
    # That of the mean alone.
    torch.testing.assert_close(gradient[:, 1:], torch.full_like(x[:, 1:], 3 / x.numel()))


def test_analytic_of_nan_is_nan():
    x = torch.rand(8, 2)
    x[3, 0] = torch.nan
    for moment in bnuq.analytic_statistics(x, 4):
        assert moment.isnan().tolist() == [True, False]


def test_analytic_gradient():
    x = skewed((7, 2, 3)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: tuple(bnuq.analytic_statistics(x, 3, 7)), x)


class Inputs:
    """The inputs of a network's batch-norm layers in its last forward, by name."""

    def __init__(self, net):
        self.found = {}
        for name, layer in net.named_modules():
            if isinstance(layer, nn.BatchNorm1d):
                layer.register_forward_pre_hook(
                    lambda _, x, name=name: self.found.update({name: x[0]})
                )

    def kl(self, M, N):
        q = {name: bnuq.analytic_statistics(x, M, N) for name, x in self.found.items()}
        return bnuq.statistics_kl(q, bnuq.implied_prior(1e-3, N))


def test_regularises_a_network_in_training():
    """The gradient by the first weights goes through both layers,
    and following it lowers the divergence."""
    torch.manual_seed(0)
    hidden = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4), nn.BatchNorm1d(4)
    net, x = nn.Sequential(*hidden).double(), torch.randn(40, 3, dtype=torch.float64)
    inputs, before = Inputs(net), None

    def kl(weight):
        torch.func.functional_call(net, {"0.weight": weight}, x)
        return inputs.kl(40, 1000)

    assert torch.autograd.gradcheck(kl, net[0].weight)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    for _ in range(30):
        optimizer.zero_grad()
        net(x)
        loss = inputs.kl(40, 1000)
        before = loss.item() if before is None else before
        loss.backward()
        optimizer.step()
    assert list(inputs.found) == ["1", "4"] and loss.item() < before - 5


def test_devices(device):
    q = StatisticsGaussian(*(t.detach().to(device) for t in density()))
    value = bnuq.statistics_kl(q, bnuq.implied_prior(1e-3, 100))
    assert value.device.type == device.type
    assert (
        abs(value.item() - bnuq.statistics_kl(density(), bnuq.implied_prior(1e-3, 100)).item())
        < 1e-9
    )


Q = StatisticsGaussian(*torch.ones(4, 2))
CASES = {
    "q type": (lambda: bnuq.statistics_kl([Q], Q), TypeError, "q must be a StatisticsGaussian or a dict"),
    "q empty": (lambda: bnuq.statistics_kl({}, Q), TypeError, "got an empty one"),
    "q entry": (lambda: bnuq.statistics_kl({"a": 1}, Q), TypeError, r"q\['a'\] must be"),
    "q variance": (lambda: bnuq.statistics_kl({"a": Q._replace(std_var=torch.tensor([1.0, -0.5]))}, Q), ValueError, r"q\['a'\].std_var must not be negative, got -0.5"),
    "q mean variance": (lambda: bnuq.statistics_kl(Q._replace(mean_var=torch.tensor([1.0, -2.0])), Q), ValueError, "q.mean_var must not be negative, got -2.0"),
    "q numbers": (lambda: bnuq.statistics_kl(bnuq.StatisticsGaussian(0.0, 1.0, 1.0, 1.0), Q), TypeError, "q.mean must be a tensor, got float"),
    "prior type": (lambda: bnuq.statistics_kl(Q, 1.0), TypeError, "prior must be a StatisticsGaussian"),
    "prior names": (lambda: bnuq.statistics_kl({"a": Q}, {"b": Q}), ValueError, r"names of q \['a'\]"),
    "prior mean_var": (lambda: bnuq.statistics_kl(Q, Q._replace(mean_var=0.0)), ValueError, "prior.mean_var must be positive"),
    "prior std_var": (lambda: bnuq.statistics_kl(Q, Q._replace(std_var=math.nan)), ValueError, "prior.std_var must be positive"),
    "prior shape": (lambda: bnuq.statistics_kl(Q, Q._replace(std=torch.ones(3))), ValueError, r"prior.std must broadcast to \[2\], got \[3\]"),
    "prior rank": (lambda: bnuq.statistics_kl(Q, Q._replace(mean_var=torch.ones(1, 2))), ValueError, r"prior.mean_var must broadcast to \[2\], got \[1, 2\]"),
    "q shapes": (lambda: bnuq.statistics_kl(Q._replace(std=torch.ones(3)), Q), ValueError, r"q.std must have shape \[2\], got \[3\]"),
    "prior none": (lambda: bnuq.statistics_kl(Q, Q._replace(mean=None)), TypeError, "prior.mean must be a number or a tensor of them, got NoneType"),
    "prior complex": (lambda: bnuq.statistics_kl(Q, Q._replace(mean=torch.ones(2) + 1j)), TypeError, "prior.mean must be a number or a tensor of them"),
    "prior word": (lambda: bnuq.statistics_kl(Q, Q._replace(std_var="a")), TypeError, "prior.std_var must be a number or a tensor of them, got str"),
    "l2 of several": (lambda: bnuq.implied_prior(torch.ones(2), 10), TypeError, r"l2 must be a number, got a tensor of shape \[2\]"),
    "l2 type": (lambda: bnuq.implied_prior("1e-3", 10), TypeError, "l2 must be a number, got '1e-3'"),
    "l2": (lambda: bnuq.implied_prior(0.0, 10), ValueError, "l2 must be positive and finite, got 0.0"),
    "tau": (lambda: bnuq.implied_prior(1.0, 10, -1.0), ValueError, "tau must be positive and finite"),
    "N": (lambda: bnuq.implied_prior(1.0, 0), ValueError, "dataset_size must be at least 1, got 0"),
    "l2 beyond floats": (lambda: bnuq.implied_prior(10**400, 10), ValueError, "^implied_prior: l2 must fit into a float, got a larger number$"),
    "tau beyond floats": (lambda: bnuq.implied_prior(0.1, 10, 10**400), ValueError, "tau must fit into a float"),
    "N beyond floats": (lambda: bnuq.implied_prior(0.1, 10**400), ValueError, "^implied_prior: dataset_size must fit into a float, got a larger number$"),
    "x integer": (lambda: bnuq.analytic_statistics(torch.ones(3, 2).long(), 2), TypeError, "x must be a floating"),
    "x shape": (lambda: bnuq.analytic_statistics(torch.ones(3), 2), ValueError, r"x must have shape \(rows, C, \*\)"),
    "M": (lambda: bnuq.analytic_statistics(torch.ones(3, 2), 0), ValueError, "batch_size must be at least 1"),
    "M over N": (lambda: bnuq.analytic_statistics(torch.ones(3, 2), 4, 3), ValueError, "dataset_size must be at least 4"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_rejects(case):
    call, error, text = CASES[case]
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("snapshots", [1, 2, 5])
def test_what_a_bank_has_observed(snapshots):
    mean, std = torch.randn(snapshots, 3), torch.rand(snapshots, 3) + 0.5
    bank = bnuq.Bank({"a": mean}, {"a": std.square()}, 8, batch_size=8)
    found = observed_statistics(bank)["a"]
    for moments, values in ((found[:2], mean.double()), (found[2:], std.double())):
        expected = values.sub(values.mean(0)).square().sum(0) / max(snapshots - 1, 1)
        torch.testing.assert_close(moments[0], values.mean(0), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(moments[1], expected, rtol=1e-5, atol=1e-7)
