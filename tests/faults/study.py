"""The study that is disturbed: how it is started, how far it is, and what its tables say."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import psutil

from analysis import load

ROOT = Path(__file__).resolve().parents[2]
NAME = "tiny"
REPORT_EVERY = 10

WORDS = [
    *("sweep", "smoke", "--name", NAME, "--no-report"),
    *("--lr", "1e-2,1", "--depth", "1", "--seed", "0"),
    *("--set", "steps=600", "--set", "warmup_steps=20", "--set", f"report_every={REPORT_EVERY}"),
    *("--checkpoint-every", "0"),  # at every report
]
"""Four cells of 60 reports; about ten seconds of training, of which every start gets a part."""

WITHOUT_KERNEL = (
    "import ray._private.utils as utils; utils.detect_fate_sharing_support = lambda: False; "
    "from tune_study.cli import main; main()"
)
"""The command line as it runs where the kernel ends no child with its parent: on macOS."""

PATIENCE_S = 240
"""How long a sweep may take to come to its end, or to its next report."""

GONE_S = 15
"""Seconds after which none of its processes may be left."""


@dataclass
class Place:
    """Where a study lies; a scenario may move it."""

    runs: Path
    data: Path

    @property
    def study(self) -> Path:
        """The study's own folder."""
        return self.runs / NAME

    def command(self, *, kernel: bool = True) -> list[str]:
        """The command line that starts the study, or goes on with it."""
        program = ["-m", "tune_study"] if kernel else ["-c", WITHOUT_KERNEL]
        where = ["--runs", str(self.runs), "--data", str(self.data)]
        return [sys.executable, *program, *WORDS, *where]

    def rows(self) -> int:
        """Reports on disk, of all starts."""
        found = 0
        for path in self.study.glob("tune/*/*/result.json"):
            found += path.read_bytes().count(b"\n")
        return found


@dataclass
class Run:
    """A sweep that was started, with the processes seen of it."""

    process: subprocess.Popen[str]
    head: psutil.Process
    behind_shell: bool
    seen: set[psutil.Process] = field(default_factory=set)

    @classmethod
    def start(cls, place: Place, *, kernel: bool = True) -> Run:
        """Starts it in a process group of its own, as a terminal would.

        Without the kernel's help it is not the group's leader, as under `make`.
        """
        shell = [] if kernel else ["sh", "-c", '"$@"; exit $?', "sh"]
        process = subprocess.Popen(
            [*shell, *place.command(kernel=kernel)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=os.environ | {"COLUMNS": "200"},
        )
        return cls(process, psutil.Process(process.pid), bool(shell))

    @property
    def ended(self) -> bool:
        """Whether the sweep itself is over."""
        return self.process.poll() is not None

    @property
    def pid(self) -> int:
        """Of the sweep, not of a shell around it."""
        children = self.head.children() if self.behind_shell else []
        return children[0].pid if children else self.head.pid

    def look(self) -> list[psutil.Process]:
        """All processes of it that live, the sweep first.

        `head` knows when it was started: a process that later got its number is not it.
        """
        if self.ended:
            return []
        try:
            family = [self.head, *self.head.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
        self.seen.update(family)
        return family[1:] if self.behind_shell else family

    def named(self, part: str) -> list[psutil.Process]:
        """Those whose name or command line holds `part`."""
        found = []
        for process in self.look():
            try:
                if part in " ".join([process.name(), *process.cmdline()[:2]]):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def output(self) -> str:
        """Everything it printed, once it has ended."""
        try:
            return self.process.communicate(timeout=PATIENCE_S)[0]
        except subprocess.TimeoutExpired:
            raise AssertionError("the sweep does not end") from None

    def mop_up(self) -> None:
        """Ends whatever a failure left of it."""
        self.look()
        for process in self.seen:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.communicate()

    def seconds_until_gone(self) -> float:
        """Waits until no process seen of it lives any more.

        Raises:
            AssertionError: if one still does after GONE_S; names it.
        """
        started = time.monotonic()
        left = set(self.seen)
        while left := {process for process in left if _lives(process)}:
            waited = time.monotonic() - started
            assert waited < GONE_S, f"still there after {GONE_S} s: {left}"
            time.sleep(0.05)
        return time.monotonic() - started


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], bool]) -> None:
    """Waits for a condition.

    Raises:
        AssertionError: if it does not come about.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@dataclass(frozen=True)
class Tables:
    """A study's cells and history, without what clocks say."""

    cells: pd.DataFrame
    history: pd.DataFrame

    @classmethod
    def of(cls, study: Path | str) -> Tables:
        """Reads them."""
        results = load(study)
        # Where nothing is left, the history has no such column.
        history = results.history.drop(columns="resumed_step", errors="ignore")
        return cls(
            results.cells.drop(columns=["seconds", "tokens_per_s", "started", "ended"]),
            history.drop(columns=[name for name in history if name.startswith("time/")]),
        )

    def against(self, undisturbed: Tables) -> dict[str, int]:
        """Rows that are missing here, rows that are here twice, and values that differ."""
        keys = ["cell", "step"]
        here, there = (table.history.set_index(keys) for table in (self, undisturbed))
        once = here[~here.index.duplicated()]
        both = once.index.intersection(there.index)
        return {
            "lost rows": len(there.index.difference(once.index)),
            "doubled rows": len(here) - len(once) + len(once.index.difference(there.index)),
            "differing values": _differing(once.loc[both], there.loc[both])
            + _differing(self.cells, undisturbed.cells),
        }


def _differing(left: pd.DataFrame, right: pd.DataFrame) -> int:
    """Values that are not the same bit for bit."""
    assert list(left) == list(right), "the tables have other columns"
    if len(left) != len(right):
        return abs(len(left) - len(right)) * len(left.columns)
    count = 0
    for name in left:
        for one, other in zip(left[name], right[name], strict=True):
            count += _text(one) != _text(other)
    return count


def _text(value: object) -> str:
    """A value with all its bits; NaN is like NaN."""
    tobytes = getattr(value, "tobytes", None)
    return tobytes().hex() if tobytes else repr(value)
