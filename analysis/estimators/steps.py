"""Steps to a target loss, with runs that never reach it kept as censored."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from analysis.estimators.grid import AXIS_KEYS, LR_KEYS, Array, cell_rows, unique_cells
from analysis.tables import NO_EVIDENCE


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
    table = unique_cells(cells)[[*AXIS_KEYS, "state", "steps", "loss_init"]]
    table = table.reset_index(drop=True)
    start = table.pop("loss_init").to_numpy(np.float64)
    run, step, loss = _reports(table, history)

    last = np.zeros(len(table))
    last[run] = step  # ascending within a run, so that its last one stays
    hits = np.flatnonzero(loss <= target)
    hits = hits[np.unique(run[hits], return_index=True)[1]]
    opening = (hits == 0) | (run[hits - 1] != run[hits])
    x0, y0 = (
        np.where(opening, at_start, values[hits - 1])
        for at_start, values in ((0.0, step), (start[run[hits]], loss))
    )
    x1, y1 = step[hits], loss[hits]
    with np.errstate(invalid="ignore", divide="ignore"):
        between = x0 + (y0 - target) / (y0 - y1) * (x1 - x0)
    crossing = np.full(len(table), np.nan)
    crossing[run[hits]] = np.where(np.isnan(y0) | (y0 <= y1), x1, between)
    crossing[start <= target] = 0.0

    unknown = table["state"].isin(NO_EVIDENCE)
    limit = np.where(unknown, last, table.pop("steps"))
    table["reached"] = ~np.isnan(crossing)
    table.insert(len(AXIS_KEYS) + 1, "step", np.where(table["reached"], crossing, limit))
    return table


def _reports(table: pd.DataFrame, history: pd.DataFrame) -> tuple[NDArray[np.intp], Array, Array]:
    """The reports that have a loss, run by run and in order: row of `table`, step, loss."""
    run = cell_rows(table, history)
    step = history["step"].to_numpy(np.float64)
    loss = history["val/loss"].to_numpy(np.float64)
    kept = np.flatnonzero((run >= 0) & (step > 0) & ~np.isnan(loss))
    kept = kept[np.lexsort((step[kept], run[kept]))]
    return run[kept], step[kept], loss[kept]


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
