"""Many arms against one baseline: small multiples, what each changes, where each is stable.

There may be more arms than colours that everybody can tell apart, so arms are told apart by
panel and by label. QK-norm's settings keep the colours they have in every other figure; the
other arms share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
    brought_out,
    cell_tooltip,
    choosable,
    colour_of,
    decades,
    last_row,
    layered,
    linear_ticks,
    log_x,
    panels,
    sized,
    state_labels,
    state_shape,
    styled,
)
from analysis.tables import NO_EVIDENCE

_LETTER = 0.52  # mean width of a letter, in font sizes


# -------------------------------------------------------------- small multiples


def arm_curves(
    cells: pd.DataFrame, curve: pd.DataFrame, arms: Sequence[str], layout: Layout = WIDE
) -> Any:
    """Final loss against learning rate, a panel an arm and depth, the baseline behind each.

    Args:
        cells: as `analysis.tables.CELL_COLUMNS`.
        curve: depth, arm, lr, median (over seeds, NaN where none has a loss).
        arms: the baseline first.
    """
    layout = replace(layout, columns=2 if layout.columns == 1 else 4, panel_height=72)
    labels = state_labels(cells["state"])
    marks = _clamped(cells).assign(state_label=cells["state"].map(labels))
    drawn = marks[marks["y"].notna()]
    top = max([*cells["loss_init"].dropna(), *drawn["y"]], default=1.0)
    low = min([0.0, *drawn["y"]])
    lrs = sorted(cells["lr"].unique())
    depths = sorted(cells["depth"].unique())
    several = len(depths) > 1
    which = [(depth, arm) for depth in depths for arm in arms[1:]]
    ticks = linear_ticks(low, top, most=4)
    scale = alt.Scale(domain=[low, top * 1.03], nice=False, zero=False)
    present = set(drawn["state"])
    shape = state_shape({s: labels[s] for s in labels if s in present}, symbolStrokeColor=GREY)
    charts = []
    for i, (depth, arm) in enumerate(which):
        x_title = "peak learning rate" if last_row(i, len(which), layout) else None
        axis = alt.Axis(title="loss" if i % layout.columns == 0 else None, values=ticks)
        x = log_x("lr", lrs, x_title, labelFlush=False)
        layers = []
        for name, strength in ((arms[0], 0.45), (arm, 0.95)):
            only = f"datum.depth == {depth} && datum.arm == '{name}'"
            colour = colour_of(name)
            line = alt.Chart(alt.NamedData("curve")).transform_filter(only)
            point = alt.Chart(alt.NamedData("cells")).transform_filter(only)
            layers += [
                line.mark_line(
                    color=colour,
                    strokeOpacity=strength,
                    strokeWidth=layout.stroke,
                    invalid=BREAK_AT_GAPS,
                ).encode(x=x, y=alt.Y("median:Q", scale=scale, axis=axis)),
                point.mark_point(
                    color=colour,
                    size=layout.point * 0.6,
                    strokeWidth=layout.stroke * 0.8,
                    filled=False,
                ).encode(
                    x=x,
                    y=alt.Y("y:Q", scale=scale, axis=axis),
                    shape=shape,
                    strokeOpacity=brought_out(strength, 0.1),
                    tooltip=cell_tooltip(),
                ),
            ]
        title = f"{arm}, depth {depth}" if several else arm
        width = layout.panel_width(len(which), 2.6)
        charts.append(sized(layered(*layers), width, layout.panel_height, title))
    notes = [f"behind each arm, in orange and fainter: {arms[0]}; a mark a cell, line: median"]
    if lost := int(marks["y"].isna().sum()):
        notes.append(f"{lost} of {len(marks)} cells errored or missing: not drawn")
    keep = ["cell", "depth", "arm", "lr", "state", "state_label", "reason", "step", "loss", "y"]
    tables = {"cells": drawn[keep], "curve": curve[["depth", "arm", "lr", "median"]]}
    figure = choosable(panels(charts, layout))
    return styled(figure, layout, tables, "Every arm and the baseline", notes)


def _clamped(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells with `y`, their loss, at most that at initialisation; NaN where there is none."""
    finite = cells["loss"].where(np.isfinite(cells["loss"]), np.inf)
    none = cells["state"].isin(NO_EVIDENCE)
    y = finite.clip(upper=cells["loss_init"]).mask(none)
    return cells.assign(y=y.where(np.isfinite(y)))


# ------------------------------------------------------------- dots and intervals


