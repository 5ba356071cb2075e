"""What can be known of the CUDA side without a GPU: in the library that the build made nothing is
spilled, and the hot loops are lean.

Registers and spills are read of the code for sm_80 and sm_90, instructions of that for sm_90 alone.
The budgets hold for nvcc 13.0: another compiler may spend a register or an instruction more.
"""

import os
import re
import shutil
import subprocess
from collections import ChainMap
from pathlib import Path

import pytest
import sass
import torch
from sass import LIBRARY, PACKAGE

from bnuq_ext import _library

ROOT = Path(__file__).parent.parent
PINNED = "13.0"
ARCHS = ("80", "90")

# H200: 132 SMs, 4 warp instructions a clock each, 1.98 GHz, 4.8 TB/s. In the time that one 16-byte
# access of a warp (512 bytes) takes, the SMs issue this many instructions.
SLOTS_PER_ACCESS = 132 * 4 * 1.98e9 * 512 / 4.8e12

# The least accesses of 16 bytes that one turn of a hot loop's unrolled body makes for one vector,
# and the blocks of 256 threads that must fit on an SM for enough bytes in flight.
HOT = {
    "columns_kernel": (2, 3),  # x, y
    "planes_kernel": (2, 3),
    "shared_columns_kernel": (1, 2),  # y: x stays in registers
    "shared_planes_kernel": (1, 2),
    "gradients_kernel": (2, 3),  # grad_y, grad_x
    "shared_gradients_kernel": (2, 2),  # grad_y, y
    "sums_kernel": (2, 2),  # grad_y, x
}


# Each file of code has a kernel whose name matches one of these: files of the first are disassembled
# here, those of the second in test_cuda_linear.
PLAIN = "columns|sums|statistics|snapshot"
BAYES = "bayes|direct|sample|mixture"


def lacking():
    """Why there is no code to look at, or None."""
    if LIBRARY is None:
        return "built without CUDA"
    if "TORCH_CUDA_ARCH_LIST" in os.environ:
        return "TORCH_CUDA_ARCH_LIST: the build need not have made code for sm_80 and sm_90"
    tools = [tool for tool in ("cuobjdump", "nvdisasm") if sass.find_tool(tool) is None]
    return f"no {' and no '.join(tools)}, on PATH or in triton's package" if tools else None


needs_code = pytest.mark.skipif(lacking() is not None, reason=str(lacking()))


def resources_of(arch):
    """{mangled name: kernel without code} in each file of the library that the build made."""
    return sass.read_library(LIBRARY, arch, sass.read_resources)


def check_release():
    """Skips where the budgets need not hold."""
    if sass.read_release(LIBRARY) != PINNED:
        pytest.skip(
            f"budgets hold for nvcc {PINNED}; {sass.read_release(LIBRARY)} built the library"
        )


def hopper_code(pattern):
    """{mangled name: kernel} on sm_90, of the files in which a kernel's name has the pattern."""
    check_release()
    return dict(ChainMap(*sass.read_library(LIBRARY, "90", pattern=pattern)))


def name_of(mangled):
    return re.match(r"_ZN4bnuq\d+([a-z_]+?_kernel)", mangled)[1]


@pytest.fixture(scope="session")
def kernels():
    """[(name, whether it moves 16 bytes at a time, kernel)] on sm_90, but for Bayesian ones."""
    rows = []
    for mangled, kernel in hopper_code(PLAIN).items():
        name = name_of(mangled)
        # The width V is a template argument; kernels over planes have no narrow form.
        wide = "planes" in name or re.search(r"Li[248]E", mangled) is not None
        rows.append((name, wide, kernel))
    return rows


@needs_code
@pytest.mark.parametrize("arch", ARCHS)
def test_no_kernel_spills(arch):
    kernels = dict(ChainMap(*resources_of(arch)))
    assert len(kernels) > 150
    assert not [name for name, kernel in kernels.items() if kernel.stack]


@needs_code
def test_every_file_of_kernels_is_disassembled():
    for names in filter(None, resources_of("90")):
        assert [name for name in names if re.search(f"{PLAIN}|{BAYES}", name)], names


@needs_code
@pytest.mark.parametrize("arch", ARCHS)
def test_registers_leave_room_for_enough_warps(arch):
    """Blocks of 256 threads, registers given out in eights, 65536 an SM."""
    check_release()
    seen = set()
    for mangled, kernel in ChainMap(*resources_of(arch)).items():
        name = name_of(mangled)
        if name in HOT:
            blocks = 65536 // (256 * (-(-kernel.registers // 8) * 8))
            assert blocks >= HOT[name][1], (name, kernel.registers)
            seen.add(name)
    assert seen == set(HOT)


def hot_loop(kernel):
    """The smallest loop with the most 16-byte accesses, and how many stores and loads it makes."""

    def wide(loop, kind):
        return sum(op.startswith(kind) and ".128" in op for op, _ in loop)

    loops = [lp for lp in kernel.loops() if wide(lp, "STG") + wide(lp, "LDG")]
    loop = min(loops, key=lambda lp: (-wide(lp, "STG") - wide(lp, "LDG"), len(lp)))
    return loop, wide(loop, "STG"), wide(loop, "LDG")


# How often the loop body is unrolled over vectors.
UNROLL = {name: 2 if name == "shared_gradients_kernel" else 4 for name in HOT}


