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
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.parquet

from analysis import latex, page, stabiliser_report
from analysis.convert import Converters, replace_file
from analysis.figures import figures
from analysis.plots.theme import COLUMN, WIDE, Layout
from analysis.summary import json_safe, summarise
from analysis.tables import CELL_COLUMNS, HISTORY_COLUMNS, meaning
from tune_study.config import ConfigError

if TYPE_CHECKING:
    import pandas as pd

    from analysis.load import Results

LAYOUTS = (COLUMN, WIDE)

SPLIT = "BYTE_STREAM_SPLIT"
"""Parquet's name for it."""


def write(results: Results, out: Path, layouts: tuple[Layout, ...] = LAYOUTS) -> Path:
    """Writes the report and returns the path of its index.html.

    Every file is written beside its place and then moved there, so that a reader never
    meets half a file. The same results give the same bytes, except
    in the PDFs, whose converter orders dictionaries at random.

    Args:
        results: as `analysis.load.load` gives them.
        out: the folder; made if it is not there.
        layouts: widths to draw the figures at.

    Raises:
        ConfigError: if no cell has reported yet.
    """
    if not len(results.history):
        raise ConfigError(
            f"{results.study.name}: no cell has reported yet, so there is nothing to draw. "
            "Go on with its sweep."
        )
    folder, tables = out / "figures", out / "tables"
    for each in (folder, tables):
        each.mkdir(parents=True, exist_ok=True)
    with Converters(len(layouts)) as converters:
        summary = json_safe(summarise(results))
        drawn = figures(results, summary)
        specs: dict[str, dict[str, dict[str, Any]]] = {}
        for figure in drawn:
            for number, layout in enumerate(layouts):
                spec = specs.setdefault(figure.name, {})[layout.name] = figure.spec(layout)
                stem = figure.name if layout == COLUMN else f"{figure.name}-{layout.name}"
                path = folder / f"{stem}.vl.json"
                replace_file(path, dump_json(spec))
                converters.convert(path, by=number)
        replace_file(tables / "arms.tex", latex.arms_table(summary))
        replace_file(tables / "verdicts.tex", latex.verdicts_table(summary))
        if (ranked := summary["stabilisers"]) is not None:
            replace_file(tables / "stabilisers.tex", stabiliser_report.latex_table(ranked))
            replace_file(tables / "stabilisers.md", stabiliser_report.markdown(ranked))
        replace_file(out / "macros.tex", latex.macros(summary))
        replace_file(out / "cells.parquet", parquet(results.cells, CELL_COLUMNS))
        replace_file(out / "history.parquet", parquet(results.history, HISTORY_COLUMNS))
        replace_file(out / "summary.json", dump_json(summary, indent=1))
        html = page.render(results, summary, drawn, specs)
    replace_file(out / "index.html", html)
    return out / "index.html"


def parquet(
    table: pd.DataFrame, described: Mapping[str, tuple[str, str]], dense: bool = False
) -> bytes:
    """The table as Parquet, each column with its meaning as `description` in the schema.

    Args:
        dense: in the fewest bytes: by zstd, the bytes of numbers sorted by their place in them.
    """
    arrow = pyarrow.Table.from_pandas(table, preserve_index=False)
    fields = [
        field.with_metadata({"description": found})
        if (found := meaning(field.name, described))
        else field
        for field in arrow.schema
    ]
    arrow = arrow.cast(pyarrow.schema(fields, arrow.schema.metadata))
    how: dict[str, Any] = {}
    if dense:
        how = {"compression": "zstd", "compression_level": 9, **_by_place(arrow.schema)}
    buffer = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(arrow, buffer, **how)
    return buffer.getvalue().to_pybytes()


def _by_place(schema: pyarrow.Schema) -> dict[str, Any]:
    """Options by which numbers are stored byte place by byte place; other columns as always."""
    numbers = {f.name for f in schema if pyarrow.types.is_floating(f.type)}
    lists = {f.name for f in schema if pyarrow.types.is_list(f.type)}
    split = dict.fromkeys([*numbers, *(f"{name}.list.element" for name in lists)], SPLIT)
    others = [name for name in schema.names if name not in numbers | lists]
    return {"column_encoding": split, "use_dictionary": others}


def dump_json(value: Any, indent: int | None = None) -> bytes:
    """Strict JSON; a number that is not finite is an error here, never a bare NaN."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, indent=indent)
    return (text + "\n").encode()
