"""Which verdicts hold when one choice behind them is made otherwise."""

from __future__ import annotations

from typing import Any

import altair as alt
import pandas as pd

from analysis.plots.theme import WIDE, Layout, layered, short_name, sized, styled

_COLOURS = {
    "supported": "#66C2A5",
    "inconclusive": "#E3E3E3",
    "contradicted": "#E69F00",
    "not judged": "#FFFFFF",
}
"""Apart from the arms' colours; the verdict is also written on each tile."""


def robustness(panel: pd.DataFrame, layout: Layout = WIDE) -> Any:
    """The verdicts, one row a change, one column a hypothesis; a frame where one changes.

    Args:
        panel: as `analysis.robustness.panel`.
    """
    several = panel["arm"].nunique() > 1
    named = panel["hypothesis"] + (" " + panel["arm"].map(short_name) if several else "")
    rows = panel["choice"] + panel["change"].map(lambda change: f": {change}" if change else "")
    table = panel.assign(column=named, row=rows)[["row", "column", "verdict", "holds"]]
    order = list(dict.fromkeys(rows))
    base = alt.Chart(alt.NamedData("panel")).encode(
        x=alt.X(
            "column:N", sort=list(dict.fromkeys(named)),
            axis=alt.Axis(title=None, orient="top", labelAngle=0, domain=False, ticks=False),
        ),
        y=alt.Y(
            "row:N", sort=order,
            axis=alt.Axis(title=None, labelLimit=0, domain=False, ticks=False),
        ),
    )  # fmt: skip
    colour = alt.Color(
        "verdict:N",
        scale=alt.Scale(domain=list(_COLOURS), range=list(_COLOURS.values())),
        legend=None,
    )
    columns = named.nunique()
    labels = max(len(row) for row in order) * layout.font * 0.5
    width = min(layout.width - labels, columns * layout.font * 11)
    chart = layered(
        base.mark_rect(stroke="white", strokeWidth=1).encode(color=colour),
        base.transform_filter("!datum.holds").mark_rect(
            filled=False, stroke="#222222", strokeWidth=layout.stroke * 1.4
        ),
        # "contradicted" is 5.5 font sizes wide.
        base.mark_text(
            fontSize=min(layout.font * 0.85, width / columns / 6), color="#222222"
        ).encode(text=alt.Text("verdict:N")),
    )
    changed = panel[panel["choice"] != "as declared"]
    held = int(changed["holds"].sum())
    notes = [f"{held} of {len(changed)} verdicts hold under a change; framed: those that do not"]
    height = len(order) * layout.font * 1.7
    tables = {"panel": table}
    return styled(sized(chart, width, height), layout, tables, "Robustness of the verdicts", notes)
