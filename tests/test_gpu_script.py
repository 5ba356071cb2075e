"""benchmarks/gpu.py without a GPU: resuming, verdicts and the report, on made-up commands."""

import json
import os
import runpy
import shutil
import subprocess
import sys
import time

import pytest
from test_gpu_process import python

from benchmarks import gpu, gpu_process, gpu_report
from benchmarks.gpu_process import run

ENV = {
    "gpu": "NVIDIA Test 9000",
    "compute_capability": "9.0",
    "cpu_cores": 8,
    "sources": "abc",
    "date": "2026-01-02",
    "commit": "c0ffee",
}


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    """In place of that of the repository."""
    monkeypatch.setattr(gpu, "SCRATCH", tmp_path / "scratch")
    return tmp_path / "scratch"


def passing_build(clock, env):
    return {"status": "passed", "seconds": 0.0}


def step(name, code="print('done')", **options):
    return gpu.Step(name, python(code), gpu.judge_exit, **options)


# ---- stages ------------------------------------------------------------------------------------


def test_a_stage_runs_its_steps_and_keeps_the_result(tmp_path):
    steps = [step("one"), step("two", "raise SystemExit(4)"), step("three", alone=False)]
    result = gpu.run_stage("test", lambda: steps, tmp_path, ENV, passing_build)
    assert result["finished"] and list(result["steps"]) == ["one", "two", "three"]
    assert [s["status"] for s in result["steps"].values()] == ["passed", "failed", "passed"]
    assert json.loads((tmp_path / "test.json").read_text()) == result
    assert gpu.exit_status([result]) == 1


def test_a_finished_stage_is_skipped_unless_forced(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("FORCE", raising=False)
    log = tmp_path / "log"
    steps = [step("one", f"open({str(log)!r}, 'a').write('x')")]
    for _ in range(2):
        result = gpu.run_stage("test", lambda: steps, tmp_path, ENV, passing_build)
    assert log.read_text() == "x" and gpu.exit_status([result]) == 0
    assert "test: finished for these sources; FORCE=1 runs it again" in capsys.readouterr().out
    monkeypatch.setenv("FORCE", "1")
    gpu.run_stage("test", lambda: steps, tmp_path, ENV, passing_build)
    assert log.read_text() == "xx"
    monkeypatch.delenv("FORCE")
    gpu.run_stage("test", lambda: steps, tmp_path, ENV | {"sources": "other"}, passing_build)
    assert log.read_text() == "xxx"


def test_a_stage_that_was_cut_off_goes_on(tmp_path):
    log = tmp_path / "log"
    hanging = step("slow", "import time; time.sleep(60)", limit=90, least=0.5)
    quick = step("quick", f"open({str(log)!r}, 'a').write('q')", limit=90, least=0.5)
    steps = [quick, hanging, step("long", least=100), step("last")]
    start = time.monotonic()
    cut = gpu.run_stage("bench", lambda: steps, tmp_path, ENV, passing_build, seconds=5)
    assert time.monotonic() - start < 30
    assert not cut["finished"] and list(cut["steps"]) == ["quick"]
    assert gpu.exit_status([cut]) == gpu.EXIT_UNFINISHED

    steps[1] = step("slow", limit=90)
    result = gpu.run_stage("bench", lambda: steps, tmp_path, ENV, passing_build)
    assert result["finished"] and list(result["steps"]) == ["quick", "slow", "long", "last"]
    assert log.read_text() == "q"


def test_all_that_a_step_prints_is_kept(tmp_path, scratch):
    printed = "for i in range(40): print(i, flush=True)\n"
    codes = {"a/b[c-(1]": "exit(1)", "good": "", "cut": "import time; time.sleep(60)"}
    steps = [step(name, printed + code, limit=90, least=0.5) for name, code in codes.items()]
    result = gpu.run_stage("test", lambda: steps, tmp_path, ENV, passing_build, seconds=5)
    assert list(result["steps"]) == ["a/b[c-(1]", "good"]
    names = ["a-b-c-1.log", "cut.log", "good.log"]
    assert sorted(path.name for path in (scratch / "logs").iterdir()) == names
    whole = "".join(f"{i}\n" for i in range(40))
    assert all((scratch / "logs" / name).read_text() == whole for name in names)
    bad, good = result["steps"].values()
    assert (gpu.ROOT / bad["log"]).samefile(scratch / "logs" / names[0]) and "log" not in good
    shown = gpu_report.stage_lines(result)
    assert f"Output of a/b[c-(1], all of which is in {bad['log']}:" in shown
    assert bad["output"] == whole.strip() and "39" in shown and "14" not in shown


def test_steps_by_name_and_the_others_later(tmp_path):
    steps = [step("one"), step("two::a[x]"), step("two::b[x]")]
    result = gpu.run_stage("bench", lambda: steps, tmp_path, ENV, passing_build, only="two")
    assert list(result["steps"]) == ["two::a[x]", "two::b[x]"] and not result["finished"]
    assert gpu.exit_status([result]) == gpu.EXIT_UNFINISHED
    result = gpu.run_stage("bench", lambda: steps, tmp_path, ENV, passing_build)
    assert list(result["steps"]) == ["two::a[x]", "two::b[x]", "one"] and result["finished"]


def test_the_same_sources_are_built_once(tmp_path, monkeypatch):
    (tmp_path / "bnuq_ext").mkdir()
    code = "for stem in ('_cpu', '_cuda'): open(f'bnuq_ext/{stem}.so', 'w')\n"
    (tmp_path / "setup.py").write_text(code + "open('log', 'a').write('x')\n")
    for module in (gpu, gpu_process):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "SCRATCH", tmp_path)

    def build(env=ENV):
        assert gpu.build(gpu.Clock(60), env)["status"] == "passed"
        return (tmp_path / "log").read_text()

    assert [build(), build()] == ["x", "x"]
    assert build(ENV | {"sources": "other"}) == "xx"
    (tmp_path / "bnuq_ext" / "_cuda.so").unlink()
    assert build(ENV | {"sources": "other"}) == "xxx"
    (tmp_path / "setup.py").write_text("raise SystemExit(1)")
    failed = gpu.build(gpu.Clock(60), ENV)
    assert failed["status"] == "failed" and failed["log"] == "logs/build.log"


