"""Cells that lost the process they ran in, on a cluster: no fault of theirs."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from ray.exceptions import RayActorError
from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler

MAX_LOSSES = 3
"""Of a cell, without a step gained in between; the next one is an error of the cell."""


class Losses(FIFOScheduler):
    """Notes them. Tune asks its scheduler first when a trial has failed, before all callbacks.

    A node that is gone shows itself in several ways, and a cell that takes its process along looks
    the same. So whatever ends the process counts as a loss, up to MAX_LOSSES times; an error that
    the cell raised itself never does.

    Args:
        count: whether to note any: on a machine of its own a sweep has nowhere else to go on.

    Attributes:
        labels: the cells lost, for all who ask; emptied by the sweep when it goes on with them.
    """

    def __init__(self, count: bool) -> None:
        super().__init__()
        self.count = count
        self.labels: set[str] = set()
        self._before: dict[str, tuple[int, int]] = {}

    def on_trial_error(self, tune_controller: Any, trial: Trial) -> None:
        """Notes the trial's cell, if it was lost."""
        if not self.count or not _process_gone(trial):
            return
        label = trial.config["cell"]["label"]
        step = max(trial.config["cell"]["last_step"], (trial.last_result or {}).get("step", 0))
        furthest, times = self._before.get(label, (-1, 0))
        times = 1 if step > furthest else times + 1
        self._before[label] = max(step, furthest), times
        if times <= MAX_LOSSES:
            self.labels.add(label)


def _process_gone(trial: Trial) -> bool:
    """Whether the trial failed with its process, by the error as Tune has kept it."""
    kept = trial.pickled_error_file
    if kept is None or not Path(kept).is_file():
        return False
    error = pickle.loads(Path(kept).read_bytes())
    return isinstance(error, RayActorError)
