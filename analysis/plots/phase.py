"""Phase maps: which (learning rate, depth) each arm survives, and which arm ends lower."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from analysis.plots.theme import (
    GREY,
    WIDE,
    Layout,
    arm_colours,
    arm_name,
    arm_order,
    last_row,
    layered,
    log_x,
    panels,
    short_name,
    sized,
    styled,
)


def phase_map(curve: pd.DataFrame, gains: pd.DataFrame, layout: Layout = WIDE) -> Any:
    """One map of stable seeds for each arm, one of the paired difference for each arm with
    QK-norm.

    Args:
        curve: as `analysis.estimators.by_lr`: depth, qk_norm, lr and the counts of states.
        gains: depth, qk_norm (the arm that off is compared with), lr, gain = loss(off) -
            loss(on) in nats a token (NaN where no pair has both), significant (bool).
    """
    arms = arm_order(curve["qk_norm"])
    compared = [arm for arm in arms if arm in set(gains["qk_norm"])]
    lrs = sorted(curve["lr"].unique())
    known = curve["n_asked"] - curve["n_errored"] - curve["n_missing"]
    states = _tiles(curve, lrs).assign(
        share=(curve["n_stable"] / known.where(known > 0)),
        text=curve["n_stable"].astype(str).where(known == curve["n_asked"], _partly(curve, known)),
    )
    differences = _tiles(gains, lrs).assign(text=np.where(gains["significant"], "•", ""))
    largest = float(gains["gain"].abs().max()) if gains["gain"].notna().any() else 1.0
    count = len(arms) + len(compared)
    height = max(layout.font * 2.1 * curve["depth"].nunique(), layout.font * 4)
    colours = arm_colours(arms)
    charts = []
    for i, (arm, is_gain) in enumerate([(a, False) for a in arms] + [(a, True) for a in compared]):
        x_title = "peak learning rate" if last_row(i, count, layout) else None
        chart = (
            _gain_map(arm, lrs, x_title, colours[arm], largest, layout)
            if is_gain
            else _state_map(arm, lrs, x_title, layout, legend=i == 0)
        )
        title = f"loss of off − loss of {short_name(arm)}" if is_gain else arm_name(arm)
        charts.append(sized(chart, layout.panel_width(count), height, title))
    figure = panels(charts, layout)
    figure.resolve = alt.Resolve(scale={"color": "independent"})
    notes = [f"number: stable seeds of {_span(curve['n_asked'])}; ?: some errored or missing"]
    if compared:
        notes.append("dot: the paired difference is significant (Holm)")
    tables = {"states": states, "gains": differences}
    return styled(figure, layout, tables, "Phase map", notes)


def _partly(curve: pd.DataFrame, known: pd.Series) -> pd.Series:
    return (curve["n_stable"].astype(str) + "?").where(known > 0, "?")


def _span(counts: pd.Series) -> str:
    low, high = counts.min(), counts.max()
    return str(low) if low == high else f"{low} to {high}"


def _sides(lrs: list[float]) -> np.ndarray:
    """Where tiles meet: half way between neighbours in log LR, and as far beyond the ends."""
    log_lr = np.log(np.array(lrs))
    middle = (log_lr[1:] + log_lr[:-1]) / 2
    first = middle[0] - log_lr[0] if len(middle) else 0.5
    last = log_lr[-1] - middle[-1] if len(middle) else 0.5
    return np.exp(np.concatenate([[log_lr[0] - first], middle, [log_lr[-1] + last]]))


def _tiles(table: pd.DataFrame, lrs: list[float]) -> pd.DataFrame:
    """The table with the left and right side of each tile."""
    sides, at = _sides(lrs), np.searchsorted(lrs, table["lr"])
    return table.assign(left=sides[at], right=sides[at + 1])


def _base(data: str, arm: str, lrs: list[float], x_title: str | None) -> tuple[Any, alt.X]:
    chart = alt.Chart(alt.NamedData(data)).transform_filter(f"datum.qk_norm == '{arm}'")
    y = alt.Y("depth:O", title="depth", sort="descending", axis=alt.Axis(labelAngle=0))
    return chart.encode(y=y), log_x("left", _sides(lrs).tolist(), x_title, room=0, grid=False)


def _state_map(
    arm: str, lrs: list[float], x_title: str | None, layout: Layout, legend: bool
) -> Any:
    base, x = _base("states", arm, lrs, x_title)
    # Cividis is ordered in lightness and looks the same with most colour-vision deficiencies.
    share = alt.Color(
        "share:Q",
        scale=alt.Scale(domain=[0, 1], scheme="cividis"),
        legend=alt.Legend(title="share stable", gradientLength=layout.font * 7, tickCount=2)
        if legend
        else None,
    )
    ink = alt.ColorValue(
        "#ffffff",
        condition=[
            {"test": "!isValid(datum.share)", "value": GREY},
            {"test": "datum.share >= 0.5", "value": "#000000"},
        ],
    )
    text = base.mark_text(fontSize=layout.font * 0.75).encode(
        x=log_x("lr", _sides(lrs).tolist(), x_title, room=0, grid=False),
        text=alt.Text("text:N"),
        color=ink,
    )
    return layered(*_rectangles(base, x, share, "share"), text)


def _gain_map(
    arm: str, lrs: list[float], x_title: str | None, colour: str, largest: float, layout: Layout
) -> Any:
    base, x = _base("gains", arm, lrs, x_title)
    # Symlog shows differences of hundredths of a nat beside those of several nats.
    scale = alt.Scale(
        type="symlog",
        constant=0.05,
        domain=[-largest, 0, largest],
        range=["#D55E00", "#f4f4f4", colour],
    )
    legend = alt.Legend(
        title="nats/token",
        gradientLength=layout.font * 10,
        values=[-largest, 0, largest],
        format=".2~f",
    )
    dot = base.transform_filter("datum.text").mark_text(fontSize=layout.font, color="#000000")
    dot = dot.encode(
        x=log_x("lr", _sides(lrs).tolist(), x_title, room=0, grid=False), text=alt.Text("text:N")
    )
    gain = alt.Color("gain:Q", scale=scale, legend=legend)
    return layered(*_rectangles(base, x, gain, "gain"), dot)


def _rectangles(base: Any, x: alt.X, colour: alt.Color, field: str) -> list[Any]:
    """Every tile's outline, and the colour of those that have a value."""
    tiles = base.encode(x=x, x2=alt.X2("right:Q"))
    return [
        tiles.transform_filter(f"isValid(datum.{field})").mark_rect().encode(color=colour),
        tiles.mark_rect(filled=False, stroke="#888888", strokeWidth=0.4),
    ]
