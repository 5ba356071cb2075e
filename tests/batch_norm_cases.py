"""Inputs of the two batch-norm ops, the call, and what the reference says, for tests of both."""

import torch
from drawn import fitted_moments

from bnuq_ext import ops, reference

OPS = ["bank", "normal", "lognormal"]  # batch_norm_bank; batch_norm_fitted with each family
# Key, first replica and stream need all of their bits.
NUM_SNAPSHOTS, KEY, FIRST, STREAM = 3, -7, 2**33 + 2, 2**31 + 5


def contiguous_as(x, channels_last):
    if not channels_last:
        return x.contiguous()
    return x.contiguous(
        memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    )


def make(op, shape, num_samples, *, shared=False, channels_last=False, dtype=torch.float64,
         device="cpu"):  # fmt: skip
    """Tensors by name; `shape` is that of one replica's rows."""
    generator = torch.Generator().manual_seed(1)
    rows = shape[0] if shared else num_samples * shape[0]
    C, acc = shape[1], torch.float64 if dtype == torch.float64 else torch.float32

    def uniform(*size, low=-1.0, high=1.0):
        return low + (high - low) * torch.rand(*size, generator=generator, dtype=torch.float64)

    x, residual = (
        contiguous_as(2 * uniform(rows, *shape[1:]), channels_last).to(device, dtype)
        for _ in range(2)
    )
    tensors = {"weight": uniform(C, low=0.5, high=2), "bias": uniform(C)}
    if op == "bank":
        tensors["mean"] = uniform(NUM_SNAPSHOTS, C)
        tensors["var"] = uniform(NUM_SNAPSHOTS, C, low=0.3, high=2)
    else:
        low = torch.tensor([[-1.0], [0.1], [0.5], [0.1]], dtype=torch.float64)
        tensors["params"] = low + uniform(4, C, low=0, high=0.5)
    tensors = {name: value.to(device, acc) for name, value in tensors.items()}
    return {"x": x, "residual": residual, **tensors}


def call(op, tensors, num_samples, **options):
    """The op on `tensors`, with seed (KEY, FIRST)."""
    t = dict(tensors)
    x = t.pop("x")
    seed = ops.new_seed(KEY, FIRST, x.device)
    if op == "bank":
        mean, var = t.pop("mean"), t.pop("var")
        return ops.batch_norm_bank(x, mean, var, seed, num_samples=num_samples, **t, **options)
    params = t.pop("params")
    return ops.batch_norm_fitted(x, params, seed, STREAM, num_samples, op, **t, **options)


def moments(op, tensors, num_samples, device):
    """Statistics of the replicas, both (T, C), from the reference and `philox_normal`'s noise on
    the device: each has the bits of its own logarithm and cosine."""
    if op == "bank":
        snapshot = reference.snapshot_indices(KEY, FIRST, len(tensors["mean"]), num_samples)
        return tensors["mean"][snapshot], tensors["var"][snapshot]
    seed = ops.new_seed(KEY, FIRST, device)
    return fitted_moments(tensors["params"], seed, STREAM, num_samples, op)


def expect(op, tensors, num_samples, **options):
    """What the op must return, in float64 on the CPU."""
    t = {name: value.double().cpu() for name, value in tensors.items()}
    mean_t, var_t = moments(op, t, num_samples, tensors["x"].device)
    affine = {name: t.get(name) for name in ("weight", "bias", "residual")}
    return reference.batch_norm(t["x"], mean_t, var_t, **affine, **options)
