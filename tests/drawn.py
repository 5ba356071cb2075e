"""Statistics of a sampler over a random bank."""

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
            shape, params = (num_samples, table.params.shape[1]), table.params.double()
            z = [
                ops.philox_normal(draw.seed, stream << 16, shape, tag=t).double()
                for t in ("mean", "spread")
            ]
            found[key] = reference.fitted_moments(params, *z, table.family)
        else:
            found[key] = table.mean[draw.snapshot], table.var[draw.snapshot]
    return found
