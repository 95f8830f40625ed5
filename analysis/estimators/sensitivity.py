"""LR sensitivity: what the wrong learning rate costs, on average over the grid."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.estimators.grid import (
    DIVERGED,
    UNTRIED,
    Array,
    Curves,
    curves,
    lost_cells,
    uneven_spacing,
    with_counts,
)

STOPPED_SHARE = 0.97
"""Where a stopped run would have ended, on the way from the best loss to the unigram entropy H1:
the decaying learning rate takes it a little below the plateau it was stopped on. Measured on runs
that were not stopped (docs/divergence.md)."""


def lr_sensitivity(
    cells: pd.DataFrame, lr_range: tuple[float, float] | None = None
) -> pd.DataFrame:
    """LR sensitivity of each (depth, qk_norm, seed): Wortsman et al. 2023 (2309.14322), sec. 2.

        mean over the grid's LRs in [a, b] of min(l(lr), l0) - l*

    with l0 the cell's measured loss at init and l* the lowest loss of a stable cell in the
    range. A cell that was stopped early counts at its last loss, but not above
    l* + STOPPED_SHARE (H1 - l*); what it would have come to is unknown between l* (`lower`) and
    l0 (`upper`). Of a grid that a search left in part untried, the evenly spaced part counts that
    ran everywhere (`Curves.spread`); `n_lrs` says how many learning rates those are.

    Args:
        lr_range: a, b, both included; the whole grid if not given.

    Returns:
        DataFrame: depth, qk_norm, seed, value, lower, upper, lr_low, lr_high, n_lrs, counts,
        reason. A grid with missing or errored cells, one without such a part, or one that is not
        log-spaced, has NaN for a value, and a reason.
    """
    grid = curves(cells).within(lr_range)
    grid = grid.columns(grid.spread)
    table = grid.keys.copy()
    table["value"], table["lower"], table["upper"] = sensitivities(grid)
    table["lr_low"], table["lr_high"], table["n_lrs"] = grid.lr[0], grid.lr[-1], len(grid.lr)
    table["reason"] = lost_cells(grid, UNTRIED)
    no_best = (table["reason"] == "").to_numpy() & ~grid.stable.any(axis=1)
    table.loc[no_best, "reason"] = "no stable cell in the range, so no best loss"
    no_init = (table["reason"] == "") & table["value"].isna()
    table.loc[no_init, "reason"] = "loss at init or final loss not measured"
    if uneven := uneven_spacing(grid.lr):
        table["reason"] = uneven
    return with_counts(table, grid.state)


def sensitivities(grid: Curves) -> tuple[Array, Array, Array]:
    """LR sensitivity of each row, and the lowest and highest it may be, shape (G,).

    NaN where a cell is lost or none is stable, and everywhere if the grid is not log-spaced.
    """
    if uneven_spacing(grid.lr):
        unknown = np.full(len(grid.state), np.nan)
        return unknown, unknown.copy(), unknown.copy()
    best = np.where(grid.stable, grid.clamped, np.inf).min(axis=1, keepdims=True)
    best = np.where(np.isfinite(best), best, np.nan)
    stopped = grid.state == DIVERGED
    plateau = best + STOPPED_SHARE * (grid.unigram_entropy - best)
    guessed = stopped & np.isfinite(grid.loss)
    supposed = (
        np.where(guessed, np.fmin(grid.clamped, plateau), grid.clamped),
        np.where(stopped, best, grid.clamped),
        np.where(stopped, grid.loss_init, grid.clamped),
    )
    value, lower, upper = (np.maximum(loss - best, 0).mean(axis=1) for loss in supposed)
    return value, lower, upper
