"""What a study came to, as plain values: the content of summary.json.

Strict JSON: a number that is unknown, unbounded or not finite is null, with a flag or a
reason beside it. `summary_schema.json` describes every field.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from analysis import estimators, hypotheses
from analysis.tables import STATES

if TYPE_CHECKING:  # analysis.load imports Ray, which plain numbers do not need
    from analysis.load import Results

SCHEMA_VERSION = 1


def summarise(results: Results) -> dict[str, Any]:
    """The summary of a study, as `summary_schema.json` describes it."""
    cells, study = results.cells, results.study
    counts = cells["state"].value_counts()
    found = {state: int(counts.get(state, 0)) for state in STATES}
    expected = len(study)
    missing = expected - (len(cells) - found["missing"])
    return {
        "schema_version": SCHEMA_VERSION,
        "study": study.name,
        "complete": not results.running and missing == 0 and found["errored"] == 0,
        "running": bool(results.running),
        "cells": {"expected": expected, "found": expected - missing, **found, "missing": missing},
        "arms": estimators.arm_summary(cells, study.margins),
        "verdicts": [verdict.to_dict() for verdict in hypotheses.judge(cells, study.margins)],
        "unigram_entropy": number(results.manifest.get("unigram_entropy")),
        "loss_floor": number(results.manifest.get("loss_floor")),
        "leak_alarm": bool(leaks(cells).any()),
        "damage": list(results.damage),
        "versions": dict(results.versions),
    }


def leaks(cells: pd.DataFrame) -> pd.Series:
    """Stable cells that ended below the entropy of the corpus, which no honest model can."""
    return cells["state"].eq("stable") & cells["loss"].lt(cells["loss_floor"])


def number(value: Any) -> float | None:
    """A float for strict JSON: None unless finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(value)


def json_safe(value: Any) -> Any:
    """`value` with every number finite or None and no type that JSON lacks."""
    if isinstance(value, dict):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return number(float(value))
    return None if value is None or value is pd.NA else str(value)


# ------------------------------------------------------------ numbers for reading


def lr_text(value: float | None) -> str:
    """A learning rate in at most three digits: 0.0316, 3.16e-5; a dash where unknown."""
    if value is None or not math.isfinite(value):
        return "–"
    if 1e-3 <= abs(value) < 1e4:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def interval_text(low: float | None, high: float | None, digits: str = ".2f") -> str:
    """'[0.10, 0.30]', with an infinity where one end is open, empty where there is none."""
    if low is None and high is None:
        return ""
    ends = (
        f"{low:{digits}}" if low is not None else "−∞",
        f"{high:{digits}}" if high is not None else "∞",
    )
    return f"[{ends[0]}, {ends[1]}]"


def edge_text(edge: dict[str, Any]) -> str:
    """A maximum stable LR with its censoring: '0.0562', '≥ 1', '< 0.001', 'unknown'."""
    if edge["censored"] == "both":
        return "off the grid at both ends, by seed"
    sign = {"above": "≥ ", "below": "< ", "": ""}[edge["censored"]]
    return "unknown" if edge["value"] is None else f"{sign}{lr_text(edge['value'])}"


def best_lr_text(arm: dict[str, Any]) -> str:
    """The best LR; at an end of the grid the true one may lie beyond: '≤ 0.001', '≥ 1'."""
    if arm["best_lr"] is None:
        return "unknown"
    return {"below": "≤ ", "above": "≥ ", "": ""}[arm["best_lr_censored"]] + lr_text(arm["best_lr"])
