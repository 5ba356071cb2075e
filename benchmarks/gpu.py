"""Builds, tests, sanitizes and benchmarks on the GPU at hand, and writes one result folder.

Three stages of under nine minutes each, run one by one or together, or some of their steps by name.
A stage saves after every step, so a stage that was cut off goes on where it stopped, and one that
has finished for these sources is skipped unless FORCE=1.
"""

import argparse
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import gpu_report
from benchmarks.gpu_process import (
    ROOT,
    STAGES,
    Outcome,
    end_with_commands,
    environment,
    find_tool,
    run,
)
from benchmarks.gpu_verdicts import (
    FOUND_ERRORS,
    judge_build,
    judge_exit,
    judge_planted,
    judge_sanitizer,
    judge_tests,
)

STAGE_SECONDS = 450  # of nine minutes: what goes before, and the report, take some
SCRATCH = ROOT / ".gpu-build"
# Each by itself: it may take minutes.
SANITIZED = ["philox", "batch_norm", "predictive", "bayes", "batched"]
# Each version of torch and Python deprecates something else.
DEPRECATIONS = ["-W", "default::DeprecationWarning", "-W", "default::FutureWarning"]
# Of pytest-benchmark, where cases fail: as errors they would stand in place of what has failed.
UNTIMED = ["-W", "default:Not saving anything", "-W", "default:Benchmark fixture"]
# Our kernels alone, for others take time and have hazards of their own; initcheck has to see what
# those write. Failing driver calls that torch tries and bears are no errors.
ONLY_OURS = ["--kernel-name", "kernel_substring=bnuq"]
SANITIZER_OPTIONS = {
    "memcheck": [*ONLY_OURS, "--report-api-errors", "no"],
    "racecheck": ONLY_OURS,
    "initcheck": [],
    "synccheck": ONLY_OURS,
}
FIRST_PORT, PORTS = 49152, 16  # sixteen of their own for each sanitizer: several run at a time
# Files that take minutes, the longest last: a step is the cases whose ids begin alike, those of one
# test and size, or one case. What a step has timed is lost if it is cut off.
SPLIT = {"bench_linear.py": r"[^\[]+(\[cuda-\(\d+)?", "bench_models.py": r".+"}
# What no other machine can show comes first, in case the time ends.
FIRST_TESTS = """
test_gpu test_gpu_bayes test_gpu_ways test_autocast test_philox test_batch_norm test_batch_norm_grad
test_batch_norm_layout test_predictive test_linear test_kl test_nan_payloads test_collect
test_collect_data test_collect_state test_bank test_batch_size test_normality test_statistics_kl
test_drop_in test_batch_norm_errors test_batch_norm_library test_derivatives
""".split()
LONGEST = {"test_hostrun_ops.py": 440}  # seconds that a file may take, 300 for the others
EXIT_UNFINISHED = 3


@dataclass
class Step:
    """One command of a stage. judge(outcome) is what the result file says, with a "status"."""

    name: str
    command: list
    judge: Callable[[Outcome], dict]
    limit: float = 300
    least: float = 5  # seconds; with less left of the stage it is not begun
    writes: Path | None = None  # for `judge` to read; removed before the step runs
    env: dict = field(default_factory=dict)
    alone: bool = True


class Clock:
    """Counts a stage's seconds down."""

    def __init__(self, seconds):
        self.end = time.monotonic() + seconds

    def left(self):
        return self.end - time.monotonic()


# ---- the steps of each stage -------------------------------------------------------------------


