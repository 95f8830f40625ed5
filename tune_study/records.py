"""What Tune left on disk, read back as it is: trial folders in, one record a cell out.

A study's folder holds one Tune experiment for each time it was started. A cell that was
cut off and gone on with has a trial folder in several of them; its history is stitched
together here, for the sweep (what is left to run, from where) and the analysis (what is
known) alike. Plain files only: no Ray, no snapshot of Ray's that a kill could have cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import orjson

from tune_study.config import Criterion, TrialConfig
from tune_study.divergence import Row, Verdict, diverged
from tune_study.store import EXPERIMENT

REASON_LENGTH = 160
"""Characters of an error's last line beyond which its first sentence must do."""


@dataclass(frozen=True)
class Attempt:
    """One trial folder. Its rows are read when asked for, since a study may have millions."""

    folder: Path
    label: str
    identity: str
    error: str

    @cached_property
    def size(self) -> int:
        """Bytes of result.json; 0 if the trial never reported."""
        try:
            return (self.folder / "result.json").stat().st_size
        except FileNotFoundError:
            return 0

    def rows(self, damage: list[str]) -> list[Row]:
        """The rows of result.json that are whole; a line in `damage` for each that is not."""
        rows: list[Row] = []
        name = _name(self.folder)
        try:
            lines = (self.folder / "result.json").read_bytes().split(b"\n")
        except FileNotFoundError:
            return rows  # the trial never reported
        except OSError as error:
            damage.append(f"{name}: result.json: {error.strerror}; it is not used")
            return rows
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            row = _parsed(line)
            if row is None:
                damage.append(f"{name}: line {number} of result.json is torn; it is not used")
            elif row.get("identity", self.identity) != self.identity:
                damage.append(f"{name}: line {number} of result.json is another cell's")
            else:
                rows.append(row)
        if len({row["step"] for row in rows}) < len(rows):
            damage.append(f"{name}: result.json has a step twice; the later line is used")
        return rows


@dataclass
class Record:
    """All that is known of one cell, over its attempts from oldest to newest."""

    attempts: list[Attempt] = field(default_factory=list)

    def history(self, config: TrialConfig, damage: list[str] | None = None) -> list[Row]:
        """Rows by step, contiguous from the first; what lies behind a gap is not used.

        An attempt that went on from a checkpoint at step s replaces what earlier attempts
        reported after s.

        Args:
            config: the cell's, which says at which steps it reports.
            damage: gets a line for each torn row, and for a gap.
        """
        damage = [] if damage is None else damage
        rows: dict[int, Row] = {}
        for attempt in self.attempts:
            if reported := attempt.rows(damage):
                resumed = reported[0].get("resumed_step", 0)
                rows = {step: row for step, row in rows.items() if step <= resumed}
                rows |= {row["step"]: row for row in reported}
        contiguous = []
        for step in report_steps(config):
            if step not in rows:
                break
            contiguous.append(rows[step])
        if len(contiguous) < len(rows):
            at = contiguous[-1]["step"] if contiguous else 0
            damage.append(f"{config.label}: no report between steps {at} and {max(rows)}")
        return contiguous

    def checkpoints(self) -> list[Path]:
        """Checkpoint folders, whole or not, newest first."""
        return [
            checkpoint
            for attempt in reversed(self.attempts)
            for checkpoint in sorted(attempt.folder.glob("checkpoint_*"), reverse=True)
        ]

    @property
    def errors(self) -> list[str]:
        """Each attempt's error in one line, oldest first."""
        return [attempt.error for attempt in self.attempts if attempt.error]

    @property
    def reasons(self) -> str:
        """All its errors in one line, each once with its count."""
        counts = Counter(self.errors)
        return "; ".join(f"{why} ({n} times)" if n > 1 else why for why, n in counts.items())

    def failures(self) -> int:
        """Attempts that ended in an error since one last reported a step not known before."""
        furthest, count = 0, 0
        for attempt in self.attempts:
            last = max((row["step"] for row in attempt.rows([])), default=0)
            if last > furthest:
                furthest, count = last, 0
            count += bool(attempt.error)
        return count


