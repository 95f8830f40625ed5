"""Estimators over the tidy tables: what a study says, seed by seed and arm by arm.

Every function takes the `cells` table (`history` where it says so) of analysis/tables.py
and returns a new table; nothing is modified, row order and repeated rows do not matter. The
state of a cell is taken from the table, never judged again. A cell that is missing or
errored is no evidence: it makes a value NaN, with the reason beside it, or widens a bin; it
never drops out of a mean. Losses are in nats per token. docs/estimators.md has the formulas
and their sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from analysis.intervals import (
    LEVEL,
    Interval,
    bin_interval,
    holm,
    mean_interval,
    t_bounds,
    t_factor,
    t_test,
)
from analysis.tables import STATES
from tune_study.config import ConfigError, Margins

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

OFF = "off"
SEED_KEYS = ["depth", "qk_norm", "seed"]
ARM_KEYS = ["depth", "qk_norm"]
LR_KEYS = ["depth", "qk_norm", "lr"]
AXIS_KEYS = ["lr", "depth", "qk_norm", "seed"]

STOPPED_SHARE = 0.97
"""Where a stopped run would have ended, on the way from the best loss to the unigram entropy H1:
the decaying learning rate takes it a little below the plateau it was stopped on. Measured on runs
that were not stopped (docs/divergence.md)."""

STABLE, FAILED, DIVERGED, ERRORED, MISSING = range(len(STATES))

SPACING_TOLERANCE = 0.1
"""Largest relative deviation of a grid step, in log LR, from the mean step. It admits grids
written with one digit, such as 1e-3, 3e-3, 1e-2 (4.6 %), and refuses 1-2-5 (19 %)."""


# ------------------------------------------------------------ the grid of cells


@dataclass(frozen=True)
class Curves:
    """The cells as arrays: one row a (depth, qk_norm, seed), one column a learning rate.

    Attributes:
        keys: depth, qk_norm, seed of each row, sorted; G rows.
        lr: the grid, ascending, shape (L,).
        state: index into STATES, shape (G, L); a cell without a row is missing.
        loss, loss_init: NaN where unknown, shape (G, L).
    """

    keys: pd.DataFrame
    lr: Array
    state: NDArray[np.int8]
    loss: Array
    loss_init: Array

    @property
    def stable(self) -> Flags:
        """Cells known to be stable."""
        return self.state == STABLE

    @property
    def unstable(self) -> Flags:
        """Cells known not to be: failed or diverged."""
        return (self.state == FAILED) | (self.state == DIVERGED)

    @property
    def unknown(self) -> Flags:
        """Cells that say nothing: errored or missing."""
        return (self.state == ERRORED) | (self.state == MISSING)

    @property
    def clamped(self) -> Array:
        """min(loss, loss_init); a loss that is not finite counts as loss_init; NaN if unknown."""
        finite = np.where(np.isfinite(self.loss), self.loss, np.inf)
        return np.where(self.unknown, np.nan, np.minimum(finite, self.loss_init))

    @property
    def step(self) -> float:
        """Median distance of neighbouring learning rates, in decades; 1 for a single one."""
        return float(np.median(np.diff(np.log10(self.lr)))) if len(self.lr) > 1 else 1.0


def curves(cells: pd.DataFrame, lr_range: tuple[float, float] | None = None) -> Curves:
    """The cells with a <= lr <= b as arrays.

    Raises:
        ConfigError: if the table or the range is empty, a state is unknown, or one cell has
            two rows that differ.
    """
    frame = _in_range(_unique(cells), lr_range)
    keys = frame[SEED_KEYS].drop_duplicates().sort_values(SEED_KEYS, ignore_index=True)
    lr = np.unique(frame["lr"].to_numpy(float))
    row = pd.MultiIndex.from_frame(keys).get_indexer(pd.MultiIndex.from_frame(frame[SEED_KEYS]))
    column = np.searchsorted(lr, frame["lr"].to_numpy(float))
    codes = pd.Categorical(frame["state"], categories=list(STATES)).codes
    state = np.full((len(keys), len(lr)), MISSING, dtype=np.int8)
    state[row, column] = codes
    values = {}
    for name in ("loss", "loss_init"):
        values[name] = np.full(state.shape, np.nan)
        values[name][row, column] = frame[name].to_numpy(float)
    return Curves(keys, lr, state, values["loss"], values["loss_init"])


def groups(frame: pd.DataFrame, by: str | list[str]) -> Iterator[tuple[Any, NDArray[np.intp]]]:
    """Each value of `by` in order, with the labels of its rows (row numbers, on a fresh index)."""
    for key, group in frame.groupby(by, sort=True):
        yield key, group.index.to_numpy()


def _unique(cells: pd.DataFrame) -> pd.DataFrame:
    """The table without repeated rows, checked to have one row a cell."""
    if not len(cells):
        raise ConfigError("cells: the table is empty. Give a study with at least one cell.")
    unknown = set(cells["state"].unique()) - set(STATES)
    if unknown:
        raise ConfigError(
            f"cells: state {sorted(map(str, unknown))[0]!r} is not known. "
            f"States: {', '.join(STATES)}."
        )
    repeated = cells.duplicated(AXIS_KEYS, keep=False)
    if not repeated.any():
        return cells
    frame = cells.drop_duplicates()
    twice = frame[frame.duplicated(AXIS_KEYS)]
    if len(twice):
        lr, depth, arm, seed = twice[AXIS_KEYS].iloc[0]
        raise ConfigError(
            f"cells: lr {lr:g}, depth {depth}, qk_norm {arm}, seed {seed} has two rows that "
            "differ. Give a table of one study with each cell once."
        )
    return frame


def _in_range(frame: pd.DataFrame, lr_range: tuple[float, float] | None) -> pd.DataFrame:
    if lr_range is None:
        return frame
    low, high = lr_range
    # A relative 1e-6 lets 0.1 in the range include 0.1 + rounding in the table.
    inside = frame[(frame["lr"] >= low * (1 - 1e-6)) & (frame["lr"] <= high * (1 + 1e-6))]
    if not len(inside):
        lrs = frame["lr"]
        raise ConfigError(
            f"lr_range = [{low:g}, {high:g}]: holds no learning rate of the grid. "
            f"Give a range that meets [{lrs.min():g}, {lrs.max():g}]."
        )
    return inside


def uneven_spacing(lr: ArrayLike) -> str:
    """Why a plain mean over this grid is not a mean over log LR, naming the step; or nothing."""
    grid = np.unique(np.asarray(lr, dtype=float))
    if len(grid) < 3:
        return ""
    steps = np.diff(np.log10(grid))
    off = np.abs(steps / steps.mean() - 1)
    worst = int(off.argmax())
    if off[worst] <= SPACING_TOLERANCE:
        return ""
    return (
        f"the grid is not log-spaced: {grid[worst]:g} to {grid[worst + 1]:g} is "
        f"{steps[worst]:.3f} decades where the mean step is {steps.mean():.3f}"
    )


def counts(cells: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """How many cells were asked for and what became of them.

    Returns:
        DataFrame: `by`, n_asked, n_found (all but missing), then n_stable, n_failed, ...
    """
    frame = _unique(cells)
    by = list(by)
    table = frame[by].copy()
    for state in STATES:
        table[f"n_{state}"] = (frame["state"] == state).astype(int)
    table = table.groupby(by, sort=True).sum().reset_index()
    states = [f"n_{state}" for state in STATES]
    table.insert(len(by), "n_asked", table[states].sum(axis=1))
    table.insert(len(by) + 1, "n_found", table["n_asked"] - table["n_missing"])
    return table


# ---------------------------------------------------------------- one per seed


def lr_sensitivity(
    cells: pd.DataFrame, lr_range: tuple[float, float] | None = None
) -> pd.DataFrame:
    """LR sensitivity of each (depth, qk_norm, seed): Wortsman et al. 2023 (2309.14322), sec. 2.

        mean over the grid's LRs in [a, b] of min(l(lr), l0) - l*

    with l0 the cell's measured loss at init and l* the lowest loss of a stable cell in the
    range. A cell that was stopped early counts at its last loss, but not above
    l* + STOPPED_SHARE (H1 - l*); what it would have come to is unknown between l* (`lower`) and
    l0 (`upper`).

    Args:
        lr_range: a, b, both included; the whole grid if not given.

    Returns:
        DataFrame: depth, qk_norm, seed, value, lower, upper, lr_low, lr_high, n_lrs, counts,
        reason. A grid with missing or errored cells, or one that is not log-spaced, has NaN
        for a value, and a reason.
    """
    grid = curves(cells, lr_range)
    best = np.where(grid.stable, grid.clamped, np.inf).min(axis=1, keepdims=True)
    best = np.where(np.isfinite(best), best, np.nan)
    stopped = grid.state == DIVERGED

    def mean_excess(loss: Array) -> Array:
        return np.maximum(loss - best, 0).mean(axis=1)

    plateau = best + STOPPED_SHARE * (cells["unigram_entropy"].max() - best)
    guessed = stopped & np.isfinite(grid.loss)
    table = grid.keys.copy()
    table["value"] = mean_excess(np.where(guessed, np.fmin(grid.clamped, plateau), grid.clamped))
    table["lower"] = mean_excess(np.where(stopped, best, grid.clamped))
    table["upper"] = mean_excess(np.where(stopped, grid.loss_init, grid.clamped))
    table["lr_low"], table["lr_high"], table["n_lrs"] = grid.lr[0], grid.lr[-1], len(grid.lr)
    table["reason"] = _lost(grid)
    no_best = (table["reason"] == "").to_numpy() & ~grid.stable.any(axis=1)
    table.loc[no_best, "reason"] = "no stable cell in the range, so no best loss"
    no_init = (table["reason"] == "") & table["value"].isna()
    table.loc[no_init, "reason"] = "loss at init or final loss not measured"
    if uneven := uneven_spacing(grid.lr):
        table[["value", "lower", "upper"]] = np.nan
        table["reason"] = uneven
    return _with_counts(table, _in_range(cells, lr_range), SEED_KEYS)


def _lost(grid: Curves) -> list[str]:
    """'2 missing, 1 errored of 13 cells' for each row, empty where nothing is lost."""
    missing = (grid.state == MISSING).sum(axis=1)
    errored = (grid.state == ERRORED).sum(axis=1)
    total = grid.state.shape[1]
    return [
        ", ".join(f"{n} {name}" for n, name in ((m, "missing"), (e, "errored")) if n)
        + (f" of {total} cells" if m + e else "")
        for m, e in zip(missing, errored, strict=True)
    ]


def _with_counts(table: pd.DataFrame, cells: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    reason = table.pop("reason") if "reason" in table else None
    merged = table.merge(counts(cells, by), on=by, how="left", validate="one_to_one")
    if reason is not None:
        merged["reason"] = reason.to_numpy()
    return merged


def max_stable_lr(cells: pd.DataFrame) -> pd.DataFrame:
    """Maximum stable LR of each (depth, qk_norm, seed), as the bin [low, high) it lies in.

    The highest learning rate such that it and all lower ones are stable is lr_k; the edge
    itself lies between lr_k and the next grid point. Missing and errored cells could be
    either: `low` takes them for unstable, `high` for stable, so that they widen the bin.

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
    low, high = _edge(grid.lr, grid.stable, grid.unstable)
    value = np.where(low > 0, low, np.where(np.isfinite(high), high, np.nan))
    table = grid.keys.copy()
    table["value"], table["low"], table["high"] = value, low, high
    table["censored"] = np.where(
        np.isnan(value), "", np.where(low == 0, "below", np.where(np.isinf(high), "above", ""))
    )
    seen_unstable = np.logical_or.accumulate(grid.unstable, axis=1)
    table["monotone"] = _none(seen_unstable & grid.stable)
    inside = (grid.lr > low[:, None]) & (grid.lr < high[:, None])
    table["widened"] = ~_none(inside & grid.unknown)
    table["reason"] = _lost(grid)
    return _with_counts(table, cells, SEED_KEYS)


