"""How the runs of a study ended: by which rule, what stopping saved, which spikes recovered."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from analysis import early_warning
from analysis.tables import NO_EVIDENCE, STATES

if TYPE_CHECKING:
    from pathlib import Path

    from analysis.load import Results

CALIBRATION = ("criterion", "false_stops", "n_stopped", "n_failures", "saved")
SHIFTS = ("sensitivity_shift", "sensitivity_shift_sd", "edge_shift")


def summarise(results: Results) -> dict[str, Any]:
    """The part `divergence` of summary.json.

    Returns:
        dict: criterion (its name), steps_saved (share of the steps asked of the cells that ended,
        None where none did), endings (rows of `endings`), warnings (rows of
        `early_warning.warning_summary`), spikes (rows of `early_warning.spike_summary`, None
        where the study has no losses of single steps), calibration (rows of `calibration`).
    """
    cells, history = results.tried.cells, results.history
    spikes = None
    if "train/losses" in history:
        spikes = early_warning.spike_summary(cells, early_warning.spikes(history))
    warned = early_warning.warnings(cells, history)
    return {
        "criterion": results.study.criterion.name,
        "steps_saved": steps_saved(cells, history),
        "endings": endings(cells).to_dict("records"),
        "warnings": early_warning.warning_summary(warned).to_dict("records"),
        "spikes": None if spikes is None else spikes.to_dict("records"),
        "calibration": calibration(results.source),
    }


def endings(cells: pd.DataFrame) -> pd.DataFrame:
    """Cells by arm, state and rule.

    Returns:
        DataFrame: qk_norm, state, rule ("" for stable cells), cells, step (median of the steps
        at which the verdicts fell), lr_low, lr_high; in the order of the states.
    """
    table = cells[["qk_norm", "state", "step", "lr"]].assign(rule=cells["reason"].map(rule))
    table["order"] = table["state"].map({state: i for i, state in enumerate(STATES)})
    group = table.groupby(["order", "state", "rule", "qk_norm"], sort=True)
    found = group.agg(
        cells=("lr", "size"), step=("step", "median"), lr_low=("lr", "min"), lr_high=("lr", "max")
    ).reset_index()
    columns = ["qk_norm", "state", "rule", "cells", "step", "lr_low", "lr_high"]
    return found[columns].astype({"step": "float64"})


def rule(reason: str) -> str:
    """A reason without the numbers measured in that cell: what many cells have in common.

    'attention logit 1.2e+05 above 1000' -> 'attention logit above 1000'
    'training loss 7.1 above loss at init 6.24' -> 'training loss above loss at init'
    'loss or gradient not finite at step 33' -> 'loss or gradient not finite'
    'cut off at step 120 of 400; replayed ...' -> 'cut off'
    """
    text = reason.split("; ")[0]
    text = re.sub(r" at step \d.*", "", text)
    text = re.sub(r" [-+.\deE]+ (?=above\b)", " ", text)
    return re.sub(r"(loss at init) [.\d]+$", r"\1", text)


def steps_saved(cells: pd.DataFrame, history: pd.DataFrame) -> float | None:
    """Share of the steps asked of the cells with a verdict that were not run."""
    ended = cells[~cells["state"].isin(NO_EVIDENCE)]
    if not len(ended):
        return None
    run = ended["cell"].map(history.groupby("cell")["step"].max()).fillna(0)
    return float(1 - np.minimum(run, ended["steps"]).sum() / ended["steps"].sum())


def calibration(source: Path | None) -> list[dict[str, Any]] | None:
    """What the rules of divergence do to this study, where `calibrate` has been run on it.

    Returns:
        One row a criterion: criterion, false_stops, n_stopped, n_failures, saved (share of all
        steps), sensitivity_shift (nats, of the arm and depth moved most), sensitivity_shift_sd
        (the same in standard deviations over seeds), edge_shift (largest, grid steps).
    """
    path = None if source is None else source / "calibration" / "calibration.json"
    if path is None or not path.is_file():
        return None
    rows = json.loads(path.read_text(encoding="utf-8"))["criteria"]
    return [{name: row[name] for name in (*CALIBRATION, *SHIFTS)} for row in rows]
