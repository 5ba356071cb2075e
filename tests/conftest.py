import gc
import json
import multiprocessing
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

try:
    import hypothesis
except ImportError:  # as on some machines with a GPU: only the files that need it are left out
    pass
else:
    hypothesis.settings.register_profile("bnuq", deadline=None, derandomize=True, print_blob=True)
    hypothesis.settings.load_profile("bnuq")

# What a test makes cannot be pickled for workers that Python 3.14 starts otherwise.
multiprocessing.set_start_method("fork", force=True)

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
# All bits set, which is what a GPU's arithmetic makes: sums of such bits carry.
NANS = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)

# Against a float64 reference of the same (rounded) inputs: relative and absolute tolerance.
TOLERANCES = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (2e-5, 2e-5),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1.6e-2),
}


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    if request.param == "cuda":  # torch's convolutions round to 11 bits by default
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    return torch.device(request.param)


@pytest.fixture(scope="module")  # or a module's own fixtures would be made before it
def without_gpu():
    """For what trains where it can on a GPU, which rounds otherwise
    and draws other dropout than the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


@pytest.fixture(scope="module")
def run_protocol(tmp_path_factory):
    """Runs a protocol by its module, name and settings: its folder, and what results.json holds."""
    from bnuq_ext.protocols import runner  # as in `model`

    def run(module, name, settings, data_root=None):
        folder = tmp_path_factory.mktemp(name)
        return folder, runner.run(module, name, folder, settings, data_root, 1, progress=False)

    return run


@pytest.fixture
def model():
    """predicting's, for files without one of their own."""
    from predicting import make_model  # this file also serves tests that lie elsewhere

    return make_model()


@pytest.fixture
def flexible():
    from predicting import make_flexible

    return make_flexible()


@pytest.fixture
def by_values_alone(monkeypatch):
    """Trials compare outputs, and do not look at how operations make them."""
    monkeypatch.setattr("bnuq_ext.proof.mixed.Mixed.check", lambda *args: None)


@pytest.fixture(params=["fused", "apart"])
def divergence_op(request, monkeypatch):
    """On the CPU a Bayesian layer and its divergence are one op, on CUDA two."""
    if request.param == "apart":
        monkeypatch.setattr("bnuq_ext.ops.linear_chain._has_fused_op", lambda x: False)


@pytest.fixture
def set_threads():
    """torch.set_num_threads, for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def on_one_thread(set_threads):
    """For what repeats a unit of an experiment, which runs so: other threads add in another order,
    and train to other numbers."""
    set_threads(1)


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request):
    return request.param


@pytest.fixture
def assert_close():
    """Compares with a float64 reference, by the tolerance of `dtype` (by default `actual`'s)."""

    def check(actual, expected, dtype=None, scale=1.0):
        rtol, atol = TOLERANCES[dtype or actual.dtype]
        torch.testing.assert_close(
            actual.detach().double().cpu(),
            expected.detach().double().cpu(),
            rtol=rtol * scale,
            atol=atol * scale,
        )

    return check


@pytest.fixture(scope="session")
def cpp_program(tmp_path_factory):
    """Builds a file of tests/cpp, which needs csrc and no torch, as the extension is built."""
    root = Path(__file__).parent.parent
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    flags = "-O3 -std=c++17 -fopenmp-simd -fno-math-errno -fno-trapping-math -pthread".split()

    def build(name):
        program = tmp_path_factory.mktemp("cpp") / name
        source = root / "tests" / "cpp" / f"{name}.cpp"
        command = [*compiler.split(), *flags, f"-I{root / 'csrc'}", source, "-o", program]
        subprocess.run(command, check=True)
        return program

    return build


@pytest.fixture(scope="session")
def philox_driver(cpp_program):
    """csrc/philox.h in a program of its own: calls it with arguments, parses what it prints."""
    program = cpp_program("philox_driver")

    def run(*arguments):
        output = subprocess.run([program, *map(str, arguments)], check=True, capture_output=True)
        return json.loads(output.stdout)

    return run


@pytest.fixture
def no_trials(monkeypatch):
    """For models that fold by their definition."""

    def refuse(*args):
        raise AssertionError("a trial")

    monkeypatch.setattr("bnuq_ext.proof.folding.Trial", refuse)


def pytest_collection_finish():
    """What is there before the first test stays to the last: the collector need not look through it
    each time."""
    gc.collect()
    gc.freeze()
