"""The tables of a bundle, and whether its numbers follow from them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.load import Results, from_rows, judge_finished, searched
from analysis.summary import json_safe, summarise
from analysis.tables import CELL_COLUMNS, HISTORY_KEYS, as_cells
from tune_study import archive
from tune_study.config import ConfigError, Criterion, Study, TrialConfig
from tune_study.divergence import Row
from tune_study.records import ended
from tune_study.store import StudyFolder

CLOSE = 1e-6
"""Relative difference allowed, as other machines and versions of libraries add in other orders."""

SHOWN = 10
"""Differences listed of each kind; the rest are counted."""

JUDGED_BY = (
    "step",
    "val/loss",
    "val/loss_init",
    "train/loss_ema",
    "attn/max_logit",
    "nonfinite_step",
    "data/unigram_entropy",
)
"""Columns of `history` that verdicts follow from."""


def read(
    folder: StudyFolder, study: Study | None = None, criterion: Criterion | None = None
) -> Results:
    """A bundle's folder as results; arguments as of `analysis.load.load`."""
    stored, status = folder.read(), archive.read(folder.path).status
    study = study or Study(**stored["study"])
    cells = _table(folder.path / archive.CELLS, tuple(CELL_COLUMNS))
    history = _table(folder.path / archive.HISTORY, HISTORY_KEYS)
    labels = {config.label for config in study.cells()}
    cells = cells[cells["cell"].isin(labels)].reset_index(drop=True)
    history = history[history["cell"].isin(labels)].reset_index(drop=True)
    if criterion is not None and criterion != study.criterion:
        study = study.replace(criterion=criterion)
        cells = judged(cells, history, study)
    search = None
    if study.search is not None:
        found: list[dict[str, Any]] = cells.replace({"state": {"untried": "missing"}}).to_dict(
            "records"
        )  # type: ignore[assignment]
        search = searched(study, found, criterion is None)
    return Results(
        study=study,
        cells=cells,
        history=history,
        manifest=stored["data"],
        damage=status.damage,
        running=status.running,
        versions=stored["versions"],
        source=folder.path,
        search=search,
    )


def _table(path: Path, columns: tuple[str, ...]) -> pd.DataFrame:
    """One of the tables, which has these columns.

    Raises:
        ConfigError: if it is no such table.
    """
    try:
        table = pd.read_parquet(path)
    except (OSError, ValueError):  # pyarrow's are of these
        raise ConfigError(f"{path}: is no Parquet file. Get the bundle again.") from None
    if lacking := [name for name in columns if name not in table]:
        raise ConfigError(f"{path}: has no column {lacking[0]!r}. Get the bundle again.")
    return table


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: is missing or damaged. Get the bundle again.")
    return content


def judged(cells: pd.DataFrame, history: pd.DataFrame, study: Study) -> pd.DataFrame:
    """The cells with the verdicts that follow from their reports by the study's criterion."""
    configs = {config.label: config for config in study.cells()}
    reports = {str(label): group for label, group in history.groupby("cell", sort=False)}
    rows: list[dict[str, Any]] = cells.to_dict("records")  # type: ignore[assignment]
    for cell in rows:
        group = reports.get(cell["cell"])
        if group is None:
            continue
        config = configs[cell["cell"]]
        verdict = ended(reported(group, JUDGED_BY), config, study.criterion)
        if verdict is not None:
            cell |= {"state": verdict.state, "reason": verdict.reason, "step": verdict.step}
        elif cell["state"] != "errored":
            at = int(group["step"].max())
            reason = f"cut off at step {at} of {config.steps}"
            cell |= {"state": "missing", "reason": reason, "step": at}
        cell["normalised_loss"] = math.nan
    judge_finished(rows, study.criterion)
    return as_cells(rows)


