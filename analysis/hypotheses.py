"""Verdicts on the three hypotheses: supported, contradicted or inconclusive, and why.

    H1  QK-norm does nothing or a little harm at low learning rates and helps much at high ones
    H2  it raises the maximum stable learning rate and lowers LR sensitivity
    H3  the necessity threshold falls as depth grows

Each hypothesis is a conjunction of parts, one quantity with one margin each, compared seed by
seed. The margins are the study's (`Margins`), declared before it ran. A part is

    supported     if its 95 % interval lies wholly where the hypothesis says,
    contradicted  if its interval lies wholly elsewhere,
    inconclusive  otherwise, or if there is no honest interval;

a hypothesis is supported if all its parts are (an intersection-union test, which needs no
correction), and contradicted if any part is, at the level 1 - 0.05 / (number of parts), which
keeps the chance of a false contradiction below 5 % however many parts there are (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis import estimators
from analysis.intervals import LEVEL, Interval, bin_interval, mean_interval, seeds_needed
from tune_study.config import Margins

Array = NDArray[np.float64]
Outcome = Literal["supported", "contradicted", "inconclusive"]

STATEMENTS = {
    "H1": "QK-norm does nothing or a little harm at low learning rates and helps much at high ones",
    "H2": "QK-norm raises the maximum stable learning rate and lowers LR sensitivity",
    "H3": "the learning rate from which on QK-norm is needed falls as depth grows",
}


@dataclass(frozen=True)
class Part:
    """One quantity with its margin.

    Attributes:
        name: what is compared, in words.
        depth: the depth it belongs to; None if it spans depths.
        verdict: on this part alone, at its own 95 %.
        effect, low, high: mean over seeds and interval, in `unit`; NaN if there is none,
            infinite where the grid leaves it open.
        above, below: the hypothesis says above < effect < below.
        n, n_asked: seeds that have a value; seeds asked for.
        note: what stands in the way of an interval, or is lost.
        needed: what would decide it; empty if it is decided.
    """

    name: str
    depth: int | None
    verdict: Outcome
    effect: float
    low: float
    high: float
    unit: str
    above: float
    below: float
    n: int
    n_asked: int
    note: str = ""
    needed: str = ""

    @property
    def sentence(self) -> str:
        """The part in words, with its numbers."""
        where = "" if self.depth is None else f" at depth {self.depth}"
        effect = "not known" if np.isnan(self.effect) else f"{self.effect:.3g}"
        if not (np.isnan(self.low) or np.isnan(self.high)):
            effect += f" [{_bound(self.low)}, {_bound(self.high)}]"
        seeds = f"{self.n} of {self.n_asked} seeds"
        text = f"{self.name}{where}: {effect} {self.unit}, {seeds}, {self.region}: {self.verdict}"
        return text + (f" ({self.note})" if self.note else "")

    @property
    def region(self) -> str:
        """Where the hypothesis says the effect lies."""
        if np.isinf(self.below):
            return f"to be above {self.above:.3g}"
        if np.isinf(self.above):
            return f"to be below {self.below:.3g}"
        return f"to lie between {self.above:.3g} and {self.below:.3g}"


@dataclass(frozen=True)
class Verdict:
    """What the study says about one hypothesis, for one arm against off.

    `effect`, `low`, `high`, `unit`, `n` are those of the part that decides: the contradicted
    one, else the inconclusive one, else the supported one with the least room.
    """

    hypothesis: str
    statement: str
    arm: str
    verdict: Outcome
    deciding: Part
    parts: tuple[Part, ...]
    rule: str
    needed: str

    @property
    def effect(self) -> float:
        """The deciding part's effect."""
        return self.deciding.effect

    @property
    def interval(self) -> tuple[float, float]:
        """The deciding part's 95 % interval."""
        return self.deciding.low, self.deciding.high

    @property
    def n(self) -> int:
        """Seeds in the deciding part."""
        return self.deciding.n

    @property
    def sentence(self) -> str:
        """The verdict for a reader, one sentence or two."""
        tally = {v: sum(p.verdict == v for p in self.parts) for v in ("supported", "inconclusive")}
        text = (
            f"{self.hypothesis} ({self.arm}) is {self.verdict}: "
            f"{tally['supported']} of {len(self.parts)} parts supported. "
            f"Deciding: {self.deciding.sentence}."
        )
        return text + (f" To decide it: {self.needed}." if self.needed else "")

    def to_dict(self) -> dict[str, Any]:
        """Strict-JSON safe: unknown and unbounded numbers are None."""
        top = {
            "hypothesis": self.hypothesis,
            "statement": self.statement,
            "arm": self.arm,
            "verdict": self.verdict,
            "effect": self.effect,
            "low": self.deciding.low,
            "high": self.deciding.high,
            "unit": self.deciding.unit,
            "n": self.deciding.n,
            "n_asked": self.deciding.n_asked,
            "rule": self.rule,
            "needed": self.needed,
            "sentence": self.sentence,
            "parts": [asdict(part) | {"sentence": part.sentence} for part in self.parts],
        }
        return _json_safe(top)


