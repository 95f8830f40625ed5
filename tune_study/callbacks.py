"""What the sweep writes while it runs, beside Tune's own files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from ray.tune import Callback
from ray.tune.experiment import Trial
from ray.tune.result import DONE, SHOULD_CHECKPOINT

from tune_study import checkpoints, configs
from tune_study.config import TrialConfig
from tune_study.files import whole, write_whole
from tune_study.store import StudyFolder

if TYPE_CHECKING:
    from tune_study.losses import Losses
    from tune_study.sweep import Plan

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


class RowLogger(Callback):
    """Writes every trial's files, in the study's folder at once: result.json, params.json,
    config.yaml (its settings alone) and error.txt.

    Tune's own logger writes into the session's temporary folder, of which Tune copies everything
    from time to time: a kill loses what was reported since, or cuts off the copies of finished
    cells.

    Args:
        losses: cells that lost their node are cut off, as by a kill, not errored.
    """

    def __init__(self, losses: Losses) -> None:
        self.losses = losses

    def on_trial_start(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        folder = Path(str(trial.path))
        # The experiment's folder is there, or it was moved away: never made anew.
        folder.mkdir(exist_ok=True)
        params = json.dumps(trial.config, indent=1, allow_nan=False)
        write_whole(folder / "params.json", params + "\n")
        cell = trial.config["cell"]
        head = f"# {cell['label']}, identity {cell['identity']}\n"
        write_whole(folder / "config.yaml", head + configs.text(TrialConfig.of(cell)))

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict, **info: Any
    ) -> None:
        row = {key: value for key, value in result.items() if key not in UNREAD}
        # One write, so that a kill leaves a whole line or an unfinished last one.
        with (Path(str(trial.path)) / "result.json").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")

    def on_trial_error(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        if trial.config["cell"]["label"] in self.losses.labels:
            for kept in (trial.error_file, trial.pickled_error_file):  # which Tune would copy here
                Path(kept).unlink(missing_ok=True)
            return
        text = Path(trial.error_file).read_text(encoding="utf-8", errors="replace")
        folder = Path(str(trial.path))
        folder.mkdir(exist_ok=True)
        write_whole(folder / "error.txt", text)


class Checkpoints(Callback):
    """Deletes checkpoints that a cell no longer needs, and keeps final weights where asked.

    Args:
        folder: the study's.
        plan: says which checkpoints earlier starts left, and of which cells weights are kept.
        kept: checkpoints of a running cell, those of earlier starts counted.
    """

    def __init__(self, folder: StudyFolder, plan: Plan, kept: int) -> None:
        self.folder = folder
        self.kept = kept
        self.keep = plan.keep
        self.usable = {cell.label: cell.checkpoints for cell in plan.may_run}
        self.others = {cell.label: cell.others for cell in plan.may_run}
        self._last: dict[str, dict[str, Any]] = {}

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict, **info: Any
    ) -> None:
        self._last[trial.trial_id] = result
        if result.get(DONE) and result["cell"] in self.keep:
            result[SHOULD_CHECKPOINT] = True  # Tune saves before it ends the trial

    def on_checkpoint(
        self, iteration: int, trials: list[Trial], trial: Trial, checkpoint: Any, **info: Any
    ) -> None:
        """Its own newest are kept, and as many of earlier starts as are then still lacking."""
        cell, own = trial.config["cell"]["label"], _own(trial)
        _delete((*own[self.kept :], *self.usable[cell][max(0, self.kept - len(own)) :]))
        _delete(self.others[cell])

    def on_trial_complete(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        row = self._last.pop(trial.trial_id, {})
        cell = trial.config["cell"]
        diverged = bool(row.get("verdict/state"))
        if not diverged and row.get("step") != cell["steps"]:
            return
        label = cell["label"]
        best_first = [*_own(trial), *self.usable[label], *self.others[label]]
        if label in self.keep:
            self._keep(label, best_first[0])
        _delete(checkpoints.surplus(best_first, diverged, cell["device"]))

    def _keep(self, label: str, checkpoint: Path) -> None:
        """The weights alone, loadable with `weights_only=True`."""
        weights = checkpoints.load(checkpoint)["model"]
        self.folder.weights.mkdir(exist_ok=True)
        with whole(self.folder.kept_weights(label)) as file:
            torch.save(weights, file)


def _own(trial: Trial) -> list[Path]:
    """Checkpoints of this trial, newest first."""
    return sorted(Path(str(trial.path)).glob("checkpoint_*"), reverse=True)


def _delete(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
