"""The Tune side of divergence: stops a trial when `divergence.diverged` says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ray import tune

from tune_study.config import Criterion
from tune_study.divergence import Row, diverged, ordered


class DivergenceStopper(tune.Stopper):
    """Stops diverged trials and writes into their last row why and at which step.

    The verdict is a function of the rows reported, not of how often they were reported: a
    row that a resumed trial reports again replaces its first report.

    Args:
        criterion: the rules; with `criterion.stop` false no trial is stopped, and the verdict
            is left to the analysis.
        warmup_steps: steps of warm-up of every trial, or a mapping from cell to steps.
        earlier: rows that earlier experiments reported, by cell, for trials that resume.
    """

    def __init__(
        self,
        criterion: Criterion,
        warmup_steps: int | Mapping[str, int],
        earlier: Mapping[str, Iterable[Row]] | None = None,
    ) -> None:
        self.criterion = criterion
        self.warmup_steps = warmup_steps
        self._rows: dict[str, dict[int, Row]] = {
            cell: {row["step"]: row for row in rows} for cell, rows in (earlier or {}).items()
        }
        self._halted = False

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        cell = result.get("cell", trial_id)
        rows = self._rows.setdefault(cell, {})
        rows[result["step"]] = result
        if not self.criterion.stop:
            return False
        warmup = (
            self.warmup_steps if isinstance(self.warmup_steps, int) else self.warmup_steps[cell]
        )
        verdict = diverged(rows.values(), self.criterion, warmup)
        if verdict is None:
            return False
        # Tune logs this very dict after the stopper has seen it, and keeps no reason itself.
        result["verdict/state"] = verdict.state
        result["verdict/reason"] = verdict.reason
        result["verdict/step"] = verdict.step
        return True

    def history(self, cell: str) -> list[Row]:
        """What a cell has reported so far, by step."""
        return ordered(self._rows.get(cell, {}).values())

    def halt(self) -> None:
        """Asks Tune to end the whole sweep in order, at the next opportunity."""
        self._halted = True

    def stop_all(self) -> bool:
        return self._halted
