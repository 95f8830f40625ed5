"""A study's folder, or its Tune experiments, as two tidy tables.

    from analysis import load
    results = load("runs/pilot")
    results.cells, results.history

Works on a study that is finished, cut off, damaged or still running: every cell asked for is
in `cells`, and what was wrong is in `damage`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.tables import as_cells
from tune_study import records
from tune_study.config import Criterion, Study, TrialConfig
from tune_study.divergence import Finish, Row, failed, normalised_loss
from tune_study.identity import identity
from tune_study.store import StudyFolder

NAN = float("nan")

NOT_METRICS = frozenset(
    {
        "cell",
        "arm",
        "identity",
        "trial_id",
        "training_iteration",
        "timestamp",
        "done",
        "device",
        "precision",
        "threads",
        "params",
        "checkpoints_skipped",
        "verdict/state",
        "verdict/reason",
        "verdict/step",
    }
)
"""Keys of a row that are the same over a cell's history, or not about training."""


@dataclass(frozen=True)
class Results:
    """A study as it stands.

    Attributes:
        study: what was asked for.
        cells: one row a cell asked for; columns as in `analysis.tables.CELL_COLUMNS`.
        history: one row a report.
        manifest: the tokens' manifest.
        damage: a line for each thing that was torn, missing or foreign.
        running: whether a sweep is at work in it now.
        versions: of Python, torch, Ray and others, when it was started.
        source: the study's folder, where these tables came from one.
    """

    study: Study
    cells: pd.DataFrame
    history: pd.DataFrame
    manifest: dict[str, Any]
    damage: tuple[str, ...] = ()
    running: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    source: Path | None = None


def load(source: Any, study: Study | None = None, criterion: Criterion | None = None) -> Results:
    """Reads a study.

    Args:
        source: the study's folder (runs/pilot), or a Ray `ExperimentAnalysis` or
            `ResultGrid` of one of its experiments.
        study: the part of the stored study to report on; all of it by default.
        criterion: judges the runs anew by other rules than the study's own, without
            running anything.

    Raises:
        ConfigError: if there is no study.
    """
    folder = _folder(source)
    stored = folder.read()
    study = study or Study(**stored["study"])
    if criterion is not None:
        study = study.replace(criterion=criterion)
    found, damage = records.read(folder.experiments)
    manifest = stored["data"]
    replays = _replays(folder)
    cells, history = [], History()
    for config in study.cells():
        name = identity(config, manifest["checksum"])
        record = found.get(name, records.Record())
        rows = record.history(config, damage)
        cells.append(_cell(config, name, record, rows, study.criterion, manifest))
        history.add(config, rows)
    judge_finished(cells, study.criterion)
    for cell in cells:
        if replayed := replays.get(cell["cell"]):
            cell["reason"] = "; ".join(filter(None, [cell["reason"], replayed["sentence"]]))
            if not replayed["agrees"]:
                damage.append(f"{cell['cell']}: {cell['state']}, {replayed['sentence']}")
    return Results(
        study=study,
        cells=as_cells(cells),
        history=history.frame(),
        manifest=manifest,
        damage=tuple(damage),
        running=folder.running(),
        versions=stored["versions"],
        source=folder.path,
    )


def _replays(folder: StudyFolder) -> dict[str, dict[str, Any]]:
    """What `python -m tune_study replay` found, by cell."""
    texts = (path.read_text(encoding="utf-8") for path in sorted(folder.replays.glob("*.json")))
    return {found["cell"]: found for found in map(json.loads, texts)}


def _folder(source: Any) -> StudyFolder:
    """The study that a path, an ExperimentAnalysis or a ResultGrid belongs to."""
    if hasattr(source, "experiment_path"):
        path = Path(source.experiment_path).parent.parent
    else:
        path = Path(source).expanduser().resolve()
    return StudyFolder(path.parent, path.name)


