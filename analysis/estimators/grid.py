"""The cells as arrays over the grid of learning rates, checked, and counted by state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from analysis.tables import ASKED, STATES
from tune_study.config import ConfigError

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

SEED_KEYS = ["depth", "qk_norm", "seed"]
ARM_KEYS = ["depth", "qk_norm"]
LR_KEYS = ["depth", "qk_norm", "lr"]
AXIS_KEYS = ["lr", "depth", "qk_norm", "seed"]

STABLE, FAILED, DIVERGED, ERRORED, MISSING, UNTRIED = range(len(STATES))

SPACING_TOLERANCE = 0.1
"""Largest relative deviation of a grid step, in log LR, from the mean step. It admits grids
written with one digit, such as 1e-3, 3e-3, 1e-2 (4.6 %), and refuses 1-2-5 (19 %)."""

SPREAD_STEP = 0.5
"""Largest step, in decades, of the part of a grid on which a mean over learning rates may rest."""


@dataclass(frozen=True)
class Curves:
    """The cells as arrays: one row a (depth, qk_norm, seed), one column a learning rate.

    Attributes:
        keys: depth, qk_norm, seed of each row, sorted; G rows.
        lr: the grid, ascending, shape (L,).
        state: index into STATES, shape (G, L); a cell without a row is missing.
        loss, loss_init: NaN where unknown, shape (G, L).
        unigram_entropy: H1 of the data.
    """

    keys: pd.DataFrame
    lr: Array
    state: NDArray[np.int8]
    loss: Array
    loss_init: Array
    unigram_entropy: float

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
    def untried(self) -> Flags:
        """Cells that a search did not ask for."""
        return self.state == UNTRIED

    @property
    def clamped(self) -> Array:
        """min(loss, loss_init); a loss that is not finite counts as loss_init; NaN if unknown."""
        finite = np.where(np.isfinite(self.loss), self.loss, np.inf)
        no_loss = self.unknown | self.untried
        return np.where(no_loss, np.nan, np.minimum(finite, self.loss_init))

    @property
    def step(self) -> float:
        """Median distance of neighbouring learning rates, in decades; 1 for a single one."""
        return float(np.median(np.diff(np.log10(self.lr)))) if len(self.lr) > 1 else 1.0

    @property
    def spread(self) -> Flags:
        """The learning rates that a mean over the grid rests on, shape (L,).

        All of them; where a search left cells untried, the finest part that every row ran,
        evenly spaced and with both ends, so that no learning rate counts for having been looked
        at. All of them, too, if such a part is coarser than SPREAD_STEP: then there is no mean.
        """
        L = len(self.lr)
        ran = np.asarray(~self.untried.any(axis=0))
        for every in range(1, L):
            part = np.arange(L) % every == 0
            if self.step * every > SPREAD_STEP * (1 + 1e-6):
                break
            if (L - 1) % every == 0 and ran[part].all():
                return part
        return np.ones(L, bool)

    def columns(self, kept: Flags) -> Curves:
        """Some of the learning rates, by a flag each, shape (L,)."""
        return replace(
            self,
            lr=self.lr[kept],
            state=self.state[:, kept],
            loss=self.loss[:, kept],
            loss_init=self.loss_init[:, kept],
        )

    def rows(self, index: NDArray[np.intp]) -> Curves:
        """Some of the rows, in the order of their numbers given."""
        return replace(
            self,
            keys=self.keys.iloc[index].reset_index(drop=True),
            state=self.state[index],
            loss=self.loss[index],
            loss_init=self.loss_init[index],
        )

    def within(self, lr_range: tuple[float, float] | None) -> Curves:
        """The columns with a <= lr <= b; all of them without a range.

        Raises:
            ConfigError: if the range holds no learning rate of the grid.
        """
        if lr_range is None:
            return self
        low, high = lr_range
        # A relative 1e-6 lets 0.1 in the range include 0.1 + rounding in the grid.
        inside = (self.lr >= low * (1 - 1e-6)) & (self.lr <= high * (1 + 1e-6))
        if not inside.any():
            raise ConfigError(
                f"lr_range = [{low:g}, {high:g}]: holds no learning rate of the grid. "
                f"Give a range that meets [{self.lr[0]:g}, {self.lr[-1]:g}]."
            )
        return self.columns(inside)


def curves(cells: pd.DataFrame) -> Curves:
    """The cells as arrays.

    Raises:
        ConfigError: if the table is empty, a state is unknown, or one cell has two rows that
            differ.
    """
    frame = unique_cells(cells)
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
    entropy = float(frame["unigram_entropy"].max())
    return Curves(keys, lr, state, values["loss"], values["loss_init"], entropy)


def groups(frame: pd.DataFrame, by: str | list[str]) -> Iterator[tuple[Any, NDArray[np.intp]]]:
    """Each value of `by` in order, with the labels of its rows (row numbers, on a fresh index)."""
    for key, group in frame.groupby(by, sort=True):
        yield key, group.index.to_numpy()


def unique_cells(cells: pd.DataFrame) -> pd.DataFrame:
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


def cell_rows(cells: pd.DataFrame, history: pd.DataFrame) -> NDArray[np.intp]:
    """Of each report the number of its cell's row in `cells`; -1 where it has none."""
    group = history.groupby(AXIS_KEYS, sort=False).ngroup().to_numpy()
    first = np.unique(group, return_index=True)[1]
    keys = pd.MultiIndex.from_frame(history[AXIS_KEYS].iloc[first])
    return pd.MultiIndex.from_frame(cells[AXIS_KEYS]).get_indexer(keys)[group]


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
    frame = unique_cells(cells)
    by = list(by)
    table = frame[by].copy()
    for state in ASKED:
        table[f"n_{state}"] = (frame["state"] == state).astype(int)
    table = table.groupby(by, sort=True).sum().reset_index()
    states = [f"n_{state}" for state in ASKED]
    table.insert(len(by), "n_asked", table[states].sum(axis=1))
    table.insert(len(by) + 1, "n_found", table["n_asked"] - table["n_missing"])
    return table


