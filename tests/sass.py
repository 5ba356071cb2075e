"""Reads what ptxas, nvdisasm and cuobjdump say of compiled kernels."""

import re
import shutil
import subprocess
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

_PTXAS = re.compile(
    r"entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores,"
    r" (\d+) bytes spill loads.*?Used (\d+) registers",
    re.DOTALL,
)
_LABEL = re.compile(r"(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*?);")


@dataclass
class Resources:
    stack: int
    spills: int
    registers: int


@dataclass
class Kernel:
    """Instructions as (name, operands), and where each label points."""

    code: list = field(default_factory=list)
    labels: dict = field(default_factory=dict)

    def loops(self):
        """The code between each backward branch and its target, the branch included."""
        for i, (name, operands) in enumerate(self.code):
            target = re.search(r"\.L_x_\d+", operands) if name.startswith("BRA") else None
            start = self.labels.get(target[0], i + 1) if target else i + 1
            if start < i:
                yield self.code[start : i + 1]


def read_ptxas(log):
    """Mangled kernel name -> Resources, from the output of `ptxas -v`."""
    return {
        name: Resources(int(stack), int(stores) + int(loads), int(registers))
        for name, stack, stores, loads, registers in _PTXAS.findall(log)
    }


def read_disassembly(text):
    """Mangled kernel name -> Kernel, from the output of `nvdisasm -c`."""
    kernels, kernel = {}, None
    for line in text.splitlines():
        if section := re.match(r"\.text\.(\w+):", line):
            kernel = kernels[section[1]] = Kernel()
        elif kernel is None:
            continue
        elif label := _LABEL.match(line):
            kernel.labels[label[1]] = len(kernel.code)
        elif instruction := _INSTRUCTION.match(line):
            kernel.code.append((instruction[1], instruction[2]))
    return kernels


def find_tool(name):
    """A disassembler: the toolkit's, or the one in triton's package."""
    spec = find_spec("triton")
    folder = Path(spec.origin).parent / "backends" / "nvidia" / "bin" if spec else Path()
    return shutil.which(name) or shutil.which(name, path=str(folder))


def extract_ptx(library, folder):
    """Writes the PTX files that a library holds into a folder."""
    command = [find_tool("cuobjdump"), "-xptx", "all", library]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
