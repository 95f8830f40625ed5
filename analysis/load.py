"""A study's folder, its Tune experiments, or a bundle of it, as two tidy tables.

    from analysis import load
    results = load("runs/pilot")
    results.cells, results.history

Works on a study that is finished, cut off, damaged or still running: every cell asked for is
in `cells`, and what was wrong is in `damage`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.tables import HISTORY_METRICS, as_cells
from tune_study import archive, histories, records, remote
from tune_study.config import Criterion, Study, TrialConfig
from tune_study.divergence import Finish, failed, normalised_loss
from tune_study.histories import LOSSES, NOTES, Histories, History
from tune_study.identity import identity
from tune_study.search.cells import Lattice
from tune_study.search.course import Course
from tune_study.search.ends import End
from tune_study.store import StudyFolder

NAN = float("nan")


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
        holder: which, in words; empty for none, or if that is not known.
        versions: of Python, torch, Ray and others, when it was started.
        source: the study's folder, where these tables came from one.
        search: how far a study that is searched has come; None for one that runs its grid.
    """

    study: Study
    cells: pd.DataFrame
    history: pd.DataFrame
    manifest: dict[str, Any]
    damage: tuple[str, ...] = ()
    running: bool = False
    holder: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    source: Path | None = None
    search: Course | None = None

    @property
    def tried(self) -> Results:
        """The same without the cells that a search did not ask for."""
        return replace(self, cells=self.cells[self.cells["state"] != "untried"])


def load(source: Any, study: Study | None = None, criterion: Criterion | None = None) -> Results:
    """Reads a study.

    Args:
        source: the study's folder (runs/pilot), the folder of a bundle (results/pilot), or a Ray
            `ExperimentAnalysis` or `ResultGrid` of one of the study's experiments.
        study: the part of the stored study to report on; all of it by default.
        criterion: judges the runs anew by other rules than the study's own, without
            running anything.

    Raises:
        ConfigError: if there is no study.
    """
    folder = _folder(source)
    if archive.is_bundle(folder.path):
        from analysis import bundled  # which needs this module

        return bundled.read(folder, study, criterion)
    return from_rows(folder, study, criterion)


def from_rows(
    folder: StudyFolder, study: Study | None = None, criterion: Criterion | None = None
) -> Results:
    """A study from the rows that its cells reported; arguments as of `load`."""
    stored = folder.read()
    study = study or Study(**stored["study"])
    if criterion is not None:
        study = study.replace(criterion=criterion)
    holder = folder.holder()
    found, damage = records.read(folder.experiments)
    manifest = stored["data"]
    replays = _replays(folder)
    configs: list[TrialConfig] = []
    names: list[str] = []
    nothing = records.Record()

    def asked() -> Iterator[histories.Asked]:
        for config in study.cells():
            configs.append(config)
            names.append(identity(config, manifest["checksum"]))
            yield config, found.get(names[-1], nothing)

    large = histories.is_large(found.values())
    parts = list(histories.read(asked(), study.criterion, large))
    ran = [cell for part in parts for cell in part.cells]
    damage += [line for part in parts for line in part.damage]
    cells = [
        _cell(config, name, found.get(name, nothing), history, manifest)
        for config, name, history in zip(configs, names, ran, strict=True)
    ]
    search = None if study.search is None else searched(study, cells, criterion is None)
    judge_finished(cells, study.criterion)
    for cell in cells:
        if replayed := replays.get(cell["cell"]):
            cell["reason"] = "; ".join(filter(None, [cell["reason"], replayed["sentence"]]))
            if not replayed["agrees"]:
                damage.append(f"{cell['cell']}: {cell['state']}, {replayed['sentence']}")
    return Results(
        study=study,
        cells=as_cells(cells),
        history=_history(configs, parts),
        manifest=manifest,
        damage=tuple(damage),
        running=bool(holder),
        holder=holder,
        versions=stored["versions"],
        source=folder.path,
        search=search,
    )


def searched(study: Study, cells: list[dict[str, Any]], own_criterion: bool) -> Course:
    """How far the search has come; cells that it did not ask for become `untried`, in place.

    By another criterion than its own it would have asked for other cells: then those without a
    result count as untried, too.
    """

    def end(config: TrialConfig) -> End | None:
        cell = by_label[config.label]
        if cell["state"] == "missing":
            return None
        diverged, lost = cell["state"] == "diverged", cell["state"] == "errored"
        return End(cell["loss"], cell["unigram_entropy"], diverged, lost)

    by_label = {cell["cell"]: cell for cell in cells}
    lattice = Lattice(study)
    course = lattice.course(end)
    asked = {lattice.configs[place].label for place in course.asked} if own_criterion else set()
    for cell in cells:
        if cell["state"] in ("missing", "errored") and cell["cell"] not in asked:
            cell["state"], cell["reason"] = "untried", "not asked for by the search"
    return course


