"""Other scales of the loss, and any metric as a function of the learning rate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from analysis.estimators.grid import AXIS_KEYS, LR_KEYS, Array, cell_rows, counts, unique_cells
from analysis.intervals import LEVEL, t_factor
from analysis.tables import NO_EVIDENCE


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
    names, keys = list(metrics), cells[AXIS_KEYS].drop_duplicates(ignore_index=True)
    run = cell_rows(keys, history)
    order = np.argsort(history["step"].to_numpy(), kind="stable")
    order = order[run[order] >= 0]
    last = np.full(len(keys), -1)
    last[run[order]] = order  # the latest step is written last, and stays
    keys, last = keys[last >= 0], last[last >= 0]
    reported = history[names].iloc[last].set_axis(keys.index)
    return cells.merge(pd.concat([keys, reported], axis=1), on=AXIS_KEYS, how="left")


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
    frame = unique_cells(cells)
    count = counts(frame, LR_KEYS)
    tables = []
    for metric in metrics:
        values = frame[metric].astype(float)
        values = values.where(np.isfinite(values) & ~frame["state"].isin(NO_EVIDENCE))
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