@needs_code
def test_hot_loops_stay_memory_bound(kernels):
    """All branches of a loop together issue fewer instructions than the memory leaves time for.

    That bounds any path from above: the loop holds the residual and every activation, a call takes
    one of them.
    """
    for name, wide, kernel in kernels:
        if name in HOT and wide:
            loop, _, _ = hot_loop(kernel)
            assert len(loop) / UNROLL[name] < 0.9 * HOT[name][0] * SLOTS_PER_ACCESS, name


@needs_code
def test_hot_loops_use_wide_accesses_and_no_slow_instruction(kernels):
    for name, wide, kernel in kernels:
        if name not in HOT or not wide:
            continue
        loop, stores, loads = hot_loop(kernel)
        assert stores + loads >= UNROLL[name] * HOT[name][0], name
        narrow = [op for op, _ in loop if op.startswith(("LDG", "STG")) and ".128" not in op]
        # Conversions, special functions, barriers: nothing of the statistics is made in the loop.
        slow = [op for op, _ in loop if op.startswith(("MUFU", "I2F", "F2I", "BAR", "ATOM", "RED"))]
        philox = [op for op, args in loop if re.search("2daee0ad|326172a9|d2511f53|cd9e8d57", args)]
        assert not narrow and not slow and not philox, name


@needs_code
def test_a_softmax_takes_one_exponential_a_class(kernels):
    """A warp's 32 logits of float32 leave 28 instructions of time, of which the loop takes 37."""
    loops = [
        max(kernel.loops(), key=len)
        for name, _, kernel in kernels
        if name == "statistics_kernel" and not any(op.startswith("DADD") for op, _ in kernel.code)
    ]
    assert len(loops) == 3 * 3  # dtypes, teams
    for loop in loops:
        special = [op for op, _ in loop if op.startswith("MUFU.EX2")]
        assert len(special) == 8  # the classes of a thread
    # A third of the loops, the teams of lanes, hold no barrier and nothing
    # that passes through memory.
    assert sorted(map(len, loops))[len(loops) // 3 - 1] < 8 * 38


@needs_code
def test_a_gradient_by_logits_accesses_nothing_else_in_its_loop(kernels):
    """32 logits of float32 and their gradients leave 56 instructions of time,
    of which the loop takes 62."""
    loops = [
        max(kernel.loops(), key=len)
        for name, _, kernel in kernels
        if name == "statistics_grad_kernel"
        and not any(op.startswith("DADD") for op, _ in kernel.code)
    ]
    assert len(loops) == 3 * 3  # dtypes, teams
    for loop in loops:
        names = [op.split(".")[0] for op, _ in loop]
        assert names.count("LDG") == names.count("STG") == 8  # the classes of a thread
    assert sorted(map(len, loops))[len(loops) // 3 - 1] < 8 * 66  # teams of lanes


def check_atomics(name, kernel):
    """Sums are made in a fixed order, so that results have the same bits every time."""
    assert len(kernel.code) > 10, name
    assert not [op for op, _ in kernel.code if op.startswith(("ATOM", "RED."))], name


@needs_code
def test_no_kernel_uses_atomics(kernels):
    for name, _, kernel in kernels:
        check_atomics(name, kernel)


# ---- the grids -----------------------------------------------------------------------------------


def test_grids_hold_for_every_size_up_to_64_bits(tmp_path):
    """Launch limits, and nothing left out, for sizes beyond 2^32 that no test could run."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    hostrun = ROOT / "tests" / "hostrun"
    sources = [ROOT / "tests/cpp/cuda_plans.cpp", hostrun / "fiber.cpp", hostrun / "block.cpp"]
    command = [*compiler.split(), "-O1", "-std=c++17", "-Wall", "-Wno-unknown-pragmas"]
    command += ["-DBNUQ_HOSTRUN", f"-I{hostrun}", f"-I{ROOT / 'csrc' / 'cuda'}", *sources]
    subprocess.run([*command, "-o", tmp_path / "plans"], check=True)
    done = subprocess.run([tmp_path / "plans"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert int(done.stdout) > 1500


# ---- the library that the build made -------------------------------------------------------------

OPS = [
    *("philox_normal", "snapshot_indices", "batch_norm_bank", "batch_norm_bank_out"),
    *("batch_norm_bank_backward", "batch_norm_fitted", "batch_norm_fitted_out"),
    *("batch_norm_fitted_backward", "predictive_statistics", "predictive_statistics_backward"),
    "predictive_accumulate_",
    *("bayes_linear", "bayes_linear_backward", "bayes_operands", "bayes_forward"),
    *("gaussian_kl", "gaussian_kl_backward", "mixture_kl", "mixture_kl_backward"),
    *("gaussian_kl_sum", "gaussian_kl_sum_backward"),
]
needs_library = pytest.mark.skipif(
    LIBRARY is None or torch.version.cuda is None,
    reason="built without CUDA, or beside a torch without it",
)


@needs_library
def test_the_library_loads_without_a_gpu_and_registers_every_op():
    assert _library.HAS_CUDA
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert [op for op in OPS if not has_kernel(f"bnuq::{op}", "CUDA")] == []


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm")
@pytest.mark.parametrize("stem", ["_cpu", "_cuda"])
def test_libraries_import_only_the_stable_abi(stem):
    """No C++ symbol of c10, at or torch, which change from release to release."""
    path = next(iter(PACKAGE.glob(f"{stem}*.so")), None)
    if path is None:
        pytest.skip(f"{stem} was not built")
    command = ["nm", "-D", "--undefined-only", path]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "aoti_torch" in symbols
    assert not re.findall(r"_ZN?K?\d*(?:2at|3c10|5torch)\w*", symbols)
