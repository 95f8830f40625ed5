"""Scenarios: which faults, in which order, at which moments; and what came of them."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.faults import damage
from tests.faults.study import NAME, REPORT_EVERY, ROOT, Place, Run, Tables, wait_for
from tune_study import checkpoints, sweep
from tune_study.config import ConfigError
from tune_study.store import StudyFolder

ROUNDS = 4
"""Disturbed starts of a scenario, before the one that runs to the end."""

DAMAGES = 1
"""Kinds of damage between two starts."""

SMALL_DISK = 80 * 2**20
"""Bytes of the tmpfs that is filled: room for what a start asks for, and little more."""


@dataclass
class Scenario:
    """One study and what is done to it.

    Attributes:
        number: its place in the suite; with the seed all else follows from it.
        endings, disturbances: names, one of each a start; '' for no disturbance.
        damages: names, some after each start.
    """

    number: int
    rng: random.Random
    endings: list[str]
    disturbances: list[str]
    damages: list[list[str]]


@dataclass
class Outcome:
    """What came of one scenario.

    Attributes:
        faults: kinds made, in order; kills is how many of them end a process of ours.
        redone: most steps of a cell that have to be done again, by the kind that ended a start.
        gone_s: longest time until no process was left, likewise.
        differences: lost rows, doubled rows, differing values.
        trouble: what went wrong; empty if nothing did.
    """

    number: int
    faults: list[str] = field(default_factory=list)
    kills: int = 0
    redone: dict[str, int] = field(default_factory=dict)
    gone_s: dict[str, float] = field(default_factory=dict)
    differences: dict[str, int] = field(default_factory=dict)
    trouble: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing went wrong, and nothing is lost, doubled or different."""
        return not self.trouble and not any(self.differences.values())


# ------------------------------------------------------------------- endings


@dataclass(frozen=True)
class Ending:
    """A way to end a running sweep.

    Attributes:
        act: does it.
        codes: the exit codes it may lead to.
        says: what the sweep must print.
        early: whether it may come before the first report.
        kernel: whether the kernel ends children with their parent.
        kills: whether it ends processes.
    """

    act: Callable[[Run, Place, random.Random], None]
    codes: set[int]
    says: str = ""
    early: bool = True
    kernel: bool = True
    kills: bool = True


def _to_sweep(number: int) -> Callable[[Run, Place, random.Random], None]:
    return lambda run, place, rng: os.kill(run.pid, number)


def _to_group(run: Run, place: Place, rng: random.Random) -> None:
    os.killpg(run.process.pid, signal.SIGINT)


def _to_group_twice(run: Run, place: Place, rng: random.Random) -> None:
    _to_group(run, place, rng)
    time.sleep(rng.uniform(0, 0.5))
    with suppress(ProcessLookupError):
        _to_group(run, place, rng)


def _server(name: str) -> Callable[[Run, Place, random.Random], None]:
    def kill(run: Run, place: Place, rng: random.Random) -> None:
        for process in run.named(name):
            process.kill()

    return kill


def _everything(run: Run, place: Place, rng: random.Random) -> None:
    family = run.look()
    rng.shuffle(family)
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _fill_disk(run: Run, place: Place, rng: random.Random) -> None:
    with _filler(place).open("wb", buffering=0) as file, suppress(OSError):
        for size in (2**20, 2**12, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))


def _filler(place: Place) -> Path:
    return place.runs.parent / "filler"


def _move_runs(run: Run, place: Place, rng: random.Random) -> None:
    _move(place)


ENDINGS = {
    "driver SIGKILL": Ending(_to_sweep(signal.SIGKILL), {-9}),
    "Ctrl-C": Ending(_to_group, {130}, "Go on with"),
    "Ctrl-C twice": Ending(_to_group_twice, {130}, "Go on with"),
    "SIGTERM": Ending(_to_sweep(signal.SIGTERM), {130}, "Go on with"),
    "SIGHUP": Ending(_to_sweep(signal.SIGHUP), {130}, "Go on with"),
    "all SIGKILL": Ending(_everything, {-9}),
    "raylet SIGKILL": Ending(_server("raylet/raylet"), {1}, "raylet is gone", early=False),
    "gcs SIGKILL": Ending(_server("gcs_server"), {1}, early=False),
    "driver SIGKILL, as on macOS": Ending(
        _to_sweep(signal.SIGKILL), {137}, early=False, kernel=False
    ),
    "Ctrl-C, as on macOS": Ending(
        _to_group, {130, -signal.SIGINT}, "Go on with", early=False, kernel=False
    ),
    "runs folder moved meanwhile": Ending(
        _move_runs, {1}, "was moved or deleted", early=False, kills=False
    ),
    "disk full": Ending(_fill_disk, {1}, "the disk is full", early=False, kills=False),
}