def lost_cells(grid: Curves, *also: int) -> list[str]:
    """'2 missing, 1 errored of 13 cells' for each row, empty where nothing is lost.

    Args:
        also: further states that count as lost, such as UNTRIED where the whole grid is needed.
    """
    codes = (MISSING, ERRORED, *also)
    counted = [(grid.state == code).sum(axis=1) for code in codes]
    total = grid.state.shape[1]
    return [
        ", ".join(f"{n} {STATES[code]}" for n, code in zip(row, codes, strict=True) if n)
        + (f" of {total} cells" if any(row) else "")
        for row in zip(*counted, strict=True)
    ]


def with_counts(table: pd.DataFrame, *states: NDArray[np.int8]) -> pd.DataFrame:
    """The table with what became of the cells behind each row; its reason, if any, goes last.

    Args:
        states: of the cells that a row rests on, each of shape (rows, cells).
    """
    for name, count in state_counts(np.concatenate(states, axis=1)).items():
        table[name] = count
    if "reason" in table:
        table["reason"] = table.pop("reason")
    return table


def state_counts(state: NDArray[np.int8]) -> dict[str, NDArray[np.int64]]:
    """n_asked, n_found (all but missing), n_stable, n_failed, ... over the last axis."""
    each = {f"n_{name}": (state == code).sum(axis=-1) for code, name in enumerate(ASKED)}
    asked = np.asarray((state != UNTRIED).sum(axis=-1))
    return {"n_asked": asked, "n_found": asked - each["n_missing"], **each}


def none_of(flags: Flags) -> Flags:
    """Whether a row has no True, as an array."""
    return np.asarray(~flags.any(axis=1))


def stable_bins(grid: Curves) -> tuple[Array, Array]:
    """The bin of each row's edge of stability, shape (G,).

    Cells that a search left untried are passed over: the bin's ends are cells that ran.

    Returns:
        low: highest lr up to which every cell is stable; 0 if not even the first.
        high: lowest lr of an unstable cell; inf if there is none.
    """
    lr, fails = grid.lr, grid.unstable
    so_far = np.logical_and.accumulate(grid.stable | grid.untried, axis=-1) & grid.stable
    last = grid.state.shape[-1] - 1 - so_far[..., ::-1].argmax(axis=-1)
    low = np.where(so_far.any(axis=-1), lr[last], 0.0)
    high = np.where(fails.any(axis=-1), lr[fails.argmax(axis=-1)], np.inf)
    return low, high


def implied(grid: Curves) -> tuple[Flags, Flags]:
    """Which cells are stable and which are not, where a search tells of those it left untried:
    stable below the highest LR up to which all that ran are, unstable above the lowest that is
    not. Between the two nothing is implied.

    Returns:
        stable, unstable: shape (G, L).
    """
    low, high = stable_bins(grid)
    stable = grid.stable | (grid.untried & (grid.lr <= low[:, None]))
    unstable = grid.unstable | (grid.untried & (grid.lr >= high[:, None]))
    return stable, unstable
