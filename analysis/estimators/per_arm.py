"""What each arm came to over its seeds, as plain values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.estimators.grid import ARM_KEYS, Array, Curves, counts, curves, groups, none_of
from analysis.estimators.sensitivity import lr_sensitivity
from analysis.estimators.stability import best_of, log_interval, lowest_loss, max_stable_lr
from analysis.intervals import LEVEL, mean_interval
from tune_study.config import Margins


def arm_summary(
    cells: pd.DataFrame, margins: Margins, level: float = LEVEL
) -> list[dict[str, Any]]:
    """What each (depth, qk_norm) came to over its seeds: the `arms` of summary.json.

    Strict-JSON safe: unknown or unbounded is None. `best_lr` has the lowest mean loss among
    the LRs at which every seed is stable; where a search left cells untried it is the geometric
    mean of each seed's own best LR, and `best_loss` the mean of their losses.
    `max_stable_lr.value` is the geometric mean over seeds of the highest stable LR; `low` and
    `high` are the interval of the edge itself, which lies up to one grid step higher. With one
    seed there is no interval over seeds, and they are the grid's bin (`method` "grid").

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
        best, loss, censored = lowest_loss(grid.lr, mean, none_of(grid.unknown[at].T))
        if grid.untried[at].any():
            best, loss, censored = _best_of_seeds(grid.rows(at))
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


def _best_of_seeds(grid: Curves) -> tuple[Array, Array, NDArray[Any]]:
    """Over seeds that a search ran at different LRs: the geometric mean of their best ones."""
    best, loss, censored = best_of(grid)
    ends = sorted({end for end in censored if end})
    return 10 ** np.log10(best).mean(), loss.mean(), np.asarray(ends[0] if ends else "")


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
    interval = log_interval(rows["low"], rows["high"], step, level)
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
