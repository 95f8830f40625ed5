"""A wall-clock budget: a sweep that ends in order before a batch system ends it otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ray.tune import Callback
from ray.tune.experiment import Trial
from ray.tune.result import DONE, SHOULD_CHECKPOINT


class Budget(Callback):
    """Halts the sweep in time, with a checkpoint of every running cell.

    From the longest time between two reports before the end on, a cell that reports is asked for
    a checkpoint; once all running cells have theirs, the sweep is halted. At the end it is
    halted whatever has been saved: a cell then goes on from an earlier checkpoint. The clock is
    one that stands still while the machine sleeps.

    Args:
        end: by `time.monotonic`; None for no budget.
        halt: ends the sweep in order.

    Attributes:
        over: whether it was halted.
    """

    def __init__(self, end: float | None, halt: Callable[[], None]) -> None:
        self.end = end
        self.halt = halt
        self.over = False
        self._longest = 0.0
        self._reported: dict[str, float] = {}
        self._asked: set[str] = set()
        self._saved: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles its callbacks with every snapshot of the experiment

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict, **info: Any
    ) -> None:
        """Asks for a checkpoint, if the end is near."""
        if self.end is None:
            return
        now, before = time.monotonic(), self._reported.get(trial.trial_id)
        if before is not None:
            self._longest = max(self._longest, now - before)
        self._reported[trial.trial_id] = now
        if self._near(now) and not result.get(DONE):
            result[SHOULD_CHECKPOINT] = True
            self._asked.add(trial.trial_id)

    def on_checkpoint(
        self, iteration: int, trials: list[Trial], trial: Trial, checkpoint: Any, **info: Any
    ) -> None:
        if trial.trial_id in self._asked:
            self._saved.add(trial.trial_id)

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Halts, if it is time."""
        now = time.monotonic()
        if self.end is None or self.over or not self._near(now):
            return
        running = {trial.trial_id for trial in trials if trial.status == Trial.RUNNING}
        if now >= self.end or (self._saved and running <= self._saved):
            self.over = True
            self.halt()

    def _near(self, now: float) -> bool:
        return self.end is not None and now >= self.end - self._longest
