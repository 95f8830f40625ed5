"""Arms by name: which one is the baseline, and which part of a study is about QK-norm alone.

A cell's `arm` names the components that differ from their `off`, joined by "+": "off",
"rmsnorm", "softcap50", "rmsnorm+zloss1e-4". Arms may share a setting of `qk_norm`, so nothing
may be grouped by that column where a study has arms beyond it. Two views keep them apart:

    by_arm(cells)         the arm in the place of qk_norm: estimators then work arm by arm
    qk_norm_cells(cells)  only the baseline and the arms that add QK-norm to it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from analysis.load import Results

OFF = "off"
RMSNORM = "rmsnorm"


def components(arm: str) -> tuple[str, ...]:
    """The components that an arm's name lists; none for "off"."""
    return () if arm == OFF else tuple(arm.split("+"))


def baseline(arms: Iterable[str]) -> str:
    """The arm the others are compared with: that with the fewest components, the first of such."""
    return min(arms, key=lambda arm: len(components(arm)))


def with_component(arm: str, component: str) -> frozenset[str]:
    """The components of an arm and one more."""
    return frozenset(components(arm)) | {component}


def by_arm(table: pd.DataFrame) -> pd.DataFrame:
    """The table with each row's arm in `qk_norm`, the column that the estimators group by."""
    return table.assign(qk_norm=table["arm"])


def results_by_arm(results: Results) -> Results:
    """The results with `by_arm` of both tables."""
    return replace(results, cells=by_arm(results.cells), history=by_arm(results.history))


def names(cells: pd.DataFrame) -> list[str]:
    """The arms of a study, the baseline first, then in the order of the table."""
    present = list(dict.fromkeys(cells["arm"]))
    first = baseline(present)
    return [first, *(arm for arm in present if arm != first)]


def qk_norm_arms(cells: pd.DataFrame) -> list[str]:
    """The arms that the question of QK-norm is about, the baseline first.

    All arms where only `qk_norm` varies; else the baseline, and RMSNorm added to it where the
    study has that arm.
    """
    present = names(cells)
    if (cells["arm"] == cells["qk_norm"]).all():
        return present
    wanted = with_component(present[0], RMSNORM)
    return [present[0], *(arm for arm in present if frozenset(components(arm)) == wanted)]


def qk_norm_cells(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells of `qk_norm_arms`: here `qk_norm` alone tells the arms apart."""
    return cells[cells["arm"].isin(qk_norm_arms(cells))].reset_index(drop=True)


def qk_norm_part(results: Results) -> Results:
    """The results with `qk_norm_cells` only. The study stays whole: it says what was asked for."""
    cells = qk_norm_cells(results.cells)
    if len(cells) == len(results.cells):
        return results
    history = results.history[results.history["cell"].isin(cells["cell"])]
    return replace(results, cells=cells, history=history.reset_index(drop=True))


def has_stabilisers(cells: pd.DataFrame) -> bool:
    """Whether a study has arms beyond the baseline and RMSNorm added to it."""
    present = names(cells)
    wanted = (frozenset(components(present[0])), with_component(present[0], RMSNORM))
    return any(frozenset(components(arm)) not in wanted for arm in present)


@dataclass(frozen=True)
class Factorial:
    """Four arms that cross two components: neither, the first, the second, both."""

    first: str
    second: str
    neither: str
    only_first: str
    only_second: str
    both: str


def factorials(arms: Iterable[str]) -> Iterator[Factorial]:
    """Every 2 x 2 among the arms; the components in the order of the name that has both."""
    present = list(dict.fromkeys(arms))
    by_set = {frozenset(components(arm)): arm for arm in present}
    for both in present:
        every = components(both)
        for first, second in combinations(every, 2):
            rest = frozenset(every) - {first, second}
            sets = (rest, rest | {first}, rest | {second})
            if all(each in by_set for each in sets):
                neither, one, other = (by_set[each] for each in sets)
                yield Factorial(first, second, neither, one, other, both)