def jobs_for(env):
    """How many steps run at a time of those that need not be alone:
    to begin one takes ten seconds of one core."""
    return max(1, min(8, env["cpu_cores"] // 2))


def architectures(env):
    """What the build is for: this GPU alone. Tests of the library ask for it too."""
    found = env["compute_capability"]
    return {"TORCH_CUDA_ARCH_LIST": found} if found else {}


def test_steps(env):
    steps, variables = [], {"OMP_NUM_THREADS": str(max(1, env["cpu_cores"] // jobs_for(env)))}
    variables |= architectures(env)
    place = {name: i for i, name in enumerate(FIRST_TESTS)}
    paths = (ROOT / "tests").glob("test_*.py")
    for path in sorted(paths, key=lambda p: (place.get(p.stem, len(place)), p.name)):
        junit = SCRATCH / "junit" / f"{path.stem}.xml"
        command = [sys.executable, "-m", "pytest", path, "-p", "no:cacheprovider"]
        command += [f"--junitxml={junit}"]
        command += DEPRECATIONS
        alone, judge = path.name == "test_gpu.py", judge_tests(junit)
        options = {"limit": LONGEST.get(path.name, Step.limit), "env": variables, "alone": alone}
        steps.append(Step(path.name, command, judge, writes=junit, **options))
    return steps


def sanitize_steps(env):
    tool = find_tool("compute-sanitizer") or "compute-sanitizer"
    nvcc, probe = find_tool("nvcc") or "nvcc", SCRATCH / "sanitize_probe"
    arch = "sm_" + (env["compute_capability"] or "9.0").replace(".", "")
    source = ROOT / "benchmarks" / "sanitize_probe.cu"
    build = [nvcc, "-arch", arch, "-lineinfo", "-o", probe, source]
    steps = [Step("build of the planted errors", build, judge_exit, 120)]
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_MODULE_LOADING": "LAZY"}
    case = [sys.executable, ROOT / "benchmarks" / "sanitize_case.py"]
    ports = count(FIRST_PORT, PORTS)
    for name, options in SANITIZER_OPTIONS.items():
        sanitizer = [tool, "--tool", name, "--error-exitcode", str(FOUND_ERRORS), *options]
        # It waits ten seconds for Python to begin, and then checks nothing;
        # the steps have limits of their own.
        sanitizer += ["--launch-timeout", "0"]
        sanitizer += ["--target-processes", "application-only", "--port"]
        command = [*sanitizer, str(next(ports)), probe, name]
        steps.append(Step(f"{name}: planted error", command, judge_planted, 60))
        for family in SANITIZED:
            command = [*sanitizer, str(next(ports)), *case, "cuda", family]
            options = {"limit": 360, "env": uncached, "alone": False}
            steps.append(Step(f"{name}: {family}", command, judge_sanitizer, **options))
    return steps


def cases_of(path, device, env):
    """The node ids of one file's cases on a device; none where they cannot be listed."""
    command = [sys.executable, "-m", "pytest", path, "--collect-only", "-q", "-o", "addopts="]
    command += [*DEPRECATIONS, *UNTIMED, "-k", device, "-p", "no:cacheprovider"]
    listed = run(command, 120, env)
    return [line for line in listed.output.splitlines() if "::" in line and listed.code == 0]


def targets_of(path, device, env):
    """What pytest is given for each step of a file, by the step's name."""
    found, cases = {}, cases_of(path, device, env) if path.name in SPLIT else []
    for case in cases or [f"benchmarks/{path.name}"]:
        name = re.match(SPLIT.get(path.name, ".+"), case.removeprefix("benchmarks/"))[0]
        found.setdefault(name, []).append(case)
    return found


def slug(gpu):
    return re.sub(r"[^a-z0-9]+", "-", (gpu or "no-gpu").lower()).strip("-")


def timings(env):
    """Where the raw timings of these sources on this GPU are."""
    return SCRATCH / "bench" / f"{slug(env['gpu'])}-{env['sources']}"


def bench_steps(env):
    """A file a step, or a part of one where it takes minutes. On a GPU only its own cases."""
    device, form = ("cuda", "full") if env["gpu"] else ("cpu", "short")
    variables, steps = {"BNUQ_BENCH": os.environ.get("BNUQ_BENCH", form)}, []
    paths = (ROOT / "benchmarks").glob("bench_*.py")
    place = {name: i + 1 for i, name in enumerate(SPLIT)}
    for path in sorted(paths, key=lambda p: (place.get(p.name, 0), p.name)):
        for i, (name, cases) in enumerate(targets_of(path, device, variables).items()):
            raw = timings(env) / f"{path.stem}-{i}.json"
            command = [sys.executable, "-m", "pytest", *cases, "--benchmark-only", "-k", device]
            command += [
                *DEPRECATIONS,
                *UNTIMED,
                "-p",
                "no:cacheprovider",
                f"--benchmark-json={raw}",
            ]
            options = {"limit": 400, "least": 90, "env": variables, "writes": raw}
            steps.append(Step(name, command, judge_exit, **options))
    return steps


def steps_of(stage, env):
    if stage == "test":
        return test_steps(env)
    return sanitize_steps(env) if stage == "sanitize" else bench_steps(env)


# ---- running -----------------------------------------------------------------------------------


def log_of(name):
    """The file of all that a step prints, also one that is cut off."""
    return SCRATCH / "logs" / (re.sub(r"[^\w.]+", "-", name).strip("-") + ".log")


def with_log(result, name):
    """A verdict that has the end of an output says where the whole of it is."""
    return result | ({"log": os.path.relpath(log_of(name), ROOT)} if "output" in result else {})


def build(clock, env):
    """The extension, in place, for this GPU alone; once for the same sources."""
    cuda = {"BNUQ_CUDA": "1" if env["gpu"] else "0"} | architectures(env)
    built, mark = SCRATCH / "built", json.dumps([env["sources"], env.get("torch"), cuda])
    made = [any((ROOT / "bnuq_ext").glob(f"{stem}*.so")) for stem in ("_cpu", "_cuda")]
    if made[0] and (made[1] or not env["gpu"]) and built.exists() and built.read_text() == mark:
        return {"status": "passed", "seconds": 0.0}
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    outcome = run(command, min(clock.left(), 300), cuda, log_of("build"))
    result = with_log(judge_build(outcome, env.get("setuptools")), "build")
    if result["status"] == "passed":
        built.write_text(mark)
    return result


def run_step(step, clock):
    """The result of one step, or None where the stage's time cut it off."""
    limit = min(step.limit, clock.left())
    if limit < min(step.limit, step.least):
        return None
    if step.writes:
        step.writes.parent.mkdir(parents=True, exist_ok=True)
        step.writes.unlink(missing_ok=True)
    outcome = run(step.command, limit, step.env, log_of(step.name))
    if outcome.status == "timed out" and limit < step.limit:
        return None
    return with_log(step.judge(outcome), step.name)


def run_steps(steps, done, clock, save, jobs):
    """Runs what is not done yet, the steps that want the machine alone first; saves after each."""
    lock = threading.Lock()

    def one(step):
        result = run_step(step, clock)
        with lock:
            if result is not None:
                done[step.name] = result
                save()
            print(f"  {step.name}: {result['status'] if result else 'no time left'}", flush=True)

    left = [step for step in steps if step.name not in done]
    for step in left:
        if step.alone:
            one(step)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, [step for step in left if not step.alone]))


def read(path, sources):
    """A result file of these very sources, or an empty one."""
    known = json.loads(path.read_text()) if path.exists() else {}
    return known if known.get("sources") == sources else {}


def run_stage(stage, make_steps, folder, env, builder, seconds=STAGE_SECONDS, only=""):
    """Runs one stage and returns its result, which `<folder>/<stage>.json` keeps.

    Args:
        make_steps: gives the steps, after the build: benchmarks are listed by importing them.
        only: a regular expression; steps in whose name it is not found are left for another time.
    """
    clock, path = Clock(seconds), folder / f"{stage}.json"
    known = {} if os.environ.get("FORCE") == "1" else read(path, env["sources"])
    if known.get("finished"):
        print(f"{stage}: finished for these sources; FORCE=1 runs it again")
        return known
    result = {"stage": stage, "sources": env["sources"], "finished": False, "steps": {}}
    result["steps"] |= known.get("steps", {})

    def save():
        """A stage that is cut off later keeps this, and its timings so far."""
        gpu_report.write_json(path, result)
        if stage == "bench":
            gpu_report.merge_benchmarks(timings(env), folder / gpu_report.RECORDS)

    result["build"] = builder(clock, env)
    print(f"{stage}: build: {gpu_report.ending(result['build'])}", flush=True)
    if result["build"]["status"] == "passed":
        steps = make_steps()
        print(f"{stage}: {len(steps)} steps", flush=True)
        chosen = [step for step in steps if re.search(only, step.name)]
        run_steps(chosen, result["steps"], clock, save, jobs_for(env))
        result["finished"] = all(step.name in result["steps"] for step in steps)
    save()
    return result


def result_folder(parent, env):
    """`<gpu>-<date>`, or the folder that these sources already have for this GPU."""
    for known in sorted(parent.glob(f"{slug(env['gpu'])}-*/environment.json")):
        its = json.loads(known.read_text())
        if (its.get("gpu"), its.get("sources")) == (env["gpu"], env["sources"]):
            return known.parent
    dated = name = f"{slug(env['gpu'])}-{env['date']}"
    number = 2
    while (parent / name).exists():
        name, number = f"{dated}-{number}", number + 1
    return parent / name


def exit_status(results):
    """0 for all well, 1 for a failure, 3 for a stage that has to be run again to go on."""
    steps = [step for result in results for step in result["steps"].values()]
    broken = any(result["build"]["status"] != "passed" for result in results)
    if broken or any(step["status"] in ("failed", "timed out", "absent") for step in steps):
        return 1
    return 0 if all(result["finished"] for result in results) else EXIT_UNFINISHED


def arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", choices=["all", *STAGES], default="all")
    results = ROOT / "benchmarks" / "results"
    parser.add_argument("--out", type=lambda p: Path(p).resolve(), default=results)
    parser.add_argument("--only", default="", help="run the steps whose names this pattern finds")
    parser.add_argument(
        "--rehearse", action="store_true", help="the same steps without a GPU, on the CPU build"
    )
    return parser.parse_args(argv)


def main(argv=None):
    args = arguments(argv)
    env = environment()
    if env["gpu"] is None and not args.rehearse:
        print("gpu: torch sees no CUDA device; --rehearse runs the steps without one")
        return 2
    folder = result_folder(args.out, env)
    for place in (folder, SCRATCH):
        place.mkdir(parents=True, exist_ok=True)
    gpu_report.write_json(folder / "environment.json", env)
    results = []
    for stage in STAGES if args.stage == "all" else [args.stage]:
        steps = partial(steps_of, stage, env)
        results.append(run_stage(stage, steps, folder, env, build, only=args.only))
        gpu_report.write(folder, timings(env))
    print(f"results: {folder}")
    return exit_status(results)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end_with_commands)
    sys.exit(main())
