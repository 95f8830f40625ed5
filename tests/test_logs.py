"""Logging to other tools, without them: what is refused, what a logger gets, what a fault does.

Against the real ones: tests/test_integrations.py.
"""

from __future__ import annotations

import math
import os
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.logger import LoggerCallback

from tune_study import cli, logs
from tune_study.config import ConfigError, TrialConfig
from tune_study.loggers import STEP, Background, metrics


def trial(trial_id: str, **settings: Any) -> Any:
    """As Tune hands it to a callback."""
    config = TrialConfig(device="cpu", **settings)
    cell = {**config.model_dump(mode="json"), "label": config.label, "arm": config.arm}
    return SimpleNamespace(
        trial_id=trial_id,
        path=f"/runs/one/tune/sweep-001/{config.label}",
        config={"cell": cell | {"identity": f"id-{config.label}", "checkpoints": []}},
    )


def row(step: int, **more: Any) -> dict[str, Any]:
    noise = {"identity": "12345", "digest": "1e5", "done": False, "train/losses": [1.0], "pid": 3}
    return {"step": step, "val/loss": 2.0, "lr_now": 0.1, "nonfinite": "", **noise, **more}


class Recorder(LoggerCallback):
    """What a logger of Ray's is asked to do, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.wrong_at = ""

    def log_trial_start(self, trial: Any) -> None:
        self.note("start", str(trial), trial.trial_id, trial.config)

    def log_trial_result(self, iteration: int, trial: Any, result: dict) -> None:
        self.note("row", str(trial), result)

    def log_trial_end(self, trial: Any, failed: bool = False) -> None:
        self.note("end", str(trial), failed)

    def on_experiment_end(self, trials: Any, **info: Any) -> None:
        self.note("over")

    def note(self, *call: Any) -> None:
        self.calls.append((*call, threading.current_thread() is threading.main_thread()))
        if call[0] == self.wrong_at:
            raise OSError("no route to host. Try again.\nand more")


def one_cell(recorder: Recorder) -> Background:
    logger, cell = Background("some", recorder, "one"), trial("7f_00001", lr=0.1, depth=3)
    logger.setup()
    logger.on_trial_start(0, [], cell)
    logger.on_trial_result(0, [], cell, row(20))
    logger.on_trial_error(0, [], trial("never begun"))
    logger.on_trial_complete(0, [], cell)
    logger.on_experiment_end([])
    return logger


def test_a_logger_sees_cells_by_name_in_a_thread_of_its_own() -> None:
    recorder = Recorder()
    assert one_cell(recorder).fault == ""
    label = "d3-off-lr1.000e-01-s0"
    start, *rest = recorder.calls
    assert start[1:3] == (label, f"one-id-{label}")  # the same in every start of the study
    settings = start[3]
    assert (settings["lr"], settings["depth"], settings["arm"]) == (0.1, 3, "off")
    assert settings["data.corpus"] == "synthetic"
    assert "checkpoints" not in settings
    assert rest == [
        ("row", label, {"val/loss": 2.0, "lr_now": 0.1, STEP: 20}, False),
        ("end", label, False, False),
        ("over", False),
    ]


@pytest.mark.parametrize("wrong_at", ["start", "row", "end", "over"])
def test_a_fault_ends_the_logging_and_nothing_else(wrong_at: str) -> None:
    recorder = Recorder()
    recorder.wrong_at = wrong_at
    assert one_cell(recorder).fault == "no route to host"
    assert recorder.calls[-1][0] == wrong_at


def test_tune_can_pickle_it_while_it_runs() -> None:
    logger = Background("some", Recorder(), "one")
    logger.setup()
    pickle.dumps(logger)
    logger.on_experiment_end([])


def test_what_was_not_finite_is_nan_and_what_is_no_number_left_out() -> None:
    found = metrics(row(40, **{"val/loss": None, "nonfinite": "val/loss,grad/norm", "x/ok": True}))
    assert set(found) == {"val/loss", "grad/norm", "lr_now", STEP}
    assert math.isnan(found["val/loss"])
    assert math.isnan(found["grad/norm"])
    assert found[STEP] == 40


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mlflow", "--log mlflow: the package is not installed. Run: .venv/bin/pip install"),
        ("wandb", "--log wandb: the package is not installed"),
        ("tensorboard", "--log tensorboard: its files are made of the study.*make tensorboard"),
        ("comet", "--log comet: unknown. Give one of: wandb, mlflow."),
    ],
)
def test_what_cannot_be_logged_to_is_refused_before_anything(
    name: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=expected) as error:
        cli.sweep("smoke", log=[name], runs=tmp_path / "runs", data=tmp_path / "data")
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_no_network_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "find_spec", lambda package: object())
    for name in logs.DEFAULTS:
        monkeypatch.setenv(name, "mine")
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "online")
    logs.check(["wandb"])
    assert os.environ["WANDB_MODE"] == "online"
    monkeypatch.delenv("WANDB_MODE")
    logs.check(["wandb", "mlflow"])
    assert os.environ["WANDB_MODE"] == "offline"
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
