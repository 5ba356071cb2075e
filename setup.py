"""Builds bnuq_ext/_cpu.so (always) and bnuq_ext/_cuda.so (torch with CUDA and nvcc at hand).

BNUQ_CUDA=0|1 overrides the choice; CUDA_HOME, TORCH_CUDA_ARCH_LIST and MAX_JOBS mean what they mean
for torch's own extensions.
"""

import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import setup


def import_torch():
    """pip's build isolation hides site-packages but keeps the interpreter, so look there too."""
    try:
        import torch
    except ImportError:
        # That of the interpreter, then those it may share. With the stable ABI any of them does.
        places = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        places += [site.getusersitepackages(), *site.getsitepackages([sys.prefix, sys.base_prefix])]
        found = next((p for p in places if (Path(p) / "torch").is_dir()), None)
        if found is None:
            sys.exit("bnuq_ext: install torch first, then `pip install --no-build-isolation .`")
        sys.path.append(found)
        import torch
    return torch


torch = import_torch()
if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10):
    sys.exit(f"bnuq_ext: torch must be 2.10 or newer, got {torch.__version__}")
from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths  # noqa: E402

TARGET = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # the stable ABI of torch 2.10
CSRC = Path("csrc")
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
SITE = Path(torch.__file__).parent.parent  # where torch's CUDA packages lie too
HEADERS = sorted(str(p) for p in [*CSRC.glob("**/*.h"), *CSRC.glob("**/*.cuh")])


def find_cuda_home():
    """The folder with bin/nvcc: CUDA_HOME, /usr/local/cuda, then the nvcc on PATH."""
    on_path = shutil.which("nvcc")
    places = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    places += [Path(on_path).resolve().parent.parent] if on_path else []
    return next((Path(p) for p in places if p and (Path(p) / "bin" / "nvcc").exists()), None)


def nvcc_version(cuda_home):
    text = subprocess.check_output([cuda_home / "bin" / "nvcc", "--version"], text=True)
    return re.search(r"release (\d+\.\d+)", text).group(1)


def decide_cuda(cuda_home):
    want = os.environ.get("BNUQ_CUDA", "auto")
    if want not in ("auto", "0", "1"):
        sys.exit(f"bnuq_ext: BNUQ_CUDA must be auto, 0 or 1, got {want}")
    if want == "1" and cuda_home is None:
        sys.exit("bnuq_ext: BNUQ_CUDA=1 but no nvcc was found; set CUDA_HOME")
    if want != "auto":
        return want == "1"
    built = torch.version.cuda
    if cuda_home is None or built is None:
        return False
    toolkit = nvcc_version(cuda_home)
    # Libraries of two CUDA majors do not load into one process.
    fits = toolkit.split(".")[0] == built.split(".")[0]
    if not fits:
        print(f"bnuq_ext: nvcc is {toolkit} and torch has CUDA {built}: no CUDA", file=sys.stderr)
    return fits


CUDA_HOME = find_cuda_home()
USE_CUDA = decide_cuda(CUDA_HOME)
print(
    f"bnuq_ext: torch {torch.__version__}, nvcc {CUDA_HOME / 'bin' / 'nvcc' if CUDA_HOME else 'not found'}: "
    f"building {'CPU and CUDA' if USE_CUDA else 'CPU only'}",
    file=sys.stderr,
)


def gencode():
    flags = []
    archs = (os.environ.get("TORCH_CUDA_ARCH_LIST") or "8.0;9.0+PTX").replace(" ", ";")
    for arch in filter(None, archs.split(";")):
        number, ptx = arch.removesuffix("+PTX").replace(".", ""), arch.endswith("+PTX")
        if number.isdigit() and int(number) < 80:
            print(f"bnuq_ext: not built for {arch}: the kernels need 8.0", file=sys.stderr)
            continue
        code = f"[sm_{number},compute_{number}]" if ptx else f"sm_{number}"
        flags += ["-gencode", f"arch=compute_{number},code={code}"]
    if not flags:
        sys.exit(
            f"bnuq_ext: TORCH_CUDA_ARCH_LIST must name 8.0 or newer, got {archs}; or BNUQ_CUDA=0"
        )
    return flags


def cuda_include_paths():
    """The toolkit's headers; what it lacks, torch's own CUDA packages carry."""
    return [CUDA_HOME / "include", *sorted(SITE.glob("nvidia/cu*/include"))]


def find_cudart():
    """The toolkit's libcudart.so, or the one in torch's CUDA packages."""
    folders = [CUDA_HOME / "lib64", CUDA_HOME / "lib", *SITE.glob("nvidia/*/lib")]
    found = (str(f) for folder in folders for f in sorted(folder.glob("libcudart.so*")))
    return next(found, "-lcudart")


class Build(BuildExtension):
    """Compiles the .cu files itself: torch's CUDAExtension refuses beside a CPU-only torch."""

    def build_extension(self, ext):
        cuda_sources = getattr(ext, "cuda_sources", ())
        self.gencode = gencode() if cuda_sources else []
        jobs = int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))
        with ThreadPoolExecutor(jobs) as pool:
            ext.extra_objects += pool.map(self.compile_cuda, cuda_sources)
        super().build_extension(ext)

    def compile_cuda(self, source):
        obj = (Path(self.build_temp) / "cuda" / Path(source).stem).with_suffix(".o").resolve()
        newest = max(Path(p).stat().st_mtime for p in [source, *HEADERS])
        if not self.force and obj.exists() and obj.stat().st_mtime > newest:
            return str(obj)
        obj.parent.mkdir(parents=True, exist_ok=True)
        command = [CUDA_HOME / "bin" / "nvcc", "-std=c++17", "-O3", *self.gencode]
        command += [TARGET, "-DUSE_CUDA", "--expt-relaxed-constexpr"]
        command += ["-Xcompiler", "-fPIC,-fvisibility=hidden,-g0"]
        command += [f"-I{p}" for p in [*include_paths(), *cuda_include_paths()]]
        subprocess.check_call([*command, "-c", source, "-o", str(obj)])
        return str(obj)


def extensions():
    # -fno-math-errno -fno-trapping-math: without them the normals run twelve times slower.
    flags = ["-O3", "-g0", "-fvisibility=hidden", "-fopenmp-simd", TARGET]
    flags += ["-fno-math-errno", "-fno-trapping-math"]
    common = {"py_limited_api": True, "depends": HEADERS, "extra_compile_args": flags}
    cpu = [str(p) for p in [CSRC / "ops.cpp", *sorted((CSRC / "cpu").glob("*.cpp"))]]
    exts = [CppExtension("bnuq_ext._cpu", cpu, **common)]
    if USE_CUDA:
        # Nothing is used from libtorch.so itself, so the linker would drop it, and with it the way
        # to libtorch_cuda.so.
        link = ["-Wl,--no-as-needed", "-ltorch", find_cudart()]
        cuda = CppExtension(
            "bnuq_ext._cuda", ["csrc/cuda/module.cpp"], extra_link_args=link, **common
        )
        cuda.cuda_sources = [str(p) for p in sorted((CSRC / "cuda").glob("*.cu"))]
        cuda.depends = [*HEADERS, *cuda.cuda_sources]
        exts.append(cuda)
    return exts


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": Build.with_options(no_python_abi_suffix=True)},
    # Python without the GIL has no limited API up to 3.14.
    options={} if FREE_THREADED else {"bdist_wheel": {"py_limited_api": "cp310"}},
)
