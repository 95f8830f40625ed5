"""A study's folder, or its Tune experiments, as two tidy tables.

    from analysis import load
    results = load("runs/pilot")
    results.cells, results.history

Works on a study that is finished, cut off, damaged or still running: every cell asked for is
in `cells`, and what was wrong is in `damage`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.tables import HISTORY_KEYS, as_cells
from tune_study import records
from tune_study.config import Criterion, Study, TrialConfig
from tune_study.divergence import Finish, Row, failed, normalised_loss
from tune_study.identity import identity
from tune_study.store import StudyFolder

NAN = float("nan")

NOT_METRICS = frozenset(
    {
        "cell",
        "identity",
        "step",
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
    """

    study: Study
    cells: pd.DataFrame
    history: pd.DataFrame
    manifest: dict[str, Any]
    damage: tuple[str, ...] = ()
    running: bool = False
    versions: dict[str, str] = field(default_factory=dict)


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
    cells, history, used = [], [], set()
    for config in study.cells():
        name = identity(config, manifest["checksum"])
        used.add(name)
        record = found.get(name, records.Record())
        rows = record.history(config)
        cells.append(_cell(config, name, record, rows, study.criterion, manifest))
        key = {k: getattr(config, k) for k in ("lr", "depth", "qk_norm", "seed")}
        history += [{"cell": config.label, **key, **_metrics(row)} for row in rows]
    judge_finished(cells, study.criterion)
    for cell in cells:
        if replayed := replays.get(cell["cell"]):
            cell["reason"] = "; ".join(filter(None, [cell["reason"], replayed["sentence"]]))
            if not replayed["agrees"]:
                damage.append(f"{cell['cell']}: {cell['state']}, {replayed['sentence']}")
    damage += [f"{cell['cell']}: {cell['gap']}" for cell in cells if cell["gap"]]
    return Results(
        study=study,
        cells=as_cells([{k: v for k, v in cell.items() if k != "gap"} for cell in cells]),
        history=_history(history),
        manifest=manifest,
        damage=tuple(damage),
        running=folder.running(),
        versions=stored["versions"],
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
    reported = max((row["step"] for a in record.attempts for row in a.rows), default=0)
    at = last.get("step", 0)
    gap = f"no report between steps {at} and {reported}" if reported > at else ""
    if verdict is not None:
        state, reason, step = verdict.state, verdict.reason, verdict.step
    elif record.errors and record.attempts[-1].error:
        state, reason, step = "errored", record.errors[-1], at
    else:
        state, step = "missing", at
        reason = gap or (f"cut off at step {at} of {config.steps}" if rows else "not started")
    peak = [row["attn/max_logit"] for row in rows]
    seconds = last.get("time/train_s", NAN)
    return {
        "cell": config.label,
        **{k: getattr(config, k) for k in ("lr", "depth", "qk_norm", "seed", "steps")},
        **{"state": state, "reason": reason, "step": step, "gap": gap},
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
        "device": last.get("device", ""),
        "precision": config.precision,
        "threads": config.threads,
        "identity": name,
    }


def judge_finished(cells: list[dict[str, Any]], criterion: Criterion) -> None:
    """Tells `failed` from `stable` among the finished cells, per depth and seed, in place."""
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for cell in cells:
        if cell["state"] == "stable":
            groups.setdefault((cell["depth"], cell["seed"]), []).append(cell)
    for group in groups.values():
        entropy = group[0]["unigram_entropy"]
        finishes = [Finish(c["lr"], c["qk_norm"], c["loss"]) for c in group]
        best = min(f.loss for f in finishes)
        for cell, verdict in zip(group, failed(finishes, entropy, criterion), strict=True):
            cell["state"], cell["reason"] = verdict.state, verdict.reason
            cell["normalised_loss"] = normalised_loss(cell["loss"], best, entropy)


def _metrics(row: Row) -> dict[str, Any]:
    return {"step": row["step"]} | {k: v for k, v in row.items() if k not in NOT_METRICS}


def _history(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """The history table; numbers that were not finite are NaN and named in `nonfinite`."""
    frame = pd.DataFrame(rows, columns=None if rows else list(HISTORY_KEYS))
    texts = {"cell", "qk_norm", "nonfinite", "train/losses"}
    numbers = [c for c in frame.columns if c not in texts]
    frame[numbers] = frame[numbers].apply(pd.to_numeric)
    return frame


def _number(value: float | None) -> float:
    return NAN if value is None else float(value)
