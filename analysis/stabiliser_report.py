"""The stabilisers' part of a report: sentences, tables and figures, from the summary.

Only for a study with arms beyond the baseline and RMSNorm; `summary["stabilisers"]`, as
`analysis.stabilisers.summarise` makes it, is None otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from analysis import arms, estimators, latex, plots
from analysis.figure import Figure
from analysis.figure_data import loss_curve
from analysis.load import Results
from analysis.stabilisers import BY_NAME, EFFECTS, QUANTITIES, Quantity
from analysis.summary import interval_text, lr_text

Row = dict[str, Any]

FIGURES = (
    *("stabilisers_loss", "stabilisers_curves", "stabilisers_change"),
    *("stabilisers_phase", "stabilisers_interaction"),
)
"""Names of the figures of all arms, in reading order."""

_DIGITS = {"lr_sensitivity": ".2f", "usable_window": ".2f", "best_loss": ".3f", "step_ms": ".2f"}
_SIGNS = {"above": "≥ ", "below": "< ", "": ""}
MARKS = {"better": "+", "worse": "−", "": ""}
"""Beside a number that is told apart from the baseline's."""


# ---------------------------------------------------------------------- numbers


def value_text(row: Row) -> str:
    """An arm's value with its censoring: '0.0562', '≥ 1', 'unknown'."""
    quantity = BY_NAME[row["quantity"]]
    if row["censored"] == "both":
        return "off the grid at both ends, by seed"
    if row["value"] is None:
        return "unknown"
    # A best loss at an end of the grid is reached, and may yet be undercut.
    sign = "≤ " if quantity.name == "best_loss" and row["censored"] else _SIGNS[row["censored"]]
    return sign + _number(quantity, row["value"])


def own_interval(row: Row) -> str:
    """The interval of an arm's value."""
    digits = _DIGITS.get(row["quantity"], ".3g")
    return interval_text(row["low"], row["high"], digits).replace("-", "−")


def change_text(row: Row) -> str:
    """The difference to the baseline with its interval: '−0.85 [−1.1, −0.6]', '×3.2 [1.9, ∞]'."""
    quantity = BY_NAME[row["quantity"]]
    low, high = row["change_low"], row["change_high"]
    interval = interval_text(low, high, ".3g" if quantity.log else _DIGITS[quantity.name])
    if not interval:
        return "not known"
    if row["change"] is None:
        return interval
    if quantity.log:
        return f"×{row['change']:.3g} {interval}"
    return f"{row['change']:+{_DIGITS[quantity.name]}} {interval}".replace("-", "−")


def rank_text(row: Row) -> str:
    """'1', '2–5'; a dash where the arm has no value."""
    if not row["n_ranked"]:
        return "–"
    first, last = row["rank_first"], row["rank_last"]
    return str(first) if first == last else f"{first}–{last}"


def _number(quantity: Quantity, value: float) -> str:
    if quantity.name == "max_stable_lr":
        return lr_text(value)
    return f"{value:{_DIGITS[quantity.name]}}"


# ----------------------------------------------------------------------- tables


def order(content: Row) -> list[str]:
    """The arms as they are listed: by LR sensitivity over the depths, unknown ones last."""
    totals: dict[str, list[float]] = {}
    for row in content["ranking"]:
        if row["quantity"] == "lr_sensitivity":
            value = row["value"]
            totals.setdefault(row["arm"], []).append(math.inf if value is None else value)
    return sorted(content["arms"], key=lambda arm: sum(totals[arm]))


def table(content: Row) -> list[Row]:
    """Depth by depth, one row an arm with the five quantities as text."""
    by_key = {(r["depth"], r["arm"], r["quantity"]): r for r in content["ranking"]}
    rows = []
    for depth in sorted({row["depth"] for row in content["ranking"]}):
        for arm in order(content):
            found = [by_key[depth, arm, quantity.name] for quantity in QUANTITIES]
            reasons = dict.fromkeys(
                f"{BY_NAME[r['quantity']].title}: {r['reason']}" for r in found if r["reason"]
            )
            rows.append(
                {
                    "depth": depth,
                    "arm": arm,
                    "baseline": arm == content["baseline"],
                    "entries": [
                        {
                            "value": value_text(r),
                            "interval": own_interval(r),
                            "change": "" if arm == content["baseline"] else change_text(r),
                            "outcome": r["outcome"],
                            "mark": MARKS[r["outcome"]],
                            "rank": rank_text(r),
                            "of": r["n_ranked"],
                            "seeds": f"{r['n']}/{r['n_asked']}",
                        }
                        for r in found
                    ],
                    "notes": "; ".join(reasons),
                }
            )
    return rows


def heads() -> list[str]:
    """The columns of the table."""
    return [f"{q.title}{f' ({q.unit})' if q.unit else ''}" for q in QUANTITIES]


