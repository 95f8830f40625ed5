"""What a search finds of what a whole grid knows: the search played on a grid's recorded cells.

    python -m benchmarks.edge CELLS.parquet

Takes the cells of a report (runs/dense/report/cells.parquet) and lets the search ask for them,
once for the edges alone, once with the best learning rates, once as `verdicts` does: shares of the
grid's cells and steps, and of the lines for which the answer is the grid's, within one learning
rate or, for the best one, CLOSE_NATS of its loss; then the verdicts by each. Seeds of which a cell
has no result are left out. Trains nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import search_spaces
from analysis import estimators, hypotheses
from analysis.load import judge_finished
from analysis.tables import NO_EVIDENCE
from tune_study.config import ConfigError, Criterion, Search
from tune_study.search import edge
from tune_study.search.course import Course
from tune_study.search.ends import End, Line, Place
from tune_study.search.rounds import Rounds

KEYS = ["depth", "qk_norm", "seed"]
CLOSE_NATS = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cells", type=Path, help="cells.parquet of a study that ran its whole grid")
    cells = whole_seeds(pd.read_parquet(parser.parse_args().cells))
    lines = cells.groupby(KEYS).ngroups
    print(
        f"{len(cells)} cells, {lines} lines of {cells['lr'].nunique()} learning rates, "
        f"seeds {', '.join(map(str, sorted(cells['seed'].unique())))}"
    )
    flags = estimators.max_stable_lr(cells)
    print(f"lines that are not monotone: {(~flags['monotone']).sum()}")
    print("| search | cells | steps | maximum stable LR | edge most believed | best LR | rounds |")
    print("|---|---|---|---|---|---|---|")
    searches = {
        "edges": Search(best_lr=False),
        "edges and best LR": search_spaces.get("edge").search,
        "verdicts": search_spaces.get("verdicts").search,
    }
    tables = {"the whole grid": cells}
    for name, rules in searches.items():
        assert rules is not None
        row = compare(cells, rules)
        tables[name] = row["found"]
        best = "" if row["best"] is None else f"{row['best']:.1%}"
        print(
            f"| {name} | {row['cells']:.1%} | {row['steps']:.1%} | {row['edge']:.1%} | "
            f"{row['believed']:.1%} | {best} | {row['rounds']} |"
        )
        for line in row["missed"]:
            print(f"  missed: {line}")
    print("\nJudged by the whole grid, then by each search's cells alone:")
    for name, table in tables.items():
        print(f"- {name}: {verdicts(table)}")


def verdicts(cells: pd.DataFrame) -> str:
    """Each hypothesis with its verdict, and its parts as depth, effect and interval."""
    said = []
    for verdict in hypotheses.judge(cells, search_spaces.get("dense").margins):
        parts = [
            f"{'' if part.depth is None else f'depth {part.depth} '}{part.effect:.3g} "
            f"[{part.low:.3g}, {part.high:.3g}]"
            for part in verdict.parts
        ]
        said.append(f"{verdict.hypothesis} {verdict.verdict} ({'; '.join(parts)})")
    return ". ".join(said)


def ran(cells: pd.DataFrame, course: Course) -> np.ndarray:
    """Which cells a search asked for, a flag a row."""
    lrs = np.sort(cells["lr"].unique())
    asked = {(at.depth, at.arm, at.seed, lrs[place]) for at, place in course.asked}
    return np.array([key in asked for key in zip(*(cells[k] for k in [*KEYS, "lr"]), strict=True)])


def whole_seeds(cells: pd.DataFrame) -> pd.DataFrame:
    """The seeds of which every cell has a result.

    Raises:
        ConfigError: if there is none.
    """
    lost = cells.loc[cells["state"].isin(NO_EVIDENCE), "seed"].unique()
    kept = cells[~cells["seed"].isin(lost)].reset_index(drop=True)
    if kept.empty:
        raise ConfigError("cells: no seed has a result in every cell. Finish the study first.")
    return kept


def compare(cells: pd.DataFrame, rules: Search) -> dict[str, Any]:
    """The search's answers beside the grid's, as shares.

    Args:
        cells: of a whole grid.

    Returns:
        dict: cells, steps (shares of the grid's); edge (lines whose maximum stable LR lies within
        one learning rate of the grid's); believed (lines whose edge, where it is most believed to
        lie from an even prior, does: one wrong verdict moves it less); best (lines whose best LR
        does, or whose loss there is within CLOSE_NATS; None unless searched for); rounds; missed
        (a text a line); found (the table as the search leaves it).
    """
    lrs = np.sort(cells["lr"].unique())
    course = play(cells, rules)
    known = ran(cells, course)
    found = judged(cells, known)
    whole, part = (estimators.max_stable_lr(table) for table in (cells, found))
    apart = np.abs(_place(lrs, whole["low"]) - _place(lrs, part["low"]))
    missed = [
        f"depth {row.depth} {row.qk_norm} seed {row.seed}: {row.low:g} for {low:g}"
        for row, low, off in zip(part.itertuples(), whole["low"], apart, strict=True)
        if off > 1
    ]
    close = None
    if rules.best_lr:
        mine, best = estimators.best_lr(found), estimators.best_lr(cells)
        near = np.abs(_place(lrs, mine["value"]) - _place(lrs, best["value"])) <= 1
        close = float((near | (mine["loss"] - best["loss"] <= CLOSE_NATS)).mean())
    return {
        "cells": float(np.mean(known)),
        "steps": float(cells.loc[known, "step"].sum() / cells["step"].sum()),
        "edge": float((apart <= 1).mean()),
        "believed": float((np.abs(believed(cells, rules) - believed(found, rules)) <= 1).mean()),
        "best": close,
        "rounds": len(course.batches),
        "missed": missed,
        "found": found,
    }


def believed(cells: pd.DataFrame, rules: Search) -> np.ndarray:
    """The place of each line's edge most believed in, by all its verdicts."""
    grid = estimators.curves(cells)
    places = []
    for stable, unstable in zip(grid.stable, grid.unstable, strict=True):
        verdicts = {int(k): bool(stable[k]) for k in np.flatnonzero(stable | unstable)}
        after = edge.belief(verdicts, edge.prior(len(grid.lr)), rules.error)
        places.append(edge.within_one(after)[0])
    return np.array(places)


