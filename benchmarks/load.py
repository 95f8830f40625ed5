"""Reading a study back: seconds and memory for a large one, and a ratio to the usual way.

    python -m benchmarks.load [--cells 10000] [--reports 100] [--quick] [--json FILE]

The large study is written here in the sweep's own format, with made-up rows. The ratio compares
`analysis.load`, which also judges every cell, with a loop over Ray's
`ExperimentAnalysis.trial_dataframes`, which does not, on one Tune experiment of a real
study given with --study.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from analysis import estimators, hypotheses
from analysis.load import load
from benchmarks.paired import show
from tune_study.config import Study, TrialConfig, log_grid
from tune_study.identity import identity
from tune_study.records import report_steps
from tune_study.store import StudyFolder

MANIFEST = {
    "checksum": "made up",
    "unigram_entropy": 4.9,
    "loss_floor": 0.2,
    "bytes_per_token": 2.8,
}


def main() -> None:
    """Prints a table, and writes it as JSON if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cells", type=int, default=10_000)
    parser.add_argument("--reports", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="200 cells x 20 reports")
    parser.add_argument("--study", type=Path, help="a real study's folder, such as runs/pilot")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    cells, reports = (200, 20) if options.quick else (options.cells, options.reports)
    with tempfile.TemporaryDirectory() as scratch:
        figures = large(Path(scratch), cells, reports)
    if options.study:
        figures |= against_ray(options.study)
    show(figures, options.json)


def large(scratch: Path, cells: int, reports: int) -> dict[str, float]:
    """Time and peak memory of `load` and all estimators on a made-up study."""
    study = write(scratch, cells, reports)
    before = peak_gib()
    started = time.perf_counter()
    results = load(scratch / study.name)
    loaded = time.perf_counter()
    if len(results.history) != len(study) * reports:
        sys.exit(f"expected {len(study) * reports} rows, found {len(results.history)}")
    estimators.arm_summary(results.cells, study.margins)
    estimators.necessity_threshold(results.cells, study.margins.necessity)
    estimators.steps_to_threshold(results.cells, results.history, 2.0)
    hypotheses.judge(results.cells, study.margins)
    done = time.perf_counter()
    return {
        "cells": len(study),
        "rows": len(results.history),
        "load, s": loaded - started,
        "estimators and verdicts, s": done - loaded,
        "peak memory, GiB": peak_gib(),
        "of which before loading, GiB": before,
    }


def write(runs: Path, cells: int, reports: int) -> Study:
    """A study of about `cells` cells with `reports` rows each, as a sweep leaves it."""
    lrs = log_grid(1e-3, 1.0, 4)
    seeds = max(1, round(cells / (len(lrs) * 4)))
    study = Study(
        name="large",
        base=TrialConfig(device="cpu", steps=20 * reports, report_every=20),
        axes={
            "lr": lrs,
            "depth": (2, 4),
            "qk_norm": ("off", "rmsnorm"),
            "seed": tuple(range(seeds)),
        },
    )
    folder = StudyFolder(runs, study.name)
    folder.write(study, MANIFEST)
    rng = np.random.default_rng(0)
    measured = {depth: [_measured(depth, rng) for _ in range(50)] for depth in (2, 4)}
    for config in study.cells():
        trial = folder.experiments / "sweep-001" / config.label
        trial.mkdir(parents=True)
        name = identity(config, MANIFEST["checksum"])
        cell = {"label": config.label, "identity": name, **config.model_dump(mode="json")}
        (trial / "params.json").write_text(json.dumps({"cell": cell}))
        edge = 0.06 if config.qk_norm == "off" else 0.4
        final = (4.8 if config.lr > edge else 0.9) + rng.random() / 50
        texts = measured[config.depth]
        with (trial / "result.json").open("w") as file:
            for k, step in enumerate(report_steps(config)):
                row = json.dumps(_row(config, name, step, final))
                file.write(f"{row[:-1]}, {texts[k % len(texts)]}}}\n")
    return study


def _row(config: TrialConfig, name: str, step: int, final: float) -> dict[str, Any]:
    """What differs from row to row, under the names and in the digits of a real one."""
    loss = final + 5.0 * 2.0 ** (-step / 200)
    return {
        "cell": config.label,
        "identity": name,
        "data/unigram_entropy": MANIFEST["unigram_entropy"],
        "params": 42_144,
        "device": "cpu (made up)",
        "precision": "fp32",
        "threads": 1,
        "step": step,
        "val/loss": loss,
        "val/loss_init": 6.247819900512695,
        "val/loss_min": loss,
        "train/loss": loss + 0.01,
        "train/loss_last": loss,
        "train/loss_max": loss + 0.2,
        "train/loss_ema": loss,
        "train/loss_ema_min": loss,
        "nonfinite_step": None,
        "lr_now": config.lr * (1 - step / config.steps),
        "time/train_s": step / 173,
        "nonfinite": "",
        "resumed_step": 0,
        "checkpoints_skipped": [],
        "done": step == config.steps,
        "training_iteration": step // 20,
        "trial_id": "54786_00072",
        "timestamp": 1795961649,
    }


def _measured(depth: int, rng: np.random.Generator) -> str:
    """The metrics that take most of a row's bytes, as JSON without its braces."""
    probed = ("attn/entropy", "attn/entropy_normalised", "attn/max_logit", "attn/sink")
    names = [*probed, "act/kurtosis", "act/massive"]
    row = {"train/losses": [float(f"{x:.6g}") for x in 1 + rng.random(20)]}
    row |= {f"{name}/layer_{layer}": 3 * rng.random() for layer in range(depth) for name in names}
    row |= {name: 3 * rng.random() for name in names}
    grad = ("grad/norm", "grad/norm_max", "grad/clipped_share", "time/tokens_per_s")
    row |= {name: rng.random() for name in grad} | {"grad/clipped_steps": 17}
    return json.dumps(row)[1:-1]


def against_ray(study: Path) -> dict[str, float]:
    """How many times longer the usual way takes on a real study's experiments."""
    import pandas as pd
    from ray.tune import ExperimentAnalysis

    experiments = sorted((study / "tune").glob("sweep-*"))
    started = time.perf_counter()
    for path in experiments:
        pd.concat(list(ExperimentAnalysis(str(path.resolve())).trial_dataframes.values()))
    usual = time.perf_counter() - started
    started = time.perf_counter()
    load(study)
    ours = time.perf_counter() - started
    return {"usual way, s": usual, "load, s, on the same": ours, "ratio": usual / ours}


def peak_gib() -> float:
    """Peak resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20


if __name__ == "__main__":
    main()
