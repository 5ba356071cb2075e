"""Races in the CUDA source, by ThreadSanitizer: every CUDA thread is one of its threads,
see hostrun/races.h.

A missing barrier is noticed in whatever order the threads ran, where the values come out right too.
"""

import subprocess
import sys

import pytest
from hostrun import build

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"host run: {build.missing()}")

SCRIPT = """
import sys, numpy
sys.path.insert(0, sys.argv[1])
from hostrun import build
module = build.load_file(build.BUILD / "hostrun_races.so")
x, y = numpy.ones(64, numpy.float32), numpy.zeros(512, numpy.float32)
module.probe(sys.argv[2], x, y, 64, grid=(3, 1, 1), block=(64, 1, 1), shared_bytes=256)
print("unharmed")
"""


def run(*arguments):
    command, env = [sys.executable, *arguments], build.races_environment()
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)


@pytest.fixture(scope="module", autouse=True)
def watched():
    """Builds what is watched; ThreadSanitizer does not start on every kernel's layout of memory."""
    start = run("-c", "pass")
    if start.returncode:
        pytest.skip(f"ThreadSanitizer does not start: {start.stderr[:200]}")
    build.build("races")


def run_probe(name):
    return run("-c", SCRIPT, str(build.HERE.parent), name)


@pytest.mark.parametrize("name", ["sum", "reverse", "staged"])
def test_a_sound_kernel_has_no_race(name):
    done = run_probe(name)
    assert done.stdout == "unharmed\n", done.stderr[-4000:]


@pytest.mark.parametrize(
    "name",
    [
        "sum_without_barrier",
        "reverse_without_barrier",
        "staged_waits_late",
        "staged_without_barrier",
        "shuffle_for_barrier",
    ],
)
def test_a_missing_barrier_is_a_race(name):
    done = run_probe(name)
    assert done.returncode != 0 and "data race" in done.stderr and "unharmed" not in done.stdout
    assert "probes.cpp" in done.stderr


def test_no_kernel_has_a_race():
    done = run(str(build.HERE / "sanitized_case.py"), "races")
    assert done.returncode == 0 and done.stdout == "every kernel ran\n", done.stderr[-4000:]
