"""Final loss against learning rate, one panel a depth: the figure the study is for.

After figure 1 of Wortsman et al. 2023 (arXiv 2309.14322), with every seed drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from analysis.plots.depth import sensitivity_panel
from analysis.plots.theme import (
    BREAK_AT_GAPS,
    GREY,
    WIDE,
    Layout,
    arm_colour,
    arm_order,
    brought_out,
    by_arm,
    cell_tooltip,
    choosable,
    dodged,
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

_READABLE = 0.6  # the smallest font of a count, as a share of the figure's
_ROW = 0.085  # height of a row above the curves, as a share of the curves' height


def lr_loss(
    cells: pd.DataFrame,
    curve: pd.DataFrame,
    references: pd.DataFrame,
    sensitivity: pd.DataFrame,
    arms_summary: list[dict[str, Any]],
    layout: Layout = WIDE,
) -> Any:
    """The LR-versus-loss curves of a study, and beneath them LR sensitivity against depth.

    Each cell is one mark: at its final loss, or, where it has none, in the rows above the
    curves. A diverged cell without a finite loss, and any loss above the loss at
    initialisation, is drawn at the loss at initialisation. The line breaks where no seed
    has a loss; "2/3" above a learning rate says how many of its seeds are stable.

    Args:
        cells: as `analysis.tables.CELL_COLUMNS`.
        curve: as `analysis.estimators.by_lr`: for each (depth, qk_norm, lr) asked, median (NaN
            where
            no seed has a loss), low, high, n_asked, n_stable, n_errored, n_missing.
        references: depth, name, value (nats a token) of the horizontal rules.
        sensitivity: as `analysis.estimators.lr_sensitivity`.
        arms_summary: as `analysis.estimators.arm_summary`.
        layout: where the figure is going.
    """
    arms = arm_order(cells["qk_norm"])
    labels = state_labels(cells["state"])
    top = _top(cells, references)
    marks = _marks(cells, top, len(arms)).assign(state_label=cells["state"].map(labels))
    highest = max(marks["y"].max(), top * (1 + _ROW * len(arms)))
    bottom = min([0.0, *references["value"], *marks["y"].dropna()])
    lrs = sorted(cells["lr"].unique())
    depths = sorted(cells["depth"].unique())
    rules = references.assign(
        label=references["name"] + references["value"].map(" {:.2f}".format),
        # The middle is where the curves leave room for all but the lowest rule, which they come
        # down to there; at low learning rates they stand far above it. Labels stand above their
        # rules, that of the lowest below it unless the axis comes first.
        low=references["value"].eq(references.groupby("depth")["value"].transform("min")),
    )
    rules["x"] = np.where(rules["low"], lrs[0], math.sqrt(lrs[0] * lrs[-1]))
    below = rules["low"] & rules["value"].gt(0.08 * top)
    line = 0.6 * layout.font / layout.panel_height * highest
    rules["y"] = rules["value"] + np.where(below, -line, line)
    counted = _counted(curve, arms, top)
    width = layout.panel_width(len(depths))
    # A character is half a font size wide, and there may be a "2/3" at each learning rate.
    longest = max(3, counted["stable"].str.len().max())
    room = width * _closest(lrs)
    count_font = min(layout.font * 0.75, room / (longest * 0.5))
    n = ""
    if count_font < layout.font * _READABLE:  # then n stands in the subtitle
        counted["stable"] = counted["stable"].str.partition("/")[0]
        count_font = min(layout.font * 0.75, room / 1.2)
        asked = curve["n_asked"][curve["n_asked"] > 0].unique()
        n = f"{asked[0]} seeds" if len(asked) == 1 else "seeds that ran"
    panel = _Panel(
        band=bool(curve[["low", "high"]].notna().any(axis=None)),
        domain=(bottom, highest + top * _ROW * 0.7),
        ticks=linear_ticks(bottom, top, most=int(layout.panel_height // (layout.font * 2))),
        colour=arm_colour(arms),
        shape=state_shape(labels),
        layout=layout,
        width=width,
        count_font=count_font,
    )
    charts = [
        panel.draw(
            i,
            depth,
            x=log_x("x", lrs, "peak learning rate" if last_row(i, len(depths), layout) else None),
            y_title=None if i % layout.columns else "final validation loss (nats/token)",
        )
        for i, depth in enumerate(depths)
    ]
    beneath, tables, lost = sensitivity_panel(sensitivity, arms_summary, layout)
    chart = panels([panels(charts, layout), beneath], layout, columns=1)
    tables |= {
        "cells": dodged(marks, arms, lrs),
        "curve": dodged(counted, arms, lrs),
        "rules": rules,
    }
    title = "Final loss against learning rate"
    chart = choosable(chart)
    notes = [*_notes(cells, n), *_at_the_edge(arms_summary), *lost]
    return styled(chart, layout, tables, title, notes)


def _closest(lrs: list[float]) -> float:
    """The smallest distance of two learning rates, as a share of an axis with room for them all."""
    places = np.log10(lrs)
    gap = float(np.diff(places).min(initial=np.inf))
    return 1.0 if math.isinf(gap) else gap / (float(places[-1] - places[0]) + gap)


def _notes(cells: pd.DataFrame, n: str) -> list[str]:
    """The subtitle: n, and whatever the picture alone would not say.

    Args:
        n: of how many the k of a label is; empty if the label says so.
    """
    counts = cells["state"].value_counts()
    seeds = cells["seed"].nunique()
    notes = [
        f"{len(cells)} cells, {seeds} seed{'s'[: seeds != 1]}; one mark a cell, line: median",
        f"{'k' if n else 'k/n'}: only k of the {n or 'n seeds'} are stable there",
    ]
    for state, words in (("errored", "errored"), ("missing", "missing or unfinished")):
        if state in counts.index:
            notes.append(f"{counts[state]} {words}: no loss, marked above the curves")
    above = cells["loss"].gt(cells["loss_init"]) | (
        cells["state"].isin(["diverged", "failed"]) & ~np.isfinite(cells["loss"])
    )
    if above.any():
        notes.append(f"{int(above.sum())} non-finite or above the loss at init, drawn at it")
    return notes


def _at_the_edge(arms: list[dict[str, Any]]) -> list[str]:
    """The arms whose best learning rate is an end of the grid, so that it may lie beyond."""
    edge = [(arm["qk_norm"], arm["depth"]) for arm in arms if arm["best_lr_censored"]]
    return [f"best LR at an end of the known grid: {by_arm(edge)}"] if edge else []


def _top(cells: pd.DataFrame, references: pd.DataFrame) -> float:
    """Where the curves end and the rows above them begin."""
    finite = cells["loss"].where(np.isfinite(cells["loss"]))
    capped = np.minimum(finite, cells["loss_init"])
    values = [*references["value"], *cells["loss_init"], *capped]
    return max([v for v in values if math.isfinite(v)], default=1.0)


def _marks(cells: pd.DataFrame, top: float, arms: int) -> pd.DataFrame:
    """Every cell with the height `y` of its mark."""
    loss = cells["loss"].where(np.isfinite(cells["loss"]))
    init = cells["loss_init"].where(np.isfinite(cells["loss_init"]))
    lost = loss.isna() & cells["state"].isin(["diverged", "failed"])
    y = loss.mask(loss.gt(init), init).mask(lost, init.fillna(top))
    absent = cells["state"].isin(NO_EVIDENCE) | y.isna()
    # Cells without a loss stand one above the other, above the rows that count the stable.
    rank = cells[absent].groupby(["depth", "lr", "qk_norm"]).cumcount().reindex(cells.index)
    y = y.mask(absent, top * (1 + _ROW * (arms + 1 + rank)))
    columns = ["cell", "depth", "lr", "qk_norm", "seed", "state", "reason", "step", "loss"]
    return cells[columns].assign(y=y)


def _counted(curve: pd.DataFrame, arms: list[str], top: float) -> pd.DataFrame:
    """The curve, with the text and the row that say how many seeds are stable."""
    row = curve["qk_norm"].map({arm: len(arms) - i for i, arm in enumerate(arms)})
    known = curve["n_asked"] - curve["n_errored"] - curve["n_missing"]
    text = curve["n_stable"].astype(str) + "/" + known.astype(str)
    return curve.assign(
        stable=text.where(curve["n_stable"] < known, ""),
        y_stable=top * (1 + _ROW * row),
    )


@dataclass(frozen=True)
class _Panel:
    """What the panels of all depths have in common."""

    band: bool
    domain: tuple[float, float]
    ticks: list[float]
    colour: alt.Color
    shape: alt.Shape
    layout: Layout
    width: float
    count_font: float

    def draw(self, index: int, depth: int, x: alt.X, y_title: str | None) -> Any:
        layout = self.layout
        only = f"datum.depth == {depth}"
        scale = alt.Scale(domain=self.domain, nice=False, zero=False)
        y_axis = alt.Axis(title=y_title, values=self.ticks)

        def y(field: str) -> alt.Y:
            return alt.Y(f"{field}:Q", scale=scale, axis=y_axis)

        rules = alt.Chart(alt.NamedData("rules")).transform_filter(only)
        curve = (
            alt.Chart(alt.NamedData("curve")).transform_filter(only).encode(x=x, color=self.colour)
        )
        band = curve.mark_area(fillOpacity=0.18, invalid=BREAK_AT_GAPS, clip=True).encode(
            y=y("low"), y2=alt.Y2("high:Q")
        )

        layers: list[Any] = [
            rules.mark_rule(color=GREY, strokeDash=[4, 3], strokeWidth=0.8).encode(y=y("value")),
            *(
                rules.transform_filter(f"{'' if low else '!'}datum.low")
                .mark_text(
                    color=GREY, fontSize=layout.font * 0.85, align="left" if low else "center"
                )
                .encode(x=x, y=y("y"), text=alt.Text("label:N"))
                for low in (False, True)
            ),
            *([band] if self.band else []),
            curve.mark_line(strokeWidth=layout.stroke, invalid=BREAK_AT_GAPS).encode(y=y("median")),
            curve.transform_filter("datum.stable")
            .mark_text(fontSize=self.count_font)
            .encode(y=y("y_stable"), text=alt.Text("stable:N")),
            alt.Chart(alt.NamedData("cells"), name=f"cells_{index}")
            .transform_filter(only)
            .mark_point(size=layout.point, strokeWidth=layout.stroke, filled=False)
            .encode(
                x=x,
                y=y("y"),
                color=self.colour,
                shape=self.shape,
                strokeOpacity=brought_out(0.9, 0.2),
                tooltip=cell_tooltip(),
            ),
        ]
        return sized(layered(*layers), self.width, layout.panel_height, f"depth {depth}")
