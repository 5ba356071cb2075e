"""One table of pytest-benchmark's records: `python benchmarks/report.py RECORDS.json...`.

Prints the table and writes it beside the first file, as <stem>.md and, in short, as
<stem>-table.json. A record's extra_info holds
    case, ours_ms, yardsticks {name: ms}, ratio {name: theirs / ours},
    ratio_range {name: (lower, upper quartile over the rounds)}    optional, as all that follow
    gb_s, copy_gb_s             bandwidth of ours, and of copy_ in the same run
    memory_mb {what: MB}        peak extra memory
    skipped {yardstick: why}
    target {yardstick: least ratio}; for "copy_" the least share of the copy's bandwidth, for
           "memory" the greatest growth from the first of memory_mb to the last.
"""

import argparse
import json
from pathlib import Path

HEADINGS = ("case", "ours ms", "GB/s", "against", "ms", "ratio", "quartiles", "to reach", "")


def verdict(value: float, target: float, upper: float) -> str:
    """met, within noise (the upper quartile reaches the target) or MISSED."""
    if value >= target:
        return "met"
    return "within noise" if upper >= target else "MISSED"


def yardstick_lines(row: dict) -> list[tuple]:
    """(against, ms, ratio, quartiles, to reach, verdict) of each yardstick, and of the copy."""
    lines, target = [], row.get("target") or {}
    for name, ms in row.get("yardsticks", {}).items():
        ratio = row["ratio"][name]
        low, high = row.get("ratio_range", {}).get(name, (ratio, ratio))
        line = [name, f"{ms:.3f}", f"{ratio:.2f}x", f"{low:.2f}-{high:.2f}", "", ""]
        if name in target and name != "copy_":
            line[4:] = [f"{target[name]:g}x", verdict(ratio, target[name], high)]
        if name == "copy_" and row.get("copy_gb_s"):
            line[2:4] = [f"{row['copy_gb_s']:.1f} GB/s", ""]
            share = row["gb_s"] / row["copy_gb_s"]
            if name in target:
                line[3] = f"{share:.0%} of copy_"
                line[4:] = [
                    f"{target[name]:.0%}",
                    verdict(share, target[name], share * high / ratio),
                ]
        lines.append(tuple(line))
    return lines


def memory_lines(row: dict) -> list[tuple]:
    sizes = row.get("memory_mb") or {}
    lines = [[f"memory {what}", f"{mb:.2f} MB", "", "", "", ""] for what, mb in sizes.items()]
    if lines and "memory" in (row.get("target") or {}):
        first, last = list(sizes.values())[0], list(sizes.values())[-1]
        limit = row["target"]["memory"]
        lines[-1][2:] = [f"{last / first:.2f}x", "", f"<= {limit:g}x"]
        lines[-1].append("met" if last <= limit * first else "MISSED")
    return [tuple(line) for line in lines]


def table(rows: list[dict]) -> list[tuple]:
    """The cells of every line; a case with several yardsticks takes several lines."""
    lines = []
    for row in rows:
        against = yardstick_lines(row) + memory_lines(row)
        against += [(name, "-", why, "", "", "") for name, why in row.get("skipped", {}).items()]
        bandwidth = f"{row['gb_s']:.1f}" if row.get("gb_s") else ""
        first = (row["case"], f"{row['ours_ms']:.3f}", bandwidth)
        for i, line in enumerate(against or [("",) * 6]):
            lines.append((*(first if i == 0 else ("", "", "")), *line))
    return lines


def as_text(lines: list[tuple]) -> str:
    lines = [HEADINGS, *lines]
    # A text that stands in place of a number runs over the columns after it.
    widths = [max(len(line[i]) for line in lines if i != 5 or line[4] != "-") for i in range(9)]
    left = {0, 3, 8}
    cells = [
        "  ".join(
            c.ljust(w) if i in left else c.rjust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join(cell.rstrip() for cell in cells)


def as_markdown(lines: list[tuple]) -> str:
    rule = tuple("---" if i in (0, 3, 8) else "---:" for i in range(len(HEADINGS)))
    return "\n".join("| " + " | ".join(line) + " |" for line in (HEADINGS, rule, *lines))


def headline(record: dict) -> str:
    """Machine, versions, commit and date of a record."""
    machine = record.get("machine_info", {})
    cpu = machine.get("cpu", {}).get("brand_raw", machine.get("machine", "unknown CPU"))
    commit = record.get("commit_info", {})
    short = (commit.get("id") or "no commit")[:10] + (
        " with changes" if commit.get("dirty") else ""
    )
    parts = [
        machine.get("gpu"),
        cpu,
        machine.get("vectors"),
        f"{machine.get('threads', '?')} threads",
        f"torch {machine.get('torch', '?')}",
        f"commit {short}",
        record.get("datetime", "")[:10],
    ]
    return ", ".join(part for part in parts if part)


def load(paths: list[Path]) -> tuple[str, list[dict]]:
    """The headline of the first record and the rows of all; an empty record gives no rows."""
    records = [json.loads(path.read_text() or "{}") for path in paths]
    rows = [b["extra_info"] for r in records for b in r.get("benchmarks", [])]
    return headline(records[0]), [row for row in rows if "case" in row]


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", nargs="+", type=Path)
    paths = parser.parse_args(argv).records
    title, rows = load(paths)
    lines = table(rows)
    print(f"{title}\n\n{as_text(lines)}")
    stem = paths[0].with_suffix("")
    stem.with_name(stem.name + ".md").write_text(f"{title}\n\n{as_markdown(lines)}\n")
    short = {"machine": title, "rows": rows}
    stem.with_name(stem.name + "-table.json").write_text(json.dumps(short, indent=1) + "\n")


if __name__ == "__main__":
    main()
