"""Ends a sweep in order when what it stands on is gone: Ray, the disk, the tokens, its folder.

These are no faults of a cell. Without a guard Ray waits for a dead server for ever, and a full
disk or missing tokens would make one cell after the other an errored one.
"""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from ray.tune import Callback
from ray.tune.experiment import Trial

from tune_study import disk
from tune_study.config import ConfigError
from tune_study.records import error_line
from tune_study.store import StudyFolder

LOOK_EVERY_S = 1.0

SERVERS = ("raylet", "gcs_server")
"""Ray's processes without which nothing goes on."""

FULL = (errno.ENOSPC, errno.EDQUOT)

SETTING = f"{ConfigError.__module__}.{ConfigError.__name__}: "
"""How a traceback begins its last line for an error that a user can mend, such as no tokens."""


class StoppedError(BaseException):
    """The sweep cannot go on. Its text says why, in one line.

    No Exception: Tune would then tidy up, which waits for the very servers that are gone.
    """


class Guard(Callback):
    """Looks once a second, and at every error of a trial.

    Args:
        folder: the study's; that of its experiments is made if it is not there.
        reserve: free bytes below which its disk counts as full.
        elsewhere: why a cluster or a store that is not ours does not go on; empty if it does.
    """

    def __init__(
        self, folder: StudyFolder, reserve: int, elsewhere: Callable[[], str] | None = None
    ) -> None:
        self.folder = folder
        self.reserve = reserve
        self._elsewhere = elsewhere
        folder.experiments.mkdir(parents=True, exist_ok=True)
        self._place = _place(folder.experiments)
        self._looked = 0.0
        self._servers: list[tuple[str, int]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles its callbacks with every snapshot of the experiment

    def setup(self, *args: Any, **info: Any) -> None:
        """Notes Ray's servers."""
        children = psutil.Process().children()
        self._servers = [(p.name(), p.pid) for p in children if p.name() in SERVERS]

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Looks, if it is time again."""
        if time.monotonic() - self._looked < LOOK_EVERY_S:
            return
        self._looked = time.monotonic()
        for name, pid in self._servers:
            if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                raise StoppedError(f"Ray's {name} is gone: killed, or out of memory.")
        if self._elsewhere is not None and (why := self._elsewhere()):
            raise StoppedError(why)
        if self.moved():
            raise StoppedError(_moved(self.folder))
        if shutil.disk_usage(self.folder.path).free < self.reserve:
            raise StoppedError(disk.full(self.folder.path))

    def on_trial_error(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Tells a fault of the cell from one of what is around it, by its last line.

        What a worker raises while it starts comes as text only.
        """
        last = error_line(Path(trial.error_file).read_text(encoding="utf-8", errors="replace"))
        if last.startswith(SETTING):
            raise StoppedError(last.removeprefix(SETTING))
        if any(f"[Errno {number}]" in last for number in FULL):
            raise StoppedError(disk.full(self.folder.path))
        if self.moved():
            raise StoppedError(_moved(self.folder))

    def moved(self) -> bool:
        """Whether the folder was moved or deleted; Tune, which saves its state, makes it anew."""
        return _place(self.folder.experiments) != self._place

    def explain(self, error: BaseException) -> str:
        """Why a sweep could not go on, in one line; empty if it is something else: our fault."""
        link: BaseException | None = error
        while link is not None:
            if isinstance(link, StoppedError):
                return str(link)
            if isinstance(link, OSError) and link.errno in FULL:
                return disk.full(self.folder.path)
            link = link.__cause__ or link.__context__
        return _moved(self.folder) if self.moved() else ""

    def tidy(self, experiment: str) -> None:
        """Takes away what Tune made anew of an experiment at the old place of a moved folder."""
        if self.moved():
            shutil.rmtree(self.folder.experiments / experiment, ignore_errors=True)
            for path in (self.folder.experiments, self.folder.path, self.folder.path.parent):
                with suppress(OSError):  # it is not there, or holds something
                    path.rmdir()


def _place(path: Path) -> tuple[int, int] | None:
    """What tells a folder from another one under the same name; None if it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _moved(folder: StudyFolder) -> str:
    return f"{folder.path}: was moved or deleted while the sweep ran."
