"""Every processor's loops over elements of the CPU's batch norm."""

import subprocess

import pytest
import torch

from bnuq_ext import ops


@pytest.fixture(scope="module")
def program(cpp_program):
    return cpp_program("batch_norm_ranges")


@pytest.mark.parametrize("form", ["plain", "fma", "avx512"])
def test_loops_match_single_elements(form, program):
    """3000 random ranges of each dtype; the program stops at the first element that differs."""
    done = subprocess.run([program, form], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    if int(done.stdout) == 0:
        pytest.skip(f"this processor has no {form}")
    assert int(done.stdout) > 10**6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_memory_off_the_elements_own_size(dtype):
    """Of a file or a message, beyond the caches, where a kernel may store
    with aligned instructions."""
    T, shape = 2, (60, 64, 56, 56) if dtype == torch.float32 else (120, 64, 56, 56)
    x = torch.randn(shape).to(dtype)
    size = T * x.numel()
    memory = bytearray(size * x.element_size() + 1)
    out = torch.frombuffer(memory, dtype=dtype, offset=1, count=size).view(T * shape[0], *shape[1:])
    arguments = (x, torch.zeros(T, 64), torch.ones(T, 64))
    options = {"snapshot": torch.arange(T), "shared": True}
    ops.batch_norm_bank(*arguments, **options, out=out)
    assert torch.equal(out, ops.batch_norm_bank(*arguments, **options))


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("C", [3, 10, 24, 33, 64, 100, 512, 728])
def test_bfloat16_rows_of_every_width(C, last):
    """Widths that are a row of sixteens alone, together with others, or never."""
    T, N, side = 3, 5, 3 if last else 1
    x = torch.randn(T * N, C, side, side, dtype=torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last) if last else x.flatten(1)
    mean, var, weight, bias = torch.randn(T, C), torch.rand(T, C) + 0.1, *torch.randn(2, C)
    y = ops.batch_norm_bank(
        x, mean, var, snapshot=torch.arange(T), num_samples=T, weight=weight, bias=bias
    )
    scale = weight.double() / torch.sqrt(var.double() + 1e-5)
    rows = x.double().view(T, N, C, -1)
    expected = (rows - mean.double()[:, None, :, None]) * scale[:, None, :, None]
    expected = (expected + bias.double()[:, None]).reshape(x.shape)
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FFF8000, 0x7F800001], ids=hex)
@pytest.mark.parametrize("name", ["mean", "var", "weight", "bias"])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_nan_of_any_bits_stays_nan(bits, name, last):
    """In bfloat16, whose rounding could carry out of the bits of a NaN."""
    nan = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    given = {"mean": torch.zeros(1, 32), "var": torch.ones(1, 32)}
    given |= {"weight": torch.ones(32), "bias": torch.zeros(32)}
    given[name][..., 5:21] = nan
    x = torch.randn(2, 32, 8, 8, dtype=torch.bfloat16)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    y = ops.batch_norm_bank(x, snapshot=torch.zeros(1, dtype=torch.int64), **given)
    assert y[:, 5:21].isnan().all()
    assert not y[:, :5].isnan().any() and not y[:, 21:].isnan().any()
