"""A diagnostic at the end of training against the learning rate, over all or by layer."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from analysis.plots.theme import (
    BREAK_AT_GAPS,
    NUMBER_LABEL,
    WIDE,
    Layout,
    arm_colour,
    arm_order,
    brought_out,
    choosable,
    decades,
    dodged,
    last_row,
    layered,
    log_x,
    panels,
    sized,
    state_labels,
    state_shape,
    styled,
)

ALL_LAYERS = "all layers"


def metric(
    values: pd.DataFrame,
    curve: pd.DataFrame,
    title: str,
    y_title: str,
    log: bool = False,
    layout: Layout = WIDE,
) -> Any:
    """A diagnostic against the learning rate, one panel a depth, one mark a cell.

    On a log axis a value of 0 or below has no place: it is drawn at the foot of the axis,
    and the subtitle counts such marks, and those without a finite value.

    Args:
        values: one row a (cell, layer): cell, depth, lr, qk_norm, seed, state, layer, value.
        curve: one row a (depth, qk_norm, lr, layer): median (NaN where there is none).
        title: of the figure.
        y_title: of the vertical axis, with the unit.
        log: whether the vertical axis is logarithmic.
    """
    arms, depths = arm_order(values["qk_norm"]), sorted(values["depth"].unique())
    lrs = sorted(values["lr"].unique())
    layers = [str(layer) for layer in values["layer"].unique()]
    finite = values["value"].where(np.isfinite(values["value"]))
    drawable = finite[finite > 0] if log else finite.dropna()
    low, high = (drawable.min(), drawable.max()) if len(drawable) else (1.0, 10.0)
    if log:
        foot = low / max((high / low) ** 0.06, 1.2)
        scale = alt.Scale(
            type="log", domain=[foot, high * max((high / low) ** 0.04, 1.1)], nice=False
        )
        axis = alt.Axis(values=decades([low, high], limit=6), labelExpr=NUMBER_LABEL)
        y_values = finite.mask(finite <= 0, foot)
        line = curve.assign(median=curve["median"].where(curve["median"] > 0))
    else:
        low = min(low, 0.0)
        room = (high - low) * 0.05 or 1.0
        scale = alt.Scale(domain=[low, high + room], nice=False)
        axis = alt.Axis(tickCount=5)
        y_values, line = finite, curve
    labels = state_labels(values.loc[finite.notna() & (values["layer"] == layers[0]), "state"])
    marks = values.assign(y=y_values, state_label=values["state"].map(labels))
    tables = {
        "values": dodged(marks[finite.notna()], arms, lrs)[
            ["cell", "depth", "arm", "layer", "state_label", "x", "y"]
        ],
        "curve": dodged(line, arms, lrs)[["depth", "arm", "layer", "x", "median"]],
    }
    layer = alt.VariableParameter(name="layer", value=layers[0])
    if len(layers) > 1:
        layer.bind = alt.BindRadioSelect(input="select", options=layers, name="layer ")
    colour, shape = arm_colour(arms), state_shape(labels)
    charts = []
    for i, depth in enumerate(depths):
        only = f"datum.depth == {depth} && datum.layer == layer"
        x = log_x("x", lrs, "peak learning rate" if last_row(i, len(depths), layout) else None)
        axis_here = axis.copy(deep=False)
        axis_here.title = None if i % layout.columns else y_title

        def y(field: str, axis: alt.Axis = axis_here) -> alt.Y:
            return alt.Y(f"{field}:Q", scale=scale, axis=axis)

        lines = alt.Chart(alt.NamedData("curve")).transform_filter(only)
        points = alt.Chart(alt.NamedData("values"), name=f"values_{i}").transform_filter(only)
        chart = layered(
            lines.mark_line(strokeWidth=layout.stroke, invalid=BREAK_AT_GAPS).encode(
                x=x, y=y("median"), color=colour
            ),
            points.mark_point(size=layout.point, strokeWidth=layout.stroke, filled=False).encode(
                x=x,
                y=y("y"),
                color=colour,
                shape=shape,
                strokeOpacity=brought_out(0.9, 0.2),
                tooltip=[alt.Tooltip("cell:N"), alt.Tooltip("state_label:N"), alt.Tooltip("y:Q")],
            ),
        )
        charts.append(
            sized(
                chart,
                layout.panel_width(len(depths), 4 if log else 3.2),
                layout.panel_height * 0.8,
                f"depth {depth}",
            )
        )
    figure = choosable(panels(charts, layout))
    figure.params = [*figure.params, layer]
    return styled(figure, layout, tables, title, _notes(values, finite, layers[0], log))


def _notes(values: pd.DataFrame, finite: pd.Series, layer: str, log: bool) -> list[str]:
    shown = values["layer"] == layer
    total, known = int(shown.sum()), int((shown & finite.notna()).sum())
    notes = [f"{known} of {total} cells, at the last report; line: median over seeds"]
    if known < total:
        notes.append(f"{total - known} without a finite value are not drawn")
    zeros = int((shown & (finite <= 0)).sum()) if log else 0
    if zeros:
        notes.append(f"{zeros} at or below 0, drawn at the foot of the log axis")
    return notes
