"""Time to a verdict: from prepared data to H2's verdict with edges at an eighth of a decade.

    python -m benchmarks.verdict [--share 0.1] [--dense FOLDER] [--quick] [--json FILE]

- ours: `python -m tune_study sweep verdicts`, from the start of the process to its end, without
  the report, then reading the study and judging it; once.
- the plain way: every cell of `dense` by plain Ray Tune, a process a trial with two threads, Tune's
  defaults, over the plain loop to its last step. A random share of the cells is timed (`fit`
  alone) and scaled to all of them.

With --dense, the folder of a finished study `dense`, its verdicts are printed beside ours.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

import search_spaces
from analysis import hypotheses
from analysis.load import Results, load
from benchmarks.paired import options_of, show
from benchmarks.sweep import plain_tune, timed_sweep
from tune_study import device
from tune_study.config import Study
from tune_study.data import prepare

QUICK = ["--lr", "1e-3,5.62e-3,3.16e-2,1.78e-1,1", "--depth", "1", "--seed", "0,1"]
"""A narrowed study for the quick mode, of few steps."""

QUICK_STEPS = ["--set", "steps=40", "--set", "warmup_steps=4"]


def main() -> None:
    """Prints all figures, and writes them as JSON if asked."""
    parser = options_of(__doc__, quick="few learning rates and steps")
    parser.add_argument("--share", type=float, default=0.1, help="of dense's cells, plainly run")
    parser.add_argument("--dense", type=Path, help="a finished study `dense`, to compare verdicts")
    options = parser.parse_args()
    words = [*QUICK, *QUICK_STEPS] if options.quick else []
    with tempfile.TemporaryDirectory() as scratch:
        show(measure(Path(scratch), words, options.share), options.json)
    if options.dense is not None:
        print(f"dense: {verdicts(load(options.dense))}")


def measure(scratch: Path, words: list[str], share: float) -> dict[str, float]:
    """All figures.

    Args:
        words: what narrows the study.
        share: of the grid's cells that the plain way is timed on.
    """
    study = search_spaces.get("verdicts")
    prepare(study.base.data, scratch / "data")
    started = time.perf_counter()
    timed_sweep("verdicts", scratch, *words)
    results = load(scratch / "runs" / "bench")
    said = verdicts(results)
    ours = time.perf_counter() - started
    print(f"ours: {said}")
    plain = plainly(results.study, scratch, share)
    asked = int((results.cells["state"] != "untried").sum())
    return {
        "cells of the grid": len(results.study),
        "cells the search ran": asked,
        "share of the grid's steps": float(
            results.cells["step"].sum() / (len(results.study) * results.study.base.steps)
        ),
        "to the verdict by the search, s": ours,
        "to the verdict the plain way, s": plain,
        "times faster": plain / ours,
    }


def plainly(study: Study, scratch: Path, share: float) -> float:
    """Seconds of the whole grid the plain way, from a random share of its cells."""
    cells = [device.settle(cell) for cell in study.cells()]
    sample = random.Random(0).sample(cells, max(2, round(share * len(cells))))
    took = plain_tune(sample, scratch / "plain", scratch, loop="plain")
    return took * len(cells) / len(sample)


def verdicts(results: Results) -> str:
    """Each hypothesis with its verdict and how many parts hold, on one line."""
    judged = hypotheses.judge(results.cells, results.study.margins)
    return "; ".join(
        f"{v.hypothesis} {v.verdict} ({sum(p.verdict == 'supported' for p in v.parts)} of "
        f"{len(v.parts)} parts)"
        for v in judged
    )


if __name__ == "__main__":
    main()
