"""Writes a calibration: tables as CSV, all of it as JSON, and its lines for a terminal.

    out/calibration.json     every table below, strict JSON
    out/criteria.csv, shifts.csv, rules.csv, losses.csv, stops.csv      analysis.calibration
    out/warnings.csv, warning_summary.csv, logit_limit.csv              analysis.early_warning
    out/spikes.csv, spike_summary.csv

A study that was calibrated before is written over.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import early_warning
from analysis.calibration import calibrate, replay
from analysis.convert import replace_file
from analysis.load import Results
from analysis.summary import json_safe
from tune_study.config import CRITERIA


def write(results: Results, out: Path) -> list[str]:
    """Calibrates on a control study, writes everything to `out`, and returns the summary.

    Raises:
        ConfigError: if the study is no control study.
    """
    found = calibrate(results)
    control = replay(results, CRITERIA["off"])
    warned = early_warning.warnings(control, results.history)
    spikes = early_warning.spikes(results.history)
    tables = {
        "criteria": found.criteria,
        "shifts": found.shifts,
        "rules": found.rules,
        "losses": found.losses,
        "stops": found.stops,
        "warnings": warned,
        "warning_summary": early_warning.warning_summary(warned),
        "logit_limit": early_warning.logit_limit(control),
        "spikes": spikes,
        "spike_summary": early_warning.spike_summary(control, spikes),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        replace_file(out / f"{name}.csv", table.to_csv(index=False, lineterminator="\n"))
    content = {"study": found.study, "cells": found.cells}
    content |= {name: table.to_dict("records") for name, table in tables.items()}
    text = json.dumps(json_safe(content), indent=1, allow_nan=False)
    replace_file(out / "calibration.json", text + "\n")
    return lines(found.study, found.cells, tables)


TITLES = {
    "criteria": "Criteria, against the control (saved: share of all steps; shifts as below)",
    "shifts": "Shift of LR sensitivity (nats, and seeds' standard deviations) and of the maximum "
    "stable LR (grid steps)",
    "rules": "Rules for the loss of a stopped cell: shift of LR sensitivity that each leaves",
    "losses": "Normalised final loss of cells above their arm's best LR",
    "warning_summary": "Early warning: failures announced, and steps before the loss departed",
    "logit_limit": f"Cells whose attention logits passed {early_warning.LOGIT_LIMIT:g}",
    "spike_summary": "Spikes of the training loss",
}


def lines(study: str, cells: int, tables: dict[str, pd.DataFrame]) -> list[str]:
    """The summary tables for a terminal."""
    text = [f"{study}: {cells} cells, all run to their end."]
    for name, title in TITLES.items():
        table = tables[name]
        if name == "losses":
            table = table.pivot(index="qk_norm", columns="low", values="count").reset_index()
        text += ["", title, *table.to_string(index=False, float_format=_short).split("\n")]
    return text


def _short(value: Any) -> str:
    return f"{value:.3g}"
