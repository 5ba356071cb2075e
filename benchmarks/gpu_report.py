"""One Markdown page and one benchmark file out of the stages of benchmarks/gpu.py."""

import json
import sys
from pathlib import Path

from benchmarks.gpu_process import ROOT, STAGES, run

RECORDS = "bench-records.json"
SHOWN = 25  # lines of an output, of which the stage's file has more


def write_json(path, value):
    """The file as a whole or as it was."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=1) + "\n")
    part.replace(path)


def load(path):
    return json.loads(path.read_text()) if path.exists() else None


def merge_benchmarks(raw_folder: Path, target: Path):
    """Joins the records of pytest-benchmark's files with those that the target has already."""
    # pytest-benchmark leaves an empty file behind where nothing was timed.
    paths = [path for path in (target, *sorted(raw_folder.glob("*.json"))) if path.exists()]
    parts = [json.loads(path.read_text()) for path in paths if path.stat().st_size]
    records = {b["fullname"]: b for part in parts for b in part["benchmarks"]}
    for record in records.values():
        record.get("stats", {}).pop("data", None)  # every single timing: megabytes
    if parts:
        merged = parts[-1] | {"benchmarks": list(records.values())}
        write_json(target, merged)


def environment_lines(env):
    return ["| | |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in env.items())]


def detail(step):
    """What a reader wants to know of a step beside its status."""
    parts = []
    if "passed" in step:
        parts.append(f"{step['passed']} passed, {step['failed']} failed, {step['skipped']} skipped")
    parts += [step[key] for key in ("reason", "summary") if step.get(key)]
    parts += [f"found in another's kernel: {name}" for name in step.get("foreign", [])]
    parts += [f"failed: {name}" for name in step.get("failures", [])]
    parts += [f"skipped: {reason}" for reason in step.get("skip_reasons", [])]
    return "; ".join(part.replace("\n", " ").replace("|", "\\|") for part in parts)


def ending(step):
    """Its status, and the reason where there is one."""
    return ": ".join(step[key] for key in ("status", "reason") if key in step)


def stage_lines(result):
    lines = [f"Build: {ending(result['build'])}."]
    if not result["finished"]:
        lines.append("Not finished: run the stage again and it goes on.")
    lines += ["", "| step | status | seconds | |", "| --- | --- | --- | --- |"]
    for name, step in result["steps"].items():
        lines.append(f"| {name} | {step['status']} | {step.get('seconds', '')} | {detail(step)} |")
    for name, step in (result["steps"] | {"build": result["build"]}).items():
        if "output" in step:
            whole = f", all of which is in {step['log']}" if "log" in step else ""
            shown = step["output"].splitlines()[-SHOWN:]
            lines += ["", f"Output of {name}{whole}:", "", "```", *shown, "```"]
    return lines


def bench_lines(raw):
    """The table of benchmarks/report.py, which it also writes as <stem>.md."""
    done = run([sys.executable, ROOT / "benchmarks" / "report.py", raw], 60)
    table = raw.with_suffix(".md")
    return ["", table.read_text() if done.status == "passed" else f"No table: {done.output}"]


def write(folder: Path, raw_folder: Path):
    """Writes report.md, and bench-records.json where there are timings, into the result folder."""
    env, raw = load(folder / "environment.json"), folder / RECORDS
    lines = [f"# {env['gpu'] or 'No GPU: a rehearsal'}, {env['date']}", "", *environment_lines(env)]
    for stage in STAGES:
        result = load(folder / f"{stage}.json")
        if result is None or result["sources"] != env["sources"]:
            continue
        lines += ["", f"## {stage}", "", *stage_lines(result)]
        if stage == "bench":
            merge_benchmarks(raw_folder, raw)
            lines += bench_lines(raw) if raw.exists() else []
    (folder / "report.md").write_text("\n".join(lines) + "\n")
