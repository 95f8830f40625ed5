"""A figure of a report: its name, what its caption says, and how it is drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import altair as alt
from altair.utils.schemapi import debug_mode

from analysis import plots


@dataclass(frozen=True)
class Figure:
    """A figure under its file name, with the caption that says what is drawn and how to read it."""

    name: str
    caption: str
    draw: Callable[[plots.Layout], Any]

    def spec(self, layout: plots.Layout) -> dict[str, Any]:
        """The Vega-Lite specification; the tests, not every report, check it against the schema."""
        with debug_mode(False):
            return _specification(self.draw(layout))


def _specification(chart: Any, **context: Any) -> dict[str, Any]:
    """`chart.to_dict()`, composed of its parts' specifications.

    Altair copies a chart deeply, with all its parts and tables, at every level of it.
    """
    whole: dict[str, Any] = {}
    for kind, name in ((alt.ConcatChart, "concat"), (alt.LayerChart, "layer")):
        if isinstance(chart, kind):
            whole[name] = [_specification(part, top_level=False) for part in chart[name]]
            chart[name] = []
    if context.get("top_level", True):
        whole["datasets"], chart.datasets = chart.datasets, alt.Undefined
    return chart.to_dict(validate=False, context=context) | whole
