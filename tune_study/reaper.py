"""A small process beside a sweep that ends what the sweep started, once the sweep is gone.

A sweep that is killed ends nothing itself. The kernel then ends Ray's servers on Linux, a process
of Ray's does on macOS, and workers notice; but Ray's agents stay for a minute, and a worker that
was just starting for half of one. This process holds one end of a pipe whose other end is the
sweep's alone: it closes when the sweep ends, however it ends.

    python reaper.py PID < pipe
"""

from __future__ import annotations

import os
import re
import select
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import psutil

LOOK_EVERY_S = 0.5


def main(pid: int) -> None:
    """Collects what the sweep starts until it says that all is there; then waits for its end."""
    try:
        sweep = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return
    ours: set[psutil.Process] = set()
    starting = True
    while True:
        with suppress(psutil.NoSuchProcess):
            ours.update(sweep.children(recursive=True))
        ready, _, _ = select.select([0], [], [], LOOK_EVERY_S if starting else None)
        if ready and not os.read(0, 1):
            break
        starting = starting and not ready
    ours.discard(psutil.Process())
    _kill(ours)
    # What Ray started since, at the very last, too.
    _kill(_of_session(sweep))
    time.sleep(LOOK_EVERY_S)
    _kill(_of_session(sweep))


def _of_session(sweep: psutil.Process) -> Iterator[psutil.Process]:
    """Processes whose command line names the Ray session that `sweep` began.

    Ray ends a session's name with the process that began it.
    """
    name = re.compile(rf"session_[\d-]+_[\d-]+_\d+_{sweep.pid}\b")
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.create_time() >= sweep.create_time() and name.search(
                " ".join(process.cmdline())
            ):
                yield process


def _kill(processes: set[psutil.Process] | Iterator[psutil.Process]) -> None:
    for process in processes:
        # psutil compares the time of its start, so a number given anew is another process.
        with suppress(psutil.Error):
            process.kill()


if __name__ == "__main__":
    main(int(sys.argv[1]))