def markdown(content: Row) -> str:
    """The ranking as Markdown: value, + or − where told apart from the baseline, rank."""
    several = len({row["depth"] for row in content["ranking"]}) > 1
    top = [*(["depth"] if several else []), "arm", *heads()]
    lines = ["| " + " | ".join(top) + " |", "|" + "---|" * len(top)]
    for row in table(content):
        cells = [f"{e['value']} {MARKS[e['outcome']]} ({e['rank']})" for e in row["entries"]]
        name = f"**{row['arm']}**" if row["baseline"] else row["arm"]
        first = [*([str(row["depth"])] if several else []), name]
        lines.append("| " + " | ".join([*first, *(" ".join(c.split()) for c in cells)]) + " |")
    lines += ["", _key(content)]
    for each in content["interactions"]:
        where = f"Depth {each['depth']}: " if several else ""
        lines.append(f"- {where}{each['sentence']}")
    return "\n".join(lines) + "\n"


def _key(content: Row) -> str:
    return (
        f"+ better, − worse than {content['baseline']}, paired by seed, Holm's p below "
        f"{1 - content['level']:.2g}; in brackets the ranks that all comparisons leave an arm."
    )


def latex_table(content: Row) -> str:
    """A booktabs table of the ranking that fits one column of a two-column paper."""
    several = len({row["depth"] for row in content["ranking"]}) > 1
    titles = ["LR sens.", "Max. LR", "Window", "Loss", "ms/step"]
    rows = [
        (
            *([str(row["depth"])] if several else []),
            row["arm"],
            *(e["value"].replace("unknown", "–") + MARKS[e["outcome"]] for e in row["entries"]),
        )
        for row in table(content)
    ]
    head = (*(["Depth"] if several else []), "Arm", *titles)
    return latex.table(head, rows, ("r" if several else "") + "lrrrrr")


def findings(content: Row) -> list[str]:
    """What the ranking says, a sentence a quantity and depth, no further than it goes."""
    depths = sorted({row["depth"] for row in content["ranking"]})
    base, alpha = content["baseline"], 1 - content["level"]
    place = {arm: i for i, arm in enumerate(order(content))}
    dearer = {
        (row["depth"], row["arm"])
        for row in content["ranking"]
        if row["quantity"] == "best_loss" and row["outcome"] == "worse"
    }
    sentences = []
    for quantity in QUANTITIES:
        rows = [
            r for r in content["ranking"] if r["quantity"] == quantity.name and r["arm"] != base
        ]
        for depth in depths:
            kinds: dict[tuple[int, str], list[str]] = {}
            here = [r for r in rows if r["depth"] == depth]
            for row in sorted(here, key=lambda r: place[r["arm"]]):
                kind, said = _finding(row, alpha, len(rows), base)
                if (depth, row["arm"]) in dearer and row["quantity"] == "lr_sensitivity":
                    said += " (from a worse best loss)"
                kinds.setdefault(kind, []).append(said)
            where = f" at depth {depth}" if len(depths) > 1 else ""
            title = quantity.title[0].upper() + quantity.title[1:]
            found = "; ".join(f"{kind[1]}: {', '.join(kinds[kind])}" for kind in sorted(kinds))
            sentences.append(f"{title}{where} – {found}.")
    return sentences


def _finding(row: Row, alpha: float, comparisons: int, base: str) -> tuple[tuple[int, str], str]:
    """What kind of finding an arm is, with the kind's place in the sentence, and how it is told."""
    with_numbers = f"{row['arm']} ({change_text(row)})"
    if row["outcome"]:
        return (["better", "worse"].index(row["outcome"]), row["outcome"]), with_numbers
    if row["p"] is None:
        return (4, "not tested"), row["arm"]
    if row["p"] < alpha:
        adjusting = f"different only before adjusting for {comparisons} comparisons"
        return (2, adjusting), with_numbers
    return (3, f"not told apart from {base}"), row["arm"]


def crossed_rows(content: Row) -> list[Row]:
    """The table of interactions, as text."""
    return [
        {
            "name": f"A = {each['first']}, B = {each['second']}",
            "depth": each["depth"],
            "title": BY_NAME[each["quantity"]].title,
            "effects": [_effect(BY_NAME[each["quantity"]], each["effects"][e]) for e in EFFECTS],
            "p": "–" if each["p_holm"] is None else f"{each['p_holm']:.2g}",
            "seeds": f"{each['effects']['interaction']['n']}/{each['n_asked']}",
            "verdict": each["verdict"],
        }
        for each in content["interactions"]
    ]


def _effect(quantity: Quantity, effect: Row) -> Row:
    digits = ".3g" if quantity.log else ".2f"
    value = effect["value"]
    if value is None:
        shown = ""
    else:
        shown = f"×{value:.3g}" if quantity.log else f"{value:+.2f}".replace("-", "−")
    interval = interval_text(effect["low"], effect["high"], digits).replace("-", "−")
    return {"value": shown, "interval": interval or "not known"}


