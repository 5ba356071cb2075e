"""The fixture `without_gpu` hides a GPU, here a made-up one, also from a module's own fixtures."""

import shutil
import subprocess
import sys
from pathlib import Path

FILES = {
    "pretended.py": """
import torch
torch.cuda.is_available = lambda: True
""",
    "test_hidden.py": """
import pytest, torch
pytestmark = pytest.mark.usefixtures("without_gpu")

@pytest.fixture(scope="module")
def done():
    return torch.cuda.is_available()

def test_it(done):
    assert not done and not torch.cuda.is_available()
""",
    "test_seen.py": """
import torch

def test_it():
    assert torch.cuda.is_available()
""",
}


def test_it_comes_before_fixtures_of_the_module(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    shutil.copy(Path(__file__).parent / "conftest.py", tmp_path)
    command = [sys.executable, "-m", "pytest", "-p", "pretended", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout
