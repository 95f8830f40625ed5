"""Writes the report of a study: one HTML page that opens anywhere, figures, tables, JSON.

    out/index.html           everything on one page, without a network
    out/figures/             each figure as PNG, SVG, PDF (88 mm and 181 mm wide) and Vega-Lite
    out/cells.parquet        one row a cell, as analysis.tables.CELL_COLUMNS
    out/history.parquet      one row a report
    out/summary.json         the numbers, as summary_schema.json describes them

Also for a study that is still running: the page says so and shows what is known.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import vl_convert

from analysis import estimators, page, plots
from analysis.summary import json_safe, summarise

if TYPE_CHECKING:
    from analysis.load import Results

_VEGALITE = "6.1"
"""The version of Vega-Lite that Altair 6 writes; vl-convert carries several."""


def write(results: Results, out: Path) -> Path:
    """Writes the report and returns the path of its index.html.

    Every file is written beside its place and then moved there, so that a reader never
    meets half a file. The same results give the same bytes.

    Args:
        results: as `analysis.load.load` gives them.
        out: the folder; made if it is not there.
    """
    figures = out / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    summary = json_safe(summarise(results))
    charts = chart_makers(results)
    for name, chart in charts.items():
        _write_figure(figures, name, chart)
    for name, table in (("cells", results.cells), ("history", results.history)):
        _replace(out / f"{name}.parquet", table.to_parquet(index=False))
    _replace(out / "summary.json", dump_json(summary, indent=1))
    _replace(out / "index.html", page.render(results, summary, charts))
    return out / "index.html"


def chart_makers(results: Results) -> dict[str, Callable[[plots.Layout], Any]]:
    """Each figure's name and the function that draws it for a layout."""
    cells = results.cells
    curve = loss_curve(cells)
    rules = reference_losses(cells)
    return {"lr_loss": lambda layout: plots.lr_loss(cells, curve, rules, layout)}


def loss_curve(cells: pd.DataFrame) -> pd.DataFrame:
    """Final loss as a function of the learning rate, none above the loss at initialisation."""
    finite = cells["loss"].where(np.isfinite(cells["loss"]))
    lost = finite.isna() & cells["state"].isin(["diverged", "failed"])
    clamped = finite.clip(upper=cells["loss_init"]).mask(lost, cells["loss_init"])
    return estimators.by_lr(cells.assign(loss=clamped))


def reference_losses(cells: pd.DataFrame) -> pd.DataFrame:
    """The losses that the curves are read against: depth, name, value (median over cells)."""
    names = {
        "loss_init": "loss at init",
        "unigram_entropy": "unigram entropy",
        "loss_floor": "entropy floor",
    }
    medians = cells.groupby("depth")[list(names)].median().rename(columns=names).reset_index()
    table = medians.melt(id_vars="depth", var_name="name", value_name="value")
    return table[np.isfinite(table["value"])].reset_index(drop=True)


def dump_json(value: Any, indent: int | None = None) -> bytes:
    """Strict JSON; a number that is not finite is an error here, never a bare NaN."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, indent=indent)
    return (text + "\n").encode()


def _write_figure(folder: Path, name: str, chart: Callable[[plots.Layout], Any]) -> None:
    """One figure at both widths of a two-column paper. A drawing is made once, as SVG."""
    for layout, suffix in ((plots.COLUMN, ""), (plots.WIDE, "-wide")):
        spec = chart(layout).to_dict()
        svg = vl_convert.vegalite_to_svg(spec, vl_version=_VEGALITE)
        stem = f"{name}{suffix}"
        _replace(folder / f"{stem}.svg", svg.encode())
        _replace(folder / f"{stem}.pdf", vl_convert.svg_to_pdf(svg))
        _replace(folder / f"{stem}.png", vl_convert.svg_to_png(svg, scale=300 / 72))
        _replace(folder / f"{stem}.vl.json", dump_json(spec))


def _replace(path: Path, content: bytes | str) -> None:
    """Writes a file whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(part, path)
