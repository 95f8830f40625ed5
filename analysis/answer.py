"""The answer in a few sentences with their numbers, written from the summary alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from analysis import estimators
from analysis.plots.theme import short_name
from analysis.summary import (
    UNKNOWN,
    arms_in_question,
    edge_text,
    interval_text,
    lr_text,
    number,
)

Row = dict[str, Any]


def answer(summary: dict[str, Any]) -> list[str]:
    """Three sentences an arm: when it is needed, what it does to the stable range, to sensitivity.

    In a study of many arms they are about QK-norm alone, which a last one says. What is censored,
    not monotone or unknown is said in place of the number.
    """
    arms: dict[str, list[Row]] = {}
    for arm in arms_in_question(summary):
        arms.setdefault(arm["qk_norm"], []).append(arm)
    off = {arm["depth"]: arm for arm in arms.pop(estimators.OFF, [])}
    sentences = []
    for name, on in arms.items():
        needed = [row for row in summary["necessity"] if row["qk_norm"] == name]
        if needed:
            sentences.append(_need(name, needed))
        subject = "It" if needed else f"QK-norm ({short_name(name)})"
        for words, unit, level, change in (
            ("the maximum stable learning rate", "x", _edge, _ratio),
            ("LR sensitivity (nats a token)", "nats", _sensitivity, _drop),
        ):
            compared = _compared(summary["verdicts"], name, unit)
            changes, levels = map(change, compared.values()), (*off.values(), *on)
            if not any(changes) and {level(arm, False) for arm in levels} == {UNKNOWN}:
                about = f"QK-norm ({short_name(name)})"
                sentences.append(f"What {about} does to {words} is not known: {_open(summary)}.")
                continue
            moves = [
                _moved(level, change, off.get(arm["depth"]), arm, compared.get(arm["depth"]))
                for arm in on
            ]
            sentences.append(f"{subject} takes {words} {_listed(moves)}.")
            subject = "It"
    if off and not arms:
        edges = [f"{_edge(arm, True)} at depth {depth}" for depth, arm in off.items()]
        sentences.append(f"Without QK-norm the maximum stable learning rate is {_listed(edges)}.")
    return [*sentences, *scope(summary)]


def scope(summary: dict[str, Any]) -> list[str]:
    """What is said of which arms; nothing for a study of QK-norm alone."""
    compared = summary["stabilisers"]
    if compared is None or len(compared["verdicts_on"]) == len(compared["arms"]):
        return []
    about = " and ".join(compared["verdicts_on"])
    return [
        f"This study has {len(compared['arms'])} arms. What is said of QK-norm, the hypotheses and "
        f"the figures against depth and over training compare {about} only; all arms are ranked "
        f"against {compared['baseline']}."
    ]


def _open(summary: dict[str, Any]) -> str:
    cells = summary["cells"]
    if cells["untried"]:
        return f"a search left {cells['untried']} cells of the grid untried"
    without = cells["missing"] + cells["errored"]
    return f"{without} of {cells['expected']} cells are without a result"


# ------------------------------------------------------------------------- when


def _need(name: str, rows: list[Row]) -> str:
    """'QK-norm is needed from 0.1 up at depth 2, ...', and where single seeds begin to need it."""
    parts = [f"{_threshold(row)} at depth {row['depth']}" for row in rows]
    text = f"QK-norm ({short_name(name)}) is needed {_listed(parts)}"
    text = text.replace("from ", "from a learning rate of ", 1)
    intervals = [interval_text(number(row["low"]), number(row["high"]), ".2g") for row in rows]
    if all(intervals):
        text += (
            ", as all seeds together show; over seeds, the need begins on average within "
            f"{_listed(intervals)}"
        )
    return text + "."


def _threshold(row: Row) -> str:
    value = number(row["value"])
    if row["censored"] == "below":
        return f"at every learning rate tried, from {lr_text(value)} up,"
    if value is None:
        tested = number(row["tested_to"])
        return "nowhere" + (
            f" up to {lr_text(tested)}" if tested is not None else " that could be tested"
        )
    return f"from {lr_text(value)} up"


# --------------------------------------------------------------------- how much


def _moved(
    level: Callable[[Row, bool], str],
    change: Callable[[Row], str],
    off: Row | None,
    on: Row,
    part: Row | None,
) -> str:
    """'from 0.056 to 0.32 at depth 2 (×5.6 [0.47, 67])', as far as it is known.

    Where the two arms were compared seed by seed, the change has the interval; else each level.
    """
    changed = "" if part is None else change(part)
    before = "" if off is None else level(off, not changed)
    after = level(on, not changed)
    origin = "" if before in ("", after) and after == UNKNOWN else _value(before)
    text = f"{origin and f'from {origin} '}to {_value(after)} at depth {on['depth']}"
    return f"{text} ({changed})" if changed else text


def _value(text: str) -> str:
    return "an unknown value" if text == UNKNOWN else text


def _compared(verdicts: list[Row], arm: str, unit: str) -> dict[int, Row]:
    """H2's parts in that unit, by depth."""
    return {
        part["depth"]: part
        for verdict in verdicts
        if verdict["hypothesis"] == "H2" and verdict["arm"] == arm
        for part in verdict["parts"]
        if part["unit"] == unit
    }


def _ratio(part: Row) -> str:
    interval = interval_text(part["low"], part["high"], ".2g")
    if part["effect"] is None:
        return interval and f"× within {interval}"
    return interval and f"×{part['effect']:.2g} {interval}"


def _drop(part: Row) -> str:
    """The part is off minus on; a reader expects the change."""
    if part["effect"] is None or part["low"] is None or part["high"] is None:
        return ""
    interval = interval_text(-part["high"], -part["low"])
    return f"{-part['effect']:+.2f} {interval}".replace("-", "−")


def _edge(arm: Row, with_interval: bool) -> str:
    edge = arm["max_stable_lr"]
    interval = interval_text(edge["low"], edge["high"], ".2g") if with_interval else ""
    return f"{edge_text(edge)} {interval}".strip() + ("" if edge["monotone"] else " (not monotone)")


def _sensitivity(arm: Row, with_interval: bool) -> str:
    value = arm["lr_sensitivity"]
    if value["value"] is None:
        return UNKNOWN
    interval = interval_text(value["low"], value["high"]) if with_interval else ""
    return f"{value['value']:.2f} {interval}".strip()


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
