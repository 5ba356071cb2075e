"""The ops of csrc/cuda from Python down to the kernels: the tests of the ops, once more,
on the emulated library.

Each run is a process of its own, where that library stands in the place of the CPU's: see
hostrun/on_cpu.py. Where the CUDA library was built, its kernels run as they were compiled,
instruction by instruction of their PTX, within the tensors of their op,
and their approximate instructions err as far as they may.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sass
from hostrun import build
from sass import LIBRARY

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"host run: {build.missing()}")

ROOT = Path(__file__).parent.parent
FILES = [
    "batch_norm", "batch_norm_errors", "batch_norm_grad", "batch_norm_layout", "batch_norm_library",
    "predictive", "philox", "linear", "kl", "kl_errors", "bayes_forward", "bayes", "posterior", "oracle",
    "autocast", "nan_payloads", "op_safety",
]  # fmt: skip
# Left to the run of everything: what takes more than a second and launches what others launch, and
# what asks about torch's graphs, or a program of its own, instead of kernels.
SLOW = [
    "gradcheck", "784-270-20", "100-129-131-20", "beyond_the_caches", "long_row", "mixture_mean",
    "moments", "opcheck", "compile", "exports", "fake_tensors", "dynamic_rows", "known_answers",
    "784-270-3", "100-129-131-3", "33-130-31-20", "9000-", "no_spread", "every_half", "residual-auto",
    "hardly_spread", "words_are_frozen", "test_export",
    "(large_products_in_float64 and not direct)",  # which go that way whatever is asked
]  # fmt: skip
SLOW_ON_A_GPU = [
    "784", "1024", "400-400", "bit_equal", "more_replicas", "peak", "weight_matrix",
    "((direct or sampled) and 600)", "(fused and 600 and 10-)", "(direct and 64-70)",
]  # fmt: skip


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What makes kernels run as compiled, in the place of their source;
    nothing where there is no library."""
    if LIBRARY is None or sass.find_tool("cuobjdump") is None:
        return {}
    folder = tmp_path_factory.mktemp("ptx")
    sass.extract(LIBRARY, folder, "-xptx", "all")
    none = not any(folder.glob("*.ptx"))  # TORCH_CUDA_ARCH_LIST may leave it out
    return {} if none else {"HOSTRUN_PTX": str(folder), "HOSTRUN_APPROXIMATION": "1"}


def run(*arguments, **variables):
    """Garbage in every fresh allocation, threads in a shuffled order; a GPU,
    if there is one, unseen."""
    places = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    fixed = {"PYTHONPATH": places, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    env = os.environ | variables | fixed | {"MALLOC_PERTURB_": "128"}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout


def run_tests(report, files, slow, *plugins, **variables):
    """(how many tests passed, the kernels that were launched, the kernels that were not)."""
    plugins = [word for name in ("hostrun.on_cpu", *plugins) for word in ("-p", name)]
    plugins += ["-p", "no:cacheprovider", "-p", "no:benchmark", "-p", "no:xdist"]
    paths = [ROOT / "tests" / f"test_{name}.py" for name in files]
    options = ["-o", "addopts=", "-k", f"not ({' or '.join(slow)})"]
    output = run(
        "-m", "pytest", *plugins, *paths, *options, HOSTRUN_REPORT=str(report), **variables
    )
    counts = json.loads(report.read_text())
    launched = {kernel.split("<")[0] for kernel, count in counts.items() if count}
    absent = {kernel.split("<")[0] for kernel in counts} - launched
    return int(re.search(r"(\d+) passed", output)[1]), launched, absent


def test_the_ops_pass_their_tests(tmp_path, compiled):
    report, ways = tmp_path / "report.json", "fused direct sampled"
    passed, _, absent = run_tests(report, FILES, SLOW, HOSTRUN_WAYS=ways, **compiled)
    assert passed >= 1900
    assert not absent


def test_the_tests_for_a_gpu_pass_as_far_as_the_cpu_has_an_answer(tmp_path, compiled):
    report, files = tmp_path / "report.json", ["gpu", "gpu_bayes", "gpu_ways"]
    passed, launched, _ = run_tests(report, files, SLOW_ON_A_GPU, "hostrun.rehearsal", **compiled)
    assert passed >= 40
    assert {"sample_noise_kernel", "bayes_grad_rho_kernel", "statistics_kernel"} <= launched


SANITIZED_CASE = """
import json, os, runpy, sys
from hostrun import on_cpu
sys.argv = ["sanitize_case.py", "cpu"]
runpy.run_path("benchmarks/sanitize_case.py", run_name="__main__")
print(json.dumps([on_cpu.kernels(), on_cpu.instructions() if on_cpu.COMPILED else None]))
"""


def test_every_form_of_a_kernel_runs(compiled):
    """Over the case that compute-sanitizer is given on a GPU."""
    launches, counted = json.loads(run("-c", SANITIZED_CASE, **compiled).splitlines()[-1])
    assert len(launches) > 150
    assert not [kernel for kernel, count in launches.items() if not count]
    if compiled:
        carried_out, instructions = counted
        assert carried_out > 0.6 * instructions
