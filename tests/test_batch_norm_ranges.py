"""Every processor's loops over elements of the CPU's batch norm, without torch."""

import subprocess

import pytest


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
