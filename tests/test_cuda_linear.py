"""The Bayesian kernels without a GPU: they compile cleanly, and the fused loop is as lean as its floor allows.

The budgets hold for nvcc 13.0: another compiler may spend a register or an instruction more.
"""

import re
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import sass
from test_cuda_build import ARCHS, NVDISASM, PINNED, ROOT, compile_cubin, needs_nvcc, release

WEIGHTS = 8  # of a lane in one fragment


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """{arch: (path of the cubin, log of the compiler)}."""
    folder = tmp_path_factory.mktemp("cuda_linear")
    source = ROOT / "tests" / "cuda_linear_instances.cu"
    with ThreadPoolExecutor(2) as pool:
        made = pool.map(lambda arch: compile_cubin(source, arch, folder / f"{arch}.cubin"), ARCHS)
        return dict(zip(ARCHS, made, strict=True))


@needs_nvcc
def test_every_kernel_compiles_without_a_warning_or_a_spill(compiled):
    for _, log in compiled.values():
        resources = sass.read_ptxas(log)
        assert len(resources) > 30
        assert not {name: r for name, r in resources.items() if r.spills or r.stack}


@pytest.fixture(scope="session")
def fused(compiled):
    """{(rows / 8, replicas, shared): kernel} of the forward on sm_90, for float16."""
    if release() != PINNED:
        pytest.skip(f"budgets are for nvcc {PINNED}, this is {release()}")
    if NVDISASM is None:
        pytest.skip("no nvdisasm, on PATH or in triton's package")
    cubin, _ = compiled["90"]
    text = subprocess.run([NVDISASM, "-c", cubin], capture_output=True, text=True).stdout
    pattern = re.compile(r"bayes_forward_kernelI6__halfLi(\d+)ELi(\d+)ELb([01])E")
    kernels = sass.read_disassembly(text)
    found = {pattern.search(name): kernel for name, kernel in kernels.items()}
    return {tuple(map(int, m.groups())): kernel for m, kernel in found.items() if m}


def noise_loop(kernel):
    """The smallest loop that makes noise."""
    loops = [lp for lp in kernel.loops() if any(op.startswith("MUFU") for op, _ in lp)]
    return Counter(op.split(".")[0] for op, _ in min(loops, key=len))


@needs_nvcc
@pytest.mark.parametrize(
    "form,slots", [((1, 4, 1), 14.5), ((4, 4, 1), 14.5), ((4, 4, 0), 15.5), ((8, 2, 1), 16.5)]
)
def test_fused_loop_is_bound_by_its_noise(fused, form, slots):
    """2 MUFU a weight are 8 weights a clock of an SM. 14.5 other issue slots are 8.8: the MUFU rate binds.

    The forms with more rows load more of x for a weight, and issue more.
    """
    loop, weights = noise_loop(fused[form]), WEIGHTS * form[1]
    assert loop["MUFU"] == 2 * weights
    assert loop["HMMA"] == form[0] * form[1]
    assert (sum(loop.values()) - loop["HMMA"]) / weights <= slots
    assert not loop["I2F"] and not loop["LDL"] and not loop["STL"]


@needs_nvcc
def test_registers_leave_room_for_independent_fragments(compiled):
    """A fragment is a chain of some 150 clocks; four or more on each quarter of an SM cover it."""
    for name, resources in sass.read_ptxas(compiled["90"][1]).items():
        if form := re.search(r"bayes_forward_kernelI\w+?Li(\d+)ELi(\d+)ELb", name):
            warps = 65536 // (256 * (-(-resources.registers // 8) * 8)) * 8
            assert warps / 4 * int(form[2]) >= 4, (name, resources.registers)