def play(cells: pd.DataFrame, rules: Search) -> Course:
    """The search, to its end, on cells that have all run."""
    lrs = np.sort(cells["lr"].unique())
    ends: dict[Place, End] = {}
    for cell in cells.itertuples():
        line = Line(int(cell.depth), str(cell.arm), int(cell.seed))
        diverged = cell.state == "diverged"
        place = int(np.searchsorted(lrs, cell.lr))
        ends[line, place] = End(cell.loss, cell.unigram_entropy, diverged)
    lines = sorted({line for line, _ in ends}, key=lambda at: (at.seed, at.depth, at.arm))
    return Course(Rounds(lines, lrs.tolist(), rules, Criterion()), ends.get)


def judged(cells: pd.DataFrame, asked: np.ndarray) -> pd.DataFrame:
    """The table as a search leaves it: judged by the cells asked for, the others untried."""
    rows = cells.to_dict("records")
    for row, known in zip(rows, asked, strict=True):
        if not known:
            row["state"] = "untried"
        elif row["state"] == "failed":
            row["state"] = "stable"  # finished: judged anew among fewer
    judge_finished(rows, Criterion())
    return pd.DataFrame(rows)


def _place(lrs: np.ndarray, values: pd.Series) -> np.ndarray:
    """Number of the learning rate; -1 below the lowest."""
    return np.searchsorted(lrs, values.to_numpy(float), side="right") - 1


if __name__ == "__main__":
    main()
