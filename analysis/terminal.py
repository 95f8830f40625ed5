"""A study on a terminal, read from its folder: how far it is, its cells, one cell, two studies."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from analysis.compare import side_by_side
from analysis.summary import json_safe, lr_text, summarise
from analysis.tables import STATES
from tune_study import view
from tune_study.board import RUNNING, TO_GO, Board
from tune_study.config import ConfigError

if TYPE_CHECKING:
    from analysis.load import Results

BLOCKS = "▁▂▃▄▅▆▇█"
DIGITS = "0123456789"
"""Heights of a sparkline, from low to high; digits where the output cannot show blocks."""

SPARK_WIDTH = 40

LISTED = ("cell", "state", "step", "loss", "max_logit_peak", "tokens_per_s", "reason")
"""Columns of the list of cells."""

TRACES = {
    "val/loss": ("validation loss", False),
    "train/loss": ("training loss", False),
    "attn/max_logit": ("max attention logit", True),
    "attn/entropy": ("attention entropy", False),
    "grad/norm": ("gradient norm", True),
}
"""What `show` draws of a cell: key in `history`, name, whether on a log scale."""


# ---------------------------------------------------------------- how far it is


def board(results: Results) -> Board:
    """The study as `sweep` shows it, from what is on disk."""
    found = Board(results.study)
    found.entropy = results.manifest["unigram_entropy"]
    at_work = _begun_last(results) if results.running else set()
    rows: list[dict[str, Any]] = results.cells.to_dict("records")  # type: ignore[assignment]
    for row in rows:
        cell = found.cells[row["cell"]]
        cell.step = 0 if pd.isna(row["step"]) else row["step"]
        cell.loss = row["loss"] if math.isfinite(row["loss"]) else None
        cell.state = row["state"]
        if cell.state == "missing":
            cell.state = RUNNING if row["cell"] in at_work else TO_GO
        if cell.step:
            whole = row["ended"] - row["started"]
            seconds = whole if math.isfinite(whole) else row["seconds"]
            cell.seconds_per_step, cell.tokens_per_s = seconds / cell.step, row["tokens_per_s"]
    return found


def _begun_last(results: Results) -> set[str]:
    """The cells that the newest start has begun with."""
    assert results.source is not None
    starts = sorted((results.source / "tune").glob("sweep-*"), key=lambda p: (len(p.name), p.name))
    return {path.name for path in starts[-1].iterdir()} if starts else set()


def status(results: Results, width: int) -> RenderableType:
    """The view of `sweep`, for a study that runs elsewhere, was stopped or is complete."""
    shown = board(results)
    if results.running:
        left = view.time_left(shown, max(1, len(shown.running())))
    elif shown.done == shown.total:
        left = "complete"
    else:
        left = "stopped"
    screen = view.screen(shown, left, width)
    return Group(f"Running: {results.holder}.", screen) if results.holder else screen


# -------------------------------------------------------------------- its cells


def listing(
    results: Results, words: Sequence[str] = (), state: str | None = None, by: str | None = None
) -> Table:
    """The cells in which all the words occur, one a line.

    Args:
        state: only cells in that state.
        by: the column to sort by, the highest last; in the study's order by default.

    Raises:
        ConfigError: for a state or a column that there is not.
    """
    cells = results.cells
    if state is not None:
        if state not in STATES:
            raise ConfigError(f"--state {state}: unknown. Give one of: {', '.join(STATES)}.")
        cells = cells[cells["state"] == state]
    if by is not None:
        if by not in cells.columns:
            raise ConfigError(f"--by {by}: no column. Give one of: {', '.join(cells.columns)}.")
        cells = cells.sort_values(by, kind="stable", na_position="first")
    columns = list(dict.fromkeys([*LISTED[:-1], *([by] if by else []), LISTED[-1]]))
    table = Table(box=None, pad_edge=False, header_style="bright_black")
    for name in columns:
        numbers = name not in ("cell", "state", "reason")
        table.add_column(
            name, justify="right" if numbers else "left", no_wrap=name != "reason", overflow="fold"
        )
    for row in cells[columns].to_dict("records"):
        texts = [_text(row[name]) for name in columns]
        whole = " ".join(texts).lower()
        if all(word.lower() in whole for word in words):
            style = view.SIGNS.get(row["state"], ("", "bright_black"))[1]
            table.add_row(texts[0], Text(texts[1], style), *texts[2:])
    return table


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if pd.isna(value):
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


# --------------------------------------------------------------------- one cell


def cell(results: Results, name: str, unicode: bool) -> RenderableType:
    """One cell: its verdict, what it is, and how it got there.

    Args:
        unicode: whether the output can show more than ASCII.

    Raises:
        ConfigError: if the study has no such cell; names those that are near.
    """
    found = results.cells[results.cells["cell"] == name]
    if found.empty:
        names = results.cells["cell"].tolist()
        near = difflib.get_close_matches(name, names, cutoff=0.5) or names[:1]
        raise ConfigError(
            f"cell = {name!r}: not in {results.study.name}. Give one such as {', '.join(near)}; "
            f"all are listed by: python -m tune_study cells {results.study.name}"
        )
    row = found.iloc[0]
    verdict = Text(f"{name}: ").append(row["state"], view.SIGNS.get(row["state"], ("", ""))[1])
    verdict.append(f"; {row['reason']}" if row["reason"] else "")
    verdict.append(f"; at step {row['step']} of {row['steps']}")
    lines = [
        verdict,
        Text(
            f"LR {lr_text(row['lr'])}, depth {row['depth']}, arm {row['arm']}, seed {row['seed']}; "
            f"{row['params']:,} parameters"
        ),
    ]
    reports = results.history[results.history["cell"] == name]
    if not len(reports):
        return Group(*lines, Text("It has reported nothing yet."))
    speed = f"{row['tokens_per_s']:,.0f} tokens/s, {row['seconds']:.3g} s of training"
    threads = view.plural(row["threads"], "thread")
    lines.append(Text(f"{row['device']}, {row['precision']}, {threads}; {speed}"))
    grid = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "left", "right"):
        grid.add_column(justify=justify, no_wrap=True)
    for key, (title, log) in TRACES.items():
        if key in reports.columns:
            values = reports[key].to_numpy(float)
            spark = sparkline(values, BLOCKS if unicode else DIGITS, log)
            grid.add_row(title, _text(values[0]), spark, _text(values[-1]))
    scale = Text(
        f"step {reports['step'].iloc[0]} to {reports['step'].iloc[-1]}, their values beside; "
        f"loss at init {row['loss_init']:.3f}, unigram entropy {row['unigram_entropy']:.3f}",
        "bright_black",
    )
    return Group(*lines, Text(), grid, scale)


def sparkline(values: np.ndarray, heights: str, log: bool = False) -> str:
    """Values as a row of heights, at most SPARK_WIDTH of them; a gap where one is not finite."""
    at = np.unique(np.linspace(0, len(values) - 1, min(len(values), SPARK_WIDTH)).round())
    shown = values[at.astype(int)]
    if log:
        with np.errstate(divide="ignore", invalid="ignore"):
            shown = np.log(shown)
    known = np.isfinite(shown)
    if not known.any():
        return " " * len(shown)
    low, span = shown[known].min(), float(np.ptp(shown[known])) or 1.0
    return "".join(
        heights[round((v - low) / span * (len(heights) - 1))] if ok else " "
        for v, ok in zip(shown, known, strict=True)
    )


# ------------------------------------------------------------------ two studies


def comparison(results: Sequence[Results]) -> RenderableType:
    """Studies side by side: settings that differ, and each arm's numbers.

    Raises:
        ConfigError: with fewer than two studies, or one of them twice.
    """
    content = side_by_side(results, [json_safe(summarise(each)) for each in results])
    names = content["names"]
    different = Table("setting", *names, box=None, pad_edge=False, header_style="bright_black")
    for row in content["differences"]:
        different.add_row(row["setting"], *row["values"])
    if not content["differences"]:
        different.add_row("nothing but the name differs")
    parts: list[RenderableType] = [different, Text()]
    shown = [("maximum stable LR", "edges")]
    if content["refused"]:
        differ = ", ".join(content["refused"])
        parts.append(Text(f"Losses and LR sensitivities are not compared: {differ} differ."))
    else:
        shown += [("LR sensitivity", "sensitivities"), ("best loss", "losses")]
    table = Table("depth", "arm", "", *names, box=None, pad_edge=False, header_style="bright_black")
    for row in content["rows"]:
        for i, (title, key) in enumerate(shown):
            where = (str(row["depth"]), row["arm"]) if not i else ("", "")
            table.add_row(*where, title, *row[key])
    return Group(*parts, table)
