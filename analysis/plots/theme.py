"""What all figures share: colours, marks, sizes, axes, names.

Colours are Okabe and Ito's (2008), told apart under the common colour-vision deficiencies.
An arm has one colour in every figure, a state one shape in every figure.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import altair as alt
import numpy as np
import pandas as pd

from analysis.tables import STATES

_FIXED_COLOURS = {
    "off": "#D55E00",
    "rmsnorm": "#0072B2",
    "layernorm": "#009E73",
    "l2": "#CC79A7",
}
_SPARE_COLOURS = ("#56B4E9", "#E69F00", "#8C6D31", "#7F7F7F")
_OTHER_COLOUR = "#8073AC"
_ARM_NAMES = {
    "off": "QK-norm off",
    "rmsnorm": "QK-norm on (RMSNorm)",
    "layernorm": "QK-norm on (LayerNorm)",
    "l2": "QK-norm on (L2)",
}
_SHORT_NAMES = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "l2": "L2"}
STATE_SHAPES = {
    "stable": "circle",
    "failed": "M-.8,-.8L.8,.8M.8,-.8L-.8,.8",  # a saltire
    "diverged": "triangle-up",
    "errored": "diamond",
    "missing": "square",
    "untried": "cross",
}
GREY = "#767676"  # 4.5:1 on white and on the dark page, so one grey serves both
VEGALITE = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
"""The version of Vega-Lite that Altair writes, as vl-convert, which carries several, names it."""
FONT = "Liberation Sans, Arial, Helvetica, sans-serif"


DARK = {
    "background": "transparent",
    "axis": {
        "labelColor": "#c9ccd1",
        "titleColor": "#c9ccd1",
        "gridColor": "#30343b",
        "domainColor": "#7d828a",
        "tickColor": "#7d828a",
    },
    "legend": {"labelColor": "#c9ccd1", "titleColor": "#c9ccd1"},
    "title": {"color": "#eceef1", "subtitleColor": "#9aa0a8"},
    "header": {"labelColor": "#c9ccd1", "titleColor": "#c9ccd1"},
}
"""What a dark page puts over a figure's own config. Arms and states keep their colours."""


@dataclass(frozen=True)
class Layout:
    """Where a figure is going. Lengths in pixels, which are points in a PDF."""

    name: str
    width: float
    columns: int
    panel_height: float
    font: float

    def panel_width(self, panels: int, axis_chars: float = 3.2) -> float:
        """Width of one of `panels` panels set side by side, axes and gaps deducted.

        Args:
            axis_chars: room for the labels of each vertical axis, in font sizes.
        """
        columns = min(panels, self.columns)
        title, gap = 1.8 * self.font, self.gap
        axes = columns * self.font * axis_chars
        return (self.width - title - axes - (columns - 1) * gap) / columns

    @property
    def gap(self) -> float:
        """Space between panels."""
        return self.font * 1.4

    @property
    def point(self) -> float:
        """Area of a point mark, in square pixels."""
        return (self.font * 0.55) ** 2

    @property
    def stroke(self) -> float:
        return self.font / 8


COLUMN = Layout("column", width=249, columns=1, panel_height=100, font=7.5)
"""One column of a two-column paper: 88 mm."""
WIDE = Layout("wide", width=513, columns=3, panel_height=155, font=8)
"""Both columns of a two-column paper: 181 mm. A page enlarges it to its own width."""


def arm_name(arm: str) -> str:
    """How an arm is called in figures and tables."""
    return _ARM_NAMES.get(arm, arm)


def short_name(arm: str) -> str:
    """An arm's name where there is little room."""
    return _SHORT_NAMES.get(arm, arm)


def by_arm(pairs: Iterable[tuple[str, int]]) -> str:
    """(arm, depth) pairs in few words: 'off at depth 1, 2; RMSNorm at depth 4'."""
    depths: dict[str, list[str]] = {}
    for arm, depth in pairs:
        depths.setdefault(arm, []).append(str(depth))
    return "; ".join(f"{short_name(arm)} at depth {', '.join(of)}" for arm, of in depths.items())


def arm_order(arms: Iterable[str]) -> list[str]:
    """The arms present, the reference (`off`) first, then the known ones, then by name."""
    present = set(arms)
    known = [arm for arm in _FIXED_COLOURS if arm in present]
    return known + sorted(present - set(known))


