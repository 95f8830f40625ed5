"""Freed memory stays with the process, and changes nothing else."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from tune_study import memory
if sys.argv[1] == "kept":
    assert memory.keep_freed()
for _ in range(20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(10, 2**20)  # 40 MiB, given back at once; settles after eight
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_memory_given_back_is_not_asked_of_the_system_again() -> None:
    def faults(what: str) -> int:
        command = [sys.executable, "-c", FAULTS, what]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert faults("kept") < 100 < 10_000 < faults("returned")  # of 10,240 pages of 4 KiB
