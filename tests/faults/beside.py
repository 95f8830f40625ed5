"""Another Ray session on this machine, which must not notice what happens to ours."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil

from tests.faults.study import wait_for

START = [
    *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port=0"),
    *("--num-cpus=1", "--object-store-memory=80000000", "--include-dashboard=false"),
    "--disable-usage-stats",
]

SERVERS = {"gcs_server", "raylet"}


@contextmanager
def another_ray() -> Iterator[Callable[[], bool]]:
    """Starts one with a folder and ports of its own; yields whether all of it still lives."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as name:
        process = subprocess.Popen(
            [*START, f"--temp-dir={name}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        head = psutil.Process(process.pid)
        try:
            wait_for(lambda: {child.name() for child in head.children()} >= SERVERS)
            family = [head, *head.children(recursive=True)]
            yield lambda: all(p.is_running() and p.status() != "zombie" for p in family)
        finally:
            for child in head.children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            process.kill()
            process.wait()
