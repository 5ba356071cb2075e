"""What samplers and ops draw: of a random bank, of fitted statistics, for a Bayesian layer."""

import torch

import bnuq_ext as bnuq
from bnuq_ext import ops, reference
from bnuq_ext.samplers import Fitted, make_sampler

CPU = torch.device("cpu")


def random_bank(snapshots=12, channels=(5, 3), **options):
    g = torch.Generator().manual_seed(0)
    mean = {f"l{i}": torch.randn(snapshots, c, generator=g) for i, c in enumerate(channels)}
    var = {f"l{i}": torch.rand(snapshots, c, generator=g) + 0.5 for i, c in enumerate(channels)}
    options = {"batch_size": 16, "dataset_size": 400, **options}
    return bnuq.Bank(mean, var, 16, **options)


def sampler(name, bank, batch_size=None):
    return make_sampler("test", name, bank, batch_size, CPU)


def statistics(name, bank, num_samples, batch_size=None, seed=3, first=0):
    """{key: (mean (T, C), var (T, C))} of the replicas, whatever the form of the draw."""
    draw = sampler(name, bank, batch_size).draw(seed, first, num_samples)
    found = {}
    for stream, (key, table) in enumerate(draw.tables.items()):
        if isinstance(table, Fitted):
            given = draw.seed, stream << 16, num_samples, table.family
            found[key] = fitted_moments(table.params.double(), *given)
        else:
            found[key] = table.mean[draw.snapshot], table.var[draw.snapshot]
    return found


def fitted_moments(params, seed, stream, num_samples, family):
    """`reference.fitted_moments` of the noise that `batch_norm_fitted` draws."""
    z_mean, z_spread = (
        ops.philox_normal(seed, stream, (num_samples, params.shape[1]), tag=tag).to(params)
        for tag in ("mean", "spread")
    )
    return reference.fitted_moments(params, z_mean, z_spread, family)


def layer_noise(key, stream, num_samples, O, I):  # noqa: E741
    """(T, O, I) and (T, O), the last arguments of `reference.bayes_linear`, in float64."""
    eps = ops.philox_normal(key, stream, (num_samples, O, I)).double()
    return eps, ops.philox_normal(key, stream, (num_samples, O), tag="bias").double()
