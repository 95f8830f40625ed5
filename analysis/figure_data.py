"""The tables that figures are drawn from, where they are not an estimator's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from analysis import estimators
from analysis.plots.metrics import ALL_LAYERS
from analysis.plots.theme import short_name
from analysis.summary import interval_text


def loss_curve(cells: pd.DataFrame) -> pd.DataFrame:
    """Final loss as a function of the learning rate, none above the loss at initialisation."""
    finite = cells["loss"].where(np.isfinite(cells["loss"]))
    lost = finite.isna() & cells["state"].isin(["diverged", "failed"])
    clamped = finite.clip(upper=cells["loss_init"]).mask(lost, cells["loss_init"])
    return estimators.by_lr(cells.assign(loss=clamped))


def reference_losses(cells: pd.DataFrame) -> pd.DataFrame:
    """The losses that the curves are read against: depth, name, value (median over cells)."""
    names = {
        "loss_init": "loss at init",
        "unigram_entropy": "unigram entropy",
        "loss_floor": "entropy floor",
    }
    medians = cells.groupby("depth")[list(names)].median().rename(columns=names).reset_index()
    table = medians.melt(id_vars="depth", var_name="name", value_name="value")
    return table[np.isfinite(table["value"])].reset_index(drop=True)


def depth_trend(
    needed: pd.DataFrame, verdicts: list[dict[str, Any]]
) -> tuple[pd.DataFrame | None, str]:
    """The line that H3 is judged by, through the middle of the seeds' thresholds.

    Args:
        needed: as `analysis.estimators.necessity_by_seed`.
        verdicts: as in summary.json, which have the slope and its interval.

    Returns:
        depth, qk_norm, value, low, high (the line at the ends of its slope's interval, NaN where
        that is open), None where no arm has a slope; and what to say of it.
    """
    lines, notes = [], []
    for verdict in verdicts:
        if verdict["hypothesis"] != "H3":
            continue
        arm, slope = verdict["arm"], verdict["effect"]
        known = needed[
            needed["qk_norm"].eq(arm) & (needed["low"] > 0) & np.isfinite(needed["high"])
        ]
        interval = interval_text(verdict["low"], verdict["high"], ".2g")
        if slope is None or known.empty:
            notes.append(
                f"{short_name(arm)}: no slope is known" + f" beyond {interval}" * bool(interval)
            )
            continue
        depths = np.unique(known["depth"]).astype(float)
        y = (np.log10(known["low"]) + np.log10(known["high"])).mean() / 2
        x = np.log10(depths) - np.log10(known["depth"].astype(float)).mean()
        ends = [np.nan if s is None else s for s in (verdict["low"], verdict["high"])]
        tilted = np.array([y + end * x for end in ends])
        lines.append(
            pd.DataFrame(
                {
                    "depth": depths,
                    "qk_norm": arm,
                    "value": 10 ** (y + slope * x),
                    "low": 10 ** tilted.min(axis=0),
                    "high": 10 ** tilted.max(axis=0),
                }
            )
        )
        notes.append(
            f"dashed: slope {slope:.2g} {interval} decades a decade of depth, "
            f"{verdict['n']} of {verdict['n_asked']} seeds ({short_name(arm)})".replace("-", "−")
        )
    return (pd.concat(lines, ignore_index=True) if lines else None), "; ".join(notes)


def layer_curves(values: pd.DataFrame) -> pd.DataFrame:
    """What `diagnostic_values` gives, as functions of the learning rate, layer by layer.

    Returns:
        DataFrame: as `analysis.estimators.by_lr`, with `layer` in place of `metric`.
    """
    layers = values["layer"].unique().tolist()
    keys = ["cell", "lr", "depth", "qk_norm", "seed", "state"]
    wide = values.pivot(index=keys, columns="layer", values="value").reset_index()
    curve = estimators.by_lr(wide, layers).rename(columns={"metric": "layer"})
    number = curve["layer"].where(curve["layer"] != ALL_LAYERS, "-1").astype(int)
    return curve[curve["depth"] > number].reset_index(drop=True)


def diagnostic_values(cells: pd.DataFrame, history: pd.DataFrame, key: str) -> pd.DataFrame | None:
    """A diagnostic at each cell's last report, over all layers and layer by layer.

    Returns:
        One row a (cell, layer): the cell's axes and state, layer, value; None where the study
        did not record it.
    """
    if key not in history.columns:
        return None
    prefix = f"{key}/layer_"
    per_layer = sorted(
        (name for name in history.columns if name.startswith(prefix)),
        key=lambda name: int(name.removeprefix(prefix)),
    )
    last = estimators.with_last_report(cells, history, [key, *per_layer])
    keep = ["cell", "lr", "depth", "qk_norm", "seed", "state"]
    parts = [last[keep].assign(layer=ALL_LAYERS, value=last[key])]
    for name in per_layer:
        number = int(name.removeprefix(prefix))
        inside = last[last["depth"] > number]
        parts.append(inside[keep].assign(layer=str(number), value=inside[name]))
    return pd.concat(parts, ignore_index=True)


def no_gains() -> pd.DataFrame:
    """What `estimators.paired_by_lr` would give without a pair of arms."""
    columns = {"depth": "int64", "qk_norm": "str", "lr": "float64", "gain": "float64"}
    columns["significant"] = "bool"
    return pd.DataFrame(columns=list(columns)).astype(columns)
