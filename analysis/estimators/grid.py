"""The cells as arrays over the grid of learning rates, checked, and counted by state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from analysis.tables import STATES
from tune_study.config import ConfigError

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

OFF = "off"
SEED_KEYS = ["depth", "qk_norm", "seed"]
ARM_KEYS = ["depth", "qk_norm"]
LR_KEYS = ["depth", "qk_norm", "lr"]
AXIS_KEYS = ["lr", "depth", "qk_norm", "seed"]

STABLE, FAILED, DIVERGED, ERRORED, MISSING = range(len(STATES))

SPACING_TOLERANCE = 0.1
"""Largest relative deviation of a grid step, in log LR, from the mean step. It admits grids
written with one digit, such as 1e-3, 3e-3, 1e-2 (4.6 %), and refuses 1-2-5 (19 %)."""


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
    frame = in_range(unique_cells(cells), lr_range)
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


def in_range(frame: pd.DataFrame, lr_range: tuple[float, float] | None) -> pd.DataFrame:
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
    frame = unique_cells(cells)
    by = list(by)
    table = frame[by].copy()
    for state in STATES:
        table[f"n_{state}"] = (frame["state"] == state).astype(int)
    table = table.groupby(by, sort=True).sum().reset_index()
    states = [f"n_{state}" for state in STATES]
    table.insert(len(by), "n_asked", table[states].sum(axis=1))
    table.insert(len(by) + 1, "n_found", table["n_asked"] - table["n_missing"])
    return table


def lost_cells(grid: Curves) -> list[str]:
    """'2 missing, 1 errored of 13 cells' for each row, empty where nothing is lost."""
    missing = (grid.state == MISSING).sum(axis=1)
    errored = (grid.state == ERRORED).sum(axis=1)
    total = grid.state.shape[1]
    return [
        ", ".join(f"{n} {name}" for n, name in ((m, "missing"), (e, "errored")) if n)
        + (f" of {total} cells" if m + e else "")
        for m, e in zip(missing, errored, strict=True)
    ]


def with_counts(table: pd.DataFrame, cells: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    reason = table.pop("reason") if "reason" in table else None
    merged = table.merge(counts(cells, by), on=by, how="left", validate="one_to_one")
    if reason is not None:
        merged["reason"] = reason.to_numpy()
    return merged


def none_of(flags: Flags) -> Flags:
    """Whether a row has no True, as an array."""
    return np.asarray(~flags.any(axis=1))
