"""The Bayesian kernels without a GPU: the fused loop is as lean as its floor allows.

The budgets hold for nvcc 13.0: another compiler may spend a register or an instruction more.
"""

import itertools
import re
import subprocess
from collections import Counter

import pytest
import sass
from test_cuda_build import BAYES, ROOT, check_atomics, hopper_code, needs_code

from benchmarks.gpu_process import find_tool

WEIGHTS = 8  # of a lane in one fragment


@pytest.fixture(scope="session")
def hopper():
    """{mangled name: kernel} on sm_90, of what is compiled for Bayesian layers."""
    return hopper_code(BAYES)


@pytest.fixture(scope="session")
def fused(hopper):
    """{rows / 8: kernel} of the forward for float16."""
    pattern = re.compile(r"bayes_forward_kernelI6__halfLi(\d+)E")
    found = {pattern.search(name): kernel for name, kernel in hopper.items()}
    return {int(m[1]): kernel for m, kernel in found.items() if m}


@pytest.fixture(scope="session")
def backward(hopper):
    """{(name, rows / 16 or 0): kernel} of the gradients for float16."""
    pattern = re.compile(r"bayes_(grad_\w+?)_kernelI6__half(?:Li(\d+))?E")
    found = {pattern.search(name): kernel for name, kernel in hopper.items()}
    return {(m[1], int(m[2] or 0)): kernel for m, kernel in found.items() if m}


def names(loop):
    return [op.split(".")[0] for op, _ in loop]


def noise_loop(kernel):
    """Counts of the smallest loop that makes noise."""
    return Counter(min((names(lp) for lp in kernel.loops() if "MUFU" in names(lp)), key=len))


@needs_code
def test_no_kernel_uses_atomics(hopper):
    for name, kernel in hopper.items():
        check_atomics(name, kernel)


@needs_code
def test_fused_loops_are_bound_by_their_noise(fused):
    """2 MUFU a weight are 8 weights a clock of an SM. 14.5 other issue slots are 8.8:
    the MUFU rate binds."""
    assert sorted(fused) == [1, 4, 8, 16]
    for blocks, kernel in fused.items():
        loop = noise_loop(kernel)
        weights = loop["MUFU"] / 2
        assert weights in (WEIGHTS, 2 * WEIGHTS)  # one turn, or two
        assert loop["HMMA"] == blocks * weights / WEIGHTS
        assert (sum(loop.values()) - loop["HMMA"]) / weights <= 14.5, blocks
        assert not loop["I2F"] and not loop["LDL"] and not loop["STL"]
        # x by whole matrices, or by the lane that needs it; no word by word through shared memory.
        assert not loop["LDS"] and bool(loop["LDSM"]) == (blocks > 1)


@needs_code
def test_one_row_costs_little_more_than_its_noise(fused):
    """Words and normals are 88 instructions for eight weights. Products by multiplications would
    add at least 12 (two and a half for a pair of weights, half of one for sigma),
    the product by mma adds 10 to 19."""
    floor = 88 / WEIGHTS
    loop = noise_loop(fused[1])
    assert sum(loop.values()) / (loop["MUFU"] / 2) <= floor + 20 / 8


@needs_code
def test_gradient_loops_are_bound_by_their_noise(backward):
    """That by x as the forward; that by rho has 20 slots a weight for a replica of 64 rows,
    products and all."""
    for tiles in (1, 2, 4, 8):
        loop = noise_loop(backward["grad_x", tiles])
        assert loop["MUFU"] == 2 * WEIGHTS and loop["HMMA"] == 2 * tiles
        assert sum(loop.values()) - loop["HMMA"] <= 14.5 * WEIGHTS
    replica = noise_loop(backward["grad_rho", 0])
    assert replica["MUFU"] == 2 * 2 * WEIGHTS
    # Three groups of matrices for four products of 16 rows, four times;
    # what N leaves out is skipped.
    assert replica["HMMA"] == 16 and replica["LDSM"] == 12
    assert sum(replica.values()) <= 20.5 * 2 * WEIGHTS


