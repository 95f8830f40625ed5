"""The HTML page of a report: one file with its data, its charts and the code to draw them.

Each chart is drawn by Vega in the browser, from the layout that fits the window. Data that
several charts or layouts share is stored once, by column.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import vl_convert

from analysis import early_warning, method, stabiliser_report
from analysis.answer import answer
from analysis.convert import replace_file
from analysis.plots.theme import COLUMN, DARK, VEGALITE, WIDE, arm_name, colour_of, short_name
from analysis.summary import (
    best_lr_text,
    edge_text,
    interval_text,
    json_safe,
    leaks,
    lr_text,
)
from analysis.tables import ASKED

if TYPE_CHECKING:
    from analysis.figure import Figure
    from analysis.load import Results

TABLE_COLUMNS = [
    *("cell", "lr", "depth", "arm", "seed", "state", "reason", "step"),
    *("loss", "loss_init", "loss_best", "normalised_loss"),
    *("attn_entropy", "max_logit_peak", "kurtosis", "grad_norm", "clipped_share"),
    *("seconds", "device", "precision"),
]
"""Columns of the table of cells on the page; cells.parquet has them all."""


def render(
    results: Results,
    summary: dict[str, Any],
    drawn: list[Figure],
    specs: dict[str, dict[str, dict[str, Any]]],
) -> str:
    """The page as one string of HTML.

    Args:
        results: the study.
        summary: what `analysis.summary.summarise` made of it.
        drawn: the figures, in reading order.
        specs: figure name -> layout name -> Vega-Lite specification.
    """
    cells = results.tried.cells[TABLE_COLUMNS]
    data = _chart_data(specs)
    data["cells"] = _columns(json_safe(cells.to_dict("records")), data["values"])
    return (
        environment()
        .get_template("page.html")
        .render(
            results=results,
            summary=summary,
            states=ASKED,
            data=_script_json(data),
            vega=vega_bundle(),
            figures=[figure for figure in drawn if figure.name not in stabiliser_report.FIGURES],
            answer=answer(summary),
            arms=_arm_rows(summary),
            several_arms=len({verdict["arm"] for verdict in summary["verdicts"]}) > 1,
            colours={arm: colour_of(arm) for arm in results.cells["arm"].unique()},
            stabilisers=_stabilisers(summary["stabilisers"], drawn),
            config=results.study.model_dump(mode="json"),
            method=method.rows(results),
            leaks=results.cells.loc[leaks(results.cells), "cell"].tolist(),
            divergence=summary["divergence"],
            spike=early_warning.SPIKE,
            spikes=sum(row["spikes"] for row in summary["divergence"]["spikes"] or ()),
            recovered=sum(row["recovered"] for row in summary["divergence"]["spikes"] or ()),
        )
    )


def render_comparison(specs: dict[str, dict[str, dict[str, Any]]], **content: Any) -> str:
    """The page of several studies side by side; `content` is what compare.html names."""
    return (
        environment()
        .get_template("compare.html")
        .render(data=_script_json(_chart_data(specs)), vega=vega_bundle(), **content)
    )


def _chart_data(specs: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """What charts.js draws from: figures, each dataset once, and the looks."""
    datasets: dict[str, Any] = {}
    values: dict[str, list[Any]] = {}
    figures = {
        name: {layout: _share(spec, datasets, values) for layout, spec in by_layout.items()}
        for name, by_layout in specs.items()
    }
    return {
        "datasets": datasets,
        "values": values,
        "figures": figures,
        "dark": DARK,
        "widths": {layout.name: layout.width for layout in (COLUMN, WIDE)},
    }


@functools.cache
def vega_bundle() -> str:
    """Vega-Embed with Vega and Vega-Lite as one script, from vl-convert; no network.

    Making it takes seconds, so it is kept with the packages that it is made of, where they lie
    in an environment that can be written to.
    """
    name = f"vega-embed-{version('vl-convert-python')}-{VEGALITE}.js"
    kept = Path(sys.prefix) / "share" / "tune_study" / name
    with contextlib.suppress(OSError):
        return kept.read_text(encoding="utf-8")
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGALITE)
    bundle = bundle.replace("</script", "<\\/script")
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        replace_file(kept, bundle)
    return bundle


def _share(
    spec: dict[str, Any], datasets: dict[str, Any], values: dict[str, list[Any]]
) -> dict[str, Any]:
    """The spec with each dataset replaced by the key of its one copy in `datasets`."""
    names = {}
    for name, rows in spec.get("datasets", {}).items():
        table = _columns(rows, values)
        names[name] = _key(table)
        datasets[names[name]] = table
    bare = {key: value for key, value in spec.items() if key != "datasets"}
    return {"spec": bare, "datasets": names}


def _columns(rows: list[dict[str, Any]], values: dict[str, list[Any]]) -> dict[str, Any]:
    """Rows as one list a column, a fraction of the size; the page turns them back.

    A column of strings, or of few different numbers, becomes {"values": key, "codes": [...]}:
    positions in a list of values, which is kept once for all columns that have the same. Without
    codes the column is that list.
    """
    table: dict[str, Any] = {}
    for name in rows[0] if rows else ():
        column = [row[name] for row in rows]
        distinct = dict.fromkeys(column)
        if len(distinct) * 4 < len(column) or any(isinstance(value, str) for value in distinct):
            code = {value: i for i, value in enumerate(distinct)}
            listed = [_short(value) for value in distinct]
            key = _key(listed)
            values[key] = listed
            table[name] = {"values": key}
            if len(distinct) < len(column):
                table[name]["codes"] = [code[value] for value in column]
        else:
            table[name] = [_short(value) for value in column]
    return table


def _key(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def _short(value: Any) -> Any:
    """Six digits are more than a screen shows."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _script_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.replace("</", "<\\/").replace("<!--", "<\\u0021--")


