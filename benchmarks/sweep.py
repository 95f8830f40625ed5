"""A sweep's wall time, against bare training and against plain Ray Tune, on the pilot study.

    python -m benchmarks.sweep [--seeds 3] [--share 0.1] [--repeats 5] [--quick] [--json FILE]

- plan: what `python -m tune_study plan pilot` says beforehand.
- ours: `python -m tune_study sweep pilot`, from the start of the process to its end, without the
  report; once.
- bare: the same cells in a loop over the Trainer, with the same rule of divergence and no Ray, as
  many processes at a time as the machine has cores, one thread each. What a sweep cannot beat.
- plain Tune: a class Trainable over the same Trainer and rule, Tune's defaults, a process a trial,
  two threads a trial.

Bare and plain Tune run a random share of the cells, in turns, a new sample each round, and are
scaled to all of them; of plain Tune `fit` is timed, without the start of Ray.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import search_spaces
from benchmarks.paired import options_of, show
from tune_study import cost, device
from tune_study import sweep as engine
from tune_study.concurrency import policy
from tune_study.config import Study, TrialConfig
from tune_study.data import open_tokens, prepare
from tune_study.divergence import Row, diverged
from tune_study.store import StudyFolder
from tune_study.trainer import Trainer

ROOT = Path(__file__).resolve().parents[1]
CORES = os.cpu_count() or 1


def main() -> None:
    """Prints all figures, and writes them as JSON if asked."""
    parser = options_of(__doc__, quick="a tiny study, one round")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.1, help="of the cells, for the others")
    options = parser.parse_args()
    study = search_spaces.get("smoke" if options.quick else "pilot")
    if not options.quick:
        axes = dict(study.axes) | {"seed": tuple(range(options.seeds))}
        study = study.replace(axes=axes)
    share, repeats = (0.5, 1) if options.quick else (options.share, options.repeats)
    with tempfile.TemporaryDirectory() as scratch:
        show(measure(study, Path(scratch), share, repeats), options.json)


def measure(study: Study, scratch: Path, share: float, repeats: int) -> dict[str, float]:
    """All figures of one study."""
    prepare(study.base.data, scratch / "data")
    planned = plan(study, scratch)
    ours = sweep(study, scratch)
    cells = [device.settle(cell) for cell in study.cells()]
    bare_s, plain_s = [], []
    for turn in range(repeats):
        sample = random.Random(turn).sample(cells, max(CORES, round(share * len(cells))))
        scale = len(cells) / len(sample)
        bare_s.append(scale * bare(sample, scratch))
        plain_s.append(scale * plain_tune(sample, scratch / f"plain-{turn}", scratch))
    return {
        "cells": len(cells),
        "plan, shortest, s": planned[0],
        "plan, longest, s": planned[1],
        "plan's middle, times the sweep": statistics.mean(planned) / ours,
        "sweep, s": ours,
        "sweep, cells/hour": 3600 * len(cells) / ours,
        "bare training on all cores, s": statistics.median(bare_s),
        "sweep, times bare training": statistics.median(ours / s for s in bare_s),
        "plain Tune, s": statistics.median(plain_s),
        "plain Tune, cells/hour": 3600 * len(cells) / statistics.median(plain_s),
        "cells/hour, times plain Tune": statistics.median(s / ours for s in plain_s),
    }


def plan(study: Study, scratch: Path) -> tuple[float, float]:
    """Seconds that `plan` says a sweep would take, shortest and longest."""
    base = device.settle(study.base)
    folder = StudyFolder(scratch / "runs", "planned")
    asked = engine.plan(study.replace(base=base), folder, "", retry_errored=True)
    vocab_size = open_tokens(base.data, scratch / "data", verify=False).vocab_size
    return cost.estimate(asked, vocab_size, policy(base), disk=0).seconds


def sweep(study: Study, scratch: Path) -> float:
    """Seconds of the sweep as a person starts it."""
    seeds = ",".join(map(str, dict(study.axes)["seed"]))
    return timed_sweep(study.name, scratch, "--seed", seeds)


def timed_sweep(name: str, scratch: Path, *words: str) -> float:
    """Seconds from the start of `sweep NAME WORDS`, under the name `bench`, to its end."""
    command = [sys.executable, "-m", "tune_study", "sweep", name, "--name", "bench", *words]
    environment = os.environ | {"RUNS": str(scratch / "runs"), "DATA": str(scratch / "data")}
    started = time.perf_counter()
    subprocess.run(
        [*command, "--no-report"],
        check=True,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - started


def bare(cells: Sequence[TrialConfig], scratch: Path) -> float:
    """Seconds of training these cells with nothing around it, on all cores.

    The sum of the cells' times over the number of cores: no core waits at the end.
    """
    with get_context("spawn").Pool(CORES) as pool:
        pool.map(_warm, range(CORES), chunksize=1)
        work = [(cell, scratch / "data") for cell in cells]
        return sum(pool.imap_unordered(_train, work, chunksize=1)) / CORES


def _warm(number: int) -> None:
    """Imports done before the clock starts."""


def _train(work: tuple[TrialConfig, Path]) -> float:
    started = time.perf_counter()
    for _ in rows(*work):
        pass
    return time.perf_counter() - started


def rows(cell: TrialConfig, data: Path) -> Any:
    """The reports of a cell up to its end or its divergence."""
    rules = search_spaces.get("pilot").criterion
    tokens = open_tokens(cell.data, data, verify=False)
    trainer, history = Trainer(cell, tokens), list[Row]()
    while not trainer.finished:
        row = trainer.train(cell.report_every)
        row["data/unigram_entropy"] = tokens.manifest.unigram_entropy
        history.append(row)
        yield row
        if diverged(history, rules, cell.warmup_steps):
            return


def plain_tune(
    cells: Sequence[TrialConfig], storage: Path, scratch: Path, loop: str = "trainer"
) -> float:
    """Seconds that plain Tune's `fit` takes on these cells, by the loop of that name."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    work = [cell.replace(threads=2).model_dump_json() for cell in cells]
    command = [
        sys.executable,
        "-m",
        "benchmarks.plain_tune",
        loop,
        storage,
        scratch / "data",
        *work,
    ]
    done = subprocess.run(
        list(map(str, command)), check=True, cwd=ROOT, env=environment, capture_output=True
    )
    return float(done.stdout.split()[-1])


if __name__ == "__main__":
    main()