def lines(content: Row) -> list[str]:
    """For a terminal: the findings, and the interactions."""
    text = [f"  arms against {content['baseline']}:"]
    text += [f"  {sentence}" for sentence in findings(content)]
    return text + [f"  {each['sentence']}" for each in content["interactions"]]


# ---------------------------------------------------------------------- figures


def figures(results: Results, content: Row) -> Iterator[Figure]:
    """The figures of all arms, in reading order."""
    cells = results.cells
    names = order(content)
    base = content["baseline"]
    curve = loss_curve(arms.by_arm(cells)).rename(columns={"qk_norm": "arm"})
    first = [base, *(arm for arm in names if arm != base)]
    yield Figure(
        "stabilisers_loss",
        "Final validation loss against the peak learning rate, a panel an arm, with the baseline "
        f"({base}) behind each. A line is the median over seeds; a cell without a finite loss "
        "stands at the loss at initialisation.",
        lambda layout: plots.arm_curves(cells, curve, first, layout),
    )
    if len(results.history):
        both = arms.results_by_arm(results)
        yield Figure(
            "stabilisers_curves",
            "Validation loss over training, a panel an arm, a line a cell. Cells chosen in another "
            "figure or in the table are brought out here.",
            lambda layout: plots.training_curves(both.cells, both.history, layout, first),
        )
    ranked = pd.DataFrame(content["ranking"])
    bounds = ["value", "low", "high", "change", "change_low", "change_high"]
    ranked[bounds] = ranked[bounds].astype(float)
    changes = _opened(ranked[ranked["arm"] != base]).assign(
        place=lambda t: t["arm"].map({arm: i for i, arm in enumerate(names)})
    )
    titles = {q.name: q.short for q in QUANTITIES}
    units = {q.name: "ratio" if q.log else q.unit for q in QUANTITIES}
    ratios = {q.name for q in QUANTITIES if q.log}
    yield Figure(
        "stabilisers_change",
        f"By how much each arm differs from the baseline ({base}), seed by seed: left is lower. "
        "What is filled is told apart from it after Holm's adjustment over all arms; what is "
        "open is a tie, wherever it stands. LR sensitivity, loss and cost are better lower, the "
        "maximum stable LR and the usable window higher.",
        lambda layout: plots.arm_changes(
            changes.sort_values(["depth", "place"]), titles, units, ratios, layout
        ),
    )
    keys = ["depth", "arm", "lr"]
    counts = estimators.counts(arms.by_arm(cells), estimators.LR_KEYS)
    counts = counts.rename(columns={"qk_norm": "arm"}).sort_values(keys)
    yield Figure(
        "stabilisers_phase",
        "How many seeds are stable at each learning rate, arm by arm.",
        lambda layout: plots.arm_phases(counts, names, layout),
    )
    if content["interactions"]:
        corners = _corners(content["interactions"], ranked)
        yield Figure(
            "stabilisers_interaction",
            "Two components together: the figure without and with the first, one line without "
            "and one with the second. Parallel lines add up. A bound that is open, because the "
            "grid ends, is not drawn.",
            lambda layout: plots.crossed(corners, layout),
        )


def _opened(rows: pd.DataFrame) -> pd.DataFrame:
    """Bounds as the plot wants them: a bound beyond the grid infinite, not absent."""
    low, high = rows["change_low"], rows["change_high"]
    some = low.notna() | high.notna()
    return rows.assign(
        change_low=low.mask(low.isna() & some, -np.inf),
        change_high=high.mask(high.isna() & some, np.inf),
    )


def _corners(interactions: list[Row], ranked: pd.DataFrame) -> pd.DataFrame:
    """The four cells of each 2 x 2 with their own values."""
    by_key = {(r["quantity"], r["depth"], r["arm"]): r for r in ranked.to_dict("records")}
    several = len({each["depth"] for each in interactions}) > 1
    rows = []
    for panel, each in enumerate(interactions):
        quantity = BY_NAME[each["quantity"]]
        name = [f"{each['first']} × {each['second']}"]
        name += [f"depth {each['depth']}"] if several else []
        on = ((False, False), (True, False), (False, True), (True, True))
        for arm, (first_on, second_on) in zip(each["arms"], on, strict=True):
            own = by_key[quantity.name, each["depth"], arm]
            rows.append(
                {
                    "panel": panel,
                    "name": name,
                    "log": quantity.log,
                    "title": quantity.short,
                    "first": each["first"],
                    "second": each["second"],
                    "first_on": first_on,
                    "second_on": second_on,
                    "value": own["value"],
                    "low": own["low"],
                    "high": own["high"],
                }
            )
    return pd.DataFrame(rows)
