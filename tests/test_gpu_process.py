"""benchmarks/gpu_process.py: commands with a limit, the commit and the digest of the sources."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu_process
from benchmarks.gpu_process import run


def python(code):
    return [sys.executable, "-c", code]


def test_run_tells_how_a_command_ended(tmp_path):
    assert run(python("print('hello')"), 30).output == "hello\n"
    failed = run(python("import sys; print('why'); sys.exit(7)"), 30)
    assert (failed.status, failed.code, failed.output) == ("failed", 7, "why\n")
    absent = run([tmp_path / "no-such-program"], 30)
    assert absent.status == "absent" and "no-such-program" in absent.output
    assert run(python("import os; print(os.environ['MARK'])"), 30, {"MARK": "m"}).output == "m\n"


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # a zombie is only not reaped yet


def ends(pid):
    """Whether a process ends within half a minute."""
    start = time.monotonic()
    while is_running(pid) and time.monotonic() - start < 30:
        time.sleep(0.05)
    return not is_running(pid)


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
child.wait()
"""


def test_run_kills_grandchildren_at_the_limit():
    start = time.monotonic()
    outcome = run(python(PARENT), 4.0)
    assert (outcome.status, outcome.code) == ("timed out", None)
    assert time.monotonic() - start < 30
    assert ends(int(outcome.output))


STAGE = """
import signal, sys, threading
from pathlib import Path
from benchmarks import gpu_process

signal.signal(signal.SIGTERM, gpu_process.end_with_commands)
def work(name):
    kept = Path(sys.argv[1]) / name
    print(gpu_process.run([sys.executable, "-c", sys.argv[2]], 60, kept=kept), flush=True)
other = threading.Thread(target=work, args=("other",))
other.start()
work("one")
other.join()
"""


def test_sigterm_ends_the_commands_of_all_threads(tmp_path):
    command = [*python(STAGE), tmp_path, PARENT]
    options = {"cwd": gpu_process.ROOT, "stdout": subprocess.PIPE, "text": True}
    kept = [tmp_path / "one", tmp_path / "other"]
    with subprocess.Popen(command, **options) as process:
        start = time.monotonic()
        while not all(path.exists() and path.read_text().endswith("\n") for path in kept):
            assert time.monotonic() - start < 30
            time.sleep(0.05)
        process.terminate()
        output, _ = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM and output == ""
    assert all(ends(int(path.read_text())) for path in kept)


def test_versions_of_packages():
    assert gpu_process.version_of("pytest") == pytest.__version__
    assert gpu_process.version_of("no-such-package") is None


def test_commit_without_git(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_process, "ROOT", tmp_path)
    monkeypatch.delenv("BNUQ_COMMIT", raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert gpu_process.commit() == "unknown"
    (tmp_path / "COMMIT").write_text("1234\n")
    assert gpu_process.commit() == "1234"
    monkeypatch.setenv("BNUQ_COMMIT", "5678")
    assert gpu_process.commit() == "5678"


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_commit_says_when_files_were_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_process, "ROOT", tmp_path)
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    (tmp_path / "file").write_text("one")
    for command in (["init", "-q"], ["add", "file"], [*identity, "commit", "-qm", "m"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    clean = gpu_process.commit()
    assert len(clean) == 40
    (tmp_path / "file").write_text("two")
    assert gpu_process.commit() == clean + "-dirty"


def test_source_digest_follows_the_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_process, "ROOT", tmp_path)
    for folder in ("csrc", "bnuq_ext", "tests/hostrun/build", "benchmarks"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("setup.py", "pyproject.toml", "csrc/a.h"):
        (tmp_path / file).write_text(file)
    first = gpu_process.source_digest()
    (tmp_path / "tests" / "hostrun" / "build" / "made.cpp").write_text("x")
    (tmp_path / "benchmarks" / "result.json").write_text("{}")
    assert gpu_process.source_digest() == first
    (tmp_path / "csrc" / "a.h").write_text("changed")
    assert gpu_process.source_digest() != first
