"""Steps to a loss: how long each arm takes, and where it never gets there."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from analysis.plots.theme import (
    BREAK_AT_GAPS,
    WIDE,
    Layout,
    arm_colour,
    arm_order,
    brought_out,
    choosable,
    dodged,
    last_row,
    layered,
    linear_ticks,
    log_x,
    panels,
    sized,
    styled,
)
from analysis.tables import NO_EVIDENCE

_NEVER, _LOST = "not reached", "no evidence"
_SHAPES = {"reached": "circle", _NEVER: "triangle-up", _LOST: "square"}


def steps_to_loss(
    times: pd.DataFrame,
    medians: pd.DataFrame,
    target: float,
    layout: Layout = WIDE,
) -> Any:
    """Steps until the validation loss is at `target`, one panel a depth, one mark a cell.

    Args:
        times: as `analysis.estimators.steps_to_threshold`, with each cell's name in `cell`;
            where `reached` is False the cell did not get there within `step` steps: an arrow
            stands at that step, or a square for a cell that errored or is missing.
        medians: as `analysis.estimators.median_steps`.
        target: the loss, nats a token.
    """
    arms, depths = arm_order(times["qk_norm"]), sorted(times["depth"].unique())
    lrs = sorted(times["lr"].unique())
    lost = times["state"].isin(NO_EVIDENCE)
    outcome = np.select([times["reached"], lost], ["reached", _LOST], _NEVER)
    counts = {name: int((outcome == name).sum()) for name in _SHAPES}
    names = {name: f"{name} ({count})" for name, count in counts.items() if count}
    top = float(times["step"].max()) or 1.0
    tables = {
        "times": dodged(times.assign(outcome=[names[each] for each in outcome]), arms, lrs)[
            ["cell", "depth", "seed", "arm", "outcome", "x", "step"]
        ],
        "medians": dodged(
            medians.assign(step=medians["step"].where(np.isfinite(medians["step"]))), arms, lrs
        ),
    }
    colour = arm_colour(arms)
    shape = alt.Shape(
        "outcome:N",
        scale=alt.Scale(domain=list(names.values()), range=[_SHAPES[name] for name in names]),
        legend=alt.Legend(title=None),
    )
    scale = alt.Scale(domain=[0, top * 1.06], nice=False)
    ticks = linear_ticks(0, top, most=int(layout.panel_height * 0.8 // (layout.font * 2)))
    charts = []
    for i, depth in enumerate(depths):
        x = log_x("x", lrs, "peak learning rate" if last_row(i, len(depths), layout) else None)
        y_title = None if i % layout.columns else f"steps to {target:.2f} nats/token"
        y = alt.Y("step:Q", scale=scale, axis=alt.Axis(title=y_title, values=ticks))
        only = f"datum.depth == {depth}"
        lines = alt.Chart(alt.NamedData("medians")).transform_filter(only)
        points = alt.Chart(alt.NamedData("times"), name=f"times_{i}").transform_filter(only)
        chart = layered(
            lines.mark_line(strokeWidth=layout.stroke, invalid=BREAK_AT_GAPS).encode(
                x=x, y=y, color=colour
            ),
            points.mark_point(size=layout.point, strokeWidth=layout.stroke).encode(
                x=x,
                y=y,
                color=colour,
                shape=shape,
                strokeOpacity=brought_out(1, 0.2),
                tooltip=[alt.Tooltip("cell:N"), alt.Tooltip("outcome:N"), alt.Tooltip("step:Q")],
            ),
        )
        width = layout.panel_width(len(depths))
        charts.append(sized(chart, width, layout.panel_height * 0.8, f"depth {depth}"))
    notes = [
        f"to {target:.2f} nats/token, as declared; {len(times)} cells",
        "line: Kaplan-Meier median over seeds",
        "no line where half of the seeds or more never get there",
    ]
    return styled(choosable(panels(charts, layout)), layout, tables, "Steps to a loss", notes)
