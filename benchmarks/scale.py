"""What a cell costs beside its training: thousands of cells through the real sweep, with a stub.

    python -m benchmarks.scale [--cells 1000,10000] [--reports 3] [--json FILE]

The stub takes the place of the Trainable and reports rows like a real cell's without training.
Everything else is what `python -m tune_study sweep`, `status` and `report` do.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.result import DONE, SHOULD_CHECKPOINT

import search_spaces
from benchmarks.paired import show
from tune_study.config import Study, log_grid

ROOT = Path(__file__).resolve().parents[1]
ROW = "TUNE_STUDY_STUB_ROW"
"""Where the workers find the row that the stub reports."""


def main() -> None:
    """Prints all figures, and writes them as JSON if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cells", default="1000,10000")
    parser.add_argument("--reports", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    for cells in map(int, options.cells.split(",")):
        with tempfile.TemporaryDirectory() as name:
            # A process each, so that one's memory is not the other's.
            command = [sys.executable, "-c", _ONE, str(cells), str(options.reports), name]
            done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
            measured = json.loads(done.stdout.splitlines()[-1])
            for verb in ("status", "report"):
                measured[f"{verb}, s"] = _timed(verb, name)
        figures |= {f"{cells} cells: {key}": value for key, value in measured.items()}
    show(figures, options.json)


_ONE = """
import sys
from benchmarks.scale import sweep
sweep(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
"""


def _timed(verb: str, runs: str) -> float:
    command = [sys.executable, "-m", "tune_study", verb, "stub", "--runs", runs]
    began = time.perf_counter()
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def stub_study(cells: int, reports: int) -> Study:
    """A study of about so many cells: 10 learning rates, 2 depths, 2 arms, and seeds."""
    smoke = search_spaces.get("smoke")
    every = smoke.base.report_every
    return smoke.replace(
        name="stub",
        base=smoke.base.replace(steps=every * reports, warmup_steps=1),
        axes={
            "lr": log_grid(1e-3, 1, per_decade=3),
            "depth": (1, 2),
            "qk_norm": ("off", "rmsnorm"),
            "seed": tuple(range(cells // 40)),
        },
    )


def sweep(cells: int, reports: int, runs: str) -> None:
    """Sweeps the stub study and prints, as JSON, what that took."""
    import trainable
    from tune_study import sweep as engine
    from tune_study.board import Board
    from tune_study.concurrency import policy
    from tune_study.data import open_tokens, prepare
    from tune_study.progress import Progress
    from tune_study.store import StudyFolder
    from tune_study.trainer import Trainer

    study = stub_study(cells, reports)
    data = Path(runs) / "data"
    prepare(study.base.data, data, say=lambda line: None)
    tokens = open_tokens(study.base.data, data)
    config = next(study.cells())
    row = Trainer(config, tokens).train(config.report_every)
    row |= {
        "data/unigram_entropy": tokens.manifest.unigram_entropy,
        "params": 1,
        "device": "stub",
        "precision": "fp32",
        "threads": 1,
    }
    path = Path(runs) / "row.json"
    path.write_text(json.dumps(row))
    os.environ[ROW] = str(path)
    trainable.GPTTrainable = StubTrainable  # type: ignore[misc,assignment]
    folder = StudyFolder(Path(runs), study.name)
    began = time.perf_counter()
    plan = engine.plan(study, folder, tokens.manifest.checksum)
    folder.write(study, tokens.manifest.model_dump(mode="json"))
    planned = time.perf_counter() - began
    progress = Progress(Board(study), policy(config).at_once)
    began = time.perf_counter()
    outcome = engine.run(plan, folder, tokens, progress)
    took = time.perf_counter() - began
    progress.close()
    if outcome.errors or outcome.stopped:
        raise RuntimeError(f"{outcome}")
    began = time.perf_counter()
    again = engine.plan(study, folder, tokens.manifest.checksum)
    assert again.done == len(study)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak *= 1 if sys.platform == "darwin" else 1024
    files = [file.stat().st_size for file in folder.path.rglob("*") if file.is_file()]
    measured = {
        "planning, s": planned,
        "sweep, s": took,
        "a cell, ms": 1000 * took / len(study),
        "planning again, s": time.perf_counter() - began,
        "driver's memory at most, MB": peak / 2**20,
        "on disk, MB": sum(files) / 2**20,
    }
    print(json.dumps(measured), flush=True)


@cache
def _row() -> dict[str, Any]:
    row: dict[str, Any] = json.loads(Path(os.environ[ROW]).read_text())
    return row


class StubTrainable(tune.Trainable):
    """Reports the same row at every step of a cell."""

    def setup(self, config: dict[str, Any]) -> None:
        self.cell = config["cell"]
        self.at = 0

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.setup(new_config)
        return True

    def step(self) -> dict[str, Any]:
        self.at += self.cell["report_every"]
        return {
            **_row(),
            "step": self.at,
            "cell": self.cell["label"],
            "arm": self.cell["arm"],
            "identity": self.cell["identity"],
            "digest": "",
            "resumed_step": 0,
            "checkpoints_skipped": [],
            DONE: self.at >= self.cell["steps"],
            SHOULD_CHECKPOINT: False,
        }

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        (Path(checkpoint_dir) / "stub").touch()


if __name__ == "__main__":
    main()
