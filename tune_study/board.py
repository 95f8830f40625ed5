"""What is known of each cell of a study while it runs, and how long the rest will take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from tune_study.config import Study
from tune_study.divergence import Finish, failed

TO_GO, RUNNING, UNTRIED = "to go", "running", "untried"
STATES = ("stable", "failed", "diverged", "errored", RUNNING, TO_GO)
"""What a cell can be, in the order in which they are counted; not counted are those that a search
has not asked for, which are UNTRIED."""


@dataclass
class Known:
    """One cell, as far as it has come.

    Attributes:
        step, loss: of its last report; 0 and None before the first.
        seconds_per_step: measured, all that a cell needs included; None before it is known.
        tokens_per_s: training tokens a second since the report before.
    """

    lr: float
    depth: int
    arm: str
    seed: int
    steps: int
    state: str = TO_GO
    step: int = 0
    loss: float | None = None
    seconds_per_step: float | None = None
    tokens_per_s: float | None = None


class Board:
    """The cells of a study by their labels.

    Args:
        asked: those that a search asks for so far; without a search, all are.

    Attributes:
        entropy: H1 of the training tokens, once a report has told it.
    """

    def __init__(self, study: Study, asked: Iterable[str] = ()) -> None:
        self.study = study
        self.entropy: float | None = None
        state = TO_GO if study.search is None else UNTRIED
        self.cells = {
            c.label: Known(c.lr, c.depth, c.arm, c.seed, c.steps, state) for c in study.cells()
        }
        self.ask(asked)
        self._groups: dict[tuple[int, int], list[Known]] = {}
        for cell in self.cells.values():
            self._groups.setdefault((cell.depth, cell.seed), []).append(cell)
        self._began: dict[str, tuple[float, int]] = {}

    # ------------------------------------------------------------- what happens

    def ask(self, labels: Iterable[str]) -> None:
        """A search asks for more cells."""
        for label in labels:
            if self.cells[label].state == UNTRIED:
                self.cells[label].state = TO_GO

    def begin(self, label: str, step: int, at: float) -> None:
        """A cell starts, or goes on after a step.

        Args:
            at: the time in seconds, by any clock.
        """
        cell = self.cells[label]
        cell.state, cell.step = RUNNING, step
        self._began[label] = at, step

    def report(self, label: str, row: Mapping[str, Any], at: float) -> None:
        """A cell reported."""
        cell = self.cells[label]
        cell.state, cell.step, cell.loss = RUNNING, row["step"], row["val/loss"]
        cell.tokens_per_s = row.get("time/tokens_per_s")
        self.entropy = row.get("data/unigram_entropy", self.entropy)
        began, step = self._began[label]
        if row["step"] > step:
            cell.seconds_per_step = (at - began) / (row["step"] - step)

    def end(self, label: str, state: str) -> None:
        """A cell ended: diverged, errored, to go (cut off), or `stable` for ran to its end.

        Which of those that ran to their end failed is judged anew among all of their seed and
        depth, as the report does.
        """
        cell = self.cells[label]
        cell.state = state
        if state in ("stable", "failed"):
            self._judge(cell.depth, cell.seed)

    def _judge(self, depth: int, seed: int) -> None:
        if self.entropy is None:
            return
        group, finishes = [], []
        for cell in self._groups[depth, seed]:
            if cell.state in ("stable", "failed") and cell.loss is not None:
                group.append(cell)
                finishes.append(Finish(cell.lr, cell.arm, cell.loss))
        verdicts = failed(finishes, self.entropy, self.study.criterion)
        for cell, verdict in zip(group, verdicts, strict=True):
            cell.state = verdict.state

    # --------------------------------------------------------- what can be asked

    def counts(self) -> dict[str, int]:
        """How many cells are in each state that occurs."""
        found = Counter(cell.state for cell in self.cells.values())
        return {state: found[state] for state in STATES if found[state]}

    @property
    def total(self) -> int:
        """Cells asked for."""
        return sum(self.counts().values())

    @property
    def searching(self) -> bool:
        """Whether a search may yet ask for more."""
        return any(cell.state == UNTRIED for cell in self.cells.values())

    @property
    def done(self) -> int:
        """Cells with a result."""
        return sum(n for state, n in self.counts().items() if state in STATES[:3])

    def running(self) -> dict[str, Known]:
        """The cells at work now, by label."""
        return {label: cell for label, cell in self.cells.items() if cell.state == RUNNING}

    def seconds_left(self, at_once: int) -> float | None:
        """How long the rest will take at the speeds measured; None before any is known.

        A cell to come is expected to take as many of its steps as other seeds of its arm, depth
        and learning rate took, where one has ended, since a diverged cell stops early; and as
        long for each as the median of the cells of its depth.

        Args:
            at_once: cells at a time.
        """
        speeds: dict[int, list[float]] = {}
        shares: dict[tuple[str, int, float], list[float]] = {}
        left: list[Known] = []
        for cell in self.cells.values():
            if cell.seconds_per_step is not None:
                speeds.setdefault(cell.depth, []).append(cell.seconds_per_step)
            if cell.state in (RUNNING, TO_GO):
                left.append(cell)
            elif cell.state in ("stable", "failed", "diverged"):
                key = (cell.arm, cell.depth, cell.lr)
                shares.setdefault(key, []).append(cell.step / cell.steps)
        if not speeds:
            return None
        by_depth = {depth: median(values) for depth, values in speeds.items()}
        unseen = median(by_depth.values())
        total = 0.0
        for cell in left:
            seen = shares.get((cell.arm, cell.depth, cell.lr), [1.0])
            steps = max(0.0, cell.steps * sum(seen) / len(seen) - cell.step)
            total += steps * by_depth.get(cell.depth, unseen)
        return total / min(at_once, max(len(left), 1))

    def tiles(self) -> dict[str, dict[int, list[str]]]:
        """Arm -> depth -> the state at each learning rate, from low to high."""
        seen: dict[str, dict[int, dict[float, set[str]]]] = {}
        for cell in self.cells.values():
            row = seen.setdefault(cell.arm, {}).setdefault(cell.depth, {})
            row.setdefault(cell.lr, set()).add(cell.state)
        return {
            arm: {
                depth: [_shared(row[lr]) for lr in sorted(row)]
                for depth, row in sorted(by_depth.items())
            }
            for arm, by_depth in seen.items()
        }


def _shared(states: set[str]) -> str:
    """The state that the seeds share, `mixed`, or what they are before any is known."""
    known = states - {TO_GO, RUNNING, UNTRIED}
    if len(known) > 1:
        return "mixed"
    return next(iter(known or states & {RUNNING} or states & {TO_GO} or {UNTRIED}))
