"""What the sweep writes while it runs, beside Tune's own files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ray.tune import Callback
from ray.tune.experiment import Trial
from ray.tune.logger import JsonLoggerCallback

UNREAD = frozenset(
    {
        "config",  # stands in params.json, once
        "date",
        "hostname",
        "node_ip",
        "pid",
        "iterations_since_restore",
        "should_checkpoint",
        "time_since_restore",
        "time_this_iter_s",
        "time_total_s",
    }
)
"""Keys Tune adds to every row that nobody reads."""


class RowLogger(JsonLoggerCallback):
    """Tune's result.json and params.json, with rows that are short and strict JSON."""

    def log_trial_result(self, iteration: int, trial: Trial, result: dict[str, Any]) -> None:
        if trial not in self._trial_files:
            self.log_trial_start(trial)
        row = {key: value for key, value in result.items() if key not in UNREAD}
        # One write, so that a kill leaves a whole line or an unfinished last one.
        self._trial_files[trial].write(json.dumps(row, allow_nan=False) + "\n")
        self._trial_files[trial].flush()


class FinishedCheckpoints(Callback):
    """Deletes a finished cell's checkpoints; its rows are its result.

    Of a cell that diverged on an accelerator the newest one stays, so that `replay` can tell a
    fault of the backend from a learning rate that is too high.
    """

    def __init__(self) -> None:
        self._last: dict[str, dict[str, Any]] = {}

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict, **info: Any
    ) -> None:
        self._last[trial.trial_id] = result

    def on_trial_complete(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        row = self._last.pop(trial.trial_id, {})
        ran_out = row.get("step") == trial.config["cell"]["steps"]
        if ran_out or row.get("verdict/state"):
            own = sorted(Path(str(trial.local_path)).glob("checkpoint_*"), reverse=True)
            newest_first = [*own, *map(Path, trial.config["cell"]["checkpoints"])]
            keep = 1 if row.get("verdict/state") and trial.config["cell"]["device"] != "cpu" else 0
            for folder in newest_first[keep:]:
                shutil.rmtree(folder, ignore_errors=True)