def _none(flags: Flags) -> Flags:
    """Whether a row has no True, as an array."""
    return np.asarray(~flags.any(axis=1))


def _edge(lr: Array, holds: Flags, fails: Flags) -> tuple[Array, Array]:
    """Bin of the edge up to which something holds, along the last axis.

    Returns:
        low: highest lr up to which it holds everywhere; 0 if not even at the first.
        high: lowest lr at which it fails; inf if it fails nowhere.
    """
    prefix = np.logical_and.accumulate(holds, axis=-1).sum(axis=-1)
    low = np.where(prefix > 0, lr[np.maximum(prefix - 1, 0)], 0.0)
    high = np.where(fails.any(axis=-1), lr[fails.argmax(axis=-1)], np.inf)
    return low, high


def best_lr(cells: pd.DataFrame) -> pd.DataFrame:
    """Learning rate of the lowest final loss of each (depth, qk_norm, seed), stable cells only.

    Returns:
        DataFrame: depth, qk_norm, seed, value, loss, censored ("below": at the lowest LR that
        is known, the best may be lower; "above": likewise), counts, reason.
    """
    grid = curves(cells)
    loss = np.where(grid.stable & np.isfinite(grid.loss), grid.loss, np.inf)
    table = grid.keys.copy()
    table["value"], table["loss"], table["censored"] = _best(grid.lr, loss, ~grid.unknown)
    table["reason"] = _lost(grid)
    return _with_counts(table, cells, SEED_KEYS)


