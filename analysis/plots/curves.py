"""Validation loss over training, cell by cell, with the step at which each verdict fell."""

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
    WIDE,
    Layout,
    arm_colour,
    arm_name,
    arm_order,
    brought_out,
    choosable,
    colour_of,
    last_row,
    layered,
    linear_ticks,
    panels,
    sized,
    state_labels,
    state_shape,
    styled,
)

MOST_POINTS = 40_000
"""Points beyond which each curve is thinned: more than a screen can tell apart."""


def training_curves(
    cells: pd.DataFrame,
    history: pd.DataFrame,
    layout: Layout = WIDE,
    arm_by_arm: Sequence[str] = (),
) -> Any:
    """Training curves, one panel a depth, one line a cell, marked where its verdict fell.

    Losses above 1.1 times the loss at initialisation are drawn there.

    Args:
        cells: as `analysis.tables.CELL_COLUMNS`.
        history: with cell, step and val/loss.
        arm_by_arm: where there are more arms than colours, all of them, in the order to be drawn:
            then each has a panel of its own.
    """
    arms, depths = arm_order(cells["qk_norm"]), sorted(cells["depth"].unique())
    reports = _reports(cells, history)
    finite = np.isfinite(reports["loss"])
    ceiling = 1.1 * max(cells["loss_init"][np.isfinite(cells["loss_init"])], default=10.0)
    over = int((reports["loss"] > ceiling).sum())
    lines = reports.assign(loss=reports["loss"].where(finite).clip(upper=ceiling))
    ends = _named(_verdicts(cells, lines), cells)
    labels = state_labels(ends["state"])
    ends = ends.assign(state_label=ends["state"].map(labels))
    kept, thinned = _thin(lines)
    kept = _named(kept, cells)
    low = float(np.nanmin([0.0, lines["loss"].min()]))
    shape = state_shape(labels, symbolStrokeColor=GREY)
    # As high as its panel, a longer title would push the panel down.
    y_title, x_ticks = ("loss", 3) if arm_by_arm else ("validation loss (nats/token)", 5)
    which = [(depth, arm) for depth in depths for arm in (arm_by_arm or (None,))]
    if arm_by_arm:
        layout = replace(layout, columns=2 if layout.columns == 1 else 4, panel_height=90)
    charts = []
    for i, (depth, arm) in enumerate(which):
        x = alt.X(
            "step:Q",
            axis=alt.Axis(
                title="step" if last_row(i, len(which), layout) else None, tickCount=x_ticks
            ),
            scale=alt.Scale(domain=[0, int(cells["steps"].max())], nice=False),
        )
        y = alt.Y(
            "loss:Q",
            axis=alt.Axis(
                title=None if i % layout.columns else y_title,
                values=linear_ticks(
                    low, ceiling, most=int(layout.panel_height // (layout.font * 2))
                ),
            ),
            scale=alt.Scale(domain=[low, ceiling * 1.04], nice=False),
        )
        only, title = f"datum.depth == {depth}", f"depth {depth}"
        colour: Any = arm_colour(arms)
        if arm is not None:
            only += f" && datum.arm == '{arm_name(arm)}'"
            title = f"{arm}, {title}" if len(depths) > 1 else arm
            colour = alt.ColorValue(colour_of(arm))
        line = alt.Chart(alt.NamedData("curves")).transform_filter(only)
        end = alt.Chart(alt.NamedData("ends"), name=f"ends_{i}").transform_filter(only)
        line = line.mark_line(invalid=BREAK_AT_GAPS).encode(
            x=x,
            y=y,
            color=colour,
            detail=alt.Detail("cell:N"),
            strokeOpacity=brought_out(0.55, 0.04),
            strokeWidth=alt.StrokeWidthValue(
                layout.stroke * 0.7,
                condition={"test": "length(chosen)", "value": layout.stroke * 1.5},
            ),
        )
        end = end.mark_point(size=layout.point * 0.7, strokeWidth=layout.stroke * 0.8).encode(
            x=x,
            y=y,
            color=colour,
            shape=shape,
            strokeOpacity=brought_out(0.9, 0.06),
            tooltip=[alt.Tooltip("cell:N"), alt.Tooltip("state:N"), alt.Tooltip("step:Q")],
        )
        charts.append(
            sized(
                layered(line, end),
                layout.panel_width(len(which)),
                layout.panel_height * 0.8,
                title,
            )
        )
    figure = choosable(panels(charts, layout))
    notes = [f"{len(ends)} of {len(cells)} cells; the mark on a curve is where its verdict fell"]
    silent = cells.loc[~cells["cell"].isin(ends["cell"]), "state"].value_counts()
    if len(silent):
        words = ", ".join(f"{count} {state}" for state, count in silent.items())
        notes.append(f"without a curve: {words}")
    if thinned:
        notes.append(f"thinned: {len(kept)} of {len(lines)} reports drawn, first and last kept")
    if lost := int((~finite).sum()):
        notes.append(f"{lost} reports without a finite loss leave a gap")
    if over:
        notes.append(f"{over} reports above {ceiling:.2f} are drawn there")
    tables = {
        "curves": kept[["cell", "depth", "arm", "step", "loss"]],
        "ends": ends[["cell", "depth", "arm", "step", "loss", "state", "state_label"]],
    }
    title = "Training curves, arm by arm" if arm_by_arm else "Training curves"
    return styled(figure, layout, tables, title, notes)


def _reports(cells: pd.DataFrame, history: pd.DataFrame) -> pd.DataFrame:
    """Every report, the loss at initialisation as that of step 0, in order: row of its cell in
    `cells`, step, loss."""
    row = pd.Index(cells["cell"]).get_indexer(pd.Index(history["cell"]))
    step, init = history["step"].to_numpy(), cells["loss_init"].to_numpy()
    begun = np.intersect1d(row, np.flatnonzero(np.isfinite(init)))
    kept = (row >= 0) & (step > 0)
    table = pd.DataFrame(
        {
            "row": np.concatenate([begun, row[kept]]),
            "step": np.concatenate([np.zeros_like(begun), step[kept]]),
            "loss": np.concatenate([init[begun], history["val/loss"].to_numpy()[kept]]),
        }
    )
    return table.iloc[np.lexsort((table["step"], table["row"]))]


def _named(reports: pd.DataFrame, cells: pd.DataFrame) -> pd.DataFrame:
    """The reports with their cell's name, depth, state and arm."""
    of = cells[["cell", "depth", "state"]].assign(arm=cells["qk_norm"].map(arm_name))
    of = of.iloc[reports["row"]].reset_index(drop=True)
    return pd.concat([of, reports.reset_index(drop=True)], axis=1)


def _verdicts(cells: pd.DataFrame, lines: pd.DataFrame) -> pd.DataFrame:
    """Where on its line each cell's verdict fell: a divergence at its step, all else at the end.

    A divergence found afterwards, in a run that was not stopped, lies before the end of the line.
    """
    known = lines[lines["loss"].notna()]
    of = cells.iloc[known["row"]]
    diverged, fell = of["state"].eq("diverged"), of["step"].to_numpy("float64", na_value=np.nan)
    at = np.where(diverged, fell, known["step"])
    before = (known["step"] <= at).to_numpy()
    return known.assign(step=at.astype("int64"))[before].drop_duplicates("row", keep="last")


def _thin(lines: pd.DataFrame) -> tuple[pd.DataFrame, bool]:
    """At most about MOST_POINTS rows: of each curve the first, the last, and some between."""
    if len(lines) <= MOST_POINTS:
        return lines, False
    cells = lines["row"].nunique()
    keep = max(2, MOST_POINTS // max(cells, 1))
    group = lines.groupby("row", sort=False)["step"]
    rank, count = group.cumcount(), group.transform("size")
    stride = np.ceil((count - 1) / (keep - 1)).clip(lower=1)
    return lines[(rank % stride == 0) | (rank == count - 1)], True
