"""Which conclusions hold when the choices behind them are made otherwise.

Each row of the panel judges the study again with one choice changed: the criterion of
divergence, the learning rates, one margin, or the seeds without one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
import pandas as pd

from analysis import estimators
from analysis.hypotheses import Evidence, Verdict, gather, judge, judge_evidence
from tune_study.config import ConfigError, Margins

AS_DECLARED = "as declared"

FACTORS = {"halved": 0.5, "doubled": 2.0}
"""What is done to each margin; the ratio of learning rates takes its square root or square."""


def panel(
    cells: pd.DataFrame,
    margins: Margins,
    criteria: Mapping[str, Callable[[], pd.DataFrame]] | None = None,
) -> pd.DataFrame:
    """The verdicts under every change of one choice.

    Args:
        criteria: by name, what gives the `cells` table judged by another criterion.

    Returns:
        DataFrame: choice ("as declared", "criterion", "learning rates", "margin", "seeds"),
        change, hypothesis, arm, verdict ("not judged" where that is refused), effect, low,
        high, n, holds (the verdict is the declared one), note (why it was not judged).

    Raises:
        ConfigError: if the study as declared cannot be judged.
    """
    estimators.require_uniform(cells)
    evidence = [gather(cells, arm, margins) for arm in estimators.arms(cells)]
    declared = _judge_gathered(evidence, margins)
    reference = {(v.hypothesis, v.arm): v.verdict for v in declared}
    rows = []
    for choice, change, again in _changes(cells, margins, evidence, criteria or {}):
        try:
            verdicts, note = again(), ""
        except ConfigError as error:
            verdicts, note = [], str(error)
        found = {(v.hypothesis, v.arm): v for v in verdicts}
        for key, expected in reference.items():
            rows.append(_row(choice, change, *key, found.get(key), expected, note))
    return pd.DataFrame(rows)


def conclusions(panel: pd.DataFrame) -> pd.DataFrame:
    """The panel by hypothesis: the declared verdict, and under how many changes it holds.

    Returns:
        DataFrame: hypothesis, arm, verdict, n_changes, n_holds, n_reversed (supported became
        contradicted or the other way round), n_not_judged.
    """
    keys = ["hypothesis", "arm"]
    as_declared = panel["choice"] == AS_DECLARED
    declared = panel[as_declared].set_index(keys)["verdict"]
    changed = panel[~as_declared]
    opposite = declared.replace(
        {"supported": "contradicted", "contradicted": "supported", "inconclusive": ""}
    )
    expected = changed.join(opposite.rename("opposite"), on=keys)["opposite"]
    table = (
        changed.assign(
            reversed=changed["verdict"] == expected,
            not_judged=changed["verdict"] == "not judged",
        )
        .groupby(keys)
        .agg(
            n_changes=("holds", "size"),
            n_holds=("holds", "sum"),
            n_reversed=("reversed", "sum"),
            n_not_judged=("not_judged", "sum"),
        )
    )
    table.insert(0, "verdict", declared)
    return table.reset_index()


Again = Callable[[], list[Verdict]]


def _changes(
    cells: pd.DataFrame,
    margins: Margins,
    evidence: list[Evidence],
    criteria: Mapping[str, Callable[[], pd.DataFrame]],
) -> Iterator[tuple[str, str, Again]]:
    yield AS_DECLARED, "", partial(_judge_gathered, evidence, margins)
    for name, rejudged in criteria.items():
        yield "criterion", name, partial(_judge_given, rejudged, margins)
    for name, kept in _grids(cells):
        yield "learning rates", name, partial(judge, kept, margins)
    for name, changed in _margins(margins):
        if changed.necessity == margins.necessity:
            yield "margin", name, partial(_judge_gathered, evidence, changed)
        else:  # the one margin that the evidence itself rests on
            yield "margin", name, partial(judge, cells, changed)
    seeds = sorted(cells["seed"].unique().tolist())
    for seed in seeds if len(seeds) > 1 else []:
        rest = [s for s in seeds if s != seed]
        fewer = [one.of_seeds(rest) for one in evidence]
        yield "seeds", f"without seed {seed}", partial(_judge_gathered, fewer, margins)


def _judge_given(give: Callable[[], pd.DataFrame], margins: Margins) -> list[Verdict]:
    return judge(give(), margins)


def _judge_gathered(evidence: list[Evidence], margins: Margins) -> list[Verdict]:
    return [verdict for one in evidence for verdict in judge_evidence(one, margins)]


def _grids(cells: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The cells on other grids: cut at either end by a sixth, and half as fine."""
    lrs = np.unique(cells["lr"].to_numpy(float))
    cut = max(len(lrs) // 6, 1)
    for name, kept in (
        (f"without the lowest {cut}", lrs[cut:]),
        (f"without the highest {cut}", lrs[:-cut]),
        ("every second", lrs[::2]),
    ):
        if len(kept) > 1:
            yield name, cells[cells["lr"].isin(kept)]


def _margins(margins: Margins) -> Iterator[tuple[str, Margins]]:
    for field in ("necessity", "equivalence", "superiority", "sensitivity", "depth_slope"):
        for name, factor in FACTORS.items():
            value = getattr(margins, field) * factor
            yield f"{field} {name}", margins.replace(**{field: value})
    for name, factor in FACTORS.items():
        ratio = margins.stable_lr_ratio**factor
        yield f"log stable_lr_ratio {name}", margins.replace(stable_lr_ratio=ratio)


def _row(
    choice: str,
    change: str,
    hypothesis: str,
    arm: str,
    verdict: Verdict | None,
    expected: str,
    note: str,
) -> dict[str, object]:
    low, high = verdict.interval if verdict else (np.nan, np.nan)
    return {
        "choice": choice,
        "change": change,
        "hypothesis": hypothesis,
        "arm": arm,
        "verdict": verdict.verdict if verdict else "not judged",
        "effect": verdict.effect if verdict else np.nan,
        "low": low,
        "high": high,
        "n": verdict.n if verdict else 0,
        "holds": verdict is not None and verdict.verdict == expected,
        "note": note,
    }
