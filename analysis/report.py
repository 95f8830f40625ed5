"""Writes the report of a study: one HTML page that opens anywhere, figures, tables, JSON.

    out/index.html           everything on one page, without a network
    out/figures/             each figure as PNG, SVG, PDF (88 mm; -wide: 181 mm) and Vega-Lite
    out/tables/, macros.tex  the numbers for a LaTeX paper, as analysis.latex describes
    out/cells.parquet        one row a cell, as analysis.tables.CELL_COLUMNS
    out/history.parquet      one row a report
    out/summary.json         the numbers, as summary_schema.json describes them

Also for a study that is still running: the page says so and shows what is known.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vl_convert

from analysis import latex, page
from analysis.figures import figures
from analysis.page import replace_file
from analysis.plots.theme import COLUMN, VEGALITE, WIDE
from analysis.summary import json_safe, summarise

if TYPE_CHECKING:
    from analysis.load import Results

LAYOUTS = (COLUMN, WIDE)


def write(results: Results, out: Path) -> Path:
    """Writes the report and returns the path of its index.html.

    Every file is written beside its place and then moved there, so that a reader never
    meets half a file. The same results give the same bytes, except
    in the PDFs, whose converter orders dictionaries at random.

    Args:
        results: as `analysis.load.load` gives them.
        out: the folder; made if it is not there.
    """
    folder = out / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    summary = json_safe(summarise(results))
    drawn = figures(results, summary["arms"])
    specs = {
        figure.name: {layout.name: figure.spec(layout) for layout in LAYOUTS} for figure in drawn
    }
    for name, by_layout in specs.items():
        for layout, spec in by_layout.items():
            _write_figure(folder, name if layout == COLUMN.name else f"{name}-{layout}", spec)
    tables = out / "tables"
    tables.mkdir(exist_ok=True)
    replace_file(tables / "arms.tex", latex.arms_table(summary))
    replace_file(tables / "verdicts.tex", latex.verdicts_table(summary))
    replace_file(out / "macros.tex", latex.macros(summary))
    for name, table in (("cells", results.cells), ("history", results.history)):
        replace_file(out / f"{name}.parquet", table.to_parquet(index=False))
    replace_file(out / "summary.json", dump_json(summary, indent=1))
    replace_file(out / "index.html", page.render(results, summary, drawn, specs))
    return out / "index.html"


def dump_json(value: Any, indent: int | None = None) -> bytes:
    """Strict JSON; a number that is not finite is an error here, never a bare NaN."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, indent=indent)
    return (text + "\n").encode()


def _write_figure(folder: Path, stem: str, spec: dict[str, Any]) -> None:
    """One figure in every format. It is drawn once, as SVG, and the others made of that."""
    svg = _numbered_afresh(vl_convert.vegalite_to_svg(spec, vl_version=VEGALITE))
    replace_file(folder / f"{stem}.svg", svg)
    replace_file(folder / f"{stem}.pdf", vl_convert.svg_to_pdf(svg))
    replace_file(folder / f"{stem}.png", vl_convert.svg_to_png(svg, scale=2.5))
    replace_file(folder / f"{stem}.vl.json", dump_json(spec))


def _numbered_afresh(svg: str) -> str:
    """The drawing with its ids counted from 0; Vega counts on from one drawing to the next."""
    ids = list(dict.fromkeys(re.findall(r'id="((?:clip|gradient_?)\d+)"', svg)))
    for i, name in enumerate(ids):
        svg = re.sub(rf"\b{name}\b", f"id_{i}", svg)
    return svg
