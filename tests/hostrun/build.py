"""Builds the host-run modules with ninja and loads them: the CUDA kernels as numpy functions."""

import argparse
import fcntl
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent.resolve()
BUILD = HERE / "build"
FLAGS = "-std=c++17 -O1 -fPIC -fvisibility=hidden -Wall -Wno-unknown-pragmas -DBNUQ_HOSTRUN"
SANITIZE = "-fsanitize=address,undefined"
RACES = "-fsanitize=thread"
# As setup.py compiles the .cu files; torch's headers are found without importing it.
TORCH = "-x c++ -DUSE_CUDA -DTORCH_TARGET_VERSION=0x020a000000000000 -isystem $torch/include"
KINDS = {  # of objects: what they are compiled with
    "plain": "",
    "ucontext": "-DHOSTRUN_UCONTEXT",
    "sanitized": f"-O0 {SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1",
    # The kernels' accesses alone are watched, one instruction for each of the source, as wide as it
    # is there: the machinery says which barriers order them. A memcpy is seen where it is a call.
    "watched": f"{RACES} -fno-builtin -g1 -fno-tree-sra -fno-tree-fre -fno-tree-forwprop",
    "unwatched": "-fno-builtin -DHOSTRUN_RACES",
    "torch": f"-O2 -fvisibility=default {TORCH}",
    "launching": f"-O0 -fvisibility=default {TORCH}",  # kernels that run as compiled
    "ptx": "-O2 -march=native -std=c++20 -frounding-math -ffp-contract=off",
}
STEMS = ["philox", "batch_norm", "batch_norm_backward", "predictive", "linear", "probes"]
KERNELS = [f"{stem}.cpp" for stem in STEMS]
MACHINE = ["block.cpp", "fiber.cpp"]
CSRC = HERE.parent.parent / "csrc"
OPS = ["torch_library.cpp", CSRC / "ops.cpp", *sorted((CSRC / "cuda").glob("*.cu"))]
PTX = ["ptx_library.cpp", "ptx_parse.cpp", "ptx_arithmetic.cpp", "ptx_memory.cpp", "ptx_run.cpp"]
VARIANTS = {  # of the module: its objects
    "plain": {"plain": ["module.cpp", *MACHINE, *KERNELS]},
    # With the portable form of the fiber switch.
    "ucontext": {"plain": ["module.cpp", *KERNELS], "ucontext": MACHINE},
    "sanitized": {"plain": ["module.cpp"], "sanitized": [*MACHINE, *KERNELS]},
    "races": {"plain": ["module.cpp"], "unwatched": MACHINE, "watched": KERNELS},
    "accesses": {"plain": ["module.cpp", *MACHINE, "accesses.cpp"], "watched": KERNELS},
    # Libraries for torch.ops.load_library.
    "torch": {"torch": [*MACHINE, *OPS], "ptx": PTX},
    "torch_compiled": {"launching": [*MACHINE, *OPS], "ptx": PTX},
    # For ctypes: PTX that a test writes.
    "ptx": {"ptx": PTX},
}
COUNTED = ["memcpy", "_Znwm", "_ZN7hostrun10begin_copyEPvPKvbNS_4SiteE"]  # see accesses.cpp
WRAPPED = [  # functions of torch that torch_library.cpp stands in for
    "aoti_torch_library_init_impl",
    "aoti_torch_device_type_cuda",
    "aoti_torch_create_device_guard",
    "aoti_torch_delete_device_guard",
    "aoti_torch_get_current_cuda_stream",
    "torch_get_const_data_ptr",
    "torch_get_mutable_data_ptr",
]


def missing():
    """Why the modules cannot be built here, or None."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"no C++ compiler ({compiler})"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return f"no Python.h in {sysconfig.get_path('include')}"
    absent = [name for name in ("pybind11", "numpy") if importlib.util.find_spec(name) is None]
    absent += [] if ninja() else ["ninja"]
    return f"not installed: {', '.join(absent)}" if absent else None


def ninja():
    """The command that starts ninja, or an empty list."""
    if importlib.util.find_spec("ninja"):
        return [sys.executable, "-m", "ninja"]
    return [shutil.which("ninja")] if shutil.which("ninja") else []


def torch_folder():
    return Path(importlib.util.find_spec("torch").origin).parent


def link_flags(variant):
    flags = [SANITIZE] if variant == "sanitized" else []
    flags += [RACES] if variant == "races" else []
    flags += [f"-Wl,--wrap={name}" for name in COUNTED] if variant == "accesses" else []
    if variant.startswith("torch"):
        flags += [f"-Wl,--wrap={name}" for name in WRAPPED]
        flags += ["-L$torch/lib", "-ltorch_cpu", "-lc10"]
    return " ".join(flags)


def build_ninja():
    """The text of build.ninja: every source once for each kind of object, every variant linked."""
    import pybind11

    lines = [
        f"cxx = {os.environ.get('CXX', 'g++')}",
        f"torch = {torch_folder()}",
        f"includes = -I{HERE} -isystem {pybind11.get_include()} -isystem {sysconfig.get_path('include')}",
        f"flags = {FLAGS}",
        "rule compile",
        "  command = $cxx $flags $includes $extra -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        "  command = $cxx -shared $in $extra -o $out",
    ]
    built = set()
    for variant, kinds in VARIANTS.items():
        objects = [(kind, HERE / name) for kind, names in kinds.items() for name in names]
        for kind, source in objects:
            if (kind, source) not in built:
                lines += [f"build {kind}/{source.stem}.o: compile {source}"]
                lines += [f"  extra = {KINDS[kind]}"]
        built.update(objects)
        inputs = " ".join(f"{kind}/{source.stem}.o" for kind, source in objects)
        lines += [f"build hostrun_{variant}.so: link {inputs}"]
        lines += [f"  extra = {link_flags(variant)}"]
    return "\n".join(lines) + "\n"


def build(variant):
    """Builds one module, or only what has changed of it, and returns its path."""
    BUILD.mkdir(exist_ok=True)
    target = f"hostrun_{variant}.so"
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may come here at once
        text, path = build_ninja(), BUILD / "build.ninja"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        command = [*ninja(), "-C", str(BUILD), target]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"hostrun: the build failed\n{done.stdout}{done.stderr}")
    return BUILD / target


def load_file(path):
    # By a name of its own: pybind11 hands out the module that it made first under a name.
    name = f"{Path(path).stem}.hostrun_module"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def load(variant="plain"):
    """The module of a variant, built first where it is out of date."""
    return load_file(build(variant))


def library(name):
    compiler = os.environ.get("CXX", "g++")
    return subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip()


def races_environment():
    """What a Python process needs in order to load the module that is watched for races."""
    threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return (
        os.environ
        | threads
        | {"LD_PRELOAD": library("libtsan.so"), "TSAN_OPTIONS": "halt_on_error=1"}
    )


def sanitizer_environment():
    """What a Python process needs in order to load the sanitized module."""
    # libstdc++ has to be there when AddressSanitizer starts, or it cannot intercept a throw.
    return os.environ | {
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variants", nargs="*", default=list(VARIANTS))
    for name in parser.parse_args().variants:
        print(build(name))