def _stabilisers(content: dict[str, Any] | None, drawn: list[Figure]) -> dict[str, Any] | None:
    """What stabilisers.html shows; None for a study without further arms."""
    if content is None:
        return None
    own = [figure for figure in drawn if figure.name in stabiliser_report.FIGURES]
    return {
        **content,
        "findings": stabiliser_report.findings(content),
        "heads": stabiliser_report.heads(),
        "table": stabiliser_report.table(content),
        "crossed": stabiliser_report.crossed_rows(content),
        "several_depths": len({row["depth"] for row in content["ranking"]}) > 1,
        "figures": own,
        "first_figure": len(drawn) - len(own),
    }


def _arm_rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """The table of arms, as text."""
    rows = []
    for arm in summary["arms"]:
        sensitivity, edge = arm["lr_sensitivity"], arm["max_stable_lr"]
        value = sensitivity["value"]
        notes = [sensitivity["reason"]]
        if edge["reason"] != sensitivity["reason"]:
            notes.append(edge["reason"])
        if not edge["monotone"]:
            notes.append("a stable cell lies above an unstable one")
        rows.append(
            {
                "arm": arm["arm"],
                "depth": arm["depth"],
                "name": arm_name(arm["arm"]),
                "best_lr": best_lr_text(arm),
                "best_loss": "–" if arm["best_loss"] is None else f"{arm['best_loss']:.3f}",
                "sensitivity": "unknown" if value is None else f"{value:.2f}",
                "sensitivity_interval": interval_text(sensitivity["low"], sensitivity["high"]),
                "range": f"{lr_text(sensitivity['lr_low'])} to {lr_text(sensitivity['lr_high'])}",
                "edge": edge_text(edge),
                "edge_interval": interval_text(edge["low"], edge["high"], ".3g"),
                "stable": f"{arm['n_stable']}/{arm['n_asked']}",
                "notes": "; ".join(note for note in notes if note),
            }
        )
    return rows


def _tally(verdict: dict[str, Any]) -> str:
    """How many parts hold, and the one that decides, with its numbers."""
    keys = ("effect", "low", "high", "unit", "n")
    deciding = next(p for p in verdict["parts"] if all(p[k] == verdict[k] for k in keys))
    held = sum(part["verdict"] == "supported" for part in verdict["parts"])
    where = "" if deciding["depth"] is None else f" at depth {deciding['depth']}"
    factor, unit = ("×", "") if verdict["unit"] == "x" else ("", f" {verdict['unit']}")
    interval = interval_text(verdict["low"], verdict["high"], ".2g")
    numbers = "unknown" if verdict["effect"] is None else f"{factor}{verdict['effect']:.2g}"
    if verdict["effect"] is not None or interval:
        numbers = f"{numbers} {interval}".strip() + unit
    text = (
        f"{held} of {len(verdict['parts'])} parts hold; it hangs on: {deciding['name']}{where}, "
        f"{numbers}, {verdict['n']} of {verdict['n_asked']} seeds"
    )
    return re.sub(r"(?<=[ \[])-(?=\d)", "−", text)


def _lr_span(row: dict[str, Any]) -> str:
    low, high = lr_text(row["lr_low"]), lr_text(row["lr_high"])
    return low if low == high else f"{low} to {high}"


def environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("analysis", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["arm_name"] = arm_name
    environment.filters["short_name"] = short_name
    environment.filters["tally"] = _tally
    environment.filters["lr_span"] = _lr_span
    environment.filters["fixed"] = lambda value: "–" if value is None else f"{value:.3g}"
    environment.filters["interval"] = lambda part: interval_text(part["low"], part["high"], ".3g")
    return environment
