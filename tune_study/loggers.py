"""Rows to Weights & Biases and MLflow while a sweep runs, by Ray's own callbacks.

Ray's settle experiment, project, group and keys. What they do for each row and cell is replaced,
because it was made for a few long trials. Measured: a cell in W&B took 7.5 s, for Ray starts two
processes a trial; a row in MLflow 40 requests of 30 ms, one a metric, in the loop that feeds the
cells.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray.air.integrations.mlflow import MLflowLoggerCallback
from ray.air.integrations.wandb import WandbLoggerCallback
from ray.tune import Callback
from ray.tune.experiment import Trial
from ray.tune.logger import LoggerCallback
from ray.tune.result import TIMESTEPS_TOTAL as STEP

from tune_study.config import ConfigError, TrialConfig
from tune_study.store import StudyFolder

FLUSH_S = 5.0
"""Seconds of reports that go to MLflow in one request."""

METRICS_A_REQUEST = 1_000
"""MLflow's limit."""

WAIT_S = 60.0
"""How long the end of a sweep waits for what is still to be logged."""


def make(names: Sequence[str], folder: StudyFolder) -> list[Background]:
    """The loggers of these names, connected.

    Raises:
        ConfigError: if one cannot be: no server answers, or W&B has no key.
    """
    made = []
    for name in names:
        logger: Any = MAKERS[name](folder)
        try:
            logger.setup()
        except Exception as error:
            raise ConfigError(f"--log {name}: {_line(error)}. {REMEDIES[name]}.") from None
        made.append(Background(name, logger, folder.path.name))
    return made


@dataclass(frozen=True)
class Shown:
    """What Ray's callbacks see in place of a trial: the cell, under the same id in every start.

    Attributes:
        label, identity: the cell's.
        trial_id: study and identity, by which W&B knows the run.
        experiment_dir_name: the study.
        local_path: the trial's folder.
        settings: what tells the run, as pairs of name and value.
    """

    label: str
    trial_id: str
    identity: str
    experiment_dir_name: str
    local_path: str
    settings: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, trial: Trial, study: str) -> Shown:
        """Of a trial of Tune's."""
        cell = trial.config["cell"]
        settings = TrialConfig.of(cell).telling()
        data = {f"data.{name}": value for name, value in settings.pop("data").items()}
        said = {"cell": cell["label"], "arm": cell["arm"], "identity": cell["identity"]}
        known = {name: v for name, v in {**said, **settings, **data}.items() if v is not None}
        return cls(
            label=cell["label"],
            trial_id=f"{study}-{cell['identity']}",
            identity=cell["identity"],
            experiment_dir_name=study,
            local_path=str(trial.path),
            settings=tuple(known.items()),
        )

    @property
    def config(self) -> dict[str, Any]:
        """The settings by name."""
        return dict(self.settings)

    def __str__(self) -> str:
        return self.label


