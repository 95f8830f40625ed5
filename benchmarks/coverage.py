"""Measured coverage of every interval and error rates of every verdict.

    python -m benchmarks.coverage [--studies N] [--world NAME] [--quick] [--json FILE]

Simulates whole studies with a known truth (analysis/simulate.py) on the pilot's grid, runs
the estimators on them, and counts. Coverage: share of 95 % intervals that hold the truth.
Width: the median one. Bias: mean estimate minus truth. The truth is put at eight places
between grid points in turn; `worst` is the coverage at the least favourable of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis import estimators, hypotheses, intervals
from analysis.simulate import Arm, World, draw, true_log_edges, true_thresholds
from tune_study.config import Margins, log_grid

Array = NDArray[np.float64]

LRS = log_grid(1e-3, 1.0, 4)
STEP = 0.25
PLACES = 8
SEEDS = (2, 3, 5, 10)
MARGINS = Margins()
MANY = 2000
"""Seeds that stand for all seeds where a truth is itself a mean over seeds."""

PILOT = World(on=Arm(edge=0.4, edge_sd=0.1, shoulder=0.17, slow_lr=8.1e-4))
"""On's edge is well inside the grid, so that the ratio has a truth at all places."""

WORLDS = {
    "pilot": PILOT,
    "steady edges": replace(
        PILOT,
        off=replace(PILOT.off, edge_sd=0.02),
        on=replace(PILOT.on, edge_sd=0.02),
        jitter=0.0,
    ),
    "wide edges": replace(
        PILOT, off=replace(PILOT.off, edge_sd=0.2), on=replace(PILOT.on, edge_sd=0.2)
    ),
    "failures stopped early": replace(PILOT, stopped=0.5),
}

SAME = replace(PILOT, on=PILOT.off)
FALLING = replace(PILOT, off=replace(PILOT.off, edge=0.16, depth_exponent=-1.0))

DEPTHS = (1, 2, 4)

