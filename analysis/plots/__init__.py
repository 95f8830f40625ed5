"""Altair charts of a study: tables in, charts out. No statistic is computed here.

Every function takes tidy tables (see `analysis.tables` and `analysis.estimators`) and a
`Layout`, and returns an `altair` chart that draws without a network:

    from analysis import load, plots
    results = load.load("runs/pilot")
    plots.lr_loss(...).save("lr_loss.pdf")
"""

from analysis.plots.lr_loss import lr_loss
from analysis.plots.theme import COLUMN, PHONE, SCREEN, WIDE, Layout

__all__ = ["COLUMN", "PHONE", "SCREEN", "WIDE", "Layout", "lr_loss"]
