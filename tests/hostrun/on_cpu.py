"""A plugin of pytest's: bnuq_ext with the library of csrc/cuda, emulated,
in the place of the CPU's.

    PYTHONPATH=tests python -m pytest -p hostrun.on_cpu tests

Tensors on the CPU then go through everything that those of a GPU go through: the ops' checks,
allocations and launches in csrc/cuda/*.cu, and the Python that is registered for CUDA.
HOSTRUN_ORDER seeds the order of the threads; 0 keeps them in order. With HOSTRUN_PTX, a folder of
PTX files, what nvcc compiled runs in the place of the kernels' source, and no access may leave the
tensors of its op; HOSTRUN_APPROXIMATION is then the share of their allowed error that approximate
instructions make, at most 1. HOSTRUN_WAYS lists the ways by which each test of a Bayesian layer runs;
other tests go the first.
"""

import ctypes
import json
import os
import re
import subprocess
import sys
import types
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hostrun import build

COMPILED = os.environ.get("HOSTRUN_PTX")
WAYS = os.environ.get("HOSTRUN_WAYS", "").split()

# What has no answer here, by a part of its node id.
LEFT_OUT = {
    "test_cuda_": "compiles for a GPU",
    "test_hostrun_": "is the emulation",
    "test_import.py": "is about the libraries that are built",
    "test_bank.py::test_on_a_device": "compares devices by their names",
    "test_statistics_kl.py::test_devices": "compares devices by their names",
    "test_more_than_2_to_the_31_elements": "takes minutes",
    "test_replicas_beyond_all_integers": "is the CPU's refusal of what a GPU would count for years",
    "layer-bayes_linear": "is refused in other words",
    "layer_kl": "has no kernel on CUDA",
    "linear-x must": "has no kernel on CUDA",
    "test_linear_kl.py::test_opcheck": "has no kernel on CUDA",
    "test_the_ops_refuse_what_does_not_fit": "has no kernel on CUDA",
    "test_bayes.py::test_replicas_have_the_noise": "noise to 24 bits; it has 11 here",
    "test_pruning_is_reversible": "bits of MKL's sums, which hang on addresses",
    # There the sums of parts of the replicas are some megabytes at the most, and no less for few.
    "test_holds_no_more_for_more_replicas": "a bound of the CPU's",
}


class Device(str):
    """The CPU for torch; a GPU for a test that asks what it may expect."""

    type = "cuda"


def install():
    """Loads the library, then bnuq_ext over it. Without any kernel for the CPU,
    none is called unseen."""
    path = build.build("torch_compiled" if COMPILED else "torch")
    torch.ops.load_library(path)
    sys.modules["bnuq_ext._library"] = types.SimpleNamespace(HAS_CUDA=False)
    from bnuq_ext.ops import linear_chain
    from bnuq_ext.ops.channel_moments import by_torch

    torch.library.impl("bnuq::channel_moments", "CPU", by_torch)
    linear_chain._has_fused_op = lambda x: False  # as on CUDA
    return ctypes.CDLL(path)


LIBRARY = install()
LIBRARY.hostrun_launches.restype = ctypes.c_char_p
LIBRARY.hostrun_set_order.argtypes = [ctypes.c_uint64]
LIBRARY.hostrun_set_order(int(os.environ.get("HOSTRUN_ORDER", "1")))


def load_compiled(folder):
    """From here on launches run the PTX files of a folder."""
    LIBRARY.hostrun_load_ptx.restype = LIBRARY.hostrun_ptx_report.restype = ctypes.c_char_p
    LIBRARY.hostrun_set_approximation.argtypes = [ctypes.c_double]
    LIBRARY.hostrun_set_approximation(float(os.environ.get("HOSTRUN_APPROXIMATION", "0")))
    for file in sorted(Path(folder).glob("*.ptx")):
        if error := LIBRARY.hostrun_load_ptx(str(file).encode()):
            raise RuntimeError(error.decode())


if COMPILED:
    load_compiled(COMPILED)


def instructions():
    """(how many instructions of PTX were carried out at least once, how many there are)."""
    lines = LIBRARY.hostrun_ptx_report().decode().splitlines()
    total, run = (sum(int(line.split()[i]) for line in lines) for i in (1, 2))
    return run, total


def kernels():
    """{kernel: number of launches}, of every instance that is in the library."""
    listed = subprocess.check_output(["nm", "--demangle", LIBRARY._name], text=True).splitlines()
    lines = LIBRARY.hostrun_launches().decode().splitlines()
    counts = {int(place): int(count) for place, count in (line.split() for line in lines)}
    found = {}
    for line in listed:
        match = re.match(r"(\w+) \w void bnuq::(\w+_kernel<.*?>)\([^{\[]*$", line)
        if match:
            found[match[2].replace("bnuq::", "")] = counts.get(int(match[1], 16), 0)
    return found


def pytest_generate_tests(metafunc):
    if WAYS:
        of_a_layer = metafunc.module.__name__ in ("test_linear", "test_bayes_forward")
        metafunc.fixturenames.append("asked_way")
        metafunc.parametrize("asked_way", WAYS if of_a_layer else WAYS[:1])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    from bnuq_ext.ops.linear_ways import going

    # Calls so small would go another way.
    with going(item.callspec.params["asked_way"]) if WAYS else nullcontext():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    value = yield
    if fixturedef.argname != "device" or isinstance(value, str):
        return value
    _, key, error = fixturedef.cached_result
    fixturedef.cached_result = (Device(value.type), key, error)
    return fixturedef.cached_result[0]


def pytest_collection_modifyitems(items):
    for item in items:
        for part, reason in LEFT_OUT.items():
            if part in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter):
    counts = kernels()
    launched = sum(count > 0 for count in counts.values())
    terminalreporter.write_line(f"{launched} of {len(counts)} forms of the kernels were launched")
    if COMPILED:
        terminalreporter.write_line("{} of {} instructions of PTX ran".format(*instructions()))
    if "HOSTRUN_REPORT" in os.environ:
        Path(os.environ["HOSTRUN_REPORT"]).write_text(json.dumps(counts))