def arm_colours(arms: Iterable[str]) -> dict[str, str]:
    """Colour of each arm; the known arms have the same one whatever else is present."""
    order = arm_order(arms)
    spare = iter(_SPARE_COLOURS * (1 + len(order) // len(_SPARE_COLOURS)))
    return {arm: _FIXED_COLOURS.get(arm) or next(spare) for arm in order}


def colour_of(arm: str) -> str:
    """The colour of one arm among many: its own where it has one, else one for all others.

    More arms than there are colours that everybody can tell apart need labels, not colours.
    """
    return _FIXED_COLOURS.get(arm, _OTHER_COLOUR)


def arm_colour(arms: Iterable[str]) -> alt.Color:
    """The colour encoding of the field `arm`, which holds the arms' names."""
    colours = arm_colours(arms)
    scale = alt.Scale(domain=[arm_name(a) for a in colours], range=list(colours.values()))
    return alt.Color(
        "arm:N",
        scale=scale,
        legend=alt.Legend(title=None, orient="top", symbolType="stroke", symbolOpacity=1),
    )


def state_labels(states: pd.Series) -> dict[str, str]:
    """Legend entry of each state that occurs, with its count: nothing vanishes uncounted."""
    counts = states.value_counts()
    return {state: f"{state} ({counts[state]})" for state in STATES if state in counts.index}


def state_shape(labels: dict[str, str], **legend: Any) -> alt.Shape:
    """The shape encoding of the field `state_label`."""
    scale = alt.Scale(domain=list(labels.values()), range=[STATE_SHAPES[s] for s in labels])
    return alt.Shape("state_label:N", scale=scale, legend=alt.Legend(title=None, **legend))


def decades(values: Iterable[float], limit: int = 8) -> list[float]:
    """Ticks of a log axis over the positive `values`: round ones, at most about `limit`.

    Powers of ten; where fewer than three fit, 1-2-5 steps, then more digits, then all.
    """
    positive = [v for v in values if v > 0 and math.isfinite(v)]
    if not positive:
        return []
    low, high = min(positive) * 0.999, max(positive) * 1.001
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, math.ceil((last - first) / limit))
    inside: list[float] = []
    for mantissas in ((1,), (1, 2, 5), (1, 2, 3, 5, 7), range(1, 10)):
        ticks = [float(f"{m}e{e}") for e in range(first, last + 1, every) for m in mantissas]
        inside = [t for t in ticks if low <= t <= high]
        if len(inside) > 2:
            return inside
    return inside if len(inside) > 1 else sorted({float(f"{v:.3g}") for v in positive})[:limit]


# d3's `~g` writes 1e-5 as 0.00001 and `~e` writes 1 as 1e+0; each has its range.
NUMBER_LABEL = (
    "datum.value == 0 ? '0' : abs(datum.value) >= 0.001 && abs(datum.value) < 10000"
    " ? format(datum.value, '~r') : replace(format(datum.value, '~e'), '+', '')"
)


def log_x(
    field: str, values: Sequence[float], title: str | None, room: float = 0.04, **axis: Any
) -> alt.X:
    """A log-scaled x axis over `values`, with a share `room` of its length free at each end."""
    scale = log_scale(values, room)
    return alt.X(f"{field}:Q", scale=scale, axis=log_axis(values, title, **axis))


def log_scale(values: Iterable[float], room: float = 0.04) -> alt.Scale:
    """A log scale from the lowest to the highest positive value, and some room beyond."""
    positive = [v for v in values if v > 0 and math.isfinite(v)] or [1.0]
    low, high = min(positive), max(positive)
    factor = (high / low) ** room if high > low else 2.0
    return alt.Scale(type="log", domain=[low / factor, high * factor], nice=False)


def log_axis(values: Iterable[float], title: str | None, **axis: Any) -> alt.Axis:
    return alt.Axis(values=decades(values), labelExpr=NUMBER_LABEL, title=title, **axis)


BREAK_AT_GAPS: Literal["break-paths-filter-domains"] = "break-paths-filter-domains"
"""A line ends at a missing value, it never spans it."""


def chartable(table: pd.DataFrame) -> pd.DataFrame:
    """A copy that Vega-Lite draws in full.

    Dots, brackets, slashes and colons leave the column names, where Vega-Lite reads them
    as paths or types; infinities become missing values, where JSON has none.
    """
    renamed = table.rename(columns=lambda name: re.sub(r"[^0-9A-Za-z_]+", "_", str(name)))
    if not renamed.columns.is_unique:
        raise ValueError(f"columns {list(table.columns)} are not distinct without punctuation")
    return renamed.replace([np.inf, -np.inf], np.nan)


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of `chartable(table)` as strict JSON values: null for what is missing."""
    columns = []
    for _, column in chartable(table).items():
        values = column.tolist()
        columns.append([None if lost else v for v, lost in zip(values, column.isna(), strict=True)])
    names = list(chartable(table.iloc[:0]).columns)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


WIDEST_STEP = 0.25
"""Decades."""


def dodged(table: pd.DataFrame, arms: list[str], lrs: Sequence[float], by: float = 0.2) -> Any:
    """`table` with the arm's name, and `x`: its lr moved aside so that arms do not overlap.

    Neighbouring arms stand `by` steps of the grid of learning rates apart, but not further than
    they would on one of WIDEST_STEP: a mark must not read as another learning rate.
    """
    step = min((math.log(b / a) for a, b in pairwise(sorted(lrs))), default=0.1)
    step = min(step, WIDEST_STEP * math.log(10))
    shift = {arm: (i - (len(arms) - 1) / 2) * by * step for i, arm in enumerate(arms)}
    return table.assign(
        arm=table["qk_norm"].map(arm_name), x=table["lr"] * np.exp(table["qk_norm"].map(shift))
    )


def linear_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from low to high, both included where they are round."""
    span = max(high - low, 1e-12)
    power = 10.0 ** math.floor(math.log10(span))
    steps = [power * m for m in (0.1, 0.2, 0.5, 1, 2, 5, 10)]
    step = next(s for s in steps if span / s <= max(most, 2))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(k * step, 12) for k in range(first, last + 1)]


