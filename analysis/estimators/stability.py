"""Where along the learning rates a seed is stable, best, and good enough."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from analysis.estimators.grid import (
    Array,
    Curves,
    Flags,
    curves,
    lost_cells,
    none_of,
    stable_bins,
    with_counts,
)
from analysis.intervals import Interval, bin_interval


def max_stable_lr(cells: pd.DataFrame) -> pd.DataFrame:
    """Maximum stable LR of each (depth, qk_norm, seed), as the bin [low, high) it lies in.

    The highest learning rate such that it and all lower ones are stable is lr_k; the edge
    itself lies between lr_k and the next grid point. Missing and errored cells could be
    either: `low` takes them for unstable, `high` for stable, so that they widen the bin. Those
    that a search left untried are passed over: all lower ones are all that ran.

    Returns:
        DataFrame: depth, qk_norm, seed, then
        value: `low` where there is one, else `high`: read with `censored`;
        low, high: the bin, 0 or inf where open;
        censored: "" | "above" (no unstable cell: >= value) | "below" (no stable cell below
            the first unstable one: < value); value is NaN if nothing is known;
        monotone: no stable cell lies above an unstable one;
        widened: cells without evidence widened the bin;
        counts and reason.
    """
    grid = curves(cells)
    low, high = stable_bins(grid)
    value = np.where(low > 0, low, np.where(np.isfinite(high), high, np.nan))
    table = grid.keys.copy()
    table["value"], table["low"], table["high"] = value, low, high
    table["censored"] = np.where(
        np.isnan(value), "", np.where(low == 0, "below", np.where(np.isinf(high), "above", ""))
    )
    seen_unstable = np.logical_or.accumulate(grid.unstable, axis=1)
    table["monotone"] = none_of(seen_unstable & grid.stable)
    inside = (grid.lr > low[:, None]) & (grid.lr < high[:, None])
    table["widened"] = ~none_of(inside & grid.unknown)
    table["reason"] = lost_cells(grid)
    return with_counts(table, grid.state)


def best_lr(cells: pd.DataFrame) -> pd.DataFrame:
    """Learning rate of the lowest final loss of each (depth, qk_norm, seed), stable cells only.

    Returns:
        DataFrame: depth, qk_norm, seed, value, loss, censored ("below": at the lowest LR that
        is known, the best may be lower; "above": likewise), counts, reason.
    """
    grid = curves(cells)
    table = grid.keys.copy()
    table["value"], table["loss"], table["censored"] = best_of(grid)
    table["reason"] = lost_cells(grid)
    return with_counts(table, grid.state)


def best_of(grid: Curves) -> tuple[Array, Array, NDArray[Any]]:
    """LR, loss and censoring of the lowest final loss of a stable cell in each row."""
    loss = np.where(grid.stable & np.isfinite(grid.loss), grid.loss, np.inf)
    return lowest_loss(grid.lr, loss, ~(grid.unknown | grid.untried))


def lowest_loss(lr: Array, loss: Array, known: Flags) -> tuple[Array, Array, NDArray[Any]]:
    """LR, loss and censoring of the lowest loss on the last axis; inf = not eligible."""
    at = loss.argmin(axis=-1)
    lowest = loss.min(axis=-1)
    some = np.isfinite(lowest)
    first, last = known.argmax(axis=-1), len(lr) - 1 - known[..., ::-1].argmax(axis=-1)
    censored = np.where(at == first, "below", np.where(at == last, "above", ""))
    return (
        np.where(some, lr[at], np.nan),
        np.where(some, lowest, np.nan),
        np.where(some, censored, ""),
    )


def usable_window(cells: pd.DataFrame, margin: float) -> pd.DataFrame:
    """Decades of LR around the best one within `margin` nats of the best loss.

    Only the run of neighbouring grid points that includes the best LR counts. The window's
    ends lie between the last usable and the first unusable grid point: `decades` counts from
    usable to usable, `decades_most` from unusable to unusable.

    Returns:
        DataFrame: depth, qk_norm, seed, low, high, decades, decades_most (inf where the grid
        ends first), censored ("", "below", "above", "both": which end ran off the grid or
        into cells without evidence), counts, reason.
    """
    grid = curves(cells)
    loss = np.where(grid.stable & np.isfinite(grid.loss), grid.loss, np.inf)
    best = loss.min(axis=1, keepdims=True)
    usable = loss <= best + margin
    usable[~np.isfinite(best[:, 0])] = False
    at = loss.argmin(axis=1)
    log_lr, unknown = np.log10(grid.lr), grid.unknown | grid.untried
    right, right_most, right_open = _reach(log_lr, usable, unknown, at)
    left, left_most, left_open = _reach(
        -log_lr[::-1], usable[:, ::-1], unknown[:, ::-1], len(log_lr) - 1 - at
    )
    table = grid.keys.copy()
    none = ~np.isfinite(best[:, 0])
    table["low"] = np.where(none, np.nan, grid.lr[len(log_lr) - 1 - left])
    table["high"] = np.where(none, np.nan, grid.lr[right])
    table["decades"] = np.where(none, np.nan, log_lr[right] - log_lr[len(log_lr) - 1 - left])
    table["decades_most"] = np.where(none, np.nan, right_most + left_most)
    table["censored"] = np.select(
        [none, left_open & right_open, left_open, right_open], ["", "both", "below", "above"], ""
    )
    table["reason"] = lost_cells(grid)
    table.loc[none, "reason"] = "no stable cell"
    return with_counts(table, grid.state)


def _reach(
    x: Array, usable: Flags, unknown: Flags, start: NDArray[np.intp]
) -> tuple[NDArray[np.intp], Array, Flags]:
    """How far to the right of `start` the run of usable points goes.

    Returns:
        Index of its last point; x of the first point known to be unusable (inf if none);
        whether the point after the last is beyond the grid or unknown.
    """
    n = len(x)
    position = np.arange(n)
    right = position > start[:, None]
    stop = np.where(right & ~usable, position, n).min(axis=1)
    known_stop = np.where(right & ~usable & ~unknown, position, n).min(axis=1)
    beyond = np.append(x, np.inf)
    open_ended = (stop == n) | np.append(unknown, np.zeros((len(unknown), 1), bool), axis=1)[
        np.arange(len(stop)), stop
    ]
    return np.asarray(stop - 1), beyond[known_stop], open_ended


def log_interval(low: ArrayLike, high: ArrayLike, step: float, level: float) -> Interval:
    """Interval of the mean log10 of bins of learning rates; 0 and inf are open ends."""
    with np.errstate(divide="ignore"):
        return bin_interval(np.log10(np.asarray(low)), np.log10(np.asarray(high)), step, level)