def arm_changes(
    ranking: pd.DataFrame,
    titles: dict[str, str],
    units: dict[str, str],
    ratios: set[str],
    layout: Layout = WIDE,
) -> Any:
    """What each arm changes against the baseline: a dot and its interval, a panel a quantity.

    Args:
        ranking: as `analysis.stabilisers.ranking`, the arms in the order to be drawn, the
            baseline left out.
        titles: of the quantities, by name, in the order of the panels.
        units: of their changes.
        ratios: the quantities whose change is a ratio.
    """
    depths = sorted(ranking["depth"].unique())
    names = list(dict.fromkeys(ranking["arm"]))
    columns = 2 if layout.columns == 1 else len(titles)
    layout = replace(layout, columns=columns)
    rows = [(depth, quantity) for depth in depths for quantity in titles]
    label = max(map(len, names)) * layout.font * _LETTER
    room = layout.width - label - (columns - 1) * layout.gap - 2 * layout.font
    width = room / columns - layout.font
    height = layout.font * 1.7 * len(names)
    charts, tables = [], []
    for i, (depth, quantity) in enumerate(rows):
        log = quantity in ratios
        mine = ranking[ranking["quantity"] == quantity]
        domain = _domain(mine, log)
        table = _drawn(mine[mine["depth"] == depth], domain, log).assign(panel=i)
        tables.append(table)
        # Panels are independent, so the labels stand where a row of panels begins.
        charts.append(
            sized(
                _dots(i, names, domain, units[quantity], log, i % columns == 0, table, layout),
                width,
                height,
                f"{titles[quantity]}, depth {depth}" if len(depths) > 1 else titles[quantity],
            )
        )
    chart = alt.concat(*charts, columns=columns)
    notes = [
        "against the baseline (line), paired by seed, 95 % interval; × is a ratio to it",
        "filled: told apart from it (Holm); open: not; triangle: the interval goes on beyond",
    ]
    unknown = ranking[ranking["change_low"].isna() & ranking["change_high"].isna()]
    if len(unknown):
        lost = [
            f"{title}: {', '.join(unknown.loc[unknown['quantity'] == name, 'arm'].unique())}"
            for name, title in titles.items()
            if name in set(unknown["quantity"])
        ]
        notes.append("not known for " + "; ".join(lost))
    return styled(chart, layout, {"changes": pd.concat(tables)}, "What each arm changes", notes)


def _domain(rows: pd.DataFrame, log: bool) -> tuple[float, float]:
    """The ends of a panel's axis: every finite bound, and no change at all."""
    none = 1.0 if log else 0.0
    ends = rows[["change", "change_low", "change_high"]].to_numpy(float).ravel()
    ends = ends[np.isfinite(ends) & (ends > 0 if log else True)]
    low, high = min([none, *ends]), max([none, *ends])
    if log:
        room = max((high / low) ** 0.12, 1.02)
        return low / room, high * room
    room = max(0.12 * (high - low), 1e-3)
    return low - room, high + room


def _drawn(rows: pd.DataFrame, domain: tuple[float, float], log: bool) -> pd.DataFrame:
    """The rows with their intervals cut at the axis, and where an arrow says so."""
    known = rows["change_low"].notna() & rows["change_high"].notna()
    low, high = rows["change_low"].where(known), rows["change_high"].where(known)
    down, up = low.le(0 if log else -np.inf), high.eq(np.inf)
    low, high = low.mask(down, domain[0]), high.mask(up, domain[1])
    return pd.DataFrame(
        {
            "arm": rows["arm"],
            # An open interval has no middle, and gets no dot.
            "change": rows["change"],
            "low": low,
            "high": high,
            "left": low.where(down),
            "right": high.where(up),
            "apart": rows["outcome"].ne(""),
            "outcome": rows["outcome"].replace("", "not told apart"),
            "n": rows["n"],
            "colour": rows["arm"].map(colour_of),
        }
    )


