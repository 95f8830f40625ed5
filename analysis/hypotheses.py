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

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis import estimators
from analysis.intervals import LEVEL, Interval, bin_interval, mean_interval, seeds_needed
from tune_study.config import Margins

Array = NDArray[np.float64]
Outcome = Literal["supported", "contradicted", "inconclusive"]

UNTRIED = "a search left learning rates untried, the whole grid is needed"

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
        interval = not (np.isnan(self.low) or np.isnan(self.high))
        unknown = "beyond the grid" if interval else "not known"
        effect = unknown if np.isnan(self.effect) else f"{_say(self.effect)} {self.unit}"
        if interval:
            effect += f" [{_say(self.low)}, {_say(self.high)}]"
        seeds = f"{self.n} of {self.n_asked} seeds"
        text = f"{self.name}{where}: {effect}, {seeds}, {self.region}: {self.verdict}"
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


def _say(x: float) -> str:
    return f"{round(x, 9):.3g}" if np.isfinite(x) else "open"


def judge(cells: pd.DataFrame, margins: Margins, level: float = LEVEL) -> list[Verdict]:
    """H1, H2 and H3 for each arm other than off.

    Args:
        cells: one study's table.
        margins: the margins the study declared.

    Raises:
        ConfigError: if the cells differ in steps, data or precision, or an arm is absent.
    """
    estimators.require_uniform(cells)
    return [
        verdict
        for arm in estimators.arms(cells)
        for verdict in judge_evidence(gather(cells, arm, margins), margins, level)
    ]


def judge_evidence(evidence: Evidence, margins: Margins, level: float = LEVEL) -> list[Verdict]:
    """H1, H2 and H3 on what `gather` has gathered, or on some of its seeds."""
    measured = {
        "H1": _low_and_high(evidence, margins),
        "H2": _stability(evidence, margins),
        "H3": _depth_trend(evidence, margins),
    }
    return [_conclude(name, evidence.arm, own, margins, level) for name, own in measured.items()]


@dataclass(frozen=True)
class Evidence:
    """What the verdicts on one arm rest on: a row for each (depth, seed) run in both arms.

    Attributes:
        arm: the arm off is compared with.
        step: step of the LR grid in decades.
        lr: the grid, shape (L,).
        depth, seed: shape (G,).
        gain: loss(off) - loss(on), each at most the loss at init, NaN if unknown, shape (G, L).
        spread: the learning rates that mean gains rest on, shape (L,).
        off_best: off's best LR, shape (G,).
        ratio: bin of log10 maximum stable LR, on minus off, shape (G, 2).
        drop: LR sensitivity, off minus on, shape (G,).
        threshold: bin of log10 necessity threshold, shape (G, 2).
        searched: a search left cells of the grid untried.
    """

    arm: str
    step: float
    lr: Array
    depth: NDArray[np.int64]
    seed: NDArray[np.int64]
    gain: Array
    spread: NDArray[np.bool_]
    off_best: Array
    ratio: Array
    drop: Array
    threshold: Array
    searched: bool = False

    def of_seeds(self, seeds: Iterable[int]) -> Evidence:
        """The same for some of the seeds."""
        at = np.isin(self.seed, list(seeds))
        rows = ("depth", "seed", "gain", "off_best", "ratio", "drop", "threshold")
        return replace(self, **{name: getattr(self, name)[at] for name in rows})

    def at_depth(self, depth: int) -> Evidence:
        """The same for one depth."""
        at = self.depth == depth
        rows = ("depth", "seed", "gain", "off_best", "ratio", "drop", "threshold")
        return replace(self, **{name: getattr(self, name)[at] for name in rows})


def gather(cells: pd.DataFrame, arm: str, margins: Margins) -> Evidence:
    """Everything the verdicts on one arm need of the cells, seed by seed."""
    return weigh(estimators.curves(cells), arm, margins)