def reported(group: pd.DataFrame, columns: tuple[str, ...] | list[str]) -> list[Row]:
    """Rows of `history` as a trial reported them: None for what was not finite, whole steps."""
    rows: list[dict[str, Any]] = group.reindex(columns=list(columns)).to_dict("records")  # type: ignore[assignment]
    for row in rows:
        for name, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                row[name] = None
            elif name in ("step", "nonfinite_step"):
                row[name] = int(value)
    return [dict(row) for row in rows]


def rows(history: pd.DataFrame) -> dict[str, list[Row]]:
    """All reports of each cell, as `reported`."""
    metrics = [name for name in history.columns if name == "step" or name not in HISTORY_KEYS]
    return {str(cell): reported(of, metrics) for cell, of in history.groupby("cell", sort=False)}


def differences(folder: StudyFolder) -> list[str]:
    """Where a bundle's numbers do not follow from what it holds; empty if they all do.

    Verdicts are judged again from the history, the summary is computed again from the tables, and
    where the cells' rows are in the bundle the tables are made of them again.
    """
    results = read(folder)
    lines = list(_other_verdicts(results))
    stored = _json(folder.path / archive.SUMMARY)
    again = json_safe(summarise(results))
    lines += _limited("summary.json", _unlike(stored, again))
    if (folder.path / archive.LOGS).is_dir():
        rows = from_rows(folder)
        for name, table, made in (
            (archive.CELLS, results.cells, rows.cells),
            (archive.HISTORY, results.history, rows.history),
        ):
            try:
                pd.testing.assert_frame_equal(table, made, check_exact=True)
            except AssertionError as error:
                why = " ".join(str(error).split())
                lines.append(f"{name}: is not what the rows in {archive.LOGS}/ give: {why[:200]}")
    return lines


def _other_verdicts(results: Results) -> Iterator[str]:
    own, again = results.cells, judged(results.cells, results.history, results.study)
    asked = own["state"] != "untried"
    other = asked & (
        (own["state"] != again["state"]) | (own["step"] != again["step"]).fillna(False)
    )
    last = results.history.groupby("cell")["val/loss"].last()
    ends = own["cell"].map(last)
    other |= asked & own["cell"].isin(last.index) & ~((own["loss"] == ends) | ends.isna())
    yield from _limited(
        archive.CELLS,
        [
            f"{cell}: {state} with loss {loss:.6g}, not what its history gives"
            for cell, state, loss in own.loc[other, ["cell", "state", "loss"]].itertuples(
                index=False
            )
        ],
    )


def _unlike(stored: Any, again: Any, at: str = "") -> list[str]:
    """Paths at which two values of JSON differ, with both."""
    if isinstance(stored, dict) and isinstance(again, dict):
        return [
            line
            for key in sorted(stored.keys() | again.keys())
            for line in _unlike(stored.get(key), again.get(key), f"{at}.{key}".lstrip("."))
        ]
    if isinstance(stored, list) and isinstance(again, list) and len(stored) == len(again):
        pairs = enumerate(zip(stored, again, strict=True))
        return [line for i, (a, b) in pairs for line in _unlike(a, b, f"{at}[{i}]")]
    numbers = all(type(value) in (int, float) for value in (stored, again))
    if stored == again or (numbers and math.isclose(stored, again, rel_tol=CLOSE, abs_tol=1e-12)):
        return []
    return [f"{at} is {stored!r}, computed again {again!r}"]


def _limited(name: str, lines: list[str]) -> list[str]:
    more = [f"{name}: {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return [f"{name}: {line}" for line in lines[:SHOWN]] + more


def configs(folder: StudyFolder) -> dict[str, tuple[TrialConfig, str]]:
    """Every cell's settings as resolved when it was packed, and its identity then."""
    content = _json(folder.path / archive.CONFIG)
    try:
        return {
            label: (TrialConfig(**content["shared"] | own["settings"]), own["identity"])
            for label, own in content["cells"].items()
        }
    except (KeyError, TypeError, AttributeError):
        raise ConfigError(f"{folder.path / archive.CONFIG}: is damaged. Get it again.") from None