def _dots(
    panel: int,
    names: list[str],
    domain: tuple[float, float],
    unit: str,
    log: bool,
    labelled: bool,
    table: pd.DataFrame,
    layout: Layout,
) -> Any:
    values = _ratio_ticks(domain) if log else linear_ticks(*domain, most=3)
    axis = alt.Axis(
        title=unit,
        values=values,
        labelExpr=f"'×' + ({NUMBER_LABEL})" if log else NUMBER_LABEL,
        labelFlush=False,
    )
    if log:
        scale = alt.Scale(type="log", domain=list(domain), nice=False)
    else:
        scale = alt.Scale(domain=list(domain), nice=False, zero=False)
    y_axis = alt.Axis(
        title=None, labels=labelled, labelLimit=0, ticks=False, domain=False, grid=True
    )
    y = alt.Y("arm:N", sort=names, scale=alt.Scale(domain=names), axis=y_axis)

    def x(field: str) -> alt.X:
        return alt.X(f"{field}:Q", scale=scale, axis=axis)

    base = alt.Chart(alt.NamedData("changes")).transform_filter(f"datum.panel == {panel}")
    colour = alt.Color("colour:N", scale=None)
    still = alt.Chart(alt.NamedData("changes")).transform_filter(f"datum.panel == {panel}")
    layers = [
        still.mark_rule(color=GREY, strokeWidth=layout.stroke * 0.8).encode(
            x=alt.XDatum(1.0 if log else 0.0, scale=scale, axis=axis)
        ),
        base.transform_filter("isValid(datum.low)")
        .mark_rule(strokeWidth=layout.stroke * 1.2)
        .encode(x=x("low"), x2=alt.X2("high:Q"), y=y, color=colour),
    ]
    tooltip = [alt.Tooltip(f) for f in ("arm:N", "outcome:N", "change:Q", "low:Q", "high:Q", "n:Q")]
    for filled in (True, False):
        dots = base.transform_filter(
            f"isValid(datum.change) && {'' if filled else '!'}datum.apart"
        ).mark_point(filled=filled, size=layout.point * 1.3, strokeWidth=layout.stroke, opacity=1)
        layers.append(dots.encode(x=x("change"), y=y, color=colour, tooltip=tooltip))
        for end, shape in (("left", "triangle-left"), ("right", "triangle-right")):
            if table[end].notna().any():
                arrow = base.transform_filter(
                    f"isValid(datum.{end}) && {'' if filled else '!'}datum.apart"
                ).mark_point(
                    shape=shape, filled=filled, size=layout.point * 1.3, strokeWidth=layout.stroke,
                    opacity=1,
                )  # fmt: skip
                layers.append(arrow.encode(x=x(end), y=y, color=colour, tooltip=tooltip))
    return layered(*layers)


def _ratio_ticks(domain: tuple[float, float]) -> list[float]:
    """A few round ratios inside the domain, 1 among them."""
    low, high = domain
    if high / low < 2.5:
        return linear_ticks(low, high, most=3)
    for mantissas in ((1, 2, 5), (1, 3), (1,)):
        ladder = [round(m * 10.0**e, 9) for e in range(-6, 7) for m in mantissas]
        inside = [t for t in ladder if low <= t <= high]
        if len(inside) <= 4:
            break
    return inside


# ------------------------------------------------------------------- where stable


def arm_phases(counts: pd.DataFrame, arms: Sequence[str], layout: Layout = WIDE) -> Any:
    """How many seeds are stable at each learning rate, arm by arm, a panel a depth.

    Args:
        counts: depth, arm, lr, n_asked, n_stable, n_errored, n_missing.
        arms: in the order to be drawn.
    """
    known = counts["n_asked"] - counts["n_errored"] - counts["n_missing"]
    whole = counts["n_stable"].astype(str)
    partly = (whole + "?").where(known > 0, "?")
    table = counts.assign(
        share=counts["n_stable"] / known.where(known > 0),
        text=whole.where(known == counts["n_asked"], partly),
        # Tiles are named, not placed: a grid of any spacing gets tiles of one width.
        rate=counts["lr"].map(lambda lr: f"{lr:.3g}"),
    )
    rates = [f"{lr:.3g}" for lr in sorted(counts["lr"].unique())]
    depths = sorted(counts["depth"].unique())
    label = max(map(len, arms)) * layout.font * _LETTER
    columns = min(layout.columns, len(depths), 2)
    width = (layout.width - columns * (label + layout.font * 2)) / columns
    height = layout.font * 1.7 * len(arms)
    x = alt.X(
        "rate:N",
        sort=rates,
        scale=alt.Scale(domain=rates),
        axis=alt.Axis(title="peak learning rate", labelAngle=-45, labelOverlap=True),
    )
    y = alt.Y("arm:N", sort=list(arms), axis=alt.Axis(title=None, labelLimit=0, ticks=False))
    # Cividis is ordered in lightness and looks the same with most colour-vision deficiencies.
    share = alt.Color(
        "share:Q",
        scale=alt.Scale(domain=[0, 1], scheme="cividis"),
        legend=alt.Legend(title="share stable", gradientLength=layout.font * 7, tickCount=2),
    )
    ink = alt.ColorValue(
        "#ffffff",
        condition=[
            {"test": "!isValid(datum.share)", "value": GREY},
            {"test": "datum.share >= 0.5", "value": "#000000"},
        ],
    )
    charts = []
    for depth in depths:
        base = (
            alt.Chart(alt.NamedData("phases"))
            .transform_filter(f"datum.depth == {depth}")
            .encode(x=x, y=y)
        )
        layers = [
            base.transform_filter("isValid(datum.share)").mark_rect().encode(color=share),
            base.mark_rect(filled=False, stroke="#888888", strokeWidth=0.4),
            base.mark_text(fontSize=layout.font * 0.75).encode(text=alt.Text("text:N"), color=ink),
        ]
        charts.append(sized(layered(*layers), width, height, f"depth {depth}"))
    keep = ["depth", "arm", "rate", "share", "text"]
    low, high = counts["n_asked"].min(), counts["n_asked"].max()
    seeds = str(low) if low == high else f"{low} to {high}"
    notes = [f"number: stable seeds of {seeds}; ?: some errored or missing"]
    figure = alt.concat(*charts, columns=columns)
    return styled(figure, layout, {"phases": table[keep]}, "Where each arm is stable", notes)


