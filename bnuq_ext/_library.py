"""Loads the compiled libraries: _cpu.so always, _cuda.so where torch has CUDA."""

import warnings
from pathlib import Path

import torch

_FOLDER = Path(__file__).parent


def _load(stem):
    path = next(iter(_FOLDER.glob(f"{stem}*.so")), None)
    if path is None:
        return False
    torch.ops.load_library(path)
    return True


def _load_cpu():
    try:
        found = _load("_cpu")
    except OSError as error:
        raise ImportError(
            f"bnuq_ext: the CPU library does not load under torch {torch.__version__}; "
            f"build it again with `pip install --no-build-isolation .`: {error}"
        ) from error
    if not found:
        raise ImportError(
            f"bnuq_ext: the CPU library is not in {_FOLDER}; run `pip install .`, and then Python in "
            "another folder than that of the sources, or `pip install -e .`"
        )


def _load_cuda():
    # A CPU-only torch lacks the symbols that the CUDA library needs: never try there.
    if torch.version.cuda is None:
        return False
    try:
        return _load("_cuda")
    except OSError as error:
        warnings.warn(f"bnuq_ext: CUDA library not loaded, CPU only: {error}", stacklevel=2)
        return False


_load_cpu()
HAS_CUDA = _load_cuda()