class Background(Callback):
    """Runs a logger in a thread of its own: a slow server holds up no cell, and a fault of a
    logger ends neither a cell nor the sweep.

    Args:
        name: the tracker's.
        logger: Ray's callback, set up.
        study: the study's name.

    Attributes:
        fault: why it stopped to log, in one line; empty if it did not.
    """

    def __init__(self, name: str, logger: LoggerCallback, study: str) -> None:
        self.name, self.study = name, study
        self.logger: Any = logger  # takes what is shown for a trial
        self.fault = ""
        self._shown: dict[str, Shown] = {}
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name}  # Tune pickles its callbacks; nothing of it is read again

    def setup(self, *args: Any, **info: Any) -> None:
        # On a cluster a sweep may be several experiments.
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def on_trial_start(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        shown = self._shown[trial.trial_id] = Shown.of(trial, self.study)
        self._queue.put(lambda: self.logger.log_trial_start(shown))

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict, **info: Any
    ) -> None:
        shown, row = self._shown[trial.trial_id], metrics(result)
        self._queue.put(lambda: self.logger.log_trial_result(iteration, shown, row))

    def on_trial_complete(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        self._end(trial, failed=False)

    def on_trial_error(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        self._end(trial, failed=True)

    def on_experiment_end(self, trials: list[Trial], **info: Any) -> None:
        self._queue.put(lambda: self.logger.on_experiment_end(trials))
        self._queue.put(None)
        self._thread.join(WAIT_S)
        if self._thread.is_alive():
            self.fault = f"{self._queue.qsize()} reports were not logged in {WAIT_S:g} s"

    def _end(self, trial: Trial, failed: bool) -> None:
        shown = self._shown.pop(trial.trial_id, None)
        if shown is not None:  # else it errored before it began
            self._queue.put(lambda: self.logger.log_trial_end(shown, failed))

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if self.fault:
                continue
            try:
                job()
            except Exception as error:
                self.fault = _line(error)


def metrics(result: dict[str, Any]) -> dict[str, float]:
    """The numbers of a row, at their optimiser step; what was not finite is NaN."""
    lost = dict.fromkeys(filter(None, result.get("nonfinite", "").split(",")), math.nan)
    numbers = {
        name: float(value)
        for name, value in result.items()
        if ("/" in name or name == "lr_now") and type(value) in (int, float)
    }
    return {**numbers, **lost, STEP: result["step"]}


class Wandb(WandbLoggerCallback):
    """A run a cell, all in this process."""

    def __init__(self, folder: StudyFolder) -> None:
        super().__init__(
            project=os.environ.get("WANDB_PROJECT", "tune_study"),
            group=folder.path.name,
            dir=str(folder.path),
            reinit="create_new",  # W&B keeps several runs apart
            resume="allow" if os.environ["WANDB_MODE"] == "online" else None,
        )
        self._runs: dict[Shown, Any] = {}

    def __del__(self) -> None:
        """Nothing of Ray's is to be ended."""

    def _start_logging_actor(self, trial: Any, exclude_results: Any, **init: Any) -> None:
        import wandb

        settings = wandb.Settings(
            console="off",  # it is the sweep's, not the run's
            silent=True,
            x_disable_stats=True,  # of the machine, which the runs share
            x_disable_meta=True,
        )
        self._runs[trial] = wandb.init(**init, settings=settings)

    def log_trial_result(self, iteration: int, trial: Any, result: dict[str, Any]) -> None:
        row = dict(result)
        self._runs[trial].log(row, step=row.pop(STEP))

    def log_trial_end(self, trial: Any, failed: bool = False) -> None:
        self._runs.pop(trial).finish(exit_code=int(failed))

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        for trial in list(self._runs):
            self.log_trial_end(trial, failed=True)


class Mlflow(MLflowLoggerCallback):
    """A run a cell, gone on with where an earlier start of the study left it."""

    def __init__(self, folder: StudyFolder) -> None:
        super().__init__(
            tracking_uri=os.environ.get("MLFLOW_TRACKING_URI")
            or f"sqlite:///{folder.path / 'mlflow.db'}",
            experiment_name=os.environ.get("MLFLOW_EXPERIMENT_NAME") or folder.path.name,
        )
        self._pending: dict[Shown, list[Any]] = {}
        self._logged: dict[Shown, int] = {}
        self._flushed = time.monotonic()

    def setup(self, *args: Any, **info: Any) -> None:
        super().setup(*args, **info)
        self._client = self.mlflow_util._get_client()

    def log_trial_start(self, trial: Any) -> None:
        from mlflow.entities import Param

        experiment = self.mlflow_util.experiment_id
        same = f"params.identity = '{trial.identity}'"
        found = self._client.search_runs([experiment], same, max_results=1)
        if found:
            run = found[0].info.run_id
            history = self._client.get_metric_history(run, "val/loss")
            self._logged[trial] = max((point.step for point in history), default=0)
            self._client.update_run(run, status="RUNNING")
        else:
            tags = {"trial_name": trial.label}
            run = self._client.create_run(experiment, run_name=trial.label, tags=tags).info.run_id
            settings = [Param(name, str(value)) for name, value in trial.settings]
            self._client.log_batch(run, params=settings)
            self._logged[trial] = 0
        self._trial_runs[trial], self._pending[trial] = run, []

    def log_trial_result(self, iteration: int, trial: Any, result: dict[str, Any]) -> None:
        from mlflow.entities import Metric

        step, now = result[STEP], time.time_ns() // 10**6
        if step > self._logged[trial]:
            self._logged[trial] = step
            self._pending[trial] += [
                Metric(name, value, now, step) for name, value in result.items() if name != STEP
            ]
        if time.monotonic() - self._flushed > FLUSH_S:
            for running in self._pending:
                self._flush(running)
            self._flushed = time.monotonic()

    def log_trial_end(self, trial: Any, failed: bool = False) -> None:
        self._flush(trial)
        del self._pending[trial], self._logged[trial]
        super().log_trial_end(trial, failed)

    def _flush(self, trial: Any) -> None:
        points = self._pending[trial]
        for first in range(0, len(points), METRICS_A_REQUEST):
            part = points[first : first + METRICS_A_REQUEST]
            self._client.log_batch(self._trial_runs[trial], metrics=part)
        self._pending[trial] = []


REMEDIES = {
    "wandb": "Run: wandb login, or leave WANDB_MODE out to log into the study's folder",
    "mlflow": "Start the server that MLFLOW_TRACKING_URI names, or leave it out to log into the "
    "study's folder",
}

MAKERS: dict[str, Callable[[StudyFolder], LoggerCallback]] = {"wandb": Wandb, "mlflow": Mlflow}


def _line(error: Exception) -> str:
    """What went wrong, in one line: the first sentence, which does without remedies of Ray's."""
    text = str(error).strip().split("\n")[0].split(". ")[0].rstrip(".")
    return text or type(error).__name__
