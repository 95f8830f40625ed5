"""A study of one cell, trained here without Ray and left as Tune would leave it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tune_study import checkpoints
from tune_study.config import Criterion, Study, TrialConfig
from tune_study.data import Tokens
from tune_study.identity import identity
from tune_study.store import StudyFolder
from tune_study.trainer import Trainer


def leave(
    runs: Path,
    config: TrialConfig,
    tokens: Tokens,
    criterion: Criterion,
    keep_at: int | None = None,
    history: list[dict[str, Any]] | None = None,
) -> tuple[StudyFolder, str]:
    """Writes the study `left` and returns its folder and the cell's name.

    Args:
        keep_at: the step whose checkpoint stays.
        history: changes to the rows, in order; the run is cut off after the last of them.
    """
    axes = {name: (getattr(config, name),) for name in ("lr", "depth", "qk_norm", "seed")}
    study = Study(name="left", base=config, axes=axes, criterion=criterion)
    folder = StudyFolder(runs, "left")
    shutil.rmtree(folder.path, ignore_errors=True)
    folder.write(study, tokens.manifest.model_dump(mode="json"))
    _train(folder, config, tokens, keep_at, history)
    return folder, config.label


def leave_all(runs: Path, study: Study, tokens: Tokens) -> None:
    """Writes a study of which every cell was trained to its end."""
    folder = StudyFolder(runs, study.name)
    folder.write(study, tokens.manifest.model_dump(mode="json"))
    for config in study.cells():
        _train(folder, config, tokens)


def _train(
    folder: StudyFolder,
    config: TrialConfig,
    tokens: Tokens,
    keep_at: int | None = None,
    history: list[dict[str, Any]] | None = None,
) -> None:
    """Trains one cell and writes its trial folder, as `leave` says."""
    trial = folder.experiments / "sweep-001" / config.label
    trial.mkdir(parents=True)
    cell = {"label": config.label, "identity": identity(config, tokens.manifest.checksum)}
    (trial / "params.json").write_text(json.dumps({"cell": cell}))
    trainer, rows, digest = Trainer(config, tokens), [], ""
    while not trainer.finished:
        row = trainer.train(config.report_every)
        digest = checkpoints.digest(digest, row)
        row |= {
            "digest": digest,
            "resumed_step": 0,
            "data/unigram_entropy": tokens.manifest.unigram_entropy,
            "params": 1,
        }
        rows.append(row | {"device": "mps (arm64)"})
        if trainer.step == keep_at:
            checkpoint = trial / "checkpoint_000000"
            checkpoint.mkdir()
            checkpoints.save(trainer.state_dict(), rows[-1]["digest"], checkpoint)
    if history is not None:
        rows = [row | changes for row, changes in zip(rows, history, strict=False)]
    (trial / "result.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