VERDICT_WORLDS: dict[str, tuple[World, dict[str, str]]] = {
    "pilot-sized effect, no trend": (PILOT, {"H1": "holds", "H2": "holds", "H3": "fails"}),
    "no effect": (SAME, {"H1": "fails", "H2": "fails", "H3": "fails"}),
    "threshold ~ 1/depth": (FALLING, {"H1": "holds", "H2": "holds", "H3": "holds"}),
}
"""Worlds of three depths, and which hypotheses are true in them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--studies", type=int, default=2000, help="simulated studies a row")
    parser.add_argument("--quick", action="store_true", help="80 studies, 3 and 5 seeds")
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds a study (2 3 5 10)")
    parser.add_argument("--world", choices=WORLDS, help="intervals of this world only")
    parser.add_argument("--skip", choices=("intervals", "verdicts"), help="leave a half out")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    studies = 80 if args.quick else args.studies
    seeds = tuple(args.seeds or ((3, 5) if args.quick else SEEDS))
    start = time.perf_counter()
    result: dict[str, Any] = {"studies": studies, "level": intervals.LEVEL}
    if args.skip != "intervals":
        worlds = [args.world] if args.world else list(WORLDS)
        result["intervals"] = _show(interval_rows(studies, seeds, worlds), "intervals")
    if args.skip != "verdicts":
        result["verdicts"] = _show(
            verdict_rows(studies, [n for n in seeds if n in (3, 5)]), "verdicts"
        )
    result["seconds"] = round(time.perf_counter() - start, 1)
    text = json.dumps(result, allow_nan=False, indent=1)
    if args.json:
        args.json.write_text(text + "\n")
    else:
        print(text)


def _show(rows: Iterator[dict[str, Any]], title: str) -> list[dict[str, Any]]:
    """Prints rows as they come, aligned under a header, and returns them."""
    print(f"\n{title}")
    kept: list[dict[str, Any]] = []
    for row in rows:
        if not kept:
            print("  ".join(f"{name:>12}" if name not in _WIDE else f"{name:32}" for name in row))
        kept.append(row)
        print("  ".join(_cell(name, value) for name, value in row.items()))
        sys.stdout.flush()
    return kept


_WIDE = ("world", "estimate", "method")


def _cell(name: str, value: Any) -> str:
    if name in _WIDE:
        return f"{value:32}"
    return f"{value if isinstance(value, str) else format(value, '.4g'):>12}"


# ------------------------------------------------------------------- intervals


def interval_rows(
    studies: int, seeds: tuple[int, ...], worlds: list[str]
) -> Iterator[dict[str, Any]]:
    """One row a (world, number of seeds, estimate, method)."""
    for name in worlds:
        world = WORLDS[name]
        truths = [_truth(world, place) for place in range(PLACES)]
        for n in seeds:
            batches = [_sample(world, n, studies // PLACES, place) for place in range(PLACES)]
            for estimate in ("LR sensitivity, off", "drop of LR sensitivity"):
                for method, bounds in intervals.MEAN_METHODS.items():
                    pieces = [bounds(batch[estimate]) for batch in batches]
                    means = [batch[estimate].mean(axis=1) for batch in batches]
                    yield _row(name, n, estimate, method, pieces, means, truths)
            for estimate, width in _BINNED.items():
                bins = [_telling(batch[estimate]) for batch in batches]
                closed = [_closed(one, width) for one in bins]
                middles = [one.mean(axis=2) for one in closed]
                means = [middle.mean(axis=1) for middle in middles]
                for method, bounds in intervals.MEAN_METHODS.items():
                    pieces = [bounds(middle) for middle in middles]
                    yield _row(name, n, estimate, f"{method} of middles", pieces, means, truths)
                pieces = [_bins(one, width) for one in bins]
                yield _row(name, n, estimate, "interval-censored t", pieces, means, truths)


_BINNED = {"log10 max stable LR, off": STEP, "log10 max stable LR ratio": 2 * STEP}
"""Estimates known up to a bin, and the bin's width in decades. A bin with an open end is
closed a width further on for the methods that take middles, else they had no value at all."""


def _row(
    world: str,
    n: int,
    estimate: str,
    method: str,
    pieces: list[tuple[Array, Array]],
    means: list[Array],
    truths: list[dict[str, float]],
) -> dict[str, Any]:
    hits = [
        (low <= truth[estimate]) & (truth[estimate] <= high)
        for (low, high), truth in zip(pieces, truths, strict=True)
    ]
    widths = np.concatenate([high - low for low, high in pieces])
    width = float(np.median(widths))
    errors = np.concatenate([m - t[estimate] for m, t in zip(means, truths, strict=True)])
    return {
        "world": world,
        "estimate": estimate,
        "method": method,
        "seeds": n,
        "coverage": float(np.concatenate(hits).mean()),
        "worst": float(min(hit.mean() for hit in hits)),
        "width": width if np.isfinite(width) else "open",
        "bias": float(errors.mean()),
    }


def _shift(place: int) -> float:
    return (place + 0.5) / PLACES * STEP


def _truth(world: World, place: int) -> dict[str, float]:
    """True values with everything moved to a place between two grid points.

    Of runs that all go to their end: stopping early must not change what is estimated.
    """
    world = replace(world, stopped=0.0)
    one = draw(world, LRS, [1], MANY, 1, np.random.default_rng([1, place]), _shift(place))
    sensitivity = estimators.lr_sensitivity(one.cells()).groupby("qk_norm")["value"].mean()
    off, on = true_log_edges(world, [1])[0]
    return {
        "LR sensitivity, off": float(sensitivity["off"]),
        "drop of LR sensitivity": float(sensitivity["off"] - sensitivity["rmsnorm"]),
        "log10 max stable LR, off": float(off) + _shift(place),
        "log10 max stable LR ratio": float(on - off),
    }


def _sample(world: World, n: int, studies: int, place: int) -> dict[str, Array]:
    """Per-seed estimates of many studies: shape (studies, n), or (studies, n, 2) for bins."""
    rng = np.random.default_rng([2, n, place])
    drawn = draw(world, LRS, [1], n, studies, rng, _shift(place))
    cells = drawn.cells(slice(None))
    sensitivity = _by_arm(estimators.lr_sensitivity(cells), ["value"], studies, n)[..., 0]
    edge = np.log10(_by_arm(estimators.max_stable_lr(cells), ["low", "high"], studies, n))
    return {
        "LR sensitivity, off": sensitivity[0],
        "drop of LR sensitivity": sensitivity[0] - sensitivity[1],
        "log10 max stable LR, off": edge[0],
        "log10 max stable LR ratio": edge[1] - edge[0][..., ::-1],
    }


def _by_arm(table: pd.DataFrame, columns: list[str], studies: int, n: int) -> Array:
    """Columns of a table sorted by arm and seed, shape (arms, studies, n, columns)."""
    arms = [
        table.loc[table["qk_norm"] == arm, columns].to_numpy(float) for arm in ("off", "rmsnorm")
    ]
    return np.stack([values.reshape(studies, n, len(columns)) for values in arms])


def _telling(bins: Array) -> Array:
    """Without the rare studies in which a seed's bin is open on both sides and says nothing."""
    return bins[np.isfinite(bins).any(axis=2).all(axis=1)]


def _closed(bins: Array, width: float) -> Array:
    return np.stack(intervals.closed_bins(bins[..., 0], bins[..., 1], width), axis=-1)


