"""The report for a paper: tables and numbers that a LaTeX text reads in, so none goes stale.

`tables/arms.tex`, `tables/verdicts.tex` and, for a study of many arms, `tables/stabilisers.tex`
need booktabs and nothing else, and fit one column of a two-column paper. `macros.tex` defines
one command for every headline number; in a name a depth is spelt, as commands hold letters only:

    The maximum stable rate rises from \\MaxStableLrOffDepthTwo{} to
    \\MaxStableLrRmsnormDepthTwo{}.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from analysis.plots.theme import short_name
from analysis.summary import best_lr_text, edge_text, interval_text, threshold_text

_SPECIAL = {
    "\\": r"\textbackslash{}",
    **{c: "\\" + c for c in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "<": r"$<$",
    ">": r"$>$",
    "−": "$-$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "∞": r"$\infty$",
    "–": "--",
    "²": "$^2$",
}
_DIGITS = ("Zero", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine")


def escape(text: str) -> str:
    """Plain text as LaTeX source; characters without a known command stay as UTF-8."""
    return "".join(_SPECIAL.get(character, character) for character in text)


def command_name(*parts: str | int) -> str:
    """A command of letters only: ("best_lr", "off", "depth", 10) -> BestLrOffDepthOneZero."""
    words = []
    for part in parts:
        spelt = re.sub(r"\d", lambda digit: f" {_DIGITS[int(digit[0])]} ", str(part))
        words += re.findall(r"[A-Za-z]+", spelt)
    return "".join(word[0].upper() + word[1:] for word in words)


def macros(summary: dict[str, Any]) -> str:
    """macros.tex: every headline number of summary.json as a command."""
    lines = [f"% numbers of study {summary['study']}"]

    def define(value: str, *name: str | int) -> None:
        lines.append(f"\\newcommand{{\\{command_name(*name)}}}{{{escape(value)}}}")

    define(summary["study"], "study", "name")
    for state, count in summary["cells"].items():
        define(str(count), "cells", state)
    if summary["unigram_entropy"] is not None:
        define(f"{summary['unigram_entropy']:.2f}", "unigram entropy")
    if summary["loss_floor"] is not None:
        define(f"{summary['loss_floor']:.2f}", "loss floor")
    for arm in summary["arms"]:
        of = (arm["arm"], "depth", arm["depth"])
        define(best_lr_text(arm), "best lr", *of)
        define(_fixed(arm["best_loss"], 3), "best loss", *of)
        define(_fixed(arm["lr_sensitivity"]["value"], 2), "lr sensitivity", *of)
        define(_interval(arm["lr_sensitivity"], ".2f"), "lr sensitivity", *of, "interval")
        define(edge_text(arm["max_stable_lr"]), "max stable lr", *of)
        define(_interval(arm["max_stable_lr"], ".3g"), "max stable lr", *of, "interval")
    for row in summary["necessity"]:
        of = (row["qk_norm"], "depth", row["depth"])
        define(threshold_text(row), "necessity", *of)
        define(_interval(row, ".2g"), "necessity", *of, "interval")
    for verdict in summary["verdicts"]:
        about = (verdict["hypothesis"], verdict["arm"])
        define(verdict["verdict"], "verdict", *about)
        define(_number(verdict["effect"]), "effect", *about)
        define(_interval(verdict, ".2g"), "effect", *about, "interval")
        if verdict["hypothesis"] != "H2":
            continue
        for part in verdict["parts"]:
            name = {"x": "max stable lr ratio", "nats": "lr sensitivity drop"}[part["unit"]]
            at = (name, verdict["arm"], "depth", part["depth"])
            define(_number(part["effect"]), *at)
            define(_interval(part, ".2g"), *at, "interval")
    saved = summary["divergence"]["steps_saved"]
    if saved is not None:
        define(f"{100 * saved:.1f}", "steps saved percent")
    return "\n".join(lines) + "\n"


def arms_table(summary: dict[str, Any]) -> str:
    """A booktabs table of the arms: best loss, LR sensitivity, maximum stable LR."""
    rows = [
        (
            str(arm["depth"]),
            short_name(arm["arm"]),
            f"{arm['n_stable']}/{arm['n_asked']}",
            _fixed(arm["best_loss"], 3),
            _fixed(arm["lr_sensitivity"]["value"], 2),
            _interval(arm["lr_sensitivity"], ".2f"),
            edge_text(arm["max_stable_lr"]),
        )
        for arm in summary["arms"]
    ]
    head = (
        "Depth",
        "Arm",
        "Stable",
        "Loss",
        "LR sens.",
        "95 % interval",
        "Max. LR",
    )
    return table(head, rows, "rlrrrlr")


def verdicts_table(summary: dict[str, Any]) -> str:
    """A booktabs table of the verdicts; the effect is that of the part that decides."""
    rows = [
        (
            verdict["hypothesis"],
            short_name(verdict["arm"]),
            verdict["verdict"],
            _number(verdict["effect"]),
            _interval(verdict, ".2g"),
            f"{verdict['n']}/{verdict['n_asked']}",
        )
        for verdict in summary["verdicts"]
    ]
    return table(("", "Arm", "Verdict", "Effect", "95 % interval", "Seeds"), rows, "lllrrr")


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], columns: str) -> str:
    """Rows of plain text as a booktabs table, small enough for one column of two."""
    body = [" & ".join(escape(text) for text in row) + r" \\" for row in (head, *rows)]
    lines = [
        # A column of a two-column paper is narrow; the group keeps the change to the table.
        r"\begingroup\footnotesize\setlength{\tabcolsep}{3pt}%",
        rf"\begin{{tabular}}{{@{{}}{columns}@{{}}}}",
        r"\toprule",
        body[0],
        r"\midrule",
        *body[1:],
        r"\bottomrule",
        r"\end{tabular}",
        r"\endgroup",
    ]
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}".replace("-", "−")


def _fixed(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _interval(estimate: dict[str, Any], digits: str) -> str:
    return interval_text(estimate["low"], estimate["high"], digits).replace("-", "−") or "–"