def _json_safe(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json_safe(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_safe(item) for item in value]
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return value


def _bound(x: float) -> str:
    return f"{x:.3g}" if np.isfinite(x) else "open"


def judge(cells: pd.DataFrame, margins: Margins, level: float = LEVEL) -> list[Verdict]:
    """H1, H2 and H3 for each arm other than off.

    Args:
        cells: one study's table.
        margins: the margins the study declared.

    Raises:
        ConfigError: if the cells differ in steps, data or precision, an arm is absent, or the
            grid is not log-spaced.
    """
    estimators.require_uniform(cells)
    verdicts = []
    for arm in estimators.arms(cells):
        parts = {
            "H1": low_and_high(cells, arm, margins),
            "H2": stability(cells, arm, margins),
            "H3": depth_trend(cells, arm, margins),
        }
        verdicts += [_conclude(name, arm, own, margins, level) for name, own in parts.items()]
    return verdicts


# ------------------------------------------------------------------- the parts


@dataclass(frozen=True)
class Measured:
    """A part before its verdict: its interval at any level, and its region."""

    name: str
    depth: int | None
    unit: str
    above: float
    below: float
    n_asked: int
    interval: Callable[[float], Interval]
    sd: float
    slack: float = 0.0
    grid_step: float = np.nan
    scale: Callable[[float], float] = float
    note: str = ""


def low_and_high(cells: pd.DataFrame, arm: str, margins: Margins) -> list[Measured]:
    """H1's parts, two a depth: the mean paired gain at low and at high learning rates.

    The gain of a seed is loss(off) - loss(on), each at most the loss at init, averaged over
    the grid's learning rates up to off's best one (low: equivalence) and above it (high:
    superiority). Off's best LR is the median over seeds.
    """
    both = estimators.pairs(cells, arm)
    gain = both.gain
    best = estimators.best_lr(cells)
    best = best[best["qk_norm"] == estimators.OFF]
    parts = []
    for depth, at in estimators.groups(both.keys, "depth"):
        known = np.sort(best.loc[best["depth"] == depth, "value"].dropna().to_numpy())
        split = known[(len(known) - 1) // 2] if len(known) else np.nan
        for name, region, above, below in (
            (
                "mean gain up to off's best LR",
                both.lr <= split,
                -margins.equivalence,
                margins.equivalence,
            ),
            ("mean gain above off's best LR", both.lr > split, margins.superiority, np.inf),
        ):
            values = gain[at][:, region].mean(axis=1) if region.any() else np.full(len(at), np.nan)
            note = "" if region.any() else "no learning rate there"
            parts.append(_of_values(name, int(depth), "nats", above, below, values, note))
    return parts


def stability(cells: pd.DataFrame, arm: str, margins: Margins) -> list[Measured]:
    """H2's parts, two a depth: ratio of maximum stable LRs, and drop of LR sensitivity."""
    edge = _paired(estimators.max_stable_lr(cells), arm, ["low", "high"])
    sensitivity = _paired(estimators.lr_sensitivity(cells, margins.lr_range), arm, ["value"])
    step = estimators.curves(cells).step
    parts = []
    for depth, at in estimators.groups(edge, "depth"):
        rows = edge.loc[at]
        with np.errstate(divide="ignore", invalid="ignore"):
            low = np.log10(rows["low_on"].to_numpy()) - np.log10(rows["high_off"].to_numpy())
            high = np.log10(rows["high_on"].to_numpy()) - np.log10(rows["low_off"].to_numpy())
        parts.append(
            _of_bins(
                "ratio of maximum stable LRs, on / off",
                int(depth),
                "x",
                np.log10(margins.stable_lr_ratio),
                np.inf,
                low,
                high,
                2 * step,
                step,
                lambda x: float(10**x),
            )
        )
        paired = sensitivity[sensitivity["depth"] == depth]
        values = (paired["value_off"] - paired["value_on"]).to_numpy()
        parts.append(
            _of_values(
                "drop of LR sensitivity, off - on",
                int(depth),
                "nats",
                margins.sensitivity,
                np.inf,
                values,
            )
        )
    return parts


def depth_trend(cells: pd.DataFrame, arm: str, margins: Margins) -> list[Measured]:
    """H3's part: slope of log10 necessity threshold against log10 depth, seed by seed.

    The slope of least squares is a weighted sum of the depths' log thresholds, so bins of
    thresholds give a bin of slopes. A seed needs a bin at every depth.
    """
    table = estimators.necessity_by_seed(cells, margins.necessity)
    table = table[table["qk_norm"] == arm]
    low = table.pivot(index="seed", columns="depth", values="low")
    high = table.pivot(index="seed", columns="depth", values="high")
    name, unit = "slope of log necessity threshold over log depth", "decades a decade of depth"
    if low.shape[1] < 2:
        values = np.full(len(low), np.nan)
        return [
            _of_values(
                name, None, unit, -np.inf, -margins.depth_slope, values, "one depth has no slope"
            )
        ]
    x = np.log10(low.columns.to_numpy(dtype=float))
    weight = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    step = estimators.curves(cells).step
    with np.errstate(divide="ignore", invalid="ignore"):
        a, b = np.log10(low.to_numpy()), np.log10(high.to_numpy())
        # A depth at the centre has weight 0 and says nothing, whatever its bin.
        used = weight != 0
        a, b, w = a[:, used], b[:, used], weight[used]
        slope_low = np.where(w > 0, w * a, w * b).sum(axis=1)
        slope_high = np.where(w > 0, w * b, w * a).sum(axis=1)
    width = step * np.abs(weight).sum()
    return [
        _of_bins(
            name, None, unit, -np.inf, -margins.depth_slope, slope_low, slope_high, width, step
        )
    ]


def _paired(table: pd.DataFrame, arm: str, columns: list[str]) -> pd.DataFrame:
    keys = ["depth", "seed"]
    off, on = (
        table.loc[table["qk_norm"] == name, [*keys, *columns]] for name in (estimators.OFF, arm)
    )
    return off.merge(on, on=keys, suffixes=("_off", "_on"))


def _of_values(
    name: str,
    depth: int | None,
    unit: str,
    above: float,
    below: float,
    values: Array,
    note: str = "",
) -> Measured:
    known = values[~np.isnan(values)]
    sd = float(known.std(ddof=1)) if len(known) > 1 else np.nan
    return Measured(
        name,
        depth,
        unit,
        above,
        below,
        len(values),
        lambda level: mean_interval(values, level),
        sd,
        note=note,
    )


def _of_bins(
    name: str,
    depth: int | None,
    unit: str,
    above: float,
    below: float,
    low: Array,
    high: Array,
    width: float,
    grid_step: float,
    scale: Callable[[float], float] = float,
) -> Measured:
    middle = (low + high) / 2
    middle = middle[np.isfinite(middle)]
    sd = float(middle.std(ddof=1)) if len(middle) > 1 else np.nan
    return Measured(
        name,
        depth,
        unit,
        above,
        below,
        len(low),
        lambda level: bin_interval(low, high, width, level),
        sd,
        slack=width / 2,
        grid_step=grid_step,
        scale=scale,
    )


# ---------------------------------------------------------------- the verdicts


def _decide(interval: Interval, above: float, below: float) -> Outcome:
    if not interval.known:
        return "inconclusive"
    if interval.low > above and interval.high < below:
        return "supported"
    if interval.high <= above or interval.low >= below:
        return "contradicted"
    return "inconclusive"


def _conclude(
    name: str, arm: str, measured: Sequence[Measured], margins: Margins, level: float
) -> Verdict:
    strict = 1 - (1 - level) / len(measured)
    parts, rooms, contradicted = [], [], []
    for one in measured:
        interval = one.interval(level)
        outcome = _decide(interval, one.above, one.below)
        parts.append(_part(one, interval, outcome, level))
        rooms.append(_room(one, interval))
        contradicted.append(_decide(one.interval(strict), one.above, one.below) == "contradicted")
    undecided = [part.verdict != "supported" for part in parts]
    verdict: Outcome
    if any(contradicted):
        verdict, candidates = "contradicted", contradicted
    elif any(undecided):
        verdict, candidates = "inconclusive", undecided
    else:
        verdict, candidates = "supported", [True] * len(parts)
    deciding = min((k for k, yes in enumerate(candidates) if yes), key=rooms.__getitem__)
    needed = "; ".join(dict.fromkeys(part.needed for part in parts if part.needed))
    return Verdict(
        hypothesis=name,
        statement=STATEMENTS[name],
        arm=arm,
        verdict=verdict,
        deciding=parts[deciding],
        parts=tuple(parts),
        rule=_rule(name, margins),
        needed=needed if verdict == "inconclusive" else "",
    )


def _part(one: Measured, interval: Interval, outcome: Outcome, level: float) -> Part:
    lost = one.n_asked - interval.n
    notes = [
        one.note or interval.note,
        f"{lost} of {one.n_asked} seeds have no value" if lost else "",
    ]
    return Part(
        name=one.name,
        depth=one.depth,
        verdict=outcome,
        effect=one.scale(interval.value),
        low=one.scale(interval.low),
        high=one.scale(interval.high),
        unit=one.unit,
        above=one.scale(one.above),
        below=one.scale(one.below),
        n=interval.n,
        n_asked=one.n_asked,
        note="; ".join(note for note in notes if note),
        needed="" if outcome == "supported" else _needed(one, interval, outcome, level),
    )


def _room(one: Measured, interval: Interval) -> float:
    """How far the interval stays inside the region; negative where it reaches out."""
    if not interval.known:
        return -np.inf
    return min(interval.low - one.above, one.below - interval.high)


def _needed(one: Measured, interval: Interval, outcome: Outcome, level: float) -> str:
    """What would decide a part, if its mean and spread stay as they are."""
    where = one.name if one.depth is None else f"{one.name} at depth {one.depth}"
    if outcome == "contradicted":
        return f"{where}: more seeds, as it contradicts on its own but not corrected for all parts"
    if one.note:
        return f"{where}: {one.note}"
    if interval.n < 2:
        return f"{where}: at least 2 seeds with a value"
    if np.isnan(interval.value):
        return f"{where}: learning rates beyond the ends of the grid"
    distances = [abs(interval.value - end) for end in (one.above, one.below) if np.isfinite(end)]
    clearance = min(distances)
    if one.slack >= clearance:
        step = one.grid_step * clearance / one.slack / 2
        if step < 0.01:
            return f"{where}: no affordable study, the mean lies on the margin"
        return f"{where}: a grid with steps of {step:.2g} decades or less around the edges"
    seeds = seeds_needed(one.sd, clearance - one.slack, level)
    if seeds is None:
        return f"{where}: more than 200 seeds"
    return f"{where}: about {max(seeds, interval.n + 1)} seeds"


def _rule(name: str, m: Margins) -> str:
    rules = {
        "H1": (
            f"at every depth the mean paired gain off - on lies within {m.equivalence:g} nats of 0 "
            f"up to off's best LR (equivalence) and is above {m.superiority:g} nats beyond it"
        ),
        "H2": (
            f"at every depth the maximum stable LR rises by more than a factor "
            f"{m.stable_lr_ratio:g} and LR sensitivity falls by more than {m.sensitivity:g} nats, "
            "paired by seed"
        ),
        "H3": (
            f"the slope of log necessity threshold over log depth is below {-m.depth_slope:g}, "
            f"a learning rate needing QK-norm where off loses by more than {m.necessity:g} nats "
            "or is unstable while on is stable"
        ),
    }
    return rules[name] + "; the 95 % intervals over seeds decide"
