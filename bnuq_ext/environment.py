"""What this installation consists of and what it can do here."""

import importlib.metadata
import os
import platform
import shutil
from pathlib import Path

import torch

from ._library import HAS_CUDA
from ._version import __version__

OPTIONAL = ("scikit-learn", "matplotlib", "timm", "torchvision", "lightning")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """The name of the CPU, as far as the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def environment() -> dict:
    """Versions, libraries and devices, as JSON values. Asks the driver for its GPUs,
    but starts none."""
    return {
        "bnuq_ext": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "torch_cuda": torch.version.cuda,
        "cuda_library": HAS_CUDA,
        "gpus": torch.cuda.device_count(),
        "nvcc": shutil.which("nvcc"),
        **{name: _version(name) for name in OPTIONAL},
    }