def _best(lr: Array, loss: Array, known: Flags) -> tuple[Array, Array, NDArray[Any]]:
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
    log_lr = np.log10(grid.lr)
    right, right_most, right_open = _reach(log_lr, usable, grid.unknown, at)
    left, left_most, left_open = _reach(
        -log_lr[::-1], usable[:, ::-1], grid.unknown[:, ::-1], len(log_lr) - 1 - at
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
    table["reason"] = _lost(grid)
    table.loc[none, "reason"] = "no stable cell"
    return _with_counts(table, cells, SEED_KEYS)


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


# ------------------------------------------------------------- paired by seed


@dataclass(frozen=True)
class Pairs:
    """Off and one other arm, cell by cell: rows (depth, seed), columns learning rates.

    Attributes:
        arm: the other arm.
        keys: depth and seed of each row; only seeds that occur in both arms.
        lr: the grid, ascending, shape (L,).
        off, on: curves of the two arms, in the rows' order.
    """

    arm: str
    keys: pd.DataFrame
    lr: Array
    off: Curves
    on: Curves

    @property
    def gain(self) -> Array:
        """loss(off) - loss(on), both at most l0; above 0 where QK-norm helps; NaN if unknown."""
        return self.off.clamped - self.on.clamped


def arms(cells: pd.DataFrame) -> list[str]:
    """The arms other than off, sorted."""
    return sorted(set(cells["qk_norm"].unique()) - {OFF})


def pairs(cells: pd.DataFrame, arm: str) -> Pairs:
    """Off and `arm` side by side, same depth, seed and learning rate.

    Raises:
        ConfigError: if an arm is not in the table or the two share no (depth, seed).
    """
    grid = curves(cells)
    for name in (OFF, arm):
        if name not in set(grid.keys["qk_norm"].unique()):
            known = ", ".join(sorted(set(grid.keys["qk_norm"].unique())))
            raise ConfigError(
                f"qk_norm = {name!r}: no cell of this arm, so nothing to pair. Arms: {known}."
            )
    keys = grid.keys.reset_index(names="row")
    off, on = (keys[keys["qk_norm"] == name] for name in (OFF, arm))
    both = off.merge(on, on=["depth", "seed"], suffixes=("_off", "_on"))
    if both.empty:
        raise ConfigError(
            f"qk_norm: off and {arm} share no depth and seed, so nothing can be paired. "
            "Run both arms with the same seeds."
        )

    def take(rows: pd.Series) -> Curves:
        index = rows.to_numpy()
        return Curves(
            grid.keys.iloc[index].reset_index(drop=True),
            grid.lr,
            grid.state[index],
            grid.loss[index],
            grid.loss_init[index],
        )

    return Pairs(arm, both[["depth", "seed"]], grid.lr, take(both["row_off"]), take(both["row_on"]))


def paired_by_lr(cells: pd.DataFrame, level: float = LEVEL) -> pd.DataFrame:
    """The paired difference of losses at each (depth, lr), for each arm other than off.

    The gain of a seed is loss(off) - loss(on), both at most the loss at init; above 0 where
    QK-norm helps. p is of a two-sided paired t test of no difference; as every learning rate
    is tested, p_holm is what counts: Holm's adjustment over all cells of the arm.

    Returns:
        DataFrame: depth, qk_norm (the arm off is compared with), lr, gain (mean over the pairs
        that are known), low, high (t interval), n, n_asked, p, p_holm, significant (p_holm
        below 1 - level).
    """
    tables = []
    for arm in arms(cells):
        both = pairs(cells, arm)
        tall = pd.DataFrame(
            {
                "depth": np.repeat(both.keys["depth"].to_numpy(), len(both.lr)),
                "qk_norm": arm,
                "lr": np.tile(both.lr, len(both.keys)),
                "gain": both.gain.ravel(),
            }
        )
        table = tall.groupby(LR_KEYS, sort=True)["gain"].agg(["mean", "std", "count", "size"])
        table = table.reset_index().rename(
            columns={"mean": "gain", "count": "n", "size": "n_asked"}
        )
        half = table["std"] * t_factor(table["n"], level)
        table["low"], table["high"] = table["gain"] - half, table["gain"] + half
        table["p"] = t_test(table["gain"], table["std"], table["n"])
        table["p_holm"] = holm(table["p"])
        table["significant"] = table["p_holm"] < 1 - level
        order = [*LR_KEYS, "gain", "low", "high", "n", "n_asked", "p", "p_holm", "significant"]
        tables.append(table[order])
    if not tables:
        raise ConfigError("qk_norm: only 'off' in the table. Add an arm with QK-norm.")
    return pd.concat(tables, ignore_index=True)


def necessity_by_seed(cells: pd.DataFrame, margin: float) -> pd.DataFrame:
    """Necessity threshold of each (depth, seed), for each arm other than off, as a bin.

    QK-norm is needed at a learning rate where off is unstable and on is stable, or where
    loss(off) - loss(on) > `margin`. The threshold is the lowest LR from which on it is needed
    at every LR up to on's maximum stable LR; beyond that, QK-norm does not help either. It
    lies in (low, high]: not needed at `low`, needed from `high`. Cells without evidence widen
    the bin.

    Returns:
        DataFrame: depth, qk_norm, seed, low (0 if needed everywhere), high (inf if not even
        at on's maximum stable LR), censored ("" | "below" | "above"), monotone, reason. Where
        on is nowhere stable, low = 0, high = inf and the reason says so.
    """
    tables = []
    for arm in arms(cells):
        both = pairs(cells, arm)
        with np.errstate(invalid="ignore"):
            needed = both.off.unstable | (both.on.stable & (both.gain > margin))
        needless = ~(both.off.unknown | both.on.unknown) & ~needed
        # Where on has no evidence it may be stable, and the threshold lie there or above.
        domain = np.logical_and.accumulate(~both.on.unstable, axis=1)
        low, high = _onset(both.lr, needed, needless, domain, both.on.stable)
        table = both.keys.copy()
        table.insert(1, "qk_norm", arm)
        table["low"], table["high"] = low, high
        empty = _none(domain & both.on.stable)
        table.loc[empty, ["low", "high"]] = 0.0, np.inf
        table["censored"] = np.select(
            [empty, (low == 0) & np.isfinite(high), (low > 0) & np.isinf(high)],
            ["", "below", "above"],
            "",
        )
        seen = np.logical_or.accumulate(needed & domain & both.on.stable, axis=1)
        table["monotone"] = _none(seen & needless & domain)
        lost = (both.off.unknown | both.on.unknown).sum(axis=1)
        table["reason"] = [
            f"{arm} has no stable cell below its first unstable one"
            if nowhere
            else (f"{n} of {len(both.lr)} pairs without evidence" if n else "")
            for nowhere, n in zip(empty, lost, strict=True)
        ]
        tables.append(table)
    if not tables:
        raise ConfigError("qk_norm: only 'off' in the table. Add an arm with QK-norm.")
    return pd.concat(tables, ignore_index=True)


def _onset(
    lr: Array, needed: Flags, needless: Flags, domain: Flags, stable: Flags
) -> tuple[Array, Array]:
    """Bin (low, high] of the lowest lr from which on `needed` holds to the domain's top.

    `high` is a learning rate at which on is known to be stable.
    """
    run = np.logical_and.accumulate((needed | ~domain)[:, ::-1], axis=1)[:, ::-1]
    run = run & domain & stable
    high = np.where(run.any(axis=1), lr[run.argmax(axis=1)], np.inf)
    needless = needless & domain
    last = len(lr) - 1 - needless[:, ::-1].argmax(axis=1)
    low = np.where(needless.any(axis=1), lr[last], 0.0)
    return low, high


def necessity_threshold(cells: pd.DataFrame, margin: float, level: float = LEVEL) -> pd.DataFrame:
    """Necessity threshold of each depth, for each arm other than off.

    The lowest LR from which on, up to on's maximum stable LR in every seed, QK-norm is needed:
    off unstable and on stable in every seed, or the paired difference's interval above
    `margin`. The learning rates are tested from the highest down, and the first that does not
    pass ends it; in this fixed order each test may use the full level (Maurer et al. 1995).
    Beside it stands the mean over seeds of log threshold with its interval-censored interval.

    Returns:
        DataFrame: depth, qk_norm, value (NaN: not needed anywhere), censored ("below": needed
        at every LR; "above": nowhere up to `tested_to`), tested_to, low, high (interval over
        seeds, NaN if none), n, n_asked, note.
    """
    by_seed = necessity_by_seed(cells, margin)
    rows = []
    for arm in arms(cells):
        both = pairs(cells, arm)
        gain = both.gain
        for depth, at in groups(both.keys, "depth"):
            domain = np.logical_and.accumulate(both.on.stable[at].all(axis=0))
            always = (both.off.unstable[at] & both.on.stable[at]).all(axis=0)
            lower, _ = t_bounds(gain[at].T, level)
            with np.errstate(invalid="ignore"):
                needed = (always | (lower > margin)) & domain
            low, high = _onset(both.lr, needed[None], ~needed[None], domain[None], domain[None])
            seeds = by_seed[(by_seed["depth"] == depth) & (by_seed["qk_norm"] == arm)]
            spread = _log_interval(seeds["low"], seeds["high"], both.on.step, level)
            found = bool(np.isfinite(high[0]))
            rows.append(
                {
                    "depth": depth,
                    "qk_norm": arm,
                    "value": high[0] if found else np.nan,
                    "censored": "above" if not found else "below" if low[0] == 0 else "",
                    "tested_to": both.lr[domain][-1] if domain.any() else np.nan,
                    "low": 10**spread.low,
                    "high": 10**spread.high,
                    "n": spread.n,
                    "n_asked": len(at),
                    "note": spread.note,
                }
            )
    return pd.DataFrame(rows)


def _log_interval(low: ArrayLike, high: ArrayLike, step: float, level: float) -> Interval:
    """Interval of the mean log10 of bins of learning rates; 0 and inf are open ends."""
    with np.errstate(divide="ignore"):
        return bin_interval(np.log10(np.asarray(low)), np.log10(np.asarray(high)), step, level)


# ----------------------------------------------------------------- time to loss


def steps_to_threshold(cells: pd.DataFrame, history: pd.DataFrame, target: float) -> pd.DataFrame:
    """First step, interpolated linearly between reports, at which val/loss is at `target`.

    The loss at init is the report at step 0. A cell that ran to its end or diverged without
    getting there never will within the steps asked: censored at `steps`, not at the step it
    was stopped, else divergence would look like lack of patience. A missing or errored cell
    is censored at the last step seen.

    Returns:
        DataFrame: lr, depth, qk_norm, seed, state, step, reached. Where `reached` is False,
        read step as "more than".
    """
    frame = _unique(cells)[[*AXIS_KEYS, "state", "steps", "loss_init"]].reset_index(drop=True)
    reports = history[[*AXIS_KEYS, "step", "val/loss"]].drop_duplicates()
    start = frame[[*AXIS_KEYS]].assign(step=0, **{"val/loss": frame["loss_init"]})
    reports = (
        pd.concat([start, reports[reports["step"] > 0]])
        .dropna(subset=["val/loss"])
        .sort_values([*AXIS_KEYS, "step"], ignore_index=True)
    )
    group = reports.groupby(AXIS_KEYS, sort=False)
    before = group[["step", "val/loss"]].shift()
    hit = reports["val/loss"] <= target
    first = hit & (hit.groupby([reports[k] for k in AXIS_KEYS], sort=False).cumsum() == 1)
    x0, y0 = before["step"].to_numpy(float), before["val/loss"].to_numpy(float)
    x1, y1 = reports["step"].to_numpy(float), reports["val/loss"].to_numpy(float)
    with np.errstate(invalid="ignore", divide="ignore"):
        crossing = np.where(
            np.isnan(x0) | (y0 <= y1), x1, x0 + (y0 - target) / (y0 - y1) * (x1 - x0)
        )
    reached = reports.loc[first, AXIS_KEYS].assign(crossing=crossing[first.to_numpy()])
    last = group["step"].last().rename("last").reset_index()
    table = frame.merge(reached, on=AXIS_KEYS, how="left").merge(last, on=AXIS_KEYS, how="left")
    unknown = table["state"].isin(["errored", "missing"])
    limit = np.where(unknown, table["last"].fillna(0), table["steps"]).astype(float)
    table["reached"] = table["crossing"].notna()
    table["step"] = table["crossing"].fillna(pd.Series(limit, index=table.index))
    return table[[*AXIS_KEYS, "state", "step", "reached"]]


def kaplan_meier(step: ArrayLike, reached: ArrayLike) -> pd.DataFrame:
    """Share of cells not yet at the target, over steps (Kaplan & Meier 1958).

    Returns:
        DataFrame: step (of each event), at_risk, events, survival = prod(1 - events/at_risk).
    """
    t, event = np.asarray(step, dtype=float), np.asarray(reached, dtype=bool)
    times = np.unique(t[event])
    at_risk = (t[None, :] >= times[:, None]).sum(axis=1)
    events = ((t[None, :] == times[:, None]) & event[None, :]).sum(axis=1)
    survival = np.cumprod(1 - events / np.maximum(at_risk, 1))
    return pd.DataFrame({"step": times, "at_risk": at_risk, "events": events, "survival": survival})


def median_steps(times: pd.DataFrame) -> pd.DataFrame:
    """Kaplan-Meier median of steps to threshold over the seeds of each (depth, qk_norm, lr).

    Args:
        times: the table steps_to_threshold gives.

    Returns:
        DataFrame: depth, qk_norm, lr, step (inf: half of the seeds never got there), n_asked,
        n_reached.
    """
    rows = []
    for key, group in times.groupby(LR_KEYS, sort=True):
        curve = kaplan_meier(group["step"], group["reached"])
        passed = curve.loc[curve["survival"] <= 0.5 + 1e-12, "step"]
        rows.append(
            {
                **dict(zip(LR_KEYS, key, strict=True)),
                "step": passed.iloc[0] if len(passed) else np.inf,
                "n_asked": len(group),
                "n_reached": int(group["reached"].sum()),
            }
        )
    return pd.DataFrame(rows)


# ------------------------------------------------------------------ other scales


def perplexity(loss: ArrayLike) -> Array:
    """exp(loss), loss in nats per token."""
    return np.exp(np.asarray(loss, dtype=float))


def bits_per_byte(loss: ArrayLike, bytes_per_token: ArrayLike) -> Array:
    """loss / (ln 2 x bytes a token): comparable between tokenizers."""
    return np.asarray(loss, dtype=float) / (np.log(2) * np.asarray(bytes_per_token, dtype=float))


def with_last_report(
    cells: pd.DataFrame, history: pd.DataFrame, metrics: Iterable[str]
) -> pd.DataFrame:
    """`cells` with metrics of each cell's last report as further columns, under their names."""
    names = list(metrics)
    last = history.sort_values("step", kind="stable").drop_duplicates(AXIS_KEYS, keep="last")[
        [*AXIS_KEYS, *names]
    ]
    return cells.merge(last, on=AXIS_KEYS, how="left")


def by_lr(
    cells: pd.DataFrame, metrics: Sequence[str] = ("loss",), level: float = LEVEL
) -> pd.DataFrame:
    """Metrics as functions of the learning rate: one row a (depth, qk_norm, lr, metric).

    A mean is given only where every seed asked for is stable; else it would speak of other
    seeds than its neighbours. Minimum, median and maximum are over the seeds with a finite value.

    Returns:
        DataFrame: depth, qk_norm, lr, metric, n (finite values), mean, low, high (t interval),
        minimum, median, maximum, counts, label ("2/3 stable").
    """
    frame = _unique(cells)
    count = counts(frame, LR_KEYS)
    tables = []
    for metric in metrics:
        values = frame[metric].astype(float)
        values = values.where(np.isfinite(values) & ~frame["state"].isin(["errored", "missing"]))
        group = frame[LR_KEYS].assign(x=values).groupby(LR_KEYS, sort=True)["x"]
        table = count[LR_KEYS].copy()
        table["metric"] = metric
        summary = group.agg(["count", "mean", "std", "min", "median", "max"]).reset_index()
        whole = (count["n_stable"] == count["n_asked"]) & (summary["count"] == count["n_asked"])
        n = summary["count"].to_numpy()
        table["n"] = summary["count"]
        table["mean"] = summary["mean"].where(whole)
        half = summary["std"].to_numpy() * t_factor(n, level)
        table["low"], table["high"] = table["mean"] - half, table["mean"] + half
        table["minimum"], table["median"] = summary["min"], summary["median"]
        table["maximum"] = summary["max"]
        tables.append(table.merge(count, on=LR_KEYS))
    result = pd.concat(tables, ignore_index=True)
    result["label"] = (
        result["n_stable"].astype(str) + "/" + result["n_asked"].astype(str) + " stable"
    )
    return result


# ------------------------------------------------------------- what may be compared

_SHARED = {
    "steps": ["steps"],
    "data": ["unigram_entropy", "loss_floor", "bytes_per_token"],
    "precision": ["precision"],
}
"""What every cell of a comparison has to share, and the columns that tell."""


def require_uniform(cells: pd.DataFrame) -> None:
    """Refuses a table whose cells were not run alike.

    Raises:
        ConfigError: naming what differs: steps, data or precision.
    """
    for what, columns in _SHARED.items():
        for column in columns:
            values = _distinct(cells, column)
            if len(values) > 1:
                raise ConfigError(
                    f"cells: {what} differ, {column} is {values[0]} and {values[1]}. "
                    "Give cells of one study, run alike."
                )


def require_comparable(
    studies: Mapping[str, pd.DataFrame],
    lr_ranges: Mapping[str, tuple[float, float] | None] | None = None,
) -> None:
    """Refuses to compare studies whose numbers do not mean the same.

    Args:
        studies: `cells` by the study's name.
        lr_ranges: the declared range of each, if LR sensitivities are to be compared.

    Raises:
        ConfigError: naming the two studies and what differs: LR grid, LR range, steps, data
            or precision.
    """
    for cells in studies.values():
        require_uniform(cells)
    (first, reference), *others = studies.items()
    for name, cells in others:
        for what, mine, theirs in _differences(reference, cells):
            raise _incomparable(what, first, mine, name, theirs)
        if lr_ranges is not None and lr_ranges[first] != lr_ranges[name]:
            raise _incomparable("LR range", first, lr_ranges[first], name, lr_ranges[name])


def _differences(a: pd.DataFrame, b: pd.DataFrame) -> Iterable[tuple[str, Any, Any]]:
    grids = [np.unique(x["lr"].to_numpy(float)) for x in (a, b)]
    if len(grids[0]) != len(grids[1]) or not np.allclose(grids[0], grids[1], rtol=1e-6, atol=0):
        spans = [f"{len(g)} LRs from {g[0]:g} to {g[-1]:g}" for g in grids]
        yield "LR grid", spans[0], spans[1]
    for what, columns in _SHARED.items():
        for column in columns:
            mine, theirs = _distinct(a, column), _distinct(b, column)
            if mine != theirs:
                yield what, f"{column} {mine[0] if mine else None}", theirs[0] if theirs else None


def _distinct(cells: pd.DataFrame, column: str) -> list[Any]:
    """The different values of a column over the cells that have one."""
    values = cells[column].dropna()
    values = values[values.astype(str) != ""]
    if pd.api.types.is_float_dtype(values):
        values = values.round(9)
    return sorted(values.unique().tolist())


def _incomparable(what: str, a: str, mine: Any, b: str, theirs: Any) -> ConfigError:
    return ConfigError(
        f"{a} and {b}: {what} differs, {mine} against {theirs}. "
        "Compare studies that share LR grid, LR range, steps, data and precision."
    )


# ------------------------------------------------------------------ one per arm


def arm_summary(
    cells: pd.DataFrame, margins: Margins, level: float = LEVEL
) -> list[dict[str, Any]]:
    """What each (depth, qk_norm) came to over its seeds: the `arms` of summary.json.

    Strict-JSON safe: unknown or unbounded is None. `best_lr` has the lowest mean loss among
    the LRs at which every seed is stable. `max_stable_lr.value` is the geometric mean over
    seeds of the highest stable LR; `low` and `high` are the interval of the edge itself,
    which lies up to one grid step higher. With one seed there is no interval over seeds, and
    they are the grid's bin (`method` "grid").

    Returns:
        list of dict: depth, qk_norm, counts, n_seeds, best_lr, best_lr_censored, best_loss,
        lr_sensitivity {value, low, high, n, method, lower, upper, lr_low, lr_high, reason},
        max_stable_lr {value, low, high, n, method, censored, monotone, reason}.
    """
    grid = curves(cells)
    sensitivity = lr_sensitivity(cells, margins.lr_range)
    edge = max_stable_lr(cells)
    count = counts(cells, ARM_KEYS).set_index(ARM_KEYS)
    result: list[dict[str, Any]] = []
    for (depth, arm), at in groups(grid.keys, ARM_KEYS):
        counted: Any = count.loc[(depth, arm)]
        whole = grid.stable[at].all(axis=0) & np.isfinite(grid.loss[at]).all(axis=0)
        mean = np.where(whole, grid.loss[at].mean(axis=0), np.inf)
        best, loss, censored = _best(grid.lr, mean, _none(grid.unknown[at].T))
        result.append(
            {
                "depth": int(depth),
                "qk_norm": str(arm),
                "n_seeds": len(at),
                **{name: int(counted[name]) for name in count.columns},
                "best_lr": _number(float(best)),
                "best_lr_censored": str(censored),
                "best_loss": _number(float(loss)),
                "lr_sensitivity": _sensitivity_summary(sensitivity.iloc[at], level),
                "max_stable_lr": _edge_summary(edge.iloc[at], grid.step, level),
            }
        )
    return result


def _sensitivity_summary(rows: pd.DataFrame, level: float) -> dict[str, Any]:
    known = rows["value"].notna()
    interval = mean_interval(rows["value"], level)
    # A seed without a value would leave a mean over other seeds: no value, and the reason.
    whole = bool(known.all())
    return {
        "value": _number(interval.value if whole else np.nan),
        "low": _number(interval.low if whole else np.nan),
        "high": _number(interval.high if whole else np.nan),
        "n": int(known.sum()),
        "method": interval.method if whole else "none",
        "lower": _number(rows["lower"].mean(skipna=False)),
        "upper": _number(rows["upper"].mean(skipna=False)),
        "lr_low": _number(rows["lr_low"].iloc[0]),
        "lr_high": _number(rows["lr_high"].iloc[0]),
        "reason": _reasons(rows) or interval.note,
    }


def _edge_summary(rows: pd.DataFrame, step: float, level: float) -> dict[str, Any]:
    interval = _log_interval(rows["low"], rows["high"], step, level)
    low, high = interval.low, interval.high
    method = interval.method
    if len(rows) == 1:
        low, high = (np.log10(x) if x > 0 else -np.inf for x in rows[["low", "high"]].iloc[0])
        method = "grid"
    censored = {c for c in rows["censored"] if c}
    both = len(censored) > 1
    known = bool(rows["value"].notna().all())
    value = 10 ** float(np.log10(rows["value"]).mean()) if known and not both else np.nan
    return {
        "value": _number(value),
        "low": _number(10**low) if np.isfinite(low) else None,
        "high": _number(10**high) if np.isfinite(high) else None,
        "n": interval.n,
        "method": method,
        "censored": "both" if both else next(iter(censored), ""),
        "monotone": bool(rows["monotone"].all()),
        "reason": _reasons(rows) or interval.note,
    }


def _reasons(rows: pd.DataFrame) -> str:
    named = zip(rows["seed"], rows["reason"], strict=True)
    return "; ".join(f"seed {seed}: {reason}" for seed, reason in named if reason)


def _number(value: float) -> float | None:
    """A float for strict JSON: None unless finite."""
    return float(value) if np.isfinite(value) else None