@needs_code
def test_results_are_stored_several_at_a_time(fused, backward):
    """A load after a store waits for it: no store may stand alone among loads."""

    def groups(kernel):
        accesses = [name for name in names(kernel.code) if name in ("LDG", "STG")]
        return [len([*run]) for name, run in itertools.groupby(accesses) if name == "STG"]

    for blocks, kernel in fused.items():
        stores = groups(kernel)
        assert min(stores) >= 4 * min(blocks, 2)
        assert sum(stores) >= 4 * blocks
    for tiles in (1, 2, 4, 8):
        assert len(groups(backward["grad_x", tiles])) <= 3 * tiles
    assert len(groups(backward["grad_rho", 0])) == 1


@needs_code
def test_noise_in_memory_costs_little_more_than_in_registers(hopper):
    """Three slots a weight more: four stores of two weights, and where they go."""
    kernels = [kernel for name, kernel in hopper.items() if "sample_noise_kernel" in name]
    assert len(kernels) == 2
    for kernel in kernels:
        assert sum(noise_loop(kernel).values()) <= 17.5 * WEIGHTS


@needs_code
def test_the_direct_way_takes_what_its_limits_assume(hopper):
    """Instructions a weight, of 8 rows or of one: what `kMostDirectWeights` was counted with."""
    assumed = {
        "direct_forward_kernelIfLi1ELi1E": 76,
        "direct_forward_kernelIfLi1ELi4E": 33,
        "direct_forward_kernelIfLi8ELi2E": 69,
        "direct_grad_weight_kernelIf": 88,
        "direct_grad_x_kernelIfLi8E": 37,
    }
    replicas = {"direct_forward_kernelIfLi1ELi4E": 4, "direct_forward_kernelIfLi8ELi2E": 2}
    for name, most in assumed.items():
        (kernel,) = [kernel for mangled, kernel in hopper.items() if name in mangled]
        assert sum(noise_loop(kernel).values()) <= most * WEIGHTS * replicas.get(name, 1), name


@needs_code
def test_the_mixture_reads_a_weight_once_for_all_replicas(hopper):
    """The loop over them makes noise and terms alone; it may read the seed again. No softplus,
    75 slots a term."""
    kernels = [
        kernel for name, kernel in hopper.items() if re.search("mixture_kl_.*kernelIf", name)
    ]
    assert len(kernels) == 2
    for loop in map(noise_loop, kernels):
        assert loop["LDG"] <= 1 and loop["STG"] == 0
        assert sum(loop.values()) <= 75 * WEIGHTS


@needs_code
def test_a_stage_costs_a_fraction_of_its_noise(fused, backward):
    """What lies between two loops over the tiles of a stage: copies of the next, a barrier.
    No place is found anew."""
    staged = [kernel for blocks, kernel in fused.items() if blocks > 1]
    for kernel in [*staged, *(backward["grad_x", tiles] for tiles in (1, 2, 4, 8))]:
        tiles, stage, *_ = sorted(len(lp) for lp in kernel.loops() if "MUFU" in names(lp))
        assert stage - tiles <= 110


@needs_code
def test_registers_leave_room_for_independent_fragments(hopper):
    """A fragment is a chain of some 150 clocks; four or more on each quarter of an SM cover it."""
    for name, kernel in hopper.items():
        if "bayes_forward_kernel" in name:
            warps = 65536 // (256 * (-(-kernel.registers // 8) * 8)) * 8
            assert warps / 4 >= 4, (name, kernel.registers)


NVCC = find_tool("nvcc")


@needs_code
@pytest.mark.skipif(
    NVCC is None, reason="no nvcc: a kernel of the benchmarks is not in the library"
)
def test_noise_alone_is_what_the_fused_loop_is_measured_by(fused, tmp_path):
    """It compiles, and its loop makes the same noise at the rate of its special functions."""
    command = [NVCC, "-std=c++17", "-O3", "-arch=sm_90", "-cubin", "-Werror", "all-warnings"]
    command += [f"-I{ROOT / 'csrc' / 'cuda'}", "--expt-relaxed-constexpr"]
    cubin = tmp_path / "noise.cubin"
    subprocess.run([*command, ROOT / "benchmarks" / "noise_floor.cu", "-o", cubin], check=True)
    (kernel,) = sass.read_cubin(cubin).values()
    assert kernel.stack == 0
    alone, product = noise_loop(kernel), noise_loop(fused[1])  # four replicas, one in two turns
    assert alone["MUFU"] == 2 * product["MUFU"] == 2 * 4 * WEIGHTS
    assert sum(alone.values()) <= 12.5 * 4 * WEIGHTS and not alone["LDG"]