def report_steps(config: TrialConfig) -> Iterator[int]:
    """The steps at which a run reports: every `report_every`, and the last."""
    yield from range(config.report_every, config.steps, config.report_every)
    yield config.steps


def ended(history: list[Row], config: TrialConfig, criterion: Criterion) -> Verdict | None:
    """How a cell's run ended: diverged, or `stable` for all steps done; None if it did not.

    Without stopping, a run goes on after it diverged, and has ended only with its last step, or
    where a value that is not finite has frozen its weights.
    """
    if not history:
        return None
    done = history[-1]["step"] >= config.steps
    verdict = diverged(history, criterion, config.warmup_steps)
    if verdict is None:
        return Verdict("stable", step=config.steps) if done else None
    frozen = history[-1].get("nonfinite_step") is not None
    return verdict if done or criterion.stop or frozen else None


def read(experiments: Path) -> tuple[dict[str, Record], list[str]]:
    """All trial folders of a study's experiments.

    Returns:
        records by cell identity, and a line for each damaged or foreign folder.
    """
    records: dict[str, Record] = {}
    damage: list[str] = []
    for experiment in sorted((p for p in experiments.glob("*") if p.is_dir()), key=_number):
        if not EXPERIMENT.fullmatch(experiment.name):
            damage.append(f"{experiment.name}: no start of this study; the folder is not used")
            continue
        for folder in sorted(p for p in experiment.iterdir() if p.is_dir()):
            attempt = _attempt(folder, damage)
            if attempt is not None:
                records.setdefault(attempt.identity, Record()).attempts.append(attempt)
    return records, damage


def _number(experiment: Path) -> tuple[int, str]:
    """Order of the starts: by number, since a thousandth would sort before the second."""
    name = EXPERIMENT.fullmatch(experiment.name)
    return int(name[1]) if name else 0, experiment.name


def _attempt(folder: Path, damage: list[str]) -> Attempt | None:
    """The trial in a folder; None for a folder without one, or one that is not its place."""
    name = _name(folder)
    if not any(folder.iterdir()):
        return None  # made for a trial that did not begin
    try:
        cell = orjson.loads((folder / "params.json").read_bytes())["cell"]
        label, identity = cell["label"], cell["identity"]
        home = cell.get("experiment", folder.parent.name), label
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # Every row tells whose it is too.
        row = _first_row(folder)
        if not {"cell", "identity"} <= row.keys():
            damage.append(f"{name}: params.json is missing or damaged; the folder is not used")
            return None
        damage.append(f"{name}: params.json is missing or damaged; its reports are used")
        label, identity = row["cell"], row["identity"]
        home = folder.parent.name, label
    if home != (folder.parent.name, folder.name):
        damage.append(f"{name}: a copy of {'/'.join(home)}; the folder is not used")
        return None
    return Attempt(folder, label, identity, _error(folder))


def _first_row(folder: Path) -> Row:
    """The first whole row of a trial; empty if there is none."""
    try:
        lines = (folder / "result.json").read_bytes().split(b"\n")
    except OSError:
        return {}
    return next(filter(None, map(_parsed, lines)), {})


def _name(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}"


def _parsed(line: bytes) -> Row | None:
    try:
        row = orjson.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def _error(folder: Path) -> str:
    """What an errored trial died of, in one line; nothing if it did not error."""
    try:
        text = (folder / "error.txt").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError:
        return "unknown error"
    last = error_line(text) or "unknown error"
    return last if len(last) <= REASON_LENGTH else last.partition(". ")[0].rstrip(".") + "."


def error_line(text: str) -> str:
    """The line of a traceback that says what it was: its last; empty if it has none."""
    return next((line.strip() for line in reversed(text.split("\n")) if line.strip()), "")
