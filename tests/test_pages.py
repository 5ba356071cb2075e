"""Freed activations stay with the process: the next ones do not fault their pages in again."""

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from bnuq_ext.pages import keep_freed_pages

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        held = [torch.ones(2**20) for _ in range(40)]  # 1024 pages each
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_pages()
faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_activations_are_not_faulted_in_twice_unless_the_user_has_it_so():
    """Without the call it is 40960 in each of the 5 turns."""
    for set_by_user, kept in (({}, True), ({"MALLOC_TRIM_THRESHOLD_": "65536"}, False)):
        options = dict(env=os.environ | set_by_user, capture_output=True, text=True)
        done = subprocess.run([sys.executable, "-c", FAULTS], **options)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) < 256 if kept else int(done.stdout) > 5 * 20_000