# -------------------------------------------------------------- disturbances


def _worker(run: Run, place: Place, rng: random.Random) -> None:
    if workers := run.named("Trainable"):
        rng.choice(workers).kill()


def _pause(run: Run, place: Place, rng: random.Random) -> None:
    family = run.look()
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.suspend()
    time.sleep(rng.uniform(1, 5))
    for process in rng.sample(family, len(family)):
        with suppress(psutil.NoSuchProcess):
            process.resume()


def _second(run: Run, place: Place, rng: random.Random) -> None:
    second = subprocess.run(place.command(), cwd=ROOT, capture_output=True, text=True)
    if not run.ended:
        assert second.returncode == 2, second.stdout + second.stderr
        assert f"process {run.pid} " in second.stderr, second.stderr


def _take_data(run: Run, place: Place, rng: random.Random) -> None:
    shutil.rmtree(place.data)


DISTURBANCES = {
    "worker SIGKILL": _worker,
    "SIGSTOP, SIGCONT": _pause,
    "second sweep": _second,
    "data taken away": _take_data,
}


def _move(place: Place) -> None:
    moved = place.runs.with_name(f"{place.runs.name}-moved")
    place.runs.rename(moved)
    place.runs = moved


MOVED = "runs folder moved"


# ------------------------------------------------------------------ the suite


def scenarios(seed: int, faults: int, disk: bool) -> list[Scenario]:
    """Enough of them for so many faults; kinds come round evenly, in an order drawn by the seed.

    Args:
        disk: whether a small disk can be mounted, to fill it.
    """
    endings = _deck([name for name in ENDINGS if name != "disk full"], f"{seed}/endings")
    disturbances = _deck([*DISTURBANCES, "", ""], f"{seed}/disturbances")
    damages = _deck([*damage.ALL, MOVED], f"{seed}/damages")
    found: list[Scenario] = []
    made = 0
    while made < faults:
        number = len(found)
        scenario = Scenario(
            number,
            random.Random(f"{seed}/{number}"),
            [next(endings) for _ in range(ROUNDS)],
            [next(disturbances) for _ in range(ROUNDS)],
            [[next(damages) for _ in range(DAMAGES)] for _ in range(ROUNDS)],
        )
        if disk and number % 4 == 3:
            scenario.endings[1], scenario.disturbances[1] = "disk full", ""
        found.append(scenario)
        made += ROUNDS + sum(map(bool, scenario.disturbances)) + ROUNDS * DAMAGES
    return found


def _deck(names: list[str], seed: str) -> Iterator[str]:
    rng = random.Random(seed)
    while True:
        yield from rng.sample(names, len(names))


@contextmanager
def place_for(scenario: Scenario, data: Path) -> Iterator[Place]:
    """A new folder with a copy of the tokens; the study on a small disk where one is to fill."""
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as name:
        disk = Path(name) / "disk"
        disk.mkdir()
        shutil.copytree(data, Path(name) / "data")
        with mounted(disk) if "disk full" in scenario.endings else nullcontext():
            yield Place(disk / "runs", Path(name) / "data")


