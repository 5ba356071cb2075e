"""Commands under a hard time limit, and what the machine at hand is."""

import datetime
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAGES = ["test", "sanitize", "bench"]
SOURCES = ["setup.py", "pyproject.toml", "csrc", "bnuq_ext", "tests", "benchmarks"]
SUFFIXES = {".py", ".h", ".cpp", ".cu", ".cuh", ".toml"}

RUNNING = set()  # the processes of commands, each the leader of a group

TORCH_QUESTION = """
import json, torch
found = torch.cuda.is_available()
gpu = torch.cuda.get_device_name() if found else None
capability = "%d.%d" % torch.cuda.get_device_capability() if found else None
print(json.dumps({"torch": torch.__version__, "torch_cuda": torch.version.cuda, "gpu": gpu,
                  "compute_capability": capability}))
"""
PACKAGES = [
    *("pytest", "pytest_benchmark", "pybind11", "ninja", "hypothesis", "scipy", "safetensors"),
    *("tqdm", "sklearn", "matplotlib", "expecttest", "triton"),
]


@dataclass
class Outcome:
    """How a command ended: status is "passed", "failed", "timed out" or "absent"."""

    status: str
    code: int | None
    seconds: float
    output: str


def opened(path):
    """A file to write and read, which has no name if it is given none."""
    if path is None:
        return tempfile.TemporaryFile()
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, "w+b")


def run(command, limit, env=None, kept=None):
    """Runs a command in the repository root and kills its whole process group at the limit.

    Args:
        command: the program and its arguments.
        limit: seconds.
        env: variables on top of the present ones.
        kept: the file in which all that the command prints is to stay.
    """
    start = time.monotonic()
    # A file, not a pipe: a grandchild that lives on would hold a pipe open.
    with opened(kept) as log:
        try:
            process = subprocess.Popen(
                [str(part) for part in command],
                cwd=ROOT,
                env=os.environ | (env or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return Outcome("absent", None, 0.0, str(error))
        RUNNING.add(process)
        try:
            code = process.wait(timeout=max(limit, 0.1))
            status = "passed" if code == 0 else "failed"
        except subprocess.TimeoutExpired:
            code, status = None, "timed out"
        finally:
            kill(process)
            process.wait()
            RUNNING.discard(process)
        log.seek(0)
        output = log.read().decode(errors="replace")
    return Outcome(status, code, round(time.monotonic() - start, 1), output)


def kill(process):
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def end_with_commands(signum, frame):
    """A signal's handler: commands are in sessions of their own and would live on.

    Nothing waits for them, or a thread would take their end for a verdict and save it.
    """
    for process in list(RUNNING):
        kill(process)
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def last_json(outcome):
    """The JSON object on the last line of an output; {} if there is none."""
    try:
        return json.loads(outcome.output.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {}


def source_digest():
    """A hash over the sources, so that a result belongs to them also where git is absent."""
    digest = hashlib.sha256()
    for place in SOURCES:
        path = ROOT / place
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.suffix in SUFFIXES and "build" not in file.relative_to(ROOT).parts:
                digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def commit():
    """The commit, "-dirty" added for local changes; BNUQ_COMMIT or a COMMIT file without git."""
    head = run(["git", "rev-parse", "HEAD"], 20)
    if head.status == "passed":
        dirty = run(["git", "status", "--porcelain", "--untracked-files=no"], 20).output.strip()
        return head.output.strip() + ("-dirty" if dirty else "")
    if os.environ.get("BNUQ_COMMIT"):
        return os.environ["BNUQ_COMMIT"]
    file = ROOT / "COMMIT"
    return file.read_text().strip() if file.exists() else "unknown"


def find_tool(name):
    """A program on PATH or in the CUDA toolkit; None if there is none."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    nvcc = shutil.which("nvcc")
    homes += [Path(nvcc).resolve().parent.parent] if nvcc else []
    places = [Path(home) / folder / name for home in homes if home for folder in ("bin", name)]
    found = shutil.which(name) or next((str(p) for p in places if os.access(p, os.X_OK)), None)
    return None if found is None or Path(found).is_dir() else found


def nvcc_release():
    """The line of nvcc's version; None where there is none."""
    nvcc = find_tool("nvcc")
    lines = run([nvcc, "--version"], 60).output.splitlines() if nvcc else []
    return next((line.strip() for line in lines if "release" in line), None)


def version_of(package):
    """A package's version, None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def environment():
    """What a reader needs to judge a number: hardware, versions, commit, date."""
    driver = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    smi = run(driver, 60)
    return {
        "gpu": None,
        "compute_capability": None,
        **last_json(run([sys.executable, "-c", TORCH_QUESTION], 180)),
        "driver": smi.output.strip().splitlines()[0] if smi.status == "passed" else None,
        "nvcc": nvcc_release(),
        "python": platform.python_version(),
        "setuptools": version_of("setuptools"),
        "platform": platform.platform(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "commit": commit(),
        "sources": source_digest(),
        "date": datetime.date.today().isoformat(),
        "missing_packages": [name for name in PACKAGES if find_spec(name) is None],
    }