def _replays(folder: StudyFolder) -> dict[str, dict[str, Any]]:
    """What `python -m tune_study replay` found, by cell."""
    texts = (path.read_text(encoding="utf-8") for path in sorted(folder.replays.glob("*.json")))
    return {found["cell"]: found for found in map(json.loads, texts)}


def _folder(source: Any) -> StudyFolder:
    """The study that a path, an ExperimentAnalysis or a ResultGrid belongs to."""
    if hasattr(source, "experiment_path"):
        path = Path(source.experiment_path).parent.parent
    elif isinstance(source, str) and remote.is_uri(source):
        runs, _, name = source.rstrip("/").rpartition("/")
        return remote.fetched(runs, name)
    else:
        path = Path(source).expanduser().resolve()
    return StudyFolder(path.parent, path.name)


def _cell(
    config: TrialConfig,
    name: str,
    record: records.Record,
    history: History,
    manifest: dict[str, Any],
) -> dict[str, Any]:
    """One row of `cells`; finished cells are `stable` until they are compared."""
    last, verdict = history.last, history.verdict
    at = last.get("step", 0)
    if verdict is not None:
        state, reason, step = verdict.state, verdict.reason, verdict.step
    elif record.errors and record.attempts[-1].error:
        state, reason, step = "errored", record.reasons, at
    else:
        state, step = "missing", at
        reason = f"cut off at step {at} of {config.steps}" if last else "not started"
    seconds = last.get("time/train_s", NAN)
    started, ended = _times(history)
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
        "max_logit_peak": history.max_logit,
        "kurtosis": _number(last.get("act/kurtosis")),
        "grad_norm": _number(last.get("grad/norm")),
        "clipped_share": last["grad/clipped_steps"] / at if last else NAN,
        "params": last.get("params", 0),
        "seconds": seconds,
        "tokens_per_s": at * config.tokens_per_step / seconds if last else NAN,
        "started": started,
        "ended": ended,
        "device": last.get("device", ""),
        "precision": config.precision,
        "threads": config.threads,
        "identity": name,
    }


def _times(history: History) -> tuple[float, float]:
    """When a cell began and ended, to Tune's second; NaN where it was cut off and gone on with,
    or its rows carry no time."""
    first, last = history.first, history.last
    if not last or last["resumed_step"] or "timestamp" not in first:
        return NAN, NAN
    return first["timestamp"] - first["time/train_s"], float(last["timestamp"])


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


def _history(configs: Sequence[TrialConfig], parts: Sequence[Histories]) -> pd.DataFrame:
    """The `history` table of all cells. Takes the columns out of `parts`: both do not fit twice."""
    counts = [cell.rows for part in parts for cell in part.cells]
    cell = np.repeat(np.arange(len(configs)), counts)
    data: dict[str, Any] = {
        "cell": pd.array([c.label for c in configs], dtype="str").take(cell),
        "lr": np.array([c.lr for c in configs])[cell],
        "depth": np.array([c.depth for c in configs])[cell],
        "qk_norm": pd.array([c.qk_norm for c in configs], dtype="str").take(cell),
        "arm": pd.array([c.arm for c in configs], dtype="str").take(cell),
        "seed": np.array([c.seed for c in configs])[cell],
    }
    names = {name for part in parts for name in part.numbers}
    if not len(cell):  # before the first report: the columns that are documented, without a row
        names = {name for name, (kind, _) in HISTORY_METRICS.items() if kind == "float64"}
    for name in ["step", *sorted(names - {"step"})]:
        columns = [
            part.numbers.pop(name)
            if name in part.numbers
            else np.full(sum(cell.rows for cell in part.cells), np.nan)
            for part in parts
        ]
        data[name] = np.concatenate(columns) if columns else np.empty(0)
    data["step"] = data["step"].astype(np.int64)
    data[NOTES] = pd.array([note for part in parts for note in part.notes], dtype="str")
    data[LOSSES] = [losses for part in parts for losses in part.step_losses()]
    return pd.DataFrame(data, copy=False)


def _number(value: float | None) -> float:
    return NAN if value is None else float(value)