def panels(charts: Sequence[Any], layout: Layout, columns: int | None = None) -> Any:
    """Panels side by side, as many in a row as the layout holds; one legend for all."""
    chart = alt.ConcatChart(columns=min(len(charts), columns or layout.columns))
    chart.concat = list(charts)
    chart.resolve = alt.Resolve(scale={"color": "shared", "shape": "shared"})
    return chart


def layered(*charts: Any) -> Any:
    """Charts drawn over one another, the first at the bottom.

    Set in place: handed to the constructor, each would be copied deeply several times.
    """
    chart = alt.LayerChart()
    chart.layer = list(charts)
    return chart


def last_row(index: int, count: int, layout: Layout) -> bool:
    """Whether panel `index` of `count` has none below it, and so carries the axis title."""
    return index + layout.columns >= count


def cell_tooltip(*more: str) -> list[alt.Tooltip]:
    """What hovering over a cell's mark tells."""
    fields = ("cell:N", "state:N", "reason:N", "step:Q", "loss:Q", *more)
    return [alt.Tooltip(field) for field in fields]


def sized(chart: Any, width: float, height: float, title: str | None = None) -> Any:
    """`chart` with its size and title set in place."""
    chart.width, chart.height = width, height
    if title is not None:
        chart.title = title
    return chart


def styled(
    chart: Any,
    layout: Layout,
    tables: dict[str, pd.DataFrame],
    title: str,
    subtitle: Sequence[str] = (),
) -> Any:
    """The finished figure: the tables its marks name, title, subtitle, the layout's sizes.

    All of it is set in place: Altair copies and checks the whole chart at every method call.
    """
    font = layout.font
    line = int(layout.width / (font * 0.48))  # mean width of a letter, in font sizes
    chart.title = alt.TitleParams(
        text=title,
        subtitle=[part for note in subtitle for part in textwrap.wrap(note, line)],
        anchor="start",
        fontSize=font * 1.15,
        subtitleFontSize=font,
        offset=font,
    )
    chart.description = ". ".join([title, *subtitle])
    chart.padding = font * 0.4
    chart.config = _config(layout)
    chart.datasets = {name: records(table) for name, table in tables.items()}
    return chart


def _config(layout: Layout) -> dict[str, Any]:
    """Vega-Lite's config for a layout, on white."""
    font = layout.font
    return {
        "font": FONT,
        "background": "white",
        "view": {"stroke": None},
        "axis": {
            "labelFontSize": font,
            "titleFontSize": font,
            "titleFontWeight": "normal",
            "titlePadding": font * 0.5,
            "labelColor": "#333333",
            "titleColor": "#333333",
            "gridColor": "#e6e6e6",
            "gridWidth": 0.5,
            "domainColor": "#888888",
            "tickColor": "#888888",
            "tickSize": font * 0.4,
            "labelOverlap": True,
        },
        "legend": {
            "orient": "bottom",
            "direction": "horizontal",
            "columns": max(1, int(layout.width // (font * 9))),
            "labelFontSize": font,
            "titleFontSize": font,
            "labelLimit": 0,
            "symbolSize": layout.point * 2.2,
            "symbolStrokeWidth": layout.stroke * 1.2,
            "columnPadding": font,
            "rowPadding": font * 0.2,
            "offset": font * 0.8,
            "padding": 0,
        },
        "title": {
            "fontSize": font,
            "fontWeight": "bold",
            "color": "#222222",
            "subtitleColor": GREY,
        },
        "concat": {"spacing": layout.gap},
    }


def choosable(chart: Any) -> Any:
    """`chart` with a parameter `chosen`: the names of the cells to bring out, none for all.

    The page sets it in every figure at once when a mark with a `cell`, or a row of the table,
    is clicked.
    """
    chart.params = [alt.VariableParameter(name="chosen", value=[])]
    return chart


def brought_out(chosen: float, other: float) -> alt.StrokeOpacityValue:
    """Opacity of a cell's strokes, by whether it is `chosen`.

    Of strokes, not of whole marks: a converter composes every half-transparent mark as a
    picture of its own, which makes a PNG five times slower and a PDF four times larger.
    """
    return alt.StrokeOpacityValue(other, condition={"test": _CHOSEN, "value": chosen})


_CHOSEN = "!length(chosen) || indexof(chosen, datum.cell) >= 0"
