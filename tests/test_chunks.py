"""Freed activations stay with the process: the next ones do not fault their pages in again."""

import platform
import subprocess
import sys

import pytest
import torch

from bnuq_ext.chunks import chunk_of

FAULTS = """
import resource, torch
from bnuq_ext.chunks import keep_freed_pages

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        held = [torch.ones(2**20) for _ in range(6)]  # 1024 pages each
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_pages()
faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_activations_are_not_faulted_in_twice():
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Without the call it is 6144 in each of the 20 turns.
    assert int(done.stdout) < 1024


def test_a_chunk_counts_what_torch_keeps_of_a_gpu_as_free(monkeypatch):
    """After a training that has filled it."""
    GB = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GB // 16, 80 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * GB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: GB)
    largest = 8 * 2**20
    assert chunk_of(largest, "auto", 1000, torch.device("cuda")) == (GB + GB // 16) // 8 // largest
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * GB)
    assert chunk_of(largest, "auto", 1000, torch.device("cuda")) == 1
