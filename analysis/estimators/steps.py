"""Steps to a target loss, with runs that never reach it kept as censored."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from analysis.estimators.grid import AXIS_KEYS, LR_KEYS, unique_cells


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
    frame = unique_cells(cells)[[*AXIS_KEYS, "state", "steps", "loss_init"]].reset_index(drop=True)
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
