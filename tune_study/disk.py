"""How much disk a start of a study needs, and whether it is there."""

from __future__ import annotations

import math
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from tune_study.config import ConfigError, Study, TrialConfig
from tune_study.store import StudyFolder

if TYPE_CHECKING:
    from tune_study.sweep import Plan

MB = 2**20

ROW_BYTES, LAYER_BYTES, LOSS_BYTES = 2_000, 600, 10
"""Of a row of result.json: at most, besides its layers and steps; for each of them."""

STATE_BYTES = 12
"""A parameter in a checkpoint: its value and AdamW's two moments, four bytes each."""

WEIGHT_BYTES = 4
"""A parameter in a cell's kept weights."""

FOLDER_BYTES = 48 * 2**10
"""A trial folder without its rows, and what a checkpoint is larger than its tensors."""

REPORT_BYTES, REPORT_SHARE = 32 * MB, 0.5
"""The report: its figures, and its tables as a share of the rows."""

RAY_BYTES = 64 * MB
"""Ray's logs and state of one start, in the folder for temporary files."""

SPARE_BYTES = 16 * MB
"""What must be left beside the next checkpoints for a sweep to go on."""


def needs(
    plan: Plan, folder: StudyFolder, vocab_size: int, at_once: int, kept: int
) -> dict[Path, dict[str, int]]:
    """Bytes that a start will write, at most: by folder, and by what for.

    Args:
        at_once: cells that run at the same time.
        kept: checkpoints of a running cell.
    """
    study = plan.study
    checkpoint = checkpoint_bytes(study, vocab_size)
    rows = sum(
        math.ceil((cell.config.steps - cell.last_step) / cell.config.report_every)
        * _row_bytes(cell.config)
        for cell in plan.may_run
    )
    weights = sum(cell.label in plan.keep for cell in plan.may_run) * _largest(study, vocab_size)
    # One more than is kept: the newest is written before the oldest goes.
    return {
        folder.path: {
            "reports": rows + FOLDER_BYTES * len(plan.may_run),
            "checkpoints": (kept + 1) * at_once * checkpoint,
            "weights": weights * WEIGHT_BYTES,
            "the report": REPORT_BYTES + int(REPORT_SHARE * rows),
        },
        Path(tempfile.gettempdir()): {
            "Ray": RAY_BYTES,
            "checkpoints on their way": at_once * checkpoint,
        },
    }


def check(needs: dict[Path, dict[str, int]]) -> None:
    """Compares what a start will write with what is free.

    Raises:
        ConfigError: naming the folder, what is needed for what, and what is free.
    """
    by_disk: dict[int, list[Path]] = {}
    for path in needs:
        by_disk.setdefault(path.stat().st_dev, []).append(path)
    for paths in by_disk.values():
        needed = sum(sum(needs[path].values()) for path in paths)
        free = shutil.disk_usage(paths[0]).free
        if free < needed:
            parts = [f"{size(n)} {what}" for p in paths for what, n in needs[p].items() if n]
            raise ConfigError(
                f"{paths[0]}: {size(free)} free, {size(needed)} needed ({', '.join(parts)}). "
                "Free some, or give another folder with --runs."
            )


def reserve(study: Study, vocab_size: int, at_once: int) -> int:
    """Free bytes below which a running sweep stops: room for the next checkpoints, and a little."""
    return at_once * checkpoint_bytes(study, vocab_size) + SPARE_BYTES


def full(path: Path) -> str:
    """What to say when the disk is full: the study's, or that of temporary files."""
    free, fullest = min(
        (shutil.disk_usage(folder).free, folder) for folder in (path, Path(tempfile.gettempdir()))
    )
    return f"{fullest}: the disk is full, {size(free)} free."


def checkpoint_bytes(study: Study, vocab_size: int) -> int:
    """Bytes of the largest cell's checkpoint."""
    return STATE_BYTES * _largest(study, vocab_size) + FOLDER_BYTES


def size(n: float) -> str:
    """Bytes for the eye, in MB or GB."""
    return f"{n / 2**30:.1f} GB" if n >= 2**30 else f"{n / MB:.0f} MB"


@lru_cache(maxsize=1)
def _largest(study: Study, vocab_size: int) -> int:
    """Parameters of the study's largest model; every shape is built for it, so once a start."""
    import torch

    from tune_study.model import GPT

    shapes = {config.replace(lr=1.0, seed=0) for config in study.cells()}
    with torch.device("meta"):  # shapes without memory
        return max(GPT(config, vocab_size, 0).parameter_count() for config in shapes)


def _row_bytes(config: TrialConfig) -> int:
    return ROW_BYTES + LAYER_BYTES * config.depth + LOSS_BYTES * config.report_every
