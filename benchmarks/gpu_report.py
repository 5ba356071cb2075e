"""One Markdown page and one benchmark file out of the stages of benchmarks/gpu.py."""

import json
import sys
from pathlib import Path

from benchmarks.gpu_process import ROOT, run


def load(path):
    return json.loads(path.read_text()) if path.exists() else None


def merge_benchmarks(raw_folder: Path, target: Path):
    """Joins the files that pytest-benchmark wrote, one for each step."""
    merged = None
    for path in sorted(raw_folder.glob("*.json")):
        # pytest-benchmark leaves an empty file behind where nothing was timed.
        part = json.loads(path.read_text() or "null")
        if part and merged:
            merged["benchmarks"] += part["benchmarks"]
        else:
            merged = merged or part
    if merged:
        target.write_text(json.dumps(merged, indent=1) + "\n")


def environment_lines(env):
    return ["| | |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in env.items())]


def detail(step):
    """What a reader wants to know of a step beside its status."""
    parts = []
    if "passed" in step:
        parts.append(f"{step['passed']} passed, {step['failed']} failed, {step['skipped']} skipped")
    parts += [step[key] for key in ("reason", "summary") if step.get(key)]
    parts += [f"failed: {name}" for name in step.get("failures", [])]
    parts += [f"skipped: {reason}" for reason in step.get("skip_reasons", [])]
    return "; ".join(part.replace("\n", " ").replace("|", "\\|") for part in parts)


def stage_lines(result):
    lines = [f"Build: {result['build']['status']}."]
    if not result["finished"]:
        lines.append("Not finished: run the stage again and it goes on.")
    lines += ["", "| step | status | seconds | |", "| --- | --- | --- | --- |"]
    for name, step in result["steps"].items():
        lines.append(f"| {name} | {step['status']} | {step.get('seconds', '')} | {detail(step)} |")
    outputs = {name: step["output"] for name, step in result["steps"].items() if "output" in step}
    if "output" in result["build"]:
        outputs["build"] = result["build"]["output"]
    for name, output in outputs.items():
        lines += ["", f"Output of {name}:", "", "```", output, "```"]
    return lines


def bench_lines(bench):
    table = run([sys.executable, ROOT / "benchmarks" / "report.py", bench], 60)
    return ["", "```", table.output.rstrip(), "```"]


def write(folder: Path, raw_folder: Path):
    """Writes report.md, and bench-raw.json where there are timings, into the result folder."""
    env, raw = load(folder / "environment.json"), folder / "bench-raw.json"
    lines = [f"# {env['gpu'] or 'No GPU: a rehearsal'}, {env['date']}", "", *environment_lines(env)]
    for stage in ("test", "sanitize", "bench"):
        result = load(folder / f"{stage}.json")
        if result is None or result["sources"] != env["sources"]:
            continue
        lines += ["", f"## {stage}", "", *stage_lines(result)]
        if stage == "bench":
            merge_benchmarks(raw_folder, raw)
            lines += bench_lines(raw) if raw.exists() else []
    (folder / "report.md").write_text("\n".join(lines) + "\n")
