"""What the random numbers are distributed like; each test says alpha, n and the effect it finds."""

import os

import numpy as np
import pytest
import torch
from scipy import stats

from bnuq_ext import ops


def test_all_words(philox_driver):
    """The recipe's own distribution, by enumeration: no chance is involved, the bounds are its
    quantisation (12-bit angle, 32-bit radius)."""
    t = philox_driver("normals", os.cpu_count())
    n = t["count"]
    assert n == 2**32
    assert abs(t["sum"] / n) < 2e-6
    assert abs(t["sum2"] / n - 1) < 2e-7
    assert abs(t["sum3"] / n) < 5e-5
    assert abs(t["sum4"] / n - 3) < 5e-6
    assert abs(t["product"] / n) < 3e-6
    assert t["above4"] / n == pytest.approx(2 * stats.norm.sf(4), rel=1e-3)
    assert t["above5"] / n == pytest.approx(2 * stats.norm.sf(5), rel=2e-2)
    assert t["largest"] == pytest.approx(np.sqrt(64 * np.log(2)), rel=1e-4)  # |lg2(2^-32)| = 32
    # No atom at zero: angles that are even multiples would put 2^-11 of all normals there.
    assert t["tiny"] / n < 2e-6 * stats.norm.pdf(0)


def test_normals_pass_kolmogorov_smirnov():
    """alpha 1e-6, n = 4e6: finds any deviation of the distribution function above 1.3e-3."""
    z = ops.philox_normal(ops.new_seed(17), 3, (4, 1_000_000)).double().numpy().ravel()
    assert stats.kstest(z, "norm").pvalue > 1e-6


CORRELATED_N = 1_000_000
CORRELATED_BOUND = 0.006  # six standard errors: alpha 2e-9 a pair, so 1e-6 over all pairs below


def _largest_correlation(rows):
    c = np.corrcoef(rows)
    return np.abs(c - np.eye(len(c))).max()


def test_replicas_streams_tags_and_seeds_are_uncorrelated():
    """n = 1e6 a pair; finds any |rho| above 0.006."""
    shape = (1, CORRELATED_N)

    def draw(key, first, stream, tag):
        return ops.philox_normal(ops.new_seed(key, first), stream, shape, tag=tag)[0].numpy()

    rows = [draw(1, first, 0, "mean") for first in (0, 1, 2, 3, 2**32)]
    rows += [draw(1, 0, stream, "mean") for stream in (1, 2, 3, 256)]
    rows += [draw(1, 0, 0, tag) for tag in ("spread", "bias", "joint")]
    rows += [draw(key, 0, 0, "mean") for key in (0, 2, 3, 2**32 + 1, -1)]
    assert _largest_correlation(np.stack(rows)) < CORRELATED_BOUND


def test_neighbouring_elements_are_uncorrelated():
    """Lags 1 to 64, of values and of squares; n = 1e6; finds any |rho| above 0.006."""
    z = ops.philox_normal(ops.new_seed(2), 0, (1, CORRELATED_N + 64))[0].double().numpy()
    for series in (z, (z * z - 1) / np.sqrt(2)):
        base = series[:CORRELATED_N]
        for lag in range(1, 65):
            assert abs(np.mean(base * series[lag : lag + CORRELATED_N])) < CORRELATED_BOUND


@pytest.mark.parametrize("num_snapshots", [2, 3, 4])
def test_permutations_are_uniform(num_snapshots):
    """All B! orders, n = 2e5 epochs, alpha 1e-6 over 2 seeds: chi-square finds a deviation of one
    order's frequency above about 8 standard errors, 8 sqrt(1 / (n B!)) of 1."""
    epochs = 200_000
    for key in (0, 12345):
        drawn = ops.snapshot_indices(ops.new_seed(key), num_snapshots, epochs * num_snapshots)
        digits = num_snapshots ** torch.arange(num_snapshots)
        codes = (drawn.view(epochs, num_snapshots) * digits).sum(1)
        counts = torch.bincount(codes)
        counts = counts[counts > 0].numpy()
        assert len(counts) == np.prod(range(1, num_snapshots + 1))
        assert stats.chisquare(counts).pvalue > 1e-6


@pytest.mark.parametrize("num_snapshots", [7, 8, 9, 31, 33, 64])
def test_positions_are_uniform(num_snapshots):
    """What a position of an epoch holds, n = 2e4 epochs;
    alpha 1e-6 over all positions and seeds."""
    epochs, seeds = 20_000, (0, 1)
    for key in seeds:
        drawn = ops.snapshot_indices(ops.new_seed(key), num_snapshots, epochs * num_snapshots)
        for column in drawn.view(epochs, num_snapshots).T:
            counts = torch.bincount(column, minlength=num_snapshots).numpy()
            assert stats.chisquare(counts).pvalue > 1e-6 / (num_snapshots * len(seeds))


def test_large_bank_is_uniform():
    """B = 65537, its first two replicas over 2e4 neighbouring seeds in 64 x 64 classes of equal
    size to 0.1 %; alpha 1e-6; finds a class whose frequency is off by a factor of 4."""
    B, n = 65537, 20_000
    drawn = np.array([ops.snapshot_indices(ops.new_seed(key), B, 2).numpy() for key in range(n)])
    classes = drawn * 64 // B
    for column in classes.T:
        assert stats.chisquare(np.bincount(column, minlength=64)).pvalue > 1e-6
    joint = np.bincount(classes[:, 0] * 64 + classes[:, 1], minlength=64 * 64)
    assert stats.chisquare(joint).pvalue > 1e-6