@contextmanager
def mounted(path: Path, size: int = SMALL_DISK) -> Iterator[None]:
    """A disk of so many bytes on a folder."""
    options = ["-t", "tmpfs", "-o", f"size={size}"]
    subprocess.run(["mount", *options, "tmpfs", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def can_mount() -> bool:
    """Whether a tmpfs can be mounted here: on Linux, as root."""
    try:
        with tempfile.TemporaryDirectory() as name, mounted(Path(name)):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def play(scenario: Scenario, place: Place, undisturbed: Tables) -> Outcome:
    """Plays a scenario to its end."""
    outcome = Outcome(scenario.number)
    try:
        rounds = zip(scenario.endings, scenario.disturbances, scenario.damages, strict=True)
        for ending, disturbance, damages in rounds:
            run = Run.start(place, kernel=ENDINGS[ending].kernel)
            try:
                _disturb_and_end(run, place, ending, disturbance, outcome, scenario.rng)
            finally:
                run.mop_up()
            for kind in damages:
                if _damage(kind, place, scenario.rng):
                    outcome.faults.append(kind)
            with suppress(ConfigError):  # study.json may be what was damaged
                Tables.of(place.study)  # whatever is there can be read
        _finish(place)
        outcome.differences = Tables.of(place.study).against(undisturbed)
    except Exception:
        outcome.trouble = traceback.format_exc()
    return outcome


def _disturb_and_end(
    run: Run, place: Place, name: str, disturbance: str, outcome: Outcome, rng: random.Random
) -> None:
    """One start; counts as undisturbed if it comes to its end before."""
    ending = ENDINGS[name]
    before = place.rows()
    if ending.early and not disturbance and rng.random() < 0.3:
        time.sleep(rng.uniform(0.3, 9))
    else:
        _await_rows(run, place, before + rng.randint(1, 40))
        time.sleep(rng.uniform(0, 0.15))
    if disturbance and not run.ended:
        DISTURBANCES[disturbance](run, place, rng)
        outcome.faults.append(disturbance)
        outcome.kills += disturbance == "worker SIGKILL"
        _await_rows(run, place, place.rows() + rng.randrange(6))
    if run.ended:
        output = run.output()
        assert run.process.returncode in (0, 1), output
        return
    run.look()
    listening = place.rows() > before
    old = place.runs
    ending.act(run, place, rng)
    outcome.faults.append(name)
    outcome.kills += ending.kills
    gone_s = run.seconds_until_gone()
    output = run.output()
    code = run.process.returncode
    if name == "disk full":
        _filler(place).unlink()
    # Just then the sweep may have come to its end; at first it does not listen to signals yet.
    allowed = ending.codes | {0, 1} if listening else {*ending.codes, 0, 1, -1, -2, -15}
    assert code in allowed, f"{name}: exit code {code}\n{output}"
    if code in ending.codes and listening:
        assert ending.says in output, f"{name}: does not say {ending.says!r}\n{output}"
    assert place.runs == old or not old.exists(), f"{name}: {list(old.rglob('*'))} was made anew"
    outcome.gone_s[name] = max(gone_s, outcome.gone_s.get(name, 0.0))
    redone = _redone(place)
    assert redone <= REPORT_EVERY, f"{name}: {redone} steps to do again"
    outcome.redone[name] = max(redone, outcome.redone.get(name, 0))


def _await_rows(run: Run, place: Place, rows: int) -> None:
    wait_for(lambda: run.ended or place.rows() >= rows)


def _redone(place: Place) -> int:
    """Most steps of a cell that ran in the last start and are not in a checkpoint."""
    try:
        plan = _plan(place)
    except ConfigError:
        return 0  # it had not begun
    newest = max(place.study.glob("tune/sweep-[0-9][0-9][0-9]"), default=None)
    redone = 0
    for cell in plan.todo:
        if newest and (newest / cell.label / "result.json").exists():
            from_step = checkpoints.stamp(cell.checkpoints[0]).step if cell.checkpoints else 0
            redone = max(redone, cell.last_step - from_step)
    return redone


def _plan(place: Place) -> sweep.Plan:
    folder = StudyFolder(place.runs, NAME)
    return sweep.plan(folder.study(), folder, folder.read()["data"]["checksum"])


def _damage(kind: str, place: Place, rng: random.Random) -> bool:
    """Whether there was something to damage."""
    if kind != MOVED:
        return bool(damage.ALL[kind](place.study, rng))
    if place.runs.exists():
        _move(place)
        return True
    return False


def _finish(place: Place) -> None:
    """Runs the study to its end; whatever a cell died of, it is retried."""
    for _ in range(2):
        run = Run.start(place)
        try:
            output = run.output()
        finally:
            run.mop_up()
        if run.process.returncode != 1:
            break
    assert run.process.returncode == 0, output
    left = _plan(place).surplus
    assert not left, f"checkpoints of finished cells: {left}"


def undisturbed(place: Place) -> Tables:
    """What the study comes to if nobody disturbs it."""
    _finish(place)
    return Tables.of(place.study)
