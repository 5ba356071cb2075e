"""benchmarks/gpu_verdicts.py: what the ends of tests and of sanitizers mean."""

import sys

import pytest

from benchmarks import gpu_report, gpu_verdicts
from benchmarks.gpu_process import Outcome, run

TESTS = """
import pytest
def test_good(): pass
def test_bad(): assert 1 == 2
@pytest.mark.skip(reason="no such thing here")
def test_left_out(): pass
"""


def run_tests(tmp_path, text):
    (tmp_path / "test_it.py").write_text(text)
    junit = tmp_path / "it.xml"
    command = [sys.executable, "-m", "pytest", tmp_path / "test_it.py", f"--junitxml={junit}"]
    command += ["-p", "no:cacheprovider", f"--rootdir={tmp_path}", "-c", "/dev/null"]
    return gpu_verdicts.judge_tests(junit)(run(command, 60))


def test_verdict_on_tests(tmp_path):
    result = run_tests(tmp_path, TESTS)
    assert result["status"] == "failed"
    assert [result[key] for key in ("passed", "failed", "skipped")] == [1, 1, 1]
    assert result["failures"] == ["test_it::test_bad: assert 1 == 2"]
    assert result["skip_reasons"] == ["no such thing here"]
    assert "assert 1 == 2" in result["output"]


POISONED = """
def test_first(): assert 1 == 2
def test_bad(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
def test_after(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
def test_good(): pass
"""


def test_what_follows_an_error_that_takes_the_gpu_away(tmp_path):
    result = run_tests(tmp_path, POISONED)
    assert (result["passed"], result["failed"]) == (1, 3)
    warned = [text.endswith("in this file may be its consequence)") for text in result["failures"]]
    assert warned == [False, True, False]


@pytest.mark.parametrize(
    "text, status, reason",
    [
        ("import no_such_package.part", "skipped", "needs no_such_package, which is not installed"),
        ("import bnuq_ext.gone", "failed", None),
        ("x = 1", "skipped", "no test collected"),
    ],
)
def test_verdict_on_tests_that_do_not_start(tmp_path, text, status, reason):
    result = run_tests(tmp_path, text)
    assert result["status"] == status and result.get("reason") == reason


def outcome(status, code, output):
    return Outcome(status, code, 1.0, output)


@pytest.mark.parametrize(
    "code, setuptools, reason",
    [
        (1, "68.1.2", "setuptools 77 or newer is needed, found 68.1.2"),
        (1, None, "setuptools 77 or newer is needed, found None"),
        (1, "77.0.1", None),
        (0, "68.1.2", None),
    ],
)
def test_verdict_on_a_build_by_an_older_setuptools(code, setuptools, reason):
    given = outcome("failed" if code else "passed", code, "a traceback")
    result = gpu_verdicts.judge_build(given, setuptools)
    assert result["status"] == given.status and result.get("reason") == reason
    assert gpu_report.ending(result) == (f"failed: {reason}" if reason else given.status)


# The tool's reports, as its manual prints them.
SUMMARY = "========= ERROR SUMMARY: 2 errors"
FOREIGN = "========= Uninitialized __global__ memory read of size 4 bytes\n"
FOREIGN += "=========     at void cutlass::Kernel<gemm>(T1::Params)+0x2a0\n"
OURS = FOREIGN.replace("cutlass::Kernel", "bnuq::affine_kernel")


@pytest.mark.parametrize(
    "given, status, planted",
    [
        (outcome("passed", 0, "========= ERROR SUMMARY: 0 errors"), "passed", "failed"),
        (outcome("failed", 86, "========= ERROR SUMMARY: 3 errors"), "failed", "passed"),
        (
            outcome("failed", 1, "Traceback: no such op\n===== ERROR SUMMARY: 0 errors"),
            "failed",
            "failed",
        ),
        (outcome("failed", 86, FOREIGN + SUMMARY), "passed", "passed"),
        (outcome("failed", 86, FOREIGN + OURS + SUMMARY), "failed", "passed"),
        (outcome("passed", 0, "the tool said nothing"), "failed", "failed"),
        (outcome("failed", 1, "========= Error: Device not supported"), "refused", "refused"),
        (outcome("absent", None, "No such file"), "refused", "refused"),
        (outcome("timed out", None, ""), "timed out", "timed out"),
    ],
)
def test_verdict_on_a_sanitizer(given, status, planted):
    assert gpu_verdicts.judge_sanitizer(given)["status"] == status
    assert gpu_verdicts.judge_planted(given)["status"] == planted


def test_what_is_found_in_others_kernels_is_told():
    step = gpu_verdicts.judge_sanitizer(outcome("failed", 86, FOREIGN + FOREIGN + SUMMARY))
    assert step["foreign"] == ["void cutlass::Kernel<gemm>(T1::Params)"]
    assert "found in another's kernel: void cutlass::Kernel" in gpu_report.detail(step)


def test_a_conftest_that_does_not_start(tmp_path):
    (tmp_path / "conftest.py").write_text("import no_such_package")
    result = run_tests(tmp_path, "def test_it(): pass")
    assert result == {
        "status": "skipped",
        "reason": "needs no_such_package, which is not installed",
    }
