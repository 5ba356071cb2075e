"""What the end of a command means: the verdicts of benchmarks/gpu.py on its steps."""

import re
import xml.etree.ElementTree as ElementTree

from benchmarks.gpu_process import Outcome

NOTHING_COLLECTED = 5  # pytest's exit status
FOUND_ERRORS = 86  # the exit status that compute-sanitizer is told to use
LEAST_SETUPTOOLS = 77  # the first that takes the licence of pyproject.toml
REFUSALS = ["Device not supported", "not supported on this", "Failed to initialize", "error 999"]
# Errors of CUDA after which a process has no GPU any more.
FATAL = re.compile(
    "illegal memory access|misaligned address|illegal instruction|device-side assert|"
    "unspecified launch failure|invalid program counter|hardware stack error|launch timed out"
)
KEPT = 1000  # lines of an output that did not pass


def tail(outcome):
    return "\n".join(outcome.output.strip().splitlines()[-KEPT:])


def judge_exit(outcome: Outcome):
    result = {"status": outcome.status, "seconds": outcome.seconds}
    if outcome.code == NOTHING_COLLECTED:
        return result | {"status": "skipped", "reason": "no test collected"}
    return result if outcome.status == "passed" else result | {"output": tail(outcome)}


def judge_build(outcome, setuptools):
    """As judge_exit; an older setuptools than pyproject.toml needs is told before its traceback."""
    result, major = judge_exit(outcome), int((setuptools or "0").split(".")[0])
    if result["status"] == "passed" or major >= LEAST_SETUPTOOLS:
        return result
    needed = f"setuptools {LEAST_SETUPTOOLS} or newer is needed, found {setuptools}"
    return result | {"reason": needed}


def told(case):
    """A failed test case by name and what it says, None for another."""
    ending = next((part for part in case if part.tag in ("failure", "error")), None)
    if ending is None:
        return None
    message = " ".join(ending.get("message", "").split())
    return f"{case.get('classname')}::{case.get('name')}: {message[:400]}"


def with_warning(failures):
    """The failures, the first of which that leaves the process without a GPU says so."""
    fatal = next((i for i, text in enumerate(failures) if FATAL.search(text)), len(failures))
    warned = [f"{text} (what follows in this file may be its consequence)" for text in failures]
    return failures[:fatal] + warned[fatal : fatal + 1] + failures[fatal + 1 :]


def junit_counts(path):
    """Numbers of a pytest run, its failures and the distinct reasons of its skips."""
    cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    failures = [text for text in map(told, cases) if text]
    skips = [c.find("skipped") for c in cases if c.find("skipped") is not None]
    return {
        "passed": len(cases) - len(failures) - len(skips),
        "failed": len(failures),
        "skipped": len(skips),
        "failures": with_warning(failures),
        "skip_reasons": sorted({s.get("message", "") for s in skips}),
    }


def judge_tests(junit):
    def judge(outcome):
        result = judge_exit(outcome)
        absent = re.search(r"ModuleNotFoundError: No module named '([\w.]+)'", outcome.output)
        # Status 2 is a collection that broke off, 4 a conftest.py: nothing of the file has run.
        if (
            outcome.code in (2, 4)
            and absent
            and not absent[1].startswith(("bnuq_ext", "benchmarks"))
        ):
            return {"status": "skipped", "reason": f"needs {absent[1]}, which is not installed"}
        if outcome.code in (0, 1) and junit.exists():
            result |= junit_counts(junit)
        return result

    return judge


def refusal(outcome):
    """The line in which the machine refuses a tool, or None."""
    lines = outcome.output.splitlines()
    return next((ln.strip() for ln in lines if any(word in ln for word in REFUSALS)), None)


def judge_sanitizer(outcome):
    said = refusal(outcome)
    if outcome.status == "absent" or said:
        return {"status": "refused", "reason": said or outcome.output}
    summary = [ln for ln in outcome.output.splitlines() if "SUMMARY" in ln]
    result = judge_exit(outcome) | {"summary": summary[-1].strip("= ") if summary else None}
    kernels = re.findall(r"=+ +at (.+?)\+0x", outcome.output)
    if outcome.code == FOUND_ERRORS and kernels and not any("bnuq" in name for name in kernels):
        return result | {"status": "passed", "foreign": sorted(set(kernels))}
    return result if summary or outcome.status == "timed out" else result | {"status": "failed"}


def judge_planted(outcome):
    """A planted error must be found: a tool that finds nothing there proves nothing elsewhere."""
    result = judge_sanitizer(outcome)
    if result["status"] in ("refused", "timed out"):
        return result
    found = outcome.code == FOUND_ERRORS
    return result | {"status": "passed" if found else "failed", "found": found}
