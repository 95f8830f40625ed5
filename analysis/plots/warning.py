"""How long before the loss left its course each signal gave warning, failure by failure."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from analysis.plots.theme import (
    GREY,
    WIDE,
    Layout,
    arm_colour,
    arm_name,
    arm_order,
    brought_out,
    choosable,
    layered,
    linear_ticks,
    panels,
    short_name,
    sized,
    state_labels,
    state_shape,
    styled,
)

_ROW = 3.6  # height of a signal's row, in font sizes
_NEVER = "no warning"


def early_warning(warned: pd.DataFrame, summary: pd.DataFrame, layout: Layout = WIDE) -> Any:
    """Lead of each signal over the loss, one panel an arm, one row a signal, one mark a failure.

    A failure that a signal never announced stands in a column of its own at the left. One whose
    loss never left the course of the reference cells, or that has none, has no lead and is
    counted in the subtitle.

    Args:
        warned: as `analysis.early_warning.warnings`, at least one row.
        summary: as `analysis.early_warning.warning_summary` of it.
        layout: where the figure is going.
    """
    arms = arm_order(warned["qk_norm"])
    signals = list(dict.fromkeys(warned["signal"]))
    judged = warned[warned["departure"].notna()]
    leads = [0.0, *judged["lead"].dropna()]
    low, high = min(leads), max(leads)
    room = max(high - low, 1.0) * 0.12
    never = low - 2 * room
    ticks = linear_ticks(low, high, most=6)
    labels = state_labels(warned.drop_duplicates("cell")["state"])
    marks = judged.assign(
        arm=judged["qk_norm"].map(arm_name),
        state_label=judged["state"].map(labels),
        x=judged["lead"].fillna(never),
    )
    rank = marks.groupby(["qk_norm", "signal", "x"]).cumcount()
    crowd = rank.groupby([marks["qk_norm"], marks["signal"]]).transform("max").clip(lower=6)
    row = marks["signal"].map({signal: i for i, signal in enumerate(signals)})
    marks = marks.assign(y=row + 0.9 - 0.5 * rank / crowd)
    rows = summary.assign(
        y=summary["signal"].map({signal: i for i, signal in enumerate(signals)}) + 0.2,
        x=never - room,
        text=[_row_text(each) for each in summary.to_dict("records")],
    )
    row_tops = np.arange(float(len(signals)))
    x_scale = alt.Scale(domain=[never - room, high + room], nice=False)
    y_scale = alt.Scale(domain=[len(signals), 0], nice=False)
    colour, shape = arm_colour(arms), state_shape(labels)
    charts = []
    columns = min(len(arms), 1 if layout.columns == 1 else 2)
    width = layout.panel_width(1, 1)
    width = (width - (columns - 1) * layout.gap) / columns
    for i, arm in enumerate(arms):
        only = f"datum.qk_norm == '{arm}'"
        axis = alt.Axis(
            title="steps before the loss left its course" if i + columns >= len(arms) else None,
            values=[never, *ticks],
            labelExpr=f"datum.value < {low - room / 2} ? '{_NEVER}' : format(datum.value, '~d')",
            grid=False,
        )
        x, y = (
            alt.X("x:Q", scale=x_scale, axis=axis),
            alt.Y("y:Q", scale=y_scale, axis=None),
        )
        zero = alt.Chart(alt.NamedData("zero")).mark_rule(color=GREY, strokeDash=[4, 3])
        lines = alt.Chart(alt.NamedData("lines")).mark_rule(color="#e6e6e6", strokeWidth=0.5)
        text = alt.Chart(alt.NamedData("rows")).transform_filter(only)
        points = alt.Chart(alt.NamedData("marks"), name=f"marks_{i}").transform_filter(only)
        chart = layered(
            lines.encode(y=y),
            zero.encode(x=x, y=y, y2=alt.Y2("y2:Q")),
            text.mark_text(align="left", color=GREY, fontSize=layout.font * 0.9).encode(
                x=x, y=y, text=alt.Text("text:N")
            ),
            points.mark_point(size=layout.point * 0.6, strokeWidth=layout.stroke * 0.8).encode(
                x=x,
                y=y,
                color=colour,
                shape=shape,
                strokeOpacity=brought_out(0.85, 0.15),
                tooltip=[
                    alt.Tooltip(f"{field}:{kind}")
                    for field, kind in (
                        ("cell", "N"),
                        ("signal", "N"),
                        ("step", "Q"),
                        ("lead", "Q"),
                    )
                ],
            ),
        )
        height = len(signals) * layout.font * _ROW
        charts.append(sized(chart, width, height, arm_name(arm)))
    figure = choosable(panels(charts, layout, columns))
    tables = {
        "marks": marks[
            ["cell", "qk_norm", "arm", "signal", "step", "lead", "state", "state_label", "x", "y"]
        ],
        "rows": rows[["qk_norm", "x", "y", "text"]],
        "zero": pd.DataFrame({"x": 0.0, "y": row_tops + 0.35, "y2": row_tops + 1}),
        "lines": pd.DataFrame({"y": row_tops[1:]}),
    }
    return styled(figure, layout, tables, "Early warning", _notes(warned, summary))


def _row_text(row: dict[Any, Any]) -> str:
    text = (
        f"{row['signal']}: {row['warned']} of {row['n']} announced, {row['first']} before the loss"
    )
    if np.isfinite(row["lead_median"]):
        text += f"; median {row['lead_median']:.0f}".replace("-", "−")
    return text


def _notes(warned: pd.DataFrame, summary: pd.DataFrame) -> list[str]:
    """The subtitle: which signals lead, which do not, and what is not drawn."""
    failures = warned.drop_duplicates("cell")
    notes = [f"{len(failures)} failed or diverged cells, one mark a cell and signal"]
    for arm in arm_order(summary["qk_norm"]):
        of = summary[(summary["qk_norm"] == arm) & (summary["lead_median"] > 0)]
        leads = ", ".join(of["signal"]) or "no signal"
        notes.append(f"{short_name(arm)}: {leads} comes before the loss in the median failure")
    if lost := int(failures["departure"].isna().sum()):
        notes.append(f"{lost} without a lead, as their loss never left a reference's course")
    return notes
