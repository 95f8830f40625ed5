"""What checkpoints cost a sweep of the pilot study.

    python -m benchmarks.checkpoints [--repeats 5] [--quick] [--json FILE]

Some of the pilot's cells are swept without a checkpoint and with one at every report, in turns,
from the start of the process to its end. The difference is what so many checkpoints cost; at the
study's own interval a sweep writes far fewer, and their share is reckoned from that.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import search_spaces
from benchmarks.paired import alternate, options_of, show
from benchmarks.sweep import timed_sweep
from tune_study.records import read, report_steps
from tune_study.store import StudyFolder

NEVER_S = 1e9

CELLS = {"pilot": ["--lr", "1e-3,3.16e-3,1e-2", "--seed", "0,1"], "smoke": ["--seed", "0"]}
"""What is swept of a study: cells that run to their end."""


def main() -> None:
    """Prints all figures, and writes them as JSON if asked."""
    parser = options_of(__doc__, quick="a tiny study, one round")
    options = parser.parse_args()
    name, repeats = ("smoke", 1) if options.quick else ("pilot", options.repeats)
    with tempfile.TemporaryDirectory() as scratch:
        show(measure(name, Path(scratch), repeats), options.json)


def measure(name: str, scratch: Path, repeats: int) -> dict[str, float]:
    """All figures of one study."""
    _sweep(name, scratch, NEVER_S)  # prepares the tokens
    ways = {
        "none": lambda: _sweep(name, scratch, NEVER_S),
        "all": lambda: _sweep(name, scratch, 0.0),
    }
    seconds = alternate(ways, repeats)
    study = StudyFolder(scratch / "runs", "bench").study()
    cells = list(study.cells())
    # None is due at a cell's last report, whose rows are its result.
    written = sum(len(list(report_steps(cell))) - 1 for cell in cells)
    each = statistics.median(
        (a - b) / written for a, b in zip(seconds["all"], seconds["none"], strict=True)
    )
    sweep_s = statistics.median(seconds["none"])
    interval = search_spaces.get(name).checkpoint_every_s
    cell_s = _longest(StudyFolder(scratch / "runs", "bench"))
    share = each / interval if cell_s > interval else 0.0
    return {
        "cells": len(cells),
        "sweep without checkpoints, s": sweep_s,
        "checkpoints written at every report": written,
        "sweep with one at every report, times without": statistics.median(
            a / b for a, b in zip(seconds["all"], seconds["none"], strict=True)
        ),
        "one checkpoint, ms": 1e3 * each,
        "longest cell, s": cell_s,
        "interval of the study, s": interval,
        "share of a cell's time at that interval, %": 100 * share,
        "share if every cell were longer than it, %": 100 * each / interval,
    }


def _sweep(name: str, scratch: Path, every_s: float) -> float:
    """Seconds of a sweep from nothing, tokens prepared."""
    folder = StudyFolder(scratch / "runs", "bench")
    if folder.exists():
        folder.path.rename(scratch / f"done-{time.monotonic_ns()}")
    return timed_sweep(name, scratch, *CELLS[name], "--checkpoint-every", str(every_s))


def _longest(folder: StudyFolder) -> float:
    """Seconds of training of the cell that took longest."""
    records, _ = read(folder.experiments)
    attempts = (record.attempts[-1] for record in records.values())
    return max(float(attempt.rows([])[-1]["time/train_s"]) for attempt in attempts)


if __name__ == "__main__":
    main()
