import pytest
import torch

from bnuq_ext import ops, reference

SHAPES = [(4, 3), (4, 7, 5), (2, 5, 4, 4), (2, 4, 3, 3, 3)]


def make(shape, device, dtype, num_samples, shared, channels_last=False):
    """x, residual of `shape` rows a replica; mean, var, weight, bias."""
    generator = torch.Generator().manual_seed(0)
    rows = shape[0] if shared else num_samples * shape[0]
    x, residual = torch.randn(2, rows, *shape[1:], generator=generator).to(device, dtype)
    if channels_last:
        memory_format = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        x, residual = (v.contiguous(memory_format=memory_format) for v in (x, residual))
    mean, var = torch.rand(2, 3, shape[1], generator=generator) + 0.25
    weight, bias = torch.randn(2, shape[1], generator=generator)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    return x, residual, *(v.to(device, acc) for v in (mean, var, weight, bias))


def expect(seed, x, residual, mean, var, weight, bias, num_samples, **options):
    snapshot = reference.snapshot_indices(int(seed[0]), int(seed[1]), len(mean), num_samples)
    x, residual, mean, var, weight, bias = (
        None if v is None else v.double().cpu() for v in (x, residual, mean, var, weight, bias)
    )
    return reference.batch_norm(
        x, mean[snapshot], var[snapshot], weight, bias, residual=residual, **options
    )


@pytest.mark.parametrize("activation", ["none", "relu", "leaky_relu"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("shared", [False, True], ids=["folded", "shared"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, shared, channels_last, activation, device, dtype, assert_close):
    if channels_last and len(shape) < 4:
        pytest.skip("no such layout")
    x, residual, *rest = make(shape, device, dtype, 5, shared, channels_last)
    mean, var, weight, bias = rest
    seed = ops.new_seed(7, 2, device)
    y = ops.batch_norm_bank(
        x, mean, var, seed, num_samples=5, weight=weight, bias=bias, residual=residual,
        activation=activation, shared=shared,
    )  # fmt: skip
    expected = expect(seed, x, residual, *rest, 5, activation=activation, shared=shared)
    assert_close(y, expected)
    assert y.dtype == dtype
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}[x.dim()] if channels_last else None
    assert y.is_contiguous(memory_format=layout or torch.contiguous_format)
