"""What a study shows, in lines for a terminal."""

from __future__ import annotations

from typing import Any

from analysis import stabiliser_report
from analysis.answer import scope
from analysis.summary import best_lr_text, edge_text, interval_text, json_safe
from analysis.tables import ASKED


def lines(summary: dict[str, Any]) -> list[str]:
    """Counts, one line an arm, and the verdicts; damage and alarms last.

    Args:
        summary: as `analysis.summary.summarise`.
    """
    cells = summary["cells"]
    states = ", ".join(f"{cells[state]} {state}" for state in ASKED if cells[state])
    progress = "complete" if summary["complete"] else "incomplete"
    running = ", running now" if summary["running"] else ""
    text = [
        f"{summary['study']}: {progress}{running}, "
        f"{cells['found']} of {cells['expected']} cells: {states}."
    ]
    if (search := summary["search"]) is not None:
        text.append(
            f"  a search: {search['cells']} of {search['of']} cells asked for, "
            f"{search['decided']} of {search['lines']} lines decided"
        )
        if search["spread"] is not None:
            text.append(f"  LR sensitivity on {search['spread']} learning rates that all lines ran")
    widest = max(len(arm["arm"]) for arm in summary["arms"])
    for arm in summary["arms"]:
        sensitivity = arm["lr_sensitivity"]
        value = "unknown" if sensitivity["value"] is None else f"{sensitivity['value']:.2f}"
        interval = interval_text(sensitivity["low"], sensitivity["high"])
        loss = "unknown" if arm["best_loss"] is None else f"{arm['best_loss']:.3f}"
        text.append(
            f"  depth {arm['depth']:<2} {arm['arm']:<{max(widest, 9)}} "
            f"max stable LR {edge_text(arm['max_stable_lr']):<9} "
            f"LR sensitivity {value} {interval:<15} "
            f"best loss {loss} at LR {best_lr_text(arm)}"
        )
    reasons = {
        a["lr_sensitivity"]["reason"].partition(";")[0].removeprefix("seed 0: ")
        for a in summary["arms"]
        if a["lr_sensitivity"]["value"] is None
    }
    text += [f"  LR sensitivity unknown: {reason}" for reason in sorted(reasons - {""})]
    text += [f"  {v['hypothesis']} {v['verdict']}: {v['statement']}" for v in summary["verdicts"]]
    if summary["not_judged"]:
        text.append(f"  no verdict: {summary['not_judged']}")
    text += [f"  {sentence}" for sentence in scope(summary)]
    if summary["stabilisers"] is not None:
        text += stabiliser_report.lines(json_safe(summary["stabilisers"]))
    if summary["leak_alarm"]:
        text.append("ALARM: a cell ended below the entropy of the corpus; the data leaks.")
    text += [f"damaged: {line}" for line in summary["damage"]]
    return text