# ------------------------------------------------------------------- interaction


def crossed(corners: pd.DataFrame, layout: Layout = WIDE) -> Any:
    """Interaction plots of 2 x 2: the second component's two lines over the first's off and on.

    Parallel lines add up; lines that meet do not.

    Args:
        corners: one row a cell of a 2 x 2: panel (its number), name (its title), log (whether its
            axis is), title (of the axis), first, second (the components' names), first_on,
            second_on (bool), value, low, high.
    """
    layout = replace(layout, columns=2 if layout.columns == 1 else 4, panel_height=85)
    table = corners.assign(
        # The two lines' intervals side by side, not one on the other.
        x=corners["first_on"] * 1.0 + np.where(corners["second_on"], 0.04, -0.04),
        line=np.where(corners["second_on"], "with", "without"),
        finite=np.isfinite(corners["low"]) & np.isfinite(corners["high"]),
    )
    numbers = sorted(table["panel"].unique())
    width = layout.panel_width(len(numbers), 4.4)
    charts = []
    for panel in numbers:
        rows = table[table["panel"] == panel]
        chart = _lines(panel, rows, layout)
        charts.append(sized(chart, width, layout.panel_height, rows["name"].iloc[0]))
    figure = alt.concat(*charts, columns=min(layout.columns, len(charts)))
    figure.resolve = alt.Resolve(scale={"color": "independent"})
    notes = [
        "left to right: the first component off, on; dashed without, solid with the second",
        "mean over seeds, 95 % interval; parallel lines: the effects add up",
    ]
    keep = ["panel", "x", "line", "value", "low", "high", "finite"]
    return styled(figure, layout, {"corners": table[keep]}, "Two components together", notes)


def _lines(panel: int, rows: pd.DataFrame, layout: Layout) -> Any:
    log, first, second = (rows[name].iloc[0] for name in ("log", "first", "second"))
    ends = rows[["value", "low", "high"]].to_numpy(float).ravel()
    ends = ends[np.isfinite(ends) & (ends > 0 if log else True)]
    low, high = min(ends, default=0.1), max(ends, default=1.0)
    if log:
        scale = alt.Scale(type="log", domain=[low / 1.3, high * 1.3], nice=False)
        ticks = decades([low, high], limit=4)
    else:
        room = max(0.1 * (high - low), 1e-3)
        scale = alt.Scale(domain=[low - room, high + room], nice=False, zero=False)
        ticks = linear_ticks(low - room, high + room, most=4)
    axis = alt.Axis(title=rows["title"].iloc[0], values=ticks, labelExpr=NUMBER_LABEL)
    names = f"datum.value < 0.5 ? 'without' : '{first}'"
    x = alt.X(
        "x:Q",
        scale=alt.Scale(domain=[-0.35, 1.35], nice=False),
        axis=alt.Axis(title=None, values=[0, 1], labelExpr=names, labelOverlap=False, grid=False),
    )
    domain = ["without", "with"]
    colour = alt.Color(
        "line:N", legend=None, scale=alt.Scale(domain=domain, range=[GREY, colour_of(second)])
    )
    dash = alt.StrokeDash(
        "line:N", legend=None, scale=alt.Scale(domain=domain, range=[[3, 2], [1, 0]])
    )
    base = alt.Chart(alt.NamedData("corners")).transform_filter(f"datum.panel == {panel}")
    base = base.encode(x=x, color=colour)

    def y(field: str) -> alt.Y:
        return alt.Y(f"{field}:Q", scale=scale, axis=axis)

    known = base.transform_filter("isValid(datum.value)")
    return layered(
        known.mark_line(strokeWidth=layout.stroke).encode(y=y("value"), strokeDash=dash),
        base.transform_filter("datum.finite")
        .mark_rule(strokeWidth=layout.stroke)
        .encode(y=y("low"), y2=alt.Y2("high:Q")),
        known.mark_point(filled=True, size=layout.point * 1.3, opacity=1).encode(y=y("value")),
    )
