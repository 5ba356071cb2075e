"""The runner of protocols: units, resuming, processes, what is written."""

import csv
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import protocol_of_squares as squares
import pytest
import torch

from bnuq_ext import cli, protocols
from bnuq_ext.metrics import significance
from bnuq_ext.protocols import results, runner


def _run(folder, settings=squares.QUICK, data_root=None, jobs=1):
    return runner.run(squares, "squares", folder, settings, data_root, jobs, progress=False)


def _computed(data_root):
    return sorted(int(line) for line in (data_root / "computed").read_text().split())


@pytest.mark.parametrize("jobs", (1, 2))
def test_report(tmp_path, jobs):
    threads = torch.get_num_threads()
    found = _run(tmp_path, jobs=jobs)
    assert torch.get_num_threads() == threads
    rows = [["of-2", 4, 4 / 3, None], ["of-3", 9, 3.0, None], ["of-4", 16, 16 / 3, None]]
    assert found["tables"]["squares"]["rows"] == rows
    assert json.loads((tmp_path / "results.json").read_text()) == json.loads(json.dumps(found))
    with open(tmp_path / "squares.csv", newline="") as file:
        assert list(csv.reader(file))[1] == ["of-2", "4", str(4 / 3), ""]
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# Squares\n") and "- numbers: (2, 3, 4)\n" in text
    assert "- data_root: none, so data that needs no files; settings of other data" in text
    assert "| unit | square | a third | paper\\|s |\n| --- |" in text
    assert "| of-2 | 4 | 1.333 |  |\n" in text and "- All are.\n" in text
    assert text.endswith("![squares.png](squares.png)\n")
    for unit in ("of-2", "of-3", "of-4"):
        entry = json.loads((tmp_path / "units" / f"{unit}.json").read_text())
        assert entry["result"]["threads"] == 1 and entry["seconds"] >= 0


def test_what_is_finished_needs_no_processes(tmp_path, monkeypatch):
    found = _run(tmp_path)
    monkeypatch.setattr(runner, "ProcessPoolExecutor", None)
    assert _run(tmp_path, jobs=2) == found


def test_figures_of_any_name_are_linked():
    about = {"title": "T", "seconds": 1.0, "settings": {}, "data_root": "/my/data"}
    about["machine"] = dict.fromkeys(("processor", "torch", "bnuq_ext"), "-")
    text = runner.markdown(about, results.Report([], ["my data (1).png"], []))
    assert text.endswith("![my data (1).png](my%20data%20%281%29.png)\n")
    assert "- data_root: /my/data\n" in text


def test_a_path_that_is_not_utf_8_is_shown_with_escapes(tmp_path):
    root = tmp_path / os.fsdecode(b"caf\xff")
    root.mkdir()
    found = _run(tmp_path / "run", data_root=root)
    written = json.loads((tmp_path / "run" / "results.json").read_text())
    assert written["data_root"] == found["data_root"] == str(root.resolve())
    assert "caf\\udcff\n" in (tmp_path / "run" / "report.md").read_text()
    assert _run(tmp_path / "run", data_root=root) == found


@pytest.mark.parametrize("jobs", (1, 2))
def test_goes_on_after_a_failure(tmp_path, jobs):
    settings, root = squares.Settings(fail_at=4), tmp_path / "data"
    root.mkdir()
    with pytest.raises(ValueError, match="squares: n must not be 4, got 4"):
        _run(tmp_path / "run", settings, root, jobs)
    assert not (tmp_path / "run" / "report.md").exists()
    (root / "mended").touch()
    found = _run(tmp_path / "run", settings, root, jobs)
    assert [row[1] for row in found["tables"]["squares"]["rows"]] == [4, 9, 16]
    assert _computed(root) == [2, 3, 4]  # each once


