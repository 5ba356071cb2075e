"""Prints the packages of pyproject.toml (run time, demo, dev), without building the project;
torch is pinned elsewhere."""

import re
from pathlib import Path


def quoted(text):
    return re.findall(r'"([^"]+)"', text)


def table(name, text):
    return re.search(rf"^{name} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL).group(1)


TEXT = Path(__file__).parent.parent.joinpath("pyproject.toml").read_text()
names = [name for key in ("dependencies", "demo", "dev") for name in quoted(table(key, TEXT))]
print(*(n for n in names if not n.startswith(("torch", "bnuq_ext"))))