def test_a_step_over_its_own_limit_is_a_verdict(tmp_path):
    steps = [step("hangs", "import time; time.sleep(60)", limit=0.5), step("after")]
    result = gpu.run_stage("test", lambda: steps, tmp_path, ENV, passing_build)
    assert result["finished"] and gpu.exit_status([result]) == 1
    assert [s["status"] for s in result["steps"].values()] == ["timed out", "passed"]


def test_nothing_runs_on_a_failed_build(tmp_path):
    def failing_build(clock, env):
        return {"status": "failed", "seconds": 1.0, "output": "nvcc: no"}

    result = gpu.run_stage("test", lambda: [step("one")], tmp_path, ENV, failing_build)
    assert result["steps"] == {} and not result["finished"] and gpu.exit_status([result]) == 1


def test_steps_of_each_stage():
    tests = gpu.steps_of("test", ENV)
    files = {p.name for p in (gpu.ROOT / "tests").glob("test_*.py")}
    assert {s.name for s in tests} == files and len(tests) == len(files)
    assert [s.name for s in tests if s.alone] == ["test_gpu.py"] and tests[0].alone
    # Cut off, it has run what needs the GPU most; the library is asked for this GPU's code alone.
    assert [s.name for s in tests[:2]] == ["test_gpu.py", "test_gpu_bayes.py"]
    assert all(s.env == {"OMP_NUM_THREADS": "2", "TORCH_CUDA_ARCH_LIST": "9.0"} for s in tests)
    sanitize = gpu.steps_of("sanitize", ENV)
    assert [s.name for s in sanitize[1:]] == [
        f"{tool}: {part}"
        for tool in gpu.SANITIZER_OPTIONS
        for part in ("planted error", *gpu.SANITIZED)
    ]
    assert "sm_90" in sanitize[0].command
    cases = [s for s in sanitize if s.command[-1] in gpu.SANITIZED]
    assert len(cases) == len(gpu.SANITIZER_OPTIONS) * len(gpu.SANITIZED)
    assert all(s.env["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1" for s in cases)
    ports = [int(s.command[s.command.index("--port") + 1]) for s in sanitize[1:]]
    waits = [s.command[s.command.index("--launch-timeout") + 1] for s in sanitize[1:]]
    assert set(waits) == {"0"}  # for as long as Python takes to begin
    assert len(set(ports)) == len(ports) and max(ports) < 65_536 - gpu.PORTS
    narrowed = [s.name for s in sanitize[1:] if "kernel_substring=bnuq" in s.command]
    assert narrowed == [s.name for s in sanitize[1:] if not s.name.startswith("initcheck")]
    assert all(s.limit < gpu.STAGE_SECONDS < 540 for s in tests + sanitize)


def test_bench_steps_are_files_or_cases(tmp_path, monkeypatch):
    (tmp_path / "benchmarks").mkdir()
    case = "import pytest\n@pytest.mark.parametrize('device', ['cpu', 'cuda'])\n"
    for name in ("bench_ops.py", "bench_models.py", "bench_linear.py"):
        (tmp_path / "benchmarks" / name).write_text(case + "def test_it(device): pass\n")
    for module in (gpu, gpu_process):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    sizes = "ids=['cuda-(400, 1)', 'cuda-(400, 8)', 'cuda-(1024, 1)', 'cpu-(1024, 1)']"
    grid = f"@pytest.mark.parametrize('case', range(4), {sizes})\ndef test_grid(case): pass\n"
    with open(tmp_path / "benchmarks" / "bench_linear.py", "a") as file:
        file.write(grid)
    monkeypatch.delenv("BNUQ_BENCH", raising=False)
    steps = gpu.steps_of("bench", ENV)
    # Cut off, it has run what is short.
    names = ["bench_ops.py", "bench_linear.py::test_it"]
    grid = [f"bench_linear.py::test_grid[cuda-({size}" for size in (400, 1024)]
    assert [s.name for s in steps] == [*names, *grid, "bench_models.py::test_it[cuda]"]
    assert [sum("::test_grid" in str(part) for part in s.command) for s in steps] == [0, 0, 2, 1, 0]
    assert steps[0].env == {"BNUQ_BENCH": "full"} and all("cuda" in s.command for s in steps)
    steps = gpu.steps_of("bench", ENV | {"gpu": None})
    names += ["bench_linear.py::test_grid", "bench_models.py::test_it[cpu]"]
    assert [s.name for s in steps] == names
    assert steps[0].env == {"BNUQ_BENCH": "short"}


def test_what_has_been_timed_is_there_while_a_stage_runs(tmp_path, monkeypatch):
    raw, records = tmp_path / "raw", tmp_path / gpu_report.RECORDS
    raw.mkdir()
    monkeypatch.setattr(gpu, "timings", lambda env: raw)
    timed = {"benchmarks": [{"fullname": "first", "extra_info": {"case": "a", "ours_ms": 2.0}}]}
    writes = f"open({str(raw / 'a.json')!r}, 'w').write({json.dumps(timed)!r})"
    looks = f"assert 'first' in open({str(records)!r}).read()"
    steps = [step("first", writes), step("second", looks)]
    result = gpu.run_stage("bench", lambda: steps, tmp_path, ENV, passing_build)
    assert {name: its["status"] for name, its in result["steps"].items()} == {
        "first": "passed",
        "second": "passed",
    }
    assert not list(tmp_path.glob("*.part"))


def test_a_bench_step_tells_why_all_its_cases_fail(tmp_path, monkeypatch):
    pytest.importorskip("pytest_benchmark", reason="what it writes is looked at")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # a worker takes no benchmarks
    (tmp_path / "benchmarks").mkdir()
    case = "def test_on_cuda(benchmark): raise ValueError('no such thing')\n"
    (tmp_path / "benchmarks" / "bench_ops.py").write_text(case)
    shutil.copy(gpu.ROOT / "pyproject.toml", tmp_path)  # where warnings are errors
    for module in (gpu, gpu_process):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    [only] = gpu.steps_of("bench", ENV)
    result = gpu.run_step(only, gpu.Clock(60 + only.least))
    assert result["status"] == "failed" and "1 failed" in result["output"]
    assert "ValueError: no such thing" in result["output"] and "1 error" not in result["output"]


# ---- made-up tools -----------------------------------------------------------------------------


FAKE_TOOL = """#!/bin/sh
case "$*" in
  *sanitize_case.py*) echo "========= ERROR SUMMARY: 0 errors" ;;
  *synccheck) echo "========= Error: Device not supported"; exit 1 ;;
  *) echo "========= ERROR SUMMARY: 1 error"; exit 86 ;;
esac
"""


def test_sanitize_stage_with_a_made_up_tool(tmp_path, monkeypatch):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(FAKE_TOOL)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    steps = gpu.steps_of("sanitize", ENV)[1:]
    result = gpu.run_stage("sanitize", lambda: steps, tmp_path, ENV, passing_build)
    assert result["finished"] and gpu.exit_status([result]) == 0
    verdicts = {name: step["status"] for name, step in result["steps"].items()}
    expected = dict.fromkeys(verdicts, "passed") | {"synccheck: planted error": "refused"}
    assert verdicts == expected
    assert result["steps"]["memcheck: bayes"]["summary"] == "ERROR SUMMARY: 0 errors"


def test_a_refused_tool_is_not_a_failure(tmp_path):
    refused = gpu.Step("memcheck", [tmp_path / "no-tool"], gpu.judge_sanitizer)
    result = gpu.run_stage("sanitize", lambda: [refused], tmp_path, ENV, passing_build)
    assert result["steps"]["memcheck"]["status"] == "refused" and gpu.exit_status([result]) == 0


# ---- the result folder -------------------------------------------------------------------------


def test_result_folder_belongs_to_gpu_and_sources(tmp_path):
    first = gpu.result_folder(tmp_path, ENV)
    assert first.name == "nvidia-test-9000-2026-01-02"
    first.mkdir()
    (first / "environment.json").write_text(json.dumps(ENV))
    assert gpu.result_folder(tmp_path, ENV | {"date": "2026-01-03"}) == first
    other = gpu.result_folder(tmp_path, ENV | {"sources": "other"})
    assert other.name == "nvidia-test-9000-2026-01-02-2"
    shorter = gpu.result_folder(tmp_path, ENV | {"gpu": "NVIDIA Test"})
    assert shorter.name == "nvidia-test-2026-01-02"


def test_raw_timings_belong_to_gpu_and_sources(monkeypatch):
    monkeypatch.setattr(gpu, "cases_of", lambda *_: [])
    others = [{"gpu": "NVIDIA Test 9001"}, {"gpu": None}, {"sources": "other"}]
    places = [gpu.timings(ENV | other) for other in ({}, *others)]
    assert len(set(places)) == 4 and places[0].name == "nvidia-test-9000-abc"
    assert all(step.writes.parent == places[0] for step in gpu.steps_of("bench", ENV))


def test_what_a_step_writes_is_never_an_earlier_run_s(tmp_path):
    raw = tmp_path / "made" / "here" / "raw.json"
    code = f"assert not __import__('os').path.exists({str(raw)!r}); open({str(raw)!r}, 'w')"
    for _ in range(2):
        assert gpu.run_step(step("one", code, writes=raw), gpu.Clock(60))["status"] == "passed"
    gpu.run_step(step("one", "exit(1)", writes=raw), gpu.Clock(60))
    assert not raw.exists()


def test_report_joins_the_stages(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    for name in ("a", "b"):
        record = {
            "fullname": name,
            "stats": {"data": [1.0]},
            "extra_info": {"case": f"case {name}", "ours_ms": 2.0},
        }
        (raw / f"{name}.json").write_text(json.dumps({"benchmarks": [record]}))
    (raw / "c.json").write_text("")
    without = {"fullname": "on a GPU", "extra_info": {"case": "case c", "ours_ms": 3.0}}
    (raw / "d.json").write_text(json.dumps({"benchmarks": [without]}))
    (tmp_path / "environment.json").write_text(json.dumps(ENV))
    gpu.run_stage(
        "test", lambda: [step("bad.py", "print('x|y'); exit(1)")], tmp_path, ENV, passing_build
    )
    gpu.run_stage("bench", lambda: [step("bench.py")], tmp_path, ENV, passing_build)
    gpu_report.write(tmp_path, raw)
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# NVIDIA Test 9000, 2026-01-02\n")
    assert "| commit | c0ffee |" in text and "| bad.py | failed |" in text and "x|y" in text
    assert "## sanitize" not in text and "| case a | 2.000 |" in text and "| case b |" in text

    # Another machine has only its own raw files; the folder keeps the earlier records.
    for name in ("a", "b", "d"):
        (raw / f"{name}.json").unlink()
    gpu_report.write(tmp_path, raw)
    merged = json.loads((tmp_path / "bench-records.json").read_text())
    assert [b["fullname"] for b in merged["benchmarks"]] == ["a", "b", "on a GPU"]
    assert len(list(tmp_path.glob("*.*"))) <= 8


def test_main_needs_a_gpu_or_rehearses(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "environment", lambda: ENV | {"gpu": None})
    monkeypatch.setattr(gpu, "build", passing_build)
    monkeypatch.setattr(gpu, "steps_of", lambda stage, env: [step(stage)])
    assert gpu.main(["--out", str(tmp_path)]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().out
    assert gpu.main(["--out", str(tmp_path), "--rehearse"]) == 0
    folder = tmp_path / "no-gpu-2026-01-02"
    names = ["bench.json", "environment.json", "report.md", "sanitize.json", "test.json"]
    assert sorted(p.name for p in folder.iterdir()) == names


def test_the_script_starts_by_itself(tmp_path):
    command = [sys.executable, gpu.ROOT / "benchmarks" / "gpu.py", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--rehearse" in done.stdout


def test_the_sanitized_case_runs(monkeypatch):
    """A family by its name; test_hostrun_ops runs them all."""
    script = gpu.ROOT / "benchmarks" / "sanitize_case.py"
    done = run([sys.executable, script, "cpu", "philox"], 120)
    assert done.status == "passed" and done.output == "every kernel ran\n"
    monkeypatch.setattr(sys, "argv", [str(script), "cpu"])
    assert list(runpy.run_path(str(script))["FAMILIES"]) == gpu.SANITIZED
    assert run([sys.executable, script, "cpu", "no family"], 120).status == "failed"
