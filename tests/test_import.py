"""Importing the package: quiet, cheap, and clear about what is missing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bnuq_ext

PACKAGE = Path(bnuq_ext.__file__).parent
ROOT = Path(__file__).parent.parent
from_source = pytest.mark.skipif(
    not (ROOT / "setup.py").exists(), reason="not run from a source tree"
)


def run(code, cwd, *flags):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(cwd)}
    command = [sys.executable, *flags, "-c", code]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


@pytest.fixture
def copy(tmp_path):
    """The package alone in a folder, to be damaged."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "bnuq_ext", ignore=ignore)
    return tmp_path


def test_import_is_silent_and_starts_no_cuda(copy):
    blocked = ("matplotlib", "sklearn", "torchvision", "torchmetrics", "scipy", "pytest")
    code = (
        "import sys\n"
        f"for name in {blocked}: sys.modules[name] = None\n"
        "import bnuq_ext, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "bnuq_ext.ops.philox_normal(bnuq_ext.ops.new_seed(0), 0, (1, 2))\n"
        "bnuq_ext.metrics.nll, bnuq_ext.plots.verdict, bnuq_ext.data.digits\n"
    )
    result = run(code, copy, "-W", "error")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_a_first_prediction_imports_no_compiler(copy):
    """It takes a second."""
    code = (
        "import sys, torch, bnuq_ext as bnuq\n"
        "layers = [torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.ReLU(), torch.nn.Linear(5, 3)]\n"
        "model = bnuq.convert(torch.nn.Sequential(*layers).eval())\n"
        "bnuq.collect(model, [torch.randn(6, 4) for _ in range(3)], progress=False)\n"
        "bnuq.predict(model, torch.randn(7, 4), likelihood='categorical', num_samples=3)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    result = run(code, copy, "-W", "error")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_missing_cpu_library_is_an_import_error(copy):
    for library in (copy / "bnuq_ext").glob("_cpu*.so"):
        library.unlink()
    result = run("import bnuq_ext", copy)
    assert result.returncode == 1
    assert (
        f"ImportError: bnuq_ext: the CPU library is not in {copy / 'bnuq_ext'}; run `pip install .`, "
        "and then Python in another folder than that of the sources" in result.stderr
    )


def test_damaged_cpu_library_is_an_import_error(copy):
    (copy / "bnuq_ext" / "_cpu.so").write_bytes(b"not a library")
    result = run("import bnuq_ext", copy)
    assert result.returncode == 1
    assert "the CPU library does not load under torch" in result.stderr


@pytest.mark.skipif(
    torch.version.cuda is None, reason="a CPU-only torch never tries the CUDA library"
)
def test_damaged_cuda_library_warns_and_leaves_the_cpu(copy):
    (copy / "bnuq_ext" / "_cuda.so").write_bytes(b"not a library")
    code = (
        "import bnuq_ext\n"
        "assert not bnuq_ext._library.HAS_CUDA\n"
        "bnuq_ext.ops.philox_normal(bnuq_ext.ops.new_seed(0), 0, (1, 2))\n"
    )
    result = run(code, copy)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("bnuq_ext: CUDA library not loaded, CPU only") == 1


@from_source
def test_build_refuses_an_unknown_choice():
    env = os.environ | {"BNUQ_CUDA": "maybe"}
    command = [sys.executable, "setup.py", "--version"]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert "BNUQ_CUDA must be auto, 0 or 1, got maybe" in result.stderr


@from_source
def test_gpus_that_the_kernels_do_not_run_on_are_left_out():
    """Of a list that names others too; of one that names no others the build is refused."""
    code = (
        "import os, runpy, sys\n"
        "sys.argv = ['setup.py', '--version']\n"
        "gencode = runpy.run_path('setup.py')['gencode']\n"
        "for archs in ('7.5;8.6 9.0+PTX', '7.0;7.5+PTX'):\n"
        "    os.environ['TORCH_CUDA_ARCH_LIST'] = archs\n"
        "    print(gencode())\n"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1 and "not built for 7.5: the kernels need 8.0" in result.stderr
    codes = ["arch=compute_86,code=sm_86", "arch=compute_90,code=[sm_90,compute_90]"]
    assert eval(result.stdout.splitlines()[-1])[1::2] == codes
    assert "TORCH_CUDA_ARCH_LIST must name 8.0 or newer, got 7.0;7.5+PTX" in result.stderr


@from_source
@pytest.mark.parametrize("place", ["of the user", "of the base", "none"])
def test_the_build_finds_torch_where_the_interpreter_would(place, tmp_path):
    """In pip's isolated build, which hides site-packages."""
    import setuptools

    site_packages = Path(torch.__file__).parent.parent
    tools = Path(setuptools.__file__).parent.parent
    for name in ("setuptools", "_distutils_hack", "packaging"):
        if (tools / name).exists():
            (tmp_path / name).symlink_to(tools / name)
    code = (
        "import runpy, site, sys, sysconfig\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "sys.argv = ['setup.py', '--version']\n"
        "get_path = sysconfig.get_path\n"
        "hidden = {'purelib', 'platlib'}\n"
        "sysconfig.get_path = lambda name, *a, **k: '/nowhere' if name in hidden else get_path(name, *a, **k)\n"
        f"found, place = {str(site_packages)!r}, {place!r}\n"
        "site.getsitepackages = lambda prefixes: [found] if place == 'of the base' else []\n"
        "site.getusersitepackages = lambda: found if place == 'of the user' else '/nowhere'\n"
        "runpy.run_path('setup.py', run_name='__main__')\n"
    )
    command = [sys.executable, "-S", "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    if place == "none":
        assert result.returncode == 1 and "bnuq_ext: install torch first" in result.stderr
    else:
        assert result.returncode == 0, result.stderr
        assert result.stdout.split()[-1] == bnuq_ext.__version__
