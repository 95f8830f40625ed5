"""What announces a failure, and how early; and the spikes that announce nothing.

A signal's warning level is not chosen but read off the study: the most extreme value that any
reference cell of the same depth and arm ever showed. Reference cells are the stable cells from
their arm's best learning rate up, those that come closest to failing and do not. So no
reference cell gives a warning; what counts is how many failures do, and how long before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis import estimators
from analysis.estimators import SEED_KEYS
from analysis.tables import NO_EVIDENCE

Array = NDArray[np.float64]

SIGNALS: dict[str, tuple[str, int]] = {
    "max logit": ("attn/max_logit", 1),
    "entropy": ("attn/entropy_normalised", -1),
    "grad norm": ("grad/norm", 1),
    "kurtosis": ("act/kurtosis", 1),
}
"""Name, column of `history`, and the side that warns: 1 above the level, -1 below it."""

LOGIT_LIMIT = 1e4
"""Attention logits above which all runs diverged in Wortsman et al. 2023 (arXiv 2309.14322,
section 3.1.1)."""

SPIKE, BACK, DECAY = 0.5, 0.1, 0.9
"""A step's training loss that lies SPIKE nats above the moving average (DECAY a step) before it
is a spike; the spike has recovered once a step lies within BACK nats of that average."""


def warnings(cells: pd.DataFrame, history: pd.DataFrame) -> pd.DataFrame:
    """First warning of each signal in each failed or diverged cell, and its lead.

    The loss departs at the first report from which on, to the last one, validation loss lies
    above that of every reference cell at the same step. A run that fails without ever having
    learned departs early. A value that is not finite is beyond every level. A signal that the
    study did not record is left out.

    Returns:
        DataFrame: cell, lr, depth, qk_norm, seed, state, signal, level, step (of the first
        warning, NaN if none came), departure (NaN if the loss did not depart), lead (departure -
        step, in steps; positive if the warning came first). One row a (cell, signal).
    """
    reference = _reference(cells)
    rows: list[dict[str, Any]] = []
    bad = cells[cells["state"].isin(["failed", "diverged"])]
    recorded = {name: signal for name, signal in SIGNALS.items() if signal[0] in history}
    columns = dict.fromkeys(column for column, _ in recorded.values())
    runs = _runs(history, ["step", "val/loss", *columns])
    never = {column: np.empty(0) for column in ("step", "val/loss", *columns)}
    for key, group in bad.groupby(["depth", "qk_norm"], sort=True):
        of_group = cells[(cells["depth"] == key[0]) & (cells["qk_norm"] == key[1])]
        names = of_group.loc[of_group["cell"].isin(reference), "cell"]
        calm = history[history["cell"].isin(names)]
        ceiling = calm.groupby("step")["val/loss"].max().dropna()
        levels = {
            signal: side * (side * calm[column]).max() if len(calm) else np.nan
            for signal, (column, side) in recorded.items()
        }
        for cell in group.to_dict("records"):
            reports = runs.get(cell["cell"], never)
            departure = _departure(reports, ceiling)
            for signal, level in levels.items():
                step = _crossing(reports, *recorded[signal], level)
                rows.append(
                    {k: cell[k] for k in ("cell", "lr", "depth", "qk_norm", "seed", "state")}
                    | {"signal": signal, "level": level, "step": step}
                    | {"departure": departure, "lead": departure - step}
                )
    keys = ["cell", "lr", "depth", "qk_norm", "seed", "state"]
    return pd.DataFrame(rows, columns=[*keys, "signal", "level", "step", "departure", "lead"])


def warning_summary(warned: pd.DataFrame) -> pd.DataFrame:
    """Per arm and signal, how many failures it announced and how early.

    Returns:
        DataFrame: qk_norm, signal, n (failures), warned (of them, at any time), first (before the
        loss departed), lead_median (steps, over those warned whose loss departed).
    """
    rows = []
    for (arm, signal), group in warned.groupby(["qk_norm", "signal"], sort=True):
        lead = group["lead"].dropna()
        rows.append(
            {
                "qk_norm": arm,
                "signal": signal,
                "n": len(group),
                "warned": int(group["step"].notna().sum()),
                "first": int((lead > 0).sum()),
                "lead_median": float(lead.median()) if len(lead) else np.nan,
            }
        )
    columns = ["qk_norm", "signal", "n", "warned", "first", "lead_median"]
    return pd.DataFrame(rows, columns=columns)


def _reference(cells: pd.DataFrame) -> set[str]:
    """Names of the stable cells at or above the best LR of their depth, arm and seed."""
    best = estimators.best_lr(cells)[[*SEED_KEYS, "value"]]
    merged = cells.merge(best, on=SEED_KEYS)
    return set(
        merged.loc[(merged["state"] == "stable") & (merged["lr"] >= merged["value"]), "cell"]
    )


def _runs(history: pd.DataFrame, columns: list[str]) -> dict[str, dict[str, Any]]:
    """The reports of each cell by step, column by column, as arrays; cells in their order."""
    codes, names = pd.factorize(history["cell"])
    order = np.lexsort((history["step"], codes))
    ends = np.cumsum(np.bincount(codes, minlength=len(names)))[:-1]
    split = {column: np.split(history[column].to_numpy()[order], ends) for column in columns}
    return {
        name: {column: parts[i] for column, parts in split.items()} for i, name in enumerate(names)
    }


def _departure(reports: dict[str, Array], ceiling: pd.Series) -> float:
    """First step of the last run of reports above the ceiling; NaN if the end is not above it."""
    step, loss = reports["step"], reports["val/loss"]
    if not len(step) or not len(ceiling):
        return np.nan
    steps, limits = ceiling.index.to_numpy(), ceiling.to_numpy(float)
    at = np.searchsorted(steps, step).clip(max=len(steps) - 1)
    above = (np.where(np.isnan(loss), np.inf, loss) > limits[at]) & (steps[at] == step)
    if not above[-1]:
        return np.nan
    calm = np.flatnonzero(~above)
    return float(step[calm[-1] + 1 if len(calm) else 0])


def _crossing(reports: dict[str, Array], column: str, side: int, level: float) -> float:
    """First step at which the column lies beyond its level, NaN if none."""
    if np.isnan(level):
        return np.nan
    values = reports[column]
    beyond = np.isnan(values) | (side * values > side * level)
    return float(reports["step"][beyond.argmax()]) if beyond.any() else np.nan


def logit_limit(cells: pd.DataFrame, limit: float = LOGIT_LIMIT) -> pd.DataFrame:
    """Whether every cell whose attention logits passed the limit failed or diverged.

    Returns:
        DataFrame: qk_norm, n_above, n_above_unstable, n_unstable, exceptions (cells that are
        stable though above, by name).
    """
    rows = []
    known = cells[~cells["state"].isin(NO_EVIDENCE)]
    for arm, group in known.groupby("qk_norm", sort=True):
        above = group["max_logit_peak"] > limit
        unstable = group["state"] != "stable"
        rows.append(
            {
                "qk_norm": arm,
                "n_above": int(above.sum()),
                "n_above_unstable": int((above & unstable).sum()),
                "n_unstable": int(unstable.sum()),
                "exceptions": ", ".join(group.loc[above & ~unstable, "cell"]),
            }
        )
    columns = ["qk_norm", "n_above", "n_above_unstable", "n_unstable", "exceptions"]
    return pd.DataFrame(rows, columns=columns)


def spikes(history: pd.DataFrame) -> pd.DataFrame:
    """Spikes of the training loss, step by step.

    Args:
        history: with `train/losses`, the loss of each step since the report before.

    Returns:
        DataFrame: cell, lr, depth, qk_norm, seed, step (at which it began), size (largest excess
        over the average before it, nats; inf if not finite), length (steps until it had
        recovered, or to the end), recovered.
    """
    keys = ["cell", "lr", "depth", "qk_norm", "seed"]
    rows: list[dict[str, Any]] = []
    cells: list[dict[Any, Any]] = history.drop_duplicates("cell")[keys].to_dict("records")
    runs = _runs(history, ["train/losses"])
    for cell in cells:
        parts = runs[cell["cell"]]["train/losses"]
        losses = np.concatenate([np.array(part, dtype=float) for part in parts])
        # Most runs have no spike, and a moving average over the whole says so at once.
        if not np.isfinite(losses).all() or _may_spike(losses):
            rows += [cell | spike for spike in _spikes(losses)]
    return pd.DataFrame(rows, columns=[*keys, "step", "size", "length", "recovered"])


def _may_spike(losses: Array) -> bool:
    """Whether any step lies SPIKE above the average before it, but for rounding."""
    average = pd.Series(losses).ewm(alpha=1 - DECAY, adjust=False).mean().to_numpy()
    return bool((losses[1:] - average[:-1] > SPIKE - 1e-6).any())


def _spikes(losses: Array) -> list[dict[str, Any]]:
    """Spikes of one run; the average stands still while a spike lasts."""
    found: list[dict[str, Any]] = []
    average, open_since, size = float(losses[0]) if len(losses) else 0.0, 0, 0.0
    for step, loss in enumerate(np.where(np.isnan(losses), np.inf, losses), start=1):
        excess = float(loss - average)
        if open_since:
            size = max(size, excess)
            if excess <= BACK:
                length = step - open_since
                found.append(
                    {"step": open_since, "size": size, "length": length, "recovered": True}
                )
                open_since = 0
        elif excess > SPIKE:
            open_since, size = step, excess
        if not open_since:
            average = DECAY * average + (1 - DECAY) * float(loss)
    if open_since:
        length = len(losses) + 1 - open_since
        found.append({"step": open_since, "size": size, "length": length, "recovered": False})
    return found


def spike_summary(cells: pd.DataFrame, found: pd.DataFrame) -> pd.DataFrame:
    """Spikes per arm and state.

    Returns:
        DataFrame: qk_norm, state, cells, with_spikes (cells), spikes, recovered, largest_recovered
        (nats).
    """
    states = cells[["cell", "qk_norm", "state"]]
    merged = found.drop(columns="qk_norm").merge(states, on="cell")
    rows = []
    for (arm, state), group in states.groupby(["qk_norm", "state"], sort=True):
        those = merged[merged["cell"].isin(group["cell"])]
        back = those[those["recovered"].astype(bool)]
        rows.append(
            {
                "qk_norm": arm,
                "state": state,
                "cells": len(group),
                "with_spikes": int(those["cell"].nunique()),
                "spikes": len(those),
                "recovered": len(back),
                "largest_recovered": float(back["size"].max()) if len(back) else np.nan,
            }
        )
    columns = ["qk_norm", "state", "cells", "with_spikes", "spikes", "recovered"]
    return pd.DataFrame(rows, columns=[*columns, "largest_recovered"])
