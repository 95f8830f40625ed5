"""The report's figures, one by one, for a notebook or a script.

from analysis import charts, load
charts.draw(load("runs/pilot"), "lr_loss").save("figure.pdf")
"""

from __future__ import annotations

from typing import Any

from analysis.figure import Figure
from analysis.figures import figures
from analysis.load import Results
from analysis.plots import WIDE, Layout
from analysis.summary import summarise
from tune_study.config import ConfigError


def names(results: Results) -> list[str]:
    """Names of the figures that these results have."""
    return [figure.name for figure in _figures(results)]


def draw(results: Results, name: str, layout: Layout = WIDE) -> Any:
    """One figure as an Altair chart, to be shown, changed or saved.

    Raises:
        ConfigError: for a figure these results do not have; lists those they have.
    """
    for figure in _figures(results):
        if figure.name == name:
            return figure.draw(layout)
    raise ConfigError(f"figure = {name!r}: not there. Give one of: {', '.join(names(results))}.")


def _figures(results: Results) -> list[Figure]:
    return figures(results, summarise(results))
