"""The command: what it prints, and how it fails."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import protocol_of_squares
import pytest
import torch

import bnuq_ext
from bnuq_ext import cli

ROOT = Path(bnuq_ext.__file__).parent.parent


def test_doctor(capsys, monkeypatch):
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bnuq_ext"] == bnuq_ext.__version__
    assert found["cuda_library"] in (True, False) and found["torch"]
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert f"bnuq_ext       {bnuq_ext.__version__}\n" in shown
    assert f"cuda_library   {'yes' if found['cuda_library'] else 'no'}\n" in shown
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    cli.main(["doctor"])
    assert "torch_threads  1\n" in capsys.readouterr().out


def test_demo(capsys, tmp_path):
    arguments = ["demo", "--quick", "--seeds", "1", "--output", str(tmp_path)]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr()
    assert "One seed: nothing to compare." in printed.out and printed.err == ""
    assert f"\nFigures:\n  {tmp_path / 'verdict.png'}\n" in printed.out
    assert cli.main([*arguments, "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["settings"]["num_seeds"] == 1 and printed.err == ""


def test_bbb(capsys, tmp_path):
    arguments = (
        "bbb --hidden 8 --epochs 1 --prior gaussian --samples 1 --seed 4 --scaling 126".split()
    )
    arguments += ["--scheme", "uniform", "--output", str(tmp_path)]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr()
    assert "1 samples a step, KL weights uniform, scaling 126, seed 4." in printed.out
    assert printed.err == "" and f"{tmp_path / 'weights.png'}" in printed.out
    assert cli.main([*arguments, "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["runs"].keys() == {"gaussian"} and printed.err == ""
    expected = {"hidden": 8, "epochs": 1, "seed": 4, "scaling": "126", "scheme": "uniform"}
    assert found["settings"].items() >= (expected | {"num_samples": 1}).items()


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    "arguments, shown",
    [
        ("demo --quick --seeds 1", "digits: 100%"),
        ("bbb --hidden 4 --epochs 1 --prior gaussian", "gaussian: 100%"),
        ("reproduce squares", "squares: 100%"),
    ],
)
def test_progress_is_shown_on_a_terminal_only(tmp_path, monkeypatch, arguments, shown):
    monkeypatch.setattr("bnuq_ext.protocols.runner.protocol", lambda name: protocol_of_squares)
    for options, stream, expected in (
        ([], Terminal(), True),
        (["--json"], Terminal(), False),
        ([], io.StringIO(), False),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        command = [*arguments.split(), "--output", str(tmp_path), *options]
        assert cli.main(command) == 0
        assert (shown in stream.getvalue()) == bool(stream.getvalue()) == expected


def test_a_quick_demo_and_a_whole_one_do_not_meet(monkeypatch):
    folders = []

    def stop(folder, *_, **__):
        folders.append(folder)
        raise ValueError

    monkeypatch.setattr("bnuq_ext.experiments.digits.run", stop)
    for arguments in (["--quick"], [], ["--quick", "--output", "o"], ["--output", "o"]):
        cli.main(["demo", *arguments])
    assert folders == ["demo-output/quick", "demo-output", "o", "o"]


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr() == (f"bnuq {bnuq_ext.__version__}\n", "")


def test_bbb_and_reproduce_hand_on_their_arguments(monkeypatch):
    seen = []

    def stop(*arguments, **options):
        seen.append((arguments, options))
        raise ValueError

    monkeypatch.setattr("bnuq_ext.protocols.runner.reproduce", stop)
    monkeypatch.setattr("bnuq_ext.experiments.bbb.run", stop)
    cli.main("reproduce toy --full --data-root d --jobs 3 --output o --json".split())
    cli.main("reproduce uci --jobs 1".split())
    cli.main("bbb --epochs 7 --data-root d --output o".split())
    assert seen[:2] == [
        (("toy", "o"), {"data_root": "d", "jobs": 3, "full": True, "progress": False}),
        (
            ("uci", "reproduce-output/uci-quick"),
            {"data_root": None, "jobs": 1, "full": False, "progress": True},
        ),
    ]
    assert cli.parser().parse_args(["reproduce", "uci"]).jobs == os.cpu_count()
    (folder, priors, settings), options = seen[2]
    assert (folder, priors) == ("o", ["gaussian", "mixture"])
    assert options == {"data_root": "d", "progress": True}
    assert (settings.hidden, settings.epochs, settings.num_samples) == (400, 7, 2)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["demo", "--seeds", "0"], "bnuq: demo: --seeds must lie in [1, 2^24), got 0\n"),
        (["demo", "--output", "/dev/null"], "bnuq: store: --output must be a folder to write to, "),
        (["demo", "--output", ""], "bnuq: store: --output must have a name, got ''\n"),
        (["bbb", "--output", ""], "bnuq: store: --output must have a name, got ''\n"),
        (["reproduce", "toy", "--output", ""], "bnuq: store: --output must have a name, got ''\n"),
        (["bbb", "--prior", "flat"], "bnuq: bbb: --prior must be one of gaussian, "),
        (["bbb", "--samples", "0"], "bnuq: bbb: --samples must lie in [1, 2^24), got 0\n"),
        (["bbb", "--hidden", "9" * 17], "bnuq: bbb: --hidden must lie in [1, 2^24), got 99999"),
        (
            ["bbb", "--data-root", "/none"],
            "bnuq: mnist: --data-root must hold train-images-idx3-ubyte or ",
        ),
        (
            ["reproduce", "toy", "--data-root", "/none"],
            "bnuq: reproduce: --data-root must be a folder of data sets, got /none\n",
        ),
        (["reproduce", "toy", "--data-root", ""], "bnuq: reproduce: --data-root must not be empty"),
        (["bbb", "--data-root", ""], "bnuq: bbb: --data-root must not be empty, got ''\n"),
        (["reproduce", "cifar"], "bnuq: cifar: --data-root must hold the folder cifar10 "),
        (["reproduce", "none"], "bnuq: reproduce: name must be one of batch-size, "),
    ],
)
def test_errors_are_one_line(capsys, arguments, message):
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(message) and printed.err.count("\n") == 1 and printed.out == ""


def test_what_is_no_option_keeps_its_name(capsys, monkeypatch):
    messages = ["predict: num_samples must be positive, got 0", "table: /x.csv must be text, got 1"]
    for message in messages:
        error = ValueError(message)
        monkeypatch.setattr("bnuq_ext.experiments.digits.run", lambda *_, e=error, **__: raised(e))
        assert cli.main(["demo"]) == 2
        assert capsys.readouterr().err == f"bnuq: {message}\n"


def raised(error):
    raise error


def test_missing_extra_is_one_line(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert cli.main(["demo", "--quick", "--json", "--output", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert "pip install 'bnuq_ext[demo]'" in printed and printed.count("\n") == 1


@pytest.mark.parametrize("command", ["demo", "bbb", "reproduce toy"])
def test_matplotlib_is_asked_for_before_the_work(capsys, monkeypatch, tmp_path, command):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for place in ("experiments.digits", "experiments.bbb", "protocols.runner"):
        name = "reproduce" if place == "protocols.runner" else "run"
        monkeypatch.setattr(f"bnuq_ext.{place}.{name}", lambda *_, **__: pytest.fail("worked"))
    assert cli.main([*command.split(), "--output", str(tmp_path / "run")]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("bnuq: plots: matplotlib must be installed (pip install ")
    assert printed.count("\n") == 1 and not (tmp_path / "run").exists()
    assert cli.main(["reproduce", "--list"]) == 0


def test_memory_is_the_user_s_and_a_fault_is_not(capsys, monkeypatch):
    def fail(*_, **__):
        raise errors.pop(0)

    torchs = RuntimeError("DefaultCPUAllocator: can't allocate memory:\n8 TB")
    errors = [torchs, MemoryError(), RuntimeError("?")]
    monkeypatch.setattr("bnuq_ext.experiments.digits.run", fail)
    assert cli.main(["demo"]) == 2
    message = "bnuq: DefaultCPUAllocator: can't allocate memory: 8 TB\n"
    assert capsys.readouterr() == ("", message)
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr() == ("", "bnuq: MemoryError\n")
    with pytest.raises(RuntimeError, match="^[?]$"):
        cli.main(["demo"])


def test_interrupt(capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("bnuq_ext.experiments.digits.run", interrupted)
    assert cli.main(["demo"]) == 130
    assert "goes on where it stopped" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["dmeo"], "bnuq: argument command: invalid choice: 'dmeo' (choose from "),
        ([], "bnuq: the following arguments are required: command (see bnuq --help)"),
        (["reproduce", "toy", "--quick", "--full"], "bnuq reproduce: argument --full: not allowed"),
        (["reproduce", "toy", "--jobs", "x"], "bnuq reproduce: argument --jobs: invalid int value"),
        (["demo", "--sedes", "1"], "bnuq: unrecognized arguments: --sedes 1"),
    ],
)
def test_usage_errors(capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    found = capsys.readouterr().err
    assert caught.value.code == 2 and found.startswith(message) and found.count("\n") == 1


def test_module_runs_as_a_program():
    place = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "bnuq_ext", "doctor", "--json"]
    done = subprocess.run(command, env=place, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["bnuq_ext"] == bnuq_ext.__version__


def test_script_is_declared():
    assert 'bnuq = "bnuq_ext.cli:main"' in (ROOT / "pyproject.toml").read_text()


def test_a_reader_that_has_seen_enough_is_no_error():
    code = "import bnuq_ext.cli as c, sys; sys.exit(c.main(['doctor', '--json']))"
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, cwd=ROOT, text=True
        )
    finally:
        os.close(write)
    assert done.returncode == 1 and done.stderr == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_result_that_cannot_be_printed_is_one_line():
    code = "import bnuq_ext.cli as c, sys; sys.exit(c.main(['doctor', '--json']))"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, cwd=ROOT, text=True
        )
    assert done.returncode == 2
    assert done.stderr.startswith("bnuq: the result cannot be printed: [Errno 28]")
    assert done.stderr.count("\n") == 1


def test_a_terminal_of_ascii_is_shown_what_it_has():
    code = "import bnuq_ext.cli as c, sys; sys.exit(c._show('0.17 ± 0.01'))"
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, b"0.17 \\xb1 0.01\n")
