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