def test_goes_on_after_a_kill(tmp_path):
    settings, root = squares.Settings(kill_at=4), tmp_path / "data"
    root.mkdir()
    with pytest.raises(ChildProcessError, match="reproduce: a process was killed, perhaps for mem"):
        _run(tmp_path / "run", settings, root, jobs=2)
    finished = [int(p.stem[3:]) for p in (tmp_path / "run" / "units").glob("of-*.json")]
    (root / "mended").touch()
    _run(tmp_path / "run", settings, root, jobs=2)
    counts = {n: _computed(root).count(n) for n in (2, 3, 4)}
    assert counts[4] == 1 and all(counts[n] == 1 for n in finished)


PARENT = """
import signal, sys
sys.path.insert(0, {tests!r})
import protocol_of_squares as squares
from bnuq_ext.protocols import runner
settings = squares.Settings(wait_at=4)
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
    runner.run(squares, "squares", {folder!r}, settings, {folder!r}, 2, False)
"""


def _begun(folder):
    """A run with two workers in a session of its own."""
    script = folder / "parent.py"
    script.write_text(PARENT.format(tests=str(Path(__file__).parent), folder=str(folder)))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    options = {"env": environment, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, str(script)], start_new_session=True, **options)


def _started(folder):
    """The same, when its worker waits ten minutes in a unit: (parent, worker's number)."""
    parent = _begun(folder)
    waiting, deadline = folder / "waiting", time.monotonic() + 120
    while not (waiting.exists() and waiting.read_text()):
        assert time.monotonic() < deadline and parent.poll() is None
        time.sleep(0.05)
    return parent, int(waiting.read_text())


def _ends(pid):
    deadline = time.monotonic() + 120
    while _is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_workers_end_with_a_killed_parent(tmp_path):
    parent, worker = _started(tmp_path)
    with parent:  # waits for it, and closes what it wrote to
        parent.kill()
    _ends(worker)


def _is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_folder_of_another_run_is_refused(tmp_path):
    _run(tmp_path)
    message = "store: folder must hold no run but one of the same settings .*, got one with numbers"
    with pytest.raises(ValueError, match=message):
        _run(tmp_path, squares.FULL)
    assert json.loads((tmp_path / "results.json").read_text())["settings"]["numbers"] == [2, 3, 4]


def test_results_of_other_data_or_versions_are_not_taken(tmp_path, monkeypatch):
    roots, folder = [tmp_path / "a", tmp_path / "b"], tmp_path / "run"
    for root in roots:
        root.mkdir()
    _run(folder, data_root=roots[0])

    def refused(what, name="squares", data_root=roots[0]):
        with pytest.raises(ValueError, match=f"got one with {what} [^;]*$"):
            runner.run(squares, name, folder, squares.QUICK, data_root, 1, progress=False)

    refused("data_root", data_root=roots[1])
    refused("data_root", data_root=None)
    refused("protocol", name="cubes")
    for place, what in ((runner, "bnuq_ext"), (torch, "torch")):
        with monkeypatch.context() as patch:
            patch.setattr(place, "__version__", "0.0.1")
            refused(what)
    monkeypatch.chdir(tmp_path)
    _run(folder, data_root="a")  # the same folder by another name
    assert _computed(roots[0]) == [2, 3, 4]
    (roots[0] / "numbers").write_text("other data at the same place")
    refused("data")


def test_the_digest_of_data_is_of_names_and_contents(tmp_path):
    def digest(**files):
        folder = tmp_path / "data"
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)
        found = results.crc32_of_files([folder])
        shutil.rmtree(folder)
        return found

    first = digest(a="1", b="2")
    assert first == digest(b="2", a="1") and results.crc32_of_files([]) == 0
    others = [digest(a="1", b="3"), digest(a="1", c="2"), digest(a="12", b=""), digest(a="1")]
    assert len({first, *others}) == 5
    assert digest(**{os.fsdecode(b"\xff"): "1"}) != digest(**{os.fsdecode(b"\xfe"): "1"})