def _bins(bins: Array, width: float) -> tuple[Array, Array]:
    """bin_bounds, worked out once for each pattern of bins that occurs."""
    base = np.where(np.isfinite(bins), bins, np.inf).min(axis=(1, 2), keepdims=True)
    moved = bins - base
    ends = np.where(np.isfinite(moved), np.round(moved / STEP * 4), np.sign(moved) * 1e6)
    pattern = ends.reshape(len(bins), -1)
    _, first, inverse = np.unique(pattern, axis=0, return_index=True, return_inverse=True)
    low, high = intervals.bin_bounds(moved[first, :, 0], moved[first, :, 1], width)
    start = base[:, 0, 0]
    return low[inverse.ravel()] + start, high[inverse.ravel()] + start


# -------------------------------------------------------------------- verdicts


def verdict_rows(studies: int, seeds: list[int]) -> Iterator[dict[str, Any]]:
    """One row a (world, number of seeds, hypothesis): shares of each verdict.

    The last rows put one margin of the pilot's world exactly where the truth is, in studies of
    one depth, with the other margins met: there a hypothesis is hardest to keep apart from its
    contrary, and `supported` is wrong just outside, `contradicted` just inside. `wrong` is the
    larger share and is to stay at or under 0.05.
    """
    for name, (world, truth) in VERDICT_WORLDS.items():
        for n in seeds:
            every = _judge(world, DEPTHS, n, studies, [MARGINS] * PLACES)
            for hypothesis, holds in truth.items():
                error = "contradicted" if holds == "holds" else "supported"
                yield _verdict_row(name, hypothesis, n, holds, every[hypothesis], [error])
    for hypothesis, margin in (
        ("H1", "equivalence"),
        ("H1", "superiority"),
        ("H2", "stable_lr_ratio"),
        ("H2", "sensitivity"),
        ("H3", "depth_slope"),
    ):
        depths = DEPTHS if hypothesis == "H3" else (2,)
        world = FALLING if hypothesis == "H3" else PILOT
        margins = [_margin_at_truth(world, depths, margin, place) for place in range(PLACES)]
        for n in seeds:
            shares = _judge(world, depths, n, studies, margins)[hypothesis]
            wrong = ["supported", "contradicted"]
            yield _verdict_row(f"{margin} = truth", hypothesis, n, "margin", shares, wrong)


def _judge(
    world: World, depths: tuple[int, ...], n: int, studies: int, margins: list[Margins]
) -> dict[str, dict[str, float]]:
    """Share of each verdict on each hypothesis, over studies of n seeds at every place."""
    outcomes: dict[str, list[str]] = {}
    for place in range(PLACES):
        rng = np.random.default_rng([3, n, place])
        count = max(studies // PLACES, 1)
        drawn = draw(world, LRS, depths, n, count, rng, _shift(place))
        evidence = hypotheses.gather(drawn.cells(slice(None)), "rmsnorm", margins[place])
        for study in range(count):
            own = evidence.of_seeds(range(study * n, (study + 1) * n))
            for verdict in hypotheses.judge_evidence(own, margins[place]):
                outcomes.setdefault(verdict.hypothesis, []).append(verdict.verdict)
    return {
        hypothesis: {outcome: verdicts.count(outcome) / len(verdicts) for outcome in _OUTCOMES}
        for hypothesis, verdicts in outcomes.items()
    }


def _verdict_row(
    world: str, hypothesis: str, n: int, truth: str, shares: dict[str, float], wrong: list[str]
) -> dict[str, Any]:
    return {
        "world": world,
        "hypothesis": hypothesis,
        "seeds": n,
        "truth": truth,
        **shares,
        "wrong": max(shares[outcome] for outcome in wrong),
    }


def _margin_at_truth(world: World, depths: tuple[int, ...], margin: str, place: int) -> Margins:
    """The default margins, with one moved to the true value of the quantity it is about."""
    if margin == "depth_slope":
        thresholds = true_thresholds(world, depths, MARGINS.necessity)
        return MARGINS.replace(depth_slope=-float(np.polyfit(np.log10(depths), thresholds, 1)[0]))
    drawn = draw(world, LRS, depths, MANY, 1, np.random.default_rng([4, place]), _shift(place))
    evidence = hypotheses.gather(drawn.cells(), "rmsnorm", MARGINS)
    low, high = (float(gain.mean()) for _, _, gain in hypotheses.mean_gains(evidence))
    off, on = true_log_edges(world, depths)[0]
    value = {
        "equivalence": low,
        "superiority": high,
        "stable_lr_ratio": 10 ** (on - off),
        "sensitivity": float(evidence.drop.mean()),
    }[margin]
    return MARGINS.replace(**{margin: float(value)})


_OUTCOMES = ("supported", "inconclusive", "contradicted")


if __name__ == "__main__":
    main()