def weigh(grid: estimators.Curves, arm: str, margins: Margins) -> Evidence:
    """The same of cells that are arrays already."""
    both = estimators.pair(grid, arm)
    off, on = (np.stack(estimators.stable_bins(x), axis=1) for x in (both.off, both.on))
    threshold = np.stack(estimators.necessity_bins(both, margins.necessity), axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log10(on) - np.log10(off[:, ::-1])
        log_threshold = np.log10(threshold)
    counted = grid.within(margins.lr_range).spread
    sensitivity = [
        estimators.sensitivities(x.within(margins.lr_range).columns(counted))[0]
        for x in (both.off, both.on)
    ]
    return Evidence(
        arm=arm,
        step=both.off.step,
        lr=both.lr,
        depth=both.keys["depth"].to_numpy(),
        seed=both.keys["seed"].to_numpy(),
        gain=both.gain,
        spread=grid.spread,
        off_best=estimators.best_of(both.off)[0],
        ratio=ratio,
        drop=sensitivity[0] - sensitivity[1],
        threshold=log_threshold,
        searched=bool((both.off.untried | both.on.untried).any()),
    )


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


def mean_gains(evidence: Evidence) -> Iterator[tuple[int, str, Array]]:
    """Each seed's mean gain at low, then at high learning rates, depth by depth.

    Low are the grid's learning rates up to off's best one, the median over seeds; high are
    those above it; of a grid that was searched, `spread` of them. Without any learning rate
    there, the gains are NaN.
    """
    for depth in np.unique(evidence.depth):
        at = evidence.at_depth(depth)
        best = np.sort(at.off_best[~np.isnan(at.off_best)])
        split = best[(len(best) - 1) // 2] if len(best) else np.nan
        for side, region in (("up to", at.lr <= split), ("above", at.lr > split)):
            region = region & at.spread
            some = region.any()
            gain = at.gain[:, region].mean(axis=1) if some else np.full(len(at.gain), np.nan)
            yield int(depth), side, gain


def _low_and_high(evidence: Evidence, margins: Margins) -> list[Measured]:
    """H1's parts, two a depth: equivalence at low, superiority at high learning rates."""
    regions = {
        "up to": (-margins.equivalence, margins.equivalence),
        "above": (margins.superiority, np.inf),
    }
    parts = []
    for depth, side, gain in mean_gains(evidence):
        name = f"mean gain {side} off's best LR"
        note = "no seed has learning rates there with every cell known" * bool(np.isnan(gain).all())
        parts.append(_of_values(name, depth, "nats", *regions[side], gain, note))
    return parts


def _stability(evidence: Evidence, margins: Margins) -> list[Measured]:
    """H2's parts, two a depth: ratio of maximum stable LRs, and drop of LR sensitivity."""
    parts = []
    for depth in np.unique(evidence.depth):
        at = evidence.at_depth(depth)
        parts.append(
            _of_bins(
                "ratio of maximum stable LRs, on / off",
                int(depth),
                "x",
                (np.log10(margins.stable_lr_ratio), np.inf),
                at.ratio,
                2 * at.step,
                at.step,
                lambda x: float(10**x),
            )
        )
        parts.append(
            _of_values(
                "drop of LR sensitivity, off - on",
                int(depth),
                "nats",
                margins.sensitivity,
                np.inf,
                at.drop,
                UNTRIED * bool(at.searched and np.isnan(at.drop).all()),
            )
        )
    return parts


def _depth_trend(evidence: Evidence, margins: Margins) -> list[Measured]:
    """H3's part: slope of log10 necessity threshold against log10 depth, seed by seed.

    The slope of least squares is a weighted sum of the depths' log thresholds, so bins of
    thresholds give a bin of slopes. A seed needs a bin at every depth.
    """
    name, unit = "slope of log necessity threshold over log depth", "decades a decade of depth"
    below = -margins.depth_slope
    depths, column = np.unique(evidence.depth, return_inverse=True)
    seeds, row = np.unique(evidence.seed, return_inverse=True)
    if len(depths) < 2:
        values = np.full(len(seeds), np.nan)
        return [
            _of_values(
                name,
                None,
                unit,
                -np.inf,
                below,
                values,
                "one depth has no slope, it needs at least two depths",
            )
        ]
    bins = np.full((len(seeds), len(depths), 2), np.nan)
    bins[row, column] = evidence.threshold
    x = np.log10(depths.astype(float))
    weight = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    # A depth in the middle has no weight and says nothing, whatever its bin.
    used = np.abs(weight) > 1e-9
    bins, weight = bins[:, used], weight[used]
    bins = np.where(weight[:, None] > 0, bins, bins[..., ::-1])
    slope = np.einsum("sdk,d->sk", bins, weight)
    width = evidence.step * float(np.abs(weight).sum())
    return [_of_bins(name, None, unit, (-np.inf, below), slope, width, evidence.step)]


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
    region: tuple[float, float],
    bins: Array,
    width: float,
    grid_step: float,
    scale: Callable[[float], float] = float,
) -> Measured:
    """A part whose values are bins, shape (seeds, 2), `width` wide on a grid without gaps."""
    middle = bins[np.isfinite(bins).all(axis=1)].mean(axis=1)
    return Measured(
        name,
        depth,
        unit,
        region[0],
        region[1],
        len(bins),
        lambda level: bin_interval(bins[:, 0], bins[:, 1], width, level),
        sd=float(middle.std(ddof=1)) if len(middle) > 1 else np.nan,
        slack=width / 2,
        grid_step=grid_step,
        scale=scale,
    )


# ---------------------------------------------------------------- the verdicts


def _decide(interval: Interval, above: float, below: float) -> Outcome:
    if not interval.known:
        return "inconclusive"
    # An open end of the interval does not matter where the region is open too.
    over, under = interval.low > above, interval.high < below
    if (over or np.isinf(above)) and (under or np.isinf(below)):
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
        contradicted.append(
            outcome == "contradicted"
            and _decide(one.interval(strict), one.above, one.below) == "contradicted"
        )
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
    return min(
        np.inf if np.isinf(one.above) else interval.low - one.above,
        np.inf if np.isinf(one.below) else one.below - interval.high,
    )


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
