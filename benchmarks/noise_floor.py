"""The noise of T weight matrices alone, by the kernels' own source; compiled where it is used."""

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from .gpu_process import find_tool
from .yardsticks import Unavailable

SOURCE = Path(__file__).parent / "noise_floor.cu"


def compile_command(arch: str, library: Path) -> list:
    nvcc = find_tool("nvcc")
    if nvcc is None:
        raise Unavailable("no nvcc")
    flags = ["-O3", "-std=c++17", f"-arch=sm_{arch}", "--expt-relaxed-constexpr"]
    return [nvcc, *flags, "-shared", "-Xcompiler", "-fPIC", "-o", library, SOURCE]


@functools.cache
def _library() -> ctypes.CDLL:
    arch = "{}{}".format(*torch.cuda.get_device_capability())
    path = Path(tempfile.mkdtemp()) / "noise_floor.so"
    done = subprocess.run(compile_command(arch, path), capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"does not compile: {done.stderr[-300:]}")
    return ctypes.CDLL(str(path))


def noise_alone(seed: Tensor, T: int, O: int, I: int) -> Callable[[], None]:  # noqa: E741
    """A function that makes the noise of (T, O, I) weights and keeps none of it."""
    library, out = _library(), seed.new_zeros(1)
    pointers = [ctypes.c_void_p(v.data_ptr()) for v in (out, seed)]
    sizes = [ctypes.c_int64(size) for size in (T, O, I)]

    def run():
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        error = library.noise_floor(*pointers, *sizes, stream)
        if error:
            raise RuntimeError(f"noise_floor: the launch failed with CUDA error {error}")

    run.kept = (out, seed)  # the pointers are theirs
    return run