def _cell(
    config: TrialConfig,
    name: str,
    record: records.Record,
    rows: list[Row],
    criterion: Criterion,
    manifest: dict[str, Any],
) -> dict[str, Any]:
    """One row of `cells`; finished cells are `stable` until they are compared."""
    last = rows[-1] if rows else {}
    verdict = records.ended(rows, config, criterion)
    at = last.get("step", 0)
    if verdict is not None:
        state, reason, step = verdict.state, verdict.reason, verdict.step
    elif record.errors and record.attempts[-1].error:
        state, reason, step = "errored", record.errors[-1], at
    else:
        state, step = "missing", at
        reason = f"cut off at step {at} of {config.steps}" if rows else "not started"
    peak = [row["attn/max_logit"] for row in rows]
    seconds = last.get("time/train_s", NAN)
    started, ended = _times(rows)
    return {
        "cell": config.label,
        **{k: getattr(config, k) for k in ("lr", "depth", "qk_norm", "arm", "seed", "steps")},
        "state": state,
        "reason": reason,
        "step": step,
        "loss": _number(last.get("val/loss")),
        "loss_init": _number(last.get("val/loss_init")),
        "loss_best": _number(last.get("val/loss_min")),
        "normalised_loss": NAN,
        "unigram_entropy": manifest["unigram_entropy"],
        "loss_floor": _number(manifest["loss_floor"]),
        "bytes_per_token": manifest["bytes_per_token"],
        "attn_entropy": _number(last.get("attn/entropy")),
        "max_logit": _number(last.get("attn/max_logit")),
        "max_logit_peak": max((p for p in peak if p is not None), default=NAN),
        "kurtosis": _number(last.get("act/kurtosis")),
        "grad_norm": _number(last.get("grad/norm")),
        "clipped_share": last["grad/clipped_steps"] / at if rows else NAN,
        "params": last.get("params", 0),
        "seconds": seconds,
        "tokens_per_s": at * config.tokens_per_step / seconds if rows else NAN,
        "started": started,
        "ended": ended,
        "device": last.get("device", ""),
        "precision": config.precision,
        "threads": config.threads,
        "identity": name,
    }


def _times(rows: list[Row]) -> tuple[float, float]:
    """When a cell began and ended, to Tune's second; NaN where it was cut off and gone on with,
    or its rows carry no time."""
    if not rows or rows[-1]["resumed_step"] or "timestamp" not in rows[0]:
        return NAN, NAN
    return rows[0]["timestamp"] - rows[0]["time/train_s"], float(rows[-1]["timestamp"])


def judge_finished(cells: list[dict[str, Any]], criterion: Criterion) -> None:
    """Tells `failed` from `stable` among the finished cells, per depth and seed, in place."""
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for cell in cells:
        if cell["state"] == "stable":
            groups.setdefault((cell["depth"], cell["seed"]), []).append(cell)
    for group in groups.values():
        entropy = group[0]["unigram_entropy"]
        finishes = [Finish(c["lr"], c["arm"], c["loss"]) for c in group]
        best = min(f.loss for f in finishes)
        for cell, verdict in zip(group, failed(finishes, entropy, criterion), strict=True):
            cell["state"], cell["reason"] = verdict.state, verdict.reason
            cell["normalised_loss"] = normalised_loss(cell["loss"], best, entropy)


class History:
    """Collects the rows of many cells as matrices: a study may have a million of them."""

    def __init__(self) -> None:
        self._cells: list[tuple[TrialConfig, int]] = []
        self._numbers: list[tuple[tuple[str, ...], np.ndarray]] = []
        self._others: dict[str, list[Any]] = {key: [] for key in OTHER_METRICS}

    def add(self, config: TrialConfig, rows: list[Row]) -> None:
        """Adds the rows of one cell."""
        self._cells.append((config, len(rows)))
        if not rows:
            return
        # A version of the code may have added a metric since a cell began: its rows lack it.
        shared = rows[0].keys() & rows[-1].keys()
        keys = tuple(sorted(shared - NOT_METRICS - OTHER_METRICS.keys()))
        # A None among the values becomes NaN; it is named in `nonfinite`.
        matrix = np.array(list(map(itemgetter(*keys), rows)), dtype=np.float64)
        self._numbers.append((keys, matrix))
        for key, convert in OTHER_METRICS.items():
            self._others[key] += [convert(row[key]) for row in rows]

    def frame(self) -> pd.DataFrame:
        """The history table; numbers that were not finite are NaN and named in `nonfinite`."""
        counts = [count for _, count in self._cells]
        data: dict[str, Any] = {
            name: np.repeat(np.array([getattr(c, field) for c, _ in self._cells]), counts)
            for name, field in KEY_FIELDS.items()
        }
        names = sorted({key for keys, _ in self._numbers for key in keys})
        columns = {key: np.full(sum(counts), np.nan) for key in names}
        start = 0
        for keys, matrix in self._numbers:
            for key, values in zip(keys, matrix.T, strict=True):
                columns[key][start : start + len(matrix)] = values
            start += len(matrix)
        data["step"] = columns.pop("step", np.empty(0)).astype(np.int64)
        return pd.DataFrame(data | columns | self._others, copy=False)


OTHER_METRICS: dict[str, Callable[[Any], Any]] = {
    "nonfinite": str,
    "train/losses": partial(np.array, dtype=np.float32),
}
"""Metrics that are not one number, and how they are kept."""

KEY_FIELDS = {"cell": "label"} | {k: k for k in ("lr", "depth", "qk_norm", "arm", "seed")}
"""The first columns of the history, and the cell's settings they show."""


def _number(value: float | None) -> float:
    return NAN if value is None else float(value)
