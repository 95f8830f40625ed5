"""What a study came to, against depth: LR sensitivity, maximum stable LR, necessity threshold.

At each depth an arm shows its mean over seeds with its interval, and beside it each seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from analysis.plots.theme import (
    BREAK_AT_GAPS,
    GREY,
    NUMBER_LABEL,
    WIDE,
    Layout,
    arm_colour,
    arm_name,
    arm_order,
    by_arm,
    decades,
    layered,
    sized,
    styled,
)


def lr_sensitivity(by_seed: pd.DataFrame, arms: list[dict[str, Any]], layout: Layout = WIDE) -> Any:
    """LR sensitivity against depth, as beneath figure 1 of Wortsman et al. 2023.

    Args:
        by_seed: as `analysis.estimators.lr_sensitivity`.
        arms: as `analysis.estimators.arm_summary`.
    """
    chart, tables, notes = sensitivity_panel(by_seed, arms, layout)
    return styled(chart, layout, tables, "LR sensitivity against depth", [_KEY, _OPEN, *notes])


def sensitivity_panel(
    by_seed: pd.DataFrame, arms: list[dict[str, Any]], layout: Layout
) -> tuple[Any, dict[str, pd.DataFrame], list[str]]:
    """The panel of LR sensitivity, the tables it names, and what its subtitle has to say."""
    seeds = by_seed.rename(columns={"value": "y"}).assign(low=np.nan, high=np.nan)
    means = _means(arms, "lr_sensitivity")
    values = pd.concat([seeds["y"], means["y"], means["low"], means["high"]])
    finite = values[np.isfinite(values)]
    top = max(finite, default=1.0) * 1.08
    scale = alt.Scale(domain=[min(0.0, min(finite, default=0.0)), top], nice=False)
    axis = alt.Axis(title="LR sensitivity (nats/token)", tickCount=5)
    chart, tables = _panel(seeds, means, scale, axis, layout)
    return chart, tables, _unknown(means, seeds, "no LR sensitivity")


def max_stable_lr(
    by_seed: pd.DataFrame,
    arms: list[dict[str, Any]],
    lrs: Sequence[float],
    layout: Layout = WIDE,
) -> Any:
    """Maximum stable learning rate against depth, with censoring.

    Args:
        by_seed: as `analysis.estimators.max_stable_lr`.
        arms: as `analysis.estimators.arm_summary`.
        lrs: the learning rates that were tried.
    """
    seeds = by_seed.rename(columns={"value": "y"})
    means = _means(arms, "max_stable_lr")
    notes = [_KEY, f"{_OPEN}; thin bar: highest stable to lowest unstable LR", _ENDS]
    broken = int((~by_seed["monotone"]).sum())
    if broken:
        notes.append(f"{broken} of {len(by_seed)} seeds have a stable cell above an unstable one")
    notes += _unknown(means, seeds, "nothing known")
    return _on_the_grid(
        seeds, means, lrs, layout, "Maximum stable learning rate", "maximum stable LR", notes
    )


def necessity(
    by_seed: pd.DataFrame,
    thresholds: pd.DataFrame,
    lrs: Sequence[float],
    trend: pd.DataFrame | None = None,
    trend_note: str = "",
    layout: Layout = WIDE,
) -> Any:
    """Learning rate from which on QK-norm is needed, against depth.

    Args:
        by_seed: as `analysis.estimators.necessity_by_seed`.
        thresholds: as `analysis.estimators.necessity_threshold`.
        lrs: the learning rates that were tried.
        trend: depth, qk_norm, value of a line fitted to the thresholds, with low and high, the
            ends of its slope's interval; drawn through the thresholds.
        trend_note: what to say of it.
    """
    lowest = by_seed["low"].where(by_seed["low"] > 0)
    seeds = by_seed.assign(y=by_seed["high"].where(np.isfinite(by_seed["high"]), lowest))
    means = thresholds.rename(columns={"value": "y"})
    # Where no learning rate could be tested, nothing is known: not that it lies beyond the grid.
    means["censored"] = means["censored"].where(means["tested_to"].notna(), "")
    notes = [
        "filled: lowest LR from which on the test says needed; thick bar: 95 % interval over seeds",
        "open, thin bar: a seed's first LR with need, from its last without",
        _ENDS,
    ]
    if trend_note:
        notes.append(trend_note)
    notes += _unknown(means, seeds, "no threshold")
    return _on_the_grid(
        seeds, means, lrs, layout, "Where QK-norm becomes necessary", "necessity threshold (LR)",
        notes, trend,
    )  # fmt: skip


_KEY = "filled: mean over seeds, 95 % interval (of one seed: its bin)"
_OPEN = "open: a seed"
_ENDS = "arrow: beyond the ends of the grid (dotted)"


def _on_the_grid(
    seeds: pd.DataFrame,
    means: pd.DataFrame,
    lrs: Sequence[float],
    layout: Layout,
    title: str,
    y_title: str,
    notes: list[str],
    trend: pd.DataFrame | None = None,
) -> Any:
    """A figure of bins of learning rates; what lies beyond the grid gets an arrow at its end."""
    low, high = min(lrs), max(lrs)
    room = (high / low) ** 0.06 if high > low else 2.0
    bottom, top = low / room, high * room
    scale = alt.Scale(type="log", domain=[bottom / room**0.5, top * room**0.5], nice=False)
    axis = alt.Axis(title=y_title, values=decades(lrs), labelExpr=NUMBER_LABEL)
    chart, tables = _panel(
        _within(seeds, bottom, top), _within(means, bottom, top), scale, axis, layout, trend
    )
    tables["grid"] = pd.DataFrame({"lr": [low, high]})
    ends = alt.Chart(alt.NamedData("grid")).mark_rule(color=GREY, strokeDash=[2, 3])
    chart.layer = [ends.encode(y=alt.Y("lr:Q", scale=scale)), *chart.layer]
    return styled(chart, layout, tables, title, notes)


def _means(arms: list[dict[str, Any]], estimate: str) -> pd.DataFrame:
    """One estimate of each arm: depth, qk_norm, y, low, high, censored; NaN where unknown."""
    rows = [
        {
            "depth": arm["depth"],
            "qk_norm": arm["qk_norm"],
            "y": arm[estimate]["value"],
            "low": arm[estimate]["low"],
            "high": arm[estimate]["high"],
            "censored": arm[estimate].get("censored", ""),
        }
        for arm in arms
    ]
    table = pd.DataFrame(rows)
    return table.astype({"y": "float64", "low": "float64", "high": "float64"})


def _within(table: pd.DataFrame, bottom: float, top: float) -> pd.DataFrame:
    """The table with its ends on the axis, and where to draw an arrow for what lies beyond."""
    up = table["censored"].isin(["above", "both"]) | (table["high"] > top)
    down = table["censored"].isin(["below", "both"]) | (table["low"] < bottom)
    low = table["low"].where(table["low"] > 0).mask(down, bottom)
    high = table["high"].where(np.isfinite(table["high"])).mask(up, top)
    return table.assign(
        low=low.clip(lower=bottom).fillna(table["y"]),
        high=high.clip(upper=top).fillna(table["y"]),
        up=np.where(up, top, np.nan),
        down=np.where(down, bottom, np.nan),
    )


def _unknown(means: pd.DataFrame, seeds: pd.DataFrame, words: str) -> list[str]:
    """Subtitle lines that name the arms and count the seeds without a value."""
    lost = means[means["y"].isna() & means.get("censored", pd.Series("", means.index)).eq("")]
    notes = [f"{words}: {by_arm(zip(lost['qk_norm'], lost['depth'], strict=True))}"]
    notes = notes if len(lost) else []
    without = int(seeds["y"].isna().sum())
    return [*notes, *([f"{without} of {len(seeds)} seeds have no value"] if without else [])]


def _panel(
    seeds: pd.DataFrame,
    means: pd.DataFrame,
    scale: alt.Scale,
    axis: alt.Axis,
    layout: Layout,
    trend: pd.DataFrame | None = None,
) -> tuple[Any, dict[str, pd.DataFrame]]:
    """Means and seeds side by side at each depth, with the tables that the marks name."""
    arms = arm_order({*seeds["qk_norm"], *means["qk_norm"]})
    depths = sorted({*seeds["depth"], *means["depth"]})
    tables = {
        "means": _beside(means, arms, depths, pd.Series(0, means.index), seeds["seed"]),
        "seeds": _beside(seeds, arms, depths, _ranks(seeds["seed"]) + 1, seeds["seed"]),
    }
    colour = arm_colour(arms)
    step = _step(depths)
    x_scale = alt.Scale(
        type="log",
        domain=[depths[0] * math.exp(-0.6 * step), depths[-1] * math.exp(0.6 * step)],
        nice=False,
    )
    x = alt.X(
        "x:Q", scale=x_scale, axis=alt.Axis(title="depth (blocks)", values=depths, grid=False)
    )

    def y(field: str) -> alt.Y:
        return alt.Y(f"{field}:Q", scale=scale, axis=axis)

    layers = []
    if trend is not None:
        tables["trend"] = trend.assign(arm=trend["qk_norm"].map(arm_name), x=trend["depth"])
        fitted = alt.Chart(alt.NamedData("trend")).encode(x=x, color=colour)
        layers += [
            fitted.mark_area(fillOpacity=0.12, clip=True, invalid=BREAK_AT_GAPS).encode(
                y=y("low"), y2=alt.Y2("high:Q")
            ),
            fitted.mark_line(strokeWidth=layout.stroke, strokeDash=[5, 3], clip=True).encode(
                y=y("value")
            ),
        ]
    for name, weight, filled in (("seeds", 1.0, False), ("means", 2.2, True)):
        base = alt.Chart(alt.NamedData(name)).encode(x=x, color=colour)
        layers.append(
            base.transform_filter("isValid(datum.low) && isValid(datum.high)")
            .mark_rule(strokeWidth=layout.stroke * weight, strokeOpacity=0.55 if filled else 0.8)
            .encode(y=y("low"), y2=alt.Y2("high:Q"))
        )  # fmt: skip
        layers.append(
            base.transform_filter("isValid(datum.y)")
            .mark_point(
                size=layout.point * (1.6 if filled else 0.7),
                filled=filled,
                opacity=1,
                strokeWidth=layout.stroke,
            )
            .encode(y=y("y"))
        )
        for end, shape in (("up", "triangle-up"), ("down", "triangle-down")):
            if tables[name].get(end, pd.Series(dtype=float)).notna().any():
                arrow = base.transform_filter(f"isValid(datum.{end})").mark_point(
                    shape=shape, size=layout.point * weight, filled=True, opacity=1
                )
                layers.append(arrow.encode(y=y(end)))
    width = layout.panel_width(1, 4) * (0.62 if layout.columns > 1 else 1)
    return sized(layered(*layers), width, layout.panel_height), tables


def _ranks(values: pd.Series) -> pd.Series:
    return values.map({value: i for i, value in enumerate(sorted(values.unique()))})


def _step(depths: Sequence[int]) -> float:
    """Smallest distance of neighbouring depths in log depth; a factor of 2 for a single one."""
    return min((math.log(b / a) for a, b in pairwise(depths)), default=math.log(2))


def _beside(
    table: pd.DataFrame,
    arms: list[str],
    depths: list[int],
    slot: pd.Series,
    seeds: Iterable[int],
) -> pd.DataFrame:
    """The table with the horizontal place `x` of each mark: arms apart, seeds by their mean."""
    per_arm = len(set(seeds)) + 2
    total = per_arm * len(arms) - 1
    place = table["qk_norm"].map({arm: i for i, arm in enumerate(arms)}) * per_arm + slot
    shift = (place - (total - 1) / 2) / total * 0.75 * _step(depths)
    return table.assign(
        arm=table["qk_norm"].map(arm_name), x=table["depth"] * np.exp(shift.astype(float))
    )