@pytest.mark.parametrize("name", protocols.NAMES)
def test_sources_are_what_a_protocol_reads(name, tmp_path, monkeypatch):
    """Without one of them it does not run."""
    module = protocols.protocol(name)
    found = [] if name == "toy" else module.sources(module.QUICK, str(needed(tmp_path, name)))
    assert bool(found) == (name != "toy") and all(path.exists() for path in found)


def needed(root, name):
    for folder in ("mnist", "fashion-mnist", "cifar10", "camvid", "uci"):
        (root / folder).mkdir()
    for table in (
        protocols.protocol("normality").QUICK.datasets if name == "normality" else ("one",)
    ):
        (root / "uci" / f"{table}.npz").touch()
    return root


def test_ctrl_c_while_workers_start_is_not_theirs_to_report(tmp_path):
    parent, deadline = _begun(tmp_path), time.monotonic() + 120
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    while len(children.read_text().split()) < 2:  # one of them multiprocessing's own
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.3)
    os.killpg(parent.pid, signal.SIGINT)
    _, said = parent.communicate(timeout=60)
    assert parent.returncode != 0 and "spawn_main" not in said


# As a terminal does; and as a script that started the run may.
@pytest.mark.parametrize("send", [os.killpg, os.kill], ids=["the group", "the parent"])
def test_ctrl_c_ends_workers_in_the_middle_of_their_units(tmp_path, send):
    parent, worker = _started(tmp_path)
    send(parent.pid, signal.SIGINT)
    _, said = parent.communicate(timeout=60)
    assert parent.returncode != 0 and ("KeyboardInterrupt" in said or "killed" in said)
    assert "leaked" not in said
    _ends(worker)


def test_units_are_reported_in_their_order_and_their_seconds_are_summed(tmp_path, monkeypatch):
    def backwards(compute, units, jobs, bar):
        seconds = {"seconds": 60.0 * len(units)}
        return {u.name: compute(u)[1] | seconds for u in reversed(units)}

    monkeypatch.setattr(runner, "_run_all", backwards)
    found = _run(tmp_path)
    assert [row[0] for row in found["tables"]["squares"]["rows"]] == ["of-2", "of-3", "of-4"]
    assert found["seconds"] == 540.0
    assert (
        "\n\nComputed in 9.0 core minutes (at most: the units' times, added up) on "
        in (tmp_path / "report.md").read_text()
    )


def test_the_folder_of_no_data_root_is_not_the_working_one(tmp_path, monkeypatch):
    (tmp_path / "camvid").mkdir()
    assert results.required_folder("toy", str(tmp_path), "camvid", "there") == tmp_path / "camvid"
    monkeypatch.chdir(tmp_path)
    message = r"toy: data_root must hold the folder camvid \(to be had from there\), got None"
    with pytest.raises(ValueError, match=message):
        results.required_folder("toy", None, "camvid", "there")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"jobs": 0}, "reproduce: jobs must be at least 1, got 0"),
        ({"data_root": "/none"}, "reproduce: data_root must be a folder of data sets, got /none"),
    ],
)
def test_errors(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        _run(tmp_path, **options)


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="reproduce: name must be one of .*, got 'none'"):
        protocols.protocol("none")


