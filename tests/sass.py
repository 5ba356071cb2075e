"""Reads what nvdisasm and cuobjdump say of compiled kernels."""

import functools
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

PACKAGE = Path(find_spec("bnuq_ext").origin).parent
LIBRARY = next(iter(PACKAGE.glob("_cuda*.so")), None)  # that the build made

_SECTION = re.compile(r"\.text\.(\w+):")
_RESOURCES = re.compile(r"Function (\w+):\s+REG:(\d+) STACK:(\d+)")
_LABEL = re.compile(r"(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*?);")
_RELEASE = re.compile(rb"Cuda compilation tools, release (\d+\.\d+)")


@dataclass
class Kernel:
    """Instructions as (name, operands), and where each label points."""

    registers: int  # of a thread
    stack: int  # bytes of a thread, where what registers do not hold is spilled to
    code: list = field(default_factory=list)
    labels: dict = field(default_factory=dict)

    def loops(self):
        """The code between each backward branch and its target, the branch included."""
        for i, (name, operands) in enumerate(self.code):
            target = re.search(r"\.L_x_\d+", operands) if name.startswith("BRA") else None
            start = self.labels.get(target[0], i + 1) if target else i + 1
            if start < i:
                yield self.code[start : i + 1]


def run_tool(name, *arguments):
    command = [find_tool(name), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def read_resources(cubin):
    """Mangled kernel name -> Kernel without its code."""
    resources = _RESOURCES.findall(run_tool("cuobjdump", "-res-usage", cubin))
    return {name: Kernel(int(registers), int(stack)) for name, registers, stack in resources}


def read_cubin(cubin, pattern=""):
    """Mangled kernel name -> Kernel; nothing where no name has the pattern."""
    kernels = read_resources(cubin)
    if not any(re.search(pattern, name) for name in kernels):
        return {}
    kernel = None
    for line in run_tool("nvdisasm", "-c", cubin).splitlines():
        if section := _SECTION.match(line):
            kernel = kernels[section[1]]
        elif kernel is None:
            continue
        elif label := _LABEL.match(line):
            kernel.labels[label[1]] = len(kernel.code)
        elif instruction := _INSTRUCTION.match(line):
            kernel.code.append((instruction[1], instruction[2]))
    return kernels


@functools.cache
def read_library(library, arch, read=read_cubin, **options):
    """What a function reads of each file of the code that a library holds for one architecture."""
    with TemporaryDirectory() as folder:
        extract(library, folder, "-xelf", f".sm_{arch}.")
        return [read(cubin, **options) for cubin in sorted(Path(folder).iterdir())]


def read_release(library):
    """The release of the toolkit that compiled a library's kernels, or None."""
    found = _RELEASE.search(Path(library).read_bytes())
    return found and found[1].decode()


def find_tool(name):
    """A disassembler: the toolkit's, or the one in triton's package."""
    spec = find_spec("triton")
    folder = Path(spec.origin).parent / "backends" / "nvidia" / "bin" if spec else Path()
    return shutil.which(name) or shutil.which(name, path=str(folder))


def extract(library, folder, kind, name):
    """Writes the files that a library holds, of a kind (`-xelf`, `-xptx`) and with this in their
    names ("all" for all), into a folder."""
    command = [find_tool("cuobjdump"), kind, name, library]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
