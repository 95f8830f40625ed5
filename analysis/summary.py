"""What a study came to, as plain values: the content of summary.json.

Strict JSON: a number that is unknown, unbounded or not finite is null, with a flag or a
reason beside it. `summary_schema.json` describes every field.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from analysis import arms, endings, estimators, hypotheses, stabilisers
from analysis.tables import ASKED, STATES
from tune_study.config import ConfigError, Margins

if TYPE_CHECKING:  # analysis.load imports Ray, which plain numbers do not need
    from analysis.load import Results

SCHEMA_VERSION = 2
UNKNOWN = "unknown"


def summarise(results: Results) -> dict[str, Any]:
    """The summary of a study, as `summary_schema.json` describes it."""
    cells, study = results.cells, results.study
    counts = cells["state"].value_counts()
    found = {state: int(counts.get(state, 0)) for state in STATES}
    expected = len(study) - found["untried"]
    missing = expected - sum(found[state] for state in ASKED if state != "missing")
    of_qk_norm = arms.qk_norm_cells(cells)
    several = arms.has_stabilisers(cells)
    verdicts, not_judged = _judge(of_qk_norm, study.margins, several)
    return {
        "schema_version": SCHEMA_VERSION,
        "study": study.name,
        "complete": not results.running and missing == 0 and found["errored"] == 0,
        "running": bool(results.running),
        "search": _search(results),
        "cells": {"expected": expected, "found": expected - missing, **found, "missing": missing},
        "arms": arm_rows(cells, study.margins),
        "necessity": _necessity(of_qk_norm, study.margins.necessity),
        "verdicts": verdicts,
        "not_judged": not_judged,
        "stabilisers": stabilisers.summarise(cells, study.margins) if several else None,
        "unigram_entropy": number(results.manifest.get("unigram_entropy")),
        "loss_floor": number(results.manifest.get("loss_floor")),
        "leak_alarm": bool(leaks(cells).any()),
        "divergence": endings.summarise(arms.results_by_arm(results)),
        "damage": list(results.damage),
        "versions": dict(results.versions),
    }


def _search(results: Results) -> dict[str, Any] | None:
    """How far a search has come; None for a study that runs its whole grid."""
    course, rules = results.search, results.study.search
    if course is None or rules is None:
        return None
    edges = course.edges()
    return {
        "cells": len(course.asked),
        "of": len(results.study),
        "lines": len(edges),
        "decided": sum(edge.decided for edge in edges),
        "confidence": rules.confidence,
        "error": rules.error,
        "spread": _spread(results.cells),
    }


def _spread(cells: pd.DataFrame) -> int | None:
    """How many learning rates means over the grid rest on; None if there is no such mean."""
    grid = estimators.curves(arms.by_arm(cells))
    part = grid.columns(grid.spread)
    return None if part.untried.any() else len(part.lr)


def arm_rows(cells: pd.DataFrame, margins: Margins) -> list[dict[str, Any]]:
    """What each (depth, arm) came to, as `estimators.arm_summary`, with `arm` and `qk_norm`; the
    baseline of a depth first, then the study's order."""
    norms = cells.groupby("arm")["qk_norm"].first()
    place = {arm: i for i, arm in enumerate(arms.names(cells))}
    rows = estimators.arm_summary(arms.by_arm(cells), margins)
    rows = [row | {"arm": row["qk_norm"], "qk_norm": norms[row["qk_norm"]]} for row in rows]
    return sorted(rows, key=lambda row: (row["depth"], place[row["arm"]]))


def arms_in_question(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of `arms` that the answer, the verdicts and most figures are about."""
    compared = summary["stabilisers"]
    rows: list[dict[str, Any]] = summary["arms"]
    return rows if compared is None else [r for r in rows if r["arm"] in compared["verdicts_on"]]


def _judge(
    cells: pd.DataFrame, margins: Margins, several: bool
) -> tuple[list[dict[str, Any]], str]:
    """The verdicts, or none and the reason why the study cannot be judged."""
    if not has_pairs(cells):
        lacking = "no arm adds RMSNorm alone to the baseline" if several else "only one arm was run"
        return [], f"{lacking}, so there is nothing to compare"
    try:
        return [verdict.to_dict() for verdict in hypotheses.judge(cells, margins)], ""
    except ConfigError as error:
        return [], str(error)


def _necessity(cells: pd.DataFrame, margin: float) -> list[dict[str, Any]]:
    """The necessity threshold of each depth and arm, as plain values."""
    if not has_pairs(cells):
        return []
    rows = estimators.necessity_threshold(cells, margin).to_dict("records")
    return [{str(key): value for key, value in row.items()} for row in rows]


def has_pairs(cells: pd.DataFrame) -> bool:
    """Whether off and another arm were asked for, so that there is something to compare."""
    return bool(estimators.arms(cells)) and estimators.OFF in set(cells["qk_norm"])


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
        _plain(low, digits) if low is not None else "−∞",
        _plain(high, digits) if high is not None else "∞",
    )
    return f"[{ends[0]}, {ends[1]}]"


def _plain(value: float, digits: str) -> str:
    """3800 where `.2g` gives 3.8e+03, 1.2e8 where it gives 1.2e+08, 6e-8 where it gives 6e-08."""
    text = f"{value:{digits}}".replace("e-0", "e-")
    if "e+" not in text:
        return text
    return f"{float(text):.0f}" if abs(value) < 1e6 else text.replace("e+0", "e").replace("e+", "e")


def edge_text(edge: dict[str, Any]) -> str:
    """A maximum stable LR with its censoring: '0.0562', '≥ 1', '< 0.001', 'unknown'."""
    if edge["censored"] == "both":
        return "off the grid at both ends, by seed"
    sign = {"above": "≥ ", "below": "< ", "": ""}[edge["censored"]]
    return UNKNOWN if edge["value"] is None else f"{sign}{lr_text(edge['value'])}"


def threshold_text(row: dict[str, Any]) -> str:
    """A necessity threshold with its censoring: '0.1', '≤ 0.001', '> 0.3', 'unknown'."""
    value = number(row["value"])
    if value is not None:
        return ("≤ " if row["censored"] == "below" else "") + lr_text(value)
    tested = number(row["tested_to"])
    return UNKNOWN if tested is None else f"> {lr_text(tested)}"


def best_lr_text(arm: dict[str, Any]) -> str:
    """The best LR; at an end of the grid the true one may lie beyond: '≤ 0.001', '≥ 1'."""
    if arm["best_lr"] is None:
        return UNKNOWN
    return {"below": "≤ ", "above": "≥ ", "": ""}[arm["best_lr_censored"]] + lr_text(arm["best_lr"])