@pytest.mark.parametrize("name", protocols.NAMES)
def test_what_runs_without_data(name):
    module = protocols.protocol(name)
    if module.WITHOUT_DATA is None:
        with pytest.raises(ValueError, match=f"^{name}: data_root must hold the folder "):
            module.make_units(module.QUICK, None)
        return
    units = module.make_units(module.QUICK, None)
    assert units and ("diabetes" in str(units)) == (module.WITHOUT_DATA == "diabetes")


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(protocols, "NAMES", ("of-squares",))
    module = types.ModuleType("bnuq_ext.protocols.of_squares")
    module.__dict__.update({k: v for k, v in vars(squares).items() if not k.startswith("__")})
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_command(registered, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["reproduce", "--list"]) == 0
    lines = [
        "protocol      without --data-root  title",
        "of-squares    (needs it)           Squares",
    ]
    assert capsys.readouterr().out.splitlines() == lines
    assert cli.main(["reproduce", "--list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"of-squares": "Squares"}
    assert cli.main(["reproduce", "of-squares", "--jobs", "1"]) == 0
    printed = capsys.readouterr()
    report = Path("reproduce-output", "of-squares-quick", "report.md")
    place = f"This report: {report}; its tables and figures lie beside it.\n"
    assert printed == (f"{report.read_text()}\n{place}", "")
    assert cli.main(["reproduce", "of-squares", "--full", "--jobs", "1", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["settings"]["numbers"] == [2, 3, 4, 5] and printed.err == ""
    assert cli.main(["reproduce"]) == 2
    assert capsys.readouterr().err == "bnuq: reproduce: name must be one of of-squares, got None\n"


def test_mean_and_error():
    values = torch.tensor([1.5, 2.5, -3.0, 7.25], dtype=torch.float64)
    mean, error = significance.mean_and_error(values)
    assert mean == pytest.approx(values.mean().item(), rel=1e-14)
    assert error == pytest.approx((values.std() / 2).item(), rel=1e-14)
    assert results.Estimate(mean, error) == "2.06 ± 2.10"
    assert results.Estimate(0.612, 0.0034) == "0.612 ± 0.003"
    assert results.Estimate(2e-5, 8.4e-7) == "0.000020 ± 0.000001"
    assert results.Estimate(2.0, 0.0) == "2.00 ± 0.00"
    assert results.Estimate.of([0.1] * 3) == "0.10 ± 0.00"
    assert results.Estimate(-999_999.0, 2.5) == "-999999.00 ± 2.50"
    assert results.Estimate(-1e6, 2.5) == "-1.000e+06 ± 2.500e+00"
    assert results.Estimate(12.0, 1.2345e150, mark="= ") == "= 1.200e+01 ± 1.234e+150"
    assert results.Estimate(1.5e150, math.nan) == "1.500e+150"
    assert results.Estimate(math.inf, math.nan) == "inf"
    assert results.Estimate(-1e-5, 2e-4, mark="= ") == "= 0.0000 ± 0.0002"
    assert results.Estimate(-6e-5, 2e-4) == "-0.0001 ± 0.0002"
    mean, error = significance.mean_and_error([3.0])
    assert mean == 3.0 and math.isnan(error) and results.Estimate(mean, error, 1) == "3.0"


def test_a_file_has_errors_in_columns_of_their_own():
    rows = [["a", results.Estimate(1 / 3, 0.25, 1), 1.5], ["b", None, None]]
    rows.append(["c", results.Estimate(2.0, math.nan), 2.5])
    table = results.Table("t", "T", ["name", "NLL", "paper"], rows)
    lines = [line.split(",") for line in table.csv().splitlines()]
    assert lines[0] == ["name", "NLL", "NLL ±", "paper"]
    assert lines[1:] == [
        ["a", str(1 / 3), "0.25", "1.5"],
        ["b", "", "", ""],
        ["c", "2.0", "nan", "2.5"],
    ]
    assert "| a | 0.3 ± 0.2 | 1.5 |\n| b |  |  |\n| c | 2.00 | 2.5 |" in table.markdown()
    assert json.dumps(rows[0]) == '["a", "0.3 \\u00b1 0.2", 1.5]'


def test_agrees():
    assert significance.agrees(1.0, 0.3, 1.9, 0.4) is True  # 0.9 <= 2 * 0.5
    assert significance.agrees(1.0, 0.3, 2.1, 0.4) is False
    assert (
        significance.agrees(1.0, math.nan, 1.0)
        is significance.agrees(1.0, 0.1, 1.0, math.nan)
        is None
    )
