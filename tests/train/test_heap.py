"""Freed memory is kept: a large block that comes again costs no page faults."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import torch
from osprey.train.heap import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
for _ in range(20):
    torch.ones(16 << 20)  # 64 MB; the heap grows for the first few
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    torch.ones(16 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's own setting")
def test_no_page_faults_for_memory_that_was_freed():
    def faults(mode):
        run = subprocess.run([sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, check=True)
        return int(run.stdout)

    assert faults("kept") < 50
    assert faults("given back") >= 3 * 32  # of huge pages; 48,000 of small ones
