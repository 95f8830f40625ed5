"""A study as an Optuna study, for its dashboard, its plots and its measures of importance."""

from __future__ import annotations

import math
from datetime import datetime
from pathlib import Path
from typing import Any

import optuna
import pandas as pd
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import FrozenTrial, TrialState, create_trial

from analysis.load import Results
from exports.settings import settings
from tune_study.config import ConfigError

STATES = {
    "stable": TrialState.COMPLETE,
    "failed": TrialState.COMPLETE,
    "diverged": TrialState.PRUNED,
    "errored": TrialState.FAIL,
    "missing": TrialState.RUNNING,
}
"""What Optuna calls a cell's state; one that has not begun is no trial."""

SQLITE = b"SQLite format 3\0"
"""How such a file begins."""

NOTED = ("cell", "arm", "state", "reason", "identity", "params", "loss_init", "max_logit_peak")
"""Columns of `cells` that a trial carries as user attributes."""


def write(results: Results, out: Path) -> int:
    """Writes `out`, an SQLite file, anew: a trial a cell that has begun.

    Parameters are what varies (lr on a log scale), the value is the last validation loss, to be
    minimised, and every report's is an intermediate value at its step. What diverged is pruned;
    its value is the loss at initialisation where its loss lies above that or is not finite, as in
    LR sensitivity.

    Returns:
        the number of trials.

    Raises:
        ConfigError: if `out` is something else.
    """
    if out.exists() and not (out.is_file() and out.read_bytes().startswith(SQLITE)):
        raise ConfigError(f"{out}: is something else than an export. Give another one by --out.")
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = settings(results)
    distributions = {name: _distribution(name, [row[name] for row in rows]) for name in rows[0]}
    reports = dict(tuple(results.history.groupby("cell", sort=False)[["step", "val/loss"]]))
    trials = [
        _trial(cell, row, distributions, reports.get(cell["cell"]))
        for cell, row in zip(results.cells.to_dict("records"), rows, strict=True)
        if cell["cell"] in reports or cell["state"] == "errored"
    ]
    part = out.with_name(f".{out.name}.part")
    part.unlink(missing_ok=True)
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        storage = optuna.storages.RDBStorage(f"sqlite:///{part}")
        study = optuna.create_study(storage=storage, study_name=results.study.name)
        study.set_user_attr("description", results.study.description)
        study.add_trials(trials)
        storage.engine.dispose()
    finally:
        optuna.logging.set_verbosity(before)
    part.replace(out)
    return len(trials)


def _distribution(name: str, values: list[Any]) -> BaseDistribution:
    """The least one that holds all values of a setting."""
    if name == "lr":
        return FloatDistribution(min(values), max(values), log=True)
    if all(type(value) is int for value in values):
        return IntDistribution(min(values), max(values))
    return CategoricalDistribution(list(dict.fromkeys(values)))


def _trial(
    cell: dict[Any, Any],
    params: dict[str, Any],
    distributions: dict[str, BaseDistribution],
    reports: pd.DataFrame | None,
) -> FrozenTrial:
    state = STATES[cell["state"]]
    losses = {} if reports is None else dict(zip(reports["step"], reports["val/loss"], strict=True))
    value = None
    if state in (TrialState.COMPLETE, TrialState.PRUNED):
        # NaN is no value for Optuna, and no measure of how bad a run was.
        value = min(cell["loss"], cell["loss_init"])
        value = cell["loss_init"] if math.isnan(value) else value
    trial = create_trial(
        state=state,
        value=value,
        params=params,
        distributions=distributions,
        user_attrs={name: cell[name] for name in NOTED if not _unknown(cell[name])},
        intermediate_values={int(step): float(loss) for step, loss in losses.items()},
    )
    if math.isfinite(cell["started"]):
        trial.datetime_start = datetime.fromtimestamp(cell["started"])
        if state.is_finished():
            trial.datetime_complete = datetime.fromtimestamp(cell["ended"])
    return trial


def _unknown(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
