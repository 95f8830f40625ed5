"""Which stabiliser does what: every arm against the baseline, and two of them together.

Five figures of an arm are ranked, each by itself: LR sensitivity, maximum stable learning rate,
usable window of learning rates, loss at the best learning rate, cost of a step. Arms are
compared seed by seed, with the intervals of analysis/intervals.py; a difference counts where
Holm's adjusted p-value, over all comparisons of that figure, is below 5 %. Where two arms
cannot be told apart they stay tied: an arm's rank is the set of ranks that its comparisons
leave it. LR sensitivity is measured from each arm's own best loss, so that an arm which learns
badly everywhere has a low one: it is to be read beside the loss. docs/estimators.md has the
definitions and their sources.

Every function takes the `cells` table of analysis/tables.py, or a table made of it here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis import arms, estimators
from analysis.intervals import (
    LEVEL,
    Interval,
    bin_interval,
    bin_p_value,
    holm,
    mean_interval,
    t_test,
)
from tune_study.config import Margins

Array = NDArray[np.float64]
Outcome = Literal["better", "worse", ""]


@dataclass(frozen=True)
class Quantity:
    """A figure that arms are compared by.

    Attributes:
        name: its key in tables and summary.json.
        title, short, unit: for readers; `short` where there is little room.
        lower_is_better: the direction of "better".
        log: compared as log10, so that a change is a ratio.
        bin_steps: a seed's value is only known up to a bin this many grid steps wide; 0 where
            it is a number.
    """

    name: str
    title: str
    short: str
    unit: str
    lower_is_better: bool
    log: bool = False
    bin_steps: int = 0

    def natural(self, x: float) -> float:
        """A value or bound off the scale of comparison; a difference becomes a ratio."""
        return float(10**x) if self.log else float(x)


QUANTITIES = (
    Quantity("lr_sensitivity", "LR sensitivity", "LR sensitivity", "nats/token", True),
    Quantity("max_stable_lr", "maximum stable LR", "max stable LR", "", False, True, bin_steps=1),
    # Each of the window's two ends lies somewhere between two grid points.
    Quantity("usable_window", "usable LR window", "LR window", "decades", False, bin_steps=2),
    Quantity("best_loss", "loss at the best LR", "loss at best LR", "nats/token", True),
    Quantity("step_ms", "cost of a step", "cost of a step", "ms", True, log=True),
)
BY_NAME = {quantity.name: quantity for quantity in QUANTITIES}

INTERACTING = ("lr_sensitivity", "max_stable_lr")
"""The figures on which the interaction of two components is looked at."""


# ------------------------------------------------------------------ one per seed


def by_seed(cells: pd.DataFrame, margins: Margins) -> pd.DataFrame:
    """The five figures of every (depth, arm, seed).

    Returns:
        DataFrame: quantity, depth, arm, seed, value (as it is shown), low, high (what is compared:
        on the quantity's scale, the ends of a bin, or twice the value), censored ("" | "below" |
        "above": the true value may lie beyond), reason (why there is none, or what widened it).
    """
    view = arms.by_arm(cells.drop_duplicates())
    tables = [
        _sensitivity(view, margins),
        _edge(view),
        _window(view, margins.usable),
        _best_loss(view, margins),
        step_cost(cells),
    ]
    names = [quantity.name for quantity in QUANTITIES]
    parts = [table.assign(quantity=name) for name, table in zip(names, tables, strict=True)]
    keys = ["quantity", "depth", "arm", "seed"]
    columns = [*keys, "value", "low", "high", "censored", "reason"]
    return pd.concat([part[columns] for part in parts], ignore_index=True)


def _sensitivity(view: pd.DataFrame, margins: Margins) -> pd.DataFrame:
    table = estimators.lr_sensitivity(view, margins.lr_range).rename(columns={"qk_norm": "arm"})
    return table.assign(low=table["value"], high=table["value"], censored="")


def _edge(view: pd.DataFrame) -> pd.DataFrame:
    table = estimators.max_stable_lr(view).rename(columns={"qk_norm": "arm"})
    with np.errstate(divide="ignore"):
        return table.assign(low=np.log10(table["low"]), high=np.log10(table["high"]))


def _window(view: pd.DataFrame, margin: float) -> pd.DataFrame:
    """A window that runs off either end of the grid is at least as wide as is seen."""
    table = estimators.usable_window(view, margin).rename(columns={"qk_norm": "arm"})
    return table.assign(
        value=table["decades"],
        low=table["decades"],
        high=table["decades_most"],
        censored=np.where(np.isinf(table["decades_most"]), "above", ""),
    )


def _best_loss(view: pd.DataFrame, margins: Margins) -> pd.DataFrame:
    """Each seed's loss at the arm's best LR, that of the lowest mean over seeds, all stable."""
    best = pd.DataFrame(
        [
            {
                "depth": arm["depth"],
                "qk_norm": arm["qk_norm"],
                "best_lr": np.nan if arm["best_lr"] is None else arm["best_lr"],
                # At an end of the grid the best may lie beyond, and be lower.
                "censored": "below" if arm["best_lr_censored"] else "",
            }
            for arm in estimators.arm_summary(view, margins)
        ]
    )
    keys = estimators.SEED_KEYS
    asked = view[keys].drop_duplicates().merge(best, on=["depth", "qk_norm"])
    at_best = view[[*keys, "lr", "loss"]].rename(columns={"lr": "best_lr", "loss": "value"})
    table = asked.merge(at_best, on=[*keys, "best_lr"], how="left").rename(
        columns={"qk_norm": "arm"}
    )
    reason = np.where(table["best_lr"].isna(), "no learning rate at which every seed is stable", "")
    return table.assign(low=table["value"], high=table["value"], reason=reason)


# ------------------------------------------------------------------------- cost


def in_flight(started: Array, ended: Array) -> Array:
    """How many cells ran at once, itself included, averaged over each cell's run.

    Args:
        started, ended: Unix times, shape (N,); NaN for a cell of which they are not known.

    Returns:
        shape (N,), NaN where the times are unknown or equal.
    """
    known = ended > started
    a, b = started[known], ended[known]
    times = np.concatenate([a, b])
    order = np.argsort(times, kind="stable")
    times = times[order]
    running = np.cumsum(np.concatenate([np.ones(len(a)), -np.ones(len(b))])[order])
    # Cell-seconds spent up to each of the times; linear between them.
    spent = np.concatenate([[0.0], np.cumsum(running[:-1] * np.diff(times))])
    result = np.full(started.shape, np.nan)
    if len(a):
        result[known] = (np.interp(b, times, spent) - np.interp(a, times, spent)) / (b - a)
    return result


def timed(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells whose speeds may be compared, with `step_ms`, milliseconds a training step.

    They ran all their steps without a break, on the device and with the number of threads, and
    of cells beside them, that most cells of the study had. A diverged cell is none of them.
    """
    frame = cells.drop_duplicates()
    at_once = in_flight(frame["started"].to_numpy(float), frame["ended"].to_numpy(float)).round()
    frame = frame.assign(at_once=at_once, step_ms=1000 * frame["seconds"] / frame["steps"])
    frame = frame[frame["state"].isin(["stable", "failed"]) & frame["at_once"].notna()]
    where = ["device", "threads", "at_once"]
    if frame.empty:
        return frame
    common = frame.value_counts(where).reset_index().iloc[0]
    return frame[(frame[where] == common[where]).all(axis=1)]


def step_cost(cells: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds a step of each (depth, arm, seed), what the machine did meanwhile taken out.

    The cells of one (depth, seed, lr) run one after the other, and are a block. A seed's value
    is the median over its blocks of log cost against the mean of the block, put back on the
    median of those means. Only blocks with a timed cell of every arm that has any are used.

    Returns:
        DataFrame: depth, arm, seed, value, low, high (log10 of it), censored, reason.
    """
    keys, seed, block = ["depth", "arm", "seed"], ["depth", "seed"], ["depth", "seed", "lr"]
    frame = timed(cells)
    every = frame.groupby(seed)["arm"].transform("nunique")
    frame = frame[frame.groupby(block)["arm"].transform("nunique") == every]
    log = np.log10(frame["step_ms"])
    level = log.groupby([frame[name] for name in block]).transform("mean")
    frame = frame.assign(against=log - level, level=level)
    frame["level"] = frame.groupby(seed)["level"].transform("median")
    medians = frame.groupby(keys)[["against", "level"]].median().sum(axis=1).rename("low")
    table = cells[keys].drop_duplicates().merge(medians, on=keys, how="left")
    none = "no learning rate at which every arm could be timed"
    reason = np.where(table["low"].isna(), none, "")
    return table.assign(value=10 ** table["low"], high=table["low"], censored="", reason=reason)


def cost_spread(cells: pd.DataFrame) -> pd.DataFrame:
    """Quartiles of milliseconds a step over the timed cells: depth, arm, n_cells, q1, q3."""
    grouped = timed(cells).groupby(["depth", "arm"])["step_ms"]
    quartiles = {"q1": grouped.quantile(0.25), "q3": grouped.quantile(0.75)}
    return pd.DataFrame(quartiles).assign(n_cells=grouped.size()).reset_index()


# ------------------------------------------------------------ contrasts of arms


@dataclass(frozen=True)
class Seeds:
    """One quantity at one depth: a bin for each arm and seed, on the scale of comparison.

    Attributes:
        quantity: which.
        width: width of a seed's bin; 0 where it is a number.
        arms: names, A of them.
        low, high: shape (A, S), NaN where there is no value.
    """

    quantity: Quantity
    width: float
    arms: tuple[str, ...]
    low: Array
    high: Array

    def contrast(self, weights: Mapping[str, float]) -> Contrast:
        """A weighted sum of arms, seed by seed; its bin holds all that the arms' bins allow."""
        low, high = np.zeros(self.low.shape[1]), np.zeros(self.low.shape[1])
        for arm, weight in weights.items():
            at = self.arms.index(arm)
            ends = (self.low[at], self.high[at])
            below, above = ends if weight > 0 else ends[::-1]
            low, high = low + weight * below, high + weight * above
        width = self.width * sum(map(abs, weights.values()))
        return Contrast(self.quantity, low, high, width)


@dataclass(frozen=True)
class Contrast:
    """A number, or a bin, for each seed."""

    quantity: Quantity
    low: Array
    high: Array
    width: float

    def interval(self, level: float = LEVEL) -> Interval:
        """Mean over seeds with its interval, on the scale of comparison."""
        if self.quantity.bin_steps:
            return bin_interval(self.low, self.high, self.width, level)
        return mean_interval(self.low, level)

    @property
    def p(self) -> float:
        """Two-sided p-value of a mean of 0; NaN where it cannot be tested."""
        if self.quantity.bin_steps:
            return bin_p_value(self.low, self.high, self.width)
        known = self.low[~np.isnan(self.low)]
        if len(known) < 2:
            return np.nan
        if not known.any():
            return 1.0  # an intervention that never set in leaves the same bits
        return float(t_test(known.mean(), known.std(ddof=1), len(known)))


def seeds(values: pd.DataFrame, step: float) -> Iterator[tuple[int, Seeds]]:
    """Depth by depth and quantity by quantity, the table of `by_seed` as arrays.

    Args:
        step: of the grid of learning rates, in decades.
    """
    key: Any  # what a group is called, which the stubs leave open
    for key, group in values.groupby(["quantity", "depth"], sort=False):
        quantity = BY_NAME[key[0]]
        low, high = (
            group.pivot(index="arm", columns="seed", values=end) for end in ("low", "high")
        )
        yield (
            int(key[1]),
            Seeds(
                quantity,
                step * quantity.bin_steps,
                tuple(low.index),
                low.to_numpy(float),
                high.to_numpy(float),
            ),
        )


# ---------------------------------------------------------------------- ranking


def ranking(values: pd.DataFrame, baseline: str, step: float, level: float = LEVEL) -> pd.DataFrame:
    """Every arm by every quantity: what it is, by how much it differs from the baseline, its rank.

    A quantity's p-values are adjusted by Holm (1979) over all its comparisons with the baseline
    (`p_holm`), and for the ranks over all its pairs of arms, at all depths. An arm is told
    apart from another where the adjusted p-value is below 1 - level; it then ranks from
    1 + (arms that are better) to (all arms) - (arms that are worse), a set that holds the true
    ranks of all arms at once with that confidence (Mogstad et al. 2024).

    Args:
        values: as `by_seed`.
        step: of the grid of learning rates, in decades.

    Returns:
        DataFrame: quantity, depth, arm, value, low, high (interval), censored, reason, change
        (arm - baseline, or arm / baseline where the quantity is a log), change_low, change_high,
        n, n_asked (seeds with both), p, p_holm, outcome ("better" | "worse" | "": not told
        apart), rank_first, rank_last, n_ranked (0 where it has no value).
    """
    rows: list[dict[str, Any]] = []
    pairs: list[tuple[str, int, str, str, float, bool]] = []
    for depth, of in seeds(values, step):
        told = values[(values["quantity"] == of.quantity.name) & (values["depth"] == depth)]
        rows += [_row(of, depth, arm, baseline, told[told["arm"] == arm], level) for arm in of.arms]
        for one, other in combinations(of.arms, 2):
            difference = of.contrast({one: 1, other: -1})
            p = difference.p
            lower = p < 1 - level and difference.interval(level).high < 0
            pairs.append((of.quantity.name, depth, one, other, p, lower))
    table = pd.DataFrame(rows)
    table["p_holm"] = table.groupby("quantity", sort=False)["p"].transform(holm)
    sign = np.where(table["quantity"].map(_lower_is_better), -1, 1) * table.pop("direction")
    apart = table["p_holm"] < 1 - level
    table["outcome"] = np.select([apart & (sign > 0), apart & (sign < 0)], ["better", "worse"], "")
    return _ranked(table, pairs, level)


def _lower_is_better(name: str) -> bool:
    return BY_NAME[name].lower_is_better


def _row(
    of: Seeds, depth: int, arm: str, baseline: str, told: pd.DataFrame, level: float
) -> dict[str, Any]:
    quantity = of.quantity
    own = of.contrast({arm: 1}).interval(level)
    reference = baseline in of.arms and arm != baseline
    difference = of.contrast({arm: 1, baseline: -1}) if reference else None
    change = difference.interval(level) if difference else _NOTHING
    censored = {each for each in told["censored"] if each}
    shown = told["value"]
    if quantity.log:
        shown = np.log10(shown)
    # Over fewer seeds, or some at either end of the grid, a mean would be of something else.
    value = np.nan if len(censored) > 1 else shown.mean(skipna=False)
    named = zip(told["seed"], told["reason"], strict=True)
    reasons = [f"seed {seed}: {reason}" for seed, reason in named if reason]
    return {
        "quantity": quantity.name,
        "depth": depth,
        "arm": arm,
        "value": quantity.natural(value),
        "low": quantity.natural(own.low),
        "high": quantity.natural(own.high),
        "censored": "both" if len(censored) > 1 else next(iter(censored), ""),
        "reason": "; ".join(reasons) or own.note,
        "change": quantity.natural(change.value),
        "change_low": quantity.natural(change.low),
        "change_high": quantity.natural(change.high),
        "n": change.n if difference else own.n,
        "n_asked": of.low.shape[1],
        "p": difference.p if difference else np.nan,
        "direction": (change.low > 0) * 1 - (change.high < 0) * 1,
        "known": own.n > 0,
    }


_NOTHING = Interval(np.nan, np.nan, np.nan, 0, "none")


def _ranked(
    table: pd.DataFrame, pairs: list[tuple[str, int, str, str, float, bool]], level: float
) -> pd.DataFrame:
    """The table with the ranks that the pairs of arms leave each of them."""
    columns = ["quantity", "depth", "one", "other", "p", "one_lower"]
    compared = pd.DataFrame(pairs, columns=columns)
    compared["p"] = compared.groupby("quantity", sort=False)["p"].transform(holm)
    compared = compared[compared["p"] < 1 - level]
    one_wins = compared["one_lower"] == compared["quantity"].map(_lower_is_better)
    winners = compared["one"].where(one_wins, compared["other"])
    losers = compared["other"].where(one_wins, compared["one"])
    keys = ["quantity", "depth", "arm"]

    def count(who: pd.Series) -> Array:
        beaten = compared[["quantity", "depth"]].assign(arm=who).value_counts(keys)
        return pd.MultiIndex.from_frame(table[keys]).map(beaten.to_dict()).fillna(0).to_numpy(float)

    known = table.pop("known")
    total = known.groupby([table["quantity"], table["depth"]]).transform("sum")
    table["rank_first"] = np.where(known, 1 + count(losers), 0).astype(int)
    table["rank_last"] = np.where(known, total - count(winners), 0).astype(int)
    table["n_ranked"] = np.where(known, total, 0)
    return table


# ------------------------------------------------------------------ interaction

EFFECTS = (
    *("first", "second", "first_with_second", "second_with_first"),
    *("main_first", "main_second", "interaction"),
)
"""What is estimated of two components, the first and the second of the name of both."""


def interactions(
    values: pd.DataFrame, margins: Margins, step: float, level: float = LEVEL
) -> list[dict[str, Any]]:
    """Each 2 x 2 of components: what either does, alone and with the other, and whether they add.

    With g a seed's figure (log10 of a learning rate) in the cells neither, A, B, both:

        A alone          g_A - g_neither          A with B       g_both - g_B
        main effect of A mean of these two
        interaction      g_both - g_A - g_B + g_neither

    Args:
        values: as `by_seed`.
        margins: within `sensitivity`, or a factor `stable_lr_ratio`, an effect counts as none.
        step: of the grid of learning rates, in decades.

    Returns:
        list of dict: quantity, depth, first, second, arms (of the four cells), effects (by name,
        each value, low, high, n), n_asked, p, p_holm (over all interactions of the quantity),
        verdict, sentence. Effects on a learning rate are ratios.
    """
    found = []
    for depth, of in seeds(values, step):
        if of.quantity.name in INTERACTING:
            found += [_Crossed(of, depth, four) for four in arms.factorials(of.arms)]
    p = np.array([each.interaction.p for each in found], dtype=float)
    names = np.array([each.of.quantity.name for each in found])
    for name in INTERACTING:
        p[names == name] = holm(p[names == name])
    return [
        each.described(margins, float(adjusted), level)
        for each, adjusted in zip(found, p, strict=True)
    ]


@dataclass(frozen=True)
class _Crossed:
    """Two components crossed, on one quantity at one depth."""

    of: Seeds
    depth: int
    four: arms.Factorial

    @property
    def interaction(self) -> Contrast:
        f = self.four
        return self.of.contrast({f.both: 1, f.only_first: -1, f.only_second: -1, f.neither: 1})

    def effects(self) -> dict[str, Contrast]:
        """Simple and main effects by name, and the interaction."""
        f = self.four
        weights: dict[str, dict[str, float]] = {
            "first": {f.only_first: 1, f.neither: -1},
            "second": {f.only_second: 1, f.neither: -1},
            "first_with_second": {f.both: 1, f.only_second: -1},
            "second_with_first": {f.both: 1, f.only_first: -1},
            "main_first": {f.only_first: 0.5, f.both: 0.5, f.neither: -0.5, f.only_second: -0.5},
            "main_second": {f.only_second: 0.5, f.both: 0.5, f.neither: -0.5, f.only_first: -0.5},
        }
        contrasts = {name: self.of.contrast(weight) for name, weight in weights.items()}
        return contrasts | {"interaction": self.interaction}

    def described(self, margins: Margins, p_holm: float, level: float) -> dict[str, Any]:
        quantity, f = self.of.quantity, self.four
        intervals = {name: each.interval(level) for name, each in self.effects().items()}
        margin = np.log10(margins.stable_lr_ratio) if quantity.log else margins.sensitivity
        verdict = _additivity(quantity, intervals["interaction"], margin, p_holm, level)
        sentence = _sentence(quantity, f, verdict, intervals, margin)
        return {
            "quantity": quantity.name,
            "depth": self.depth,
            "first": f.first,
            "second": f.second,
            "arms": [f.neither, f.only_first, f.only_second, f.both],
            "effects": {
                name: {
                    "value": quantity.natural(each.value),
                    "low": quantity.natural(each.low),
                    "high": quantity.natural(each.high),
                    "n": each.n,
                }
                for name, each in intervals.items()
            },
            "n_asked": self.of.low.shape[1],
            "p": self.interaction.p,
            "p_holm": p_holm,
            "verdict": verdict,
            "sentence": sentence,
        }


def _gain(quantity: Quantity, effect: Interval) -> tuple[float, float]:
    """The interval of an effect, turned so that up is better."""
    if quantity.lower_is_better:
        return -effect.high, -effect.low
    return effect.low, effect.high


def _additivity(
    quantity: Quantity, effect: Interval, margin: float, p_holm: float, level: float
) -> str:
    """What the interval of an interaction allows to be said."""
    if not effect.known:
        return "not known"
    low, high = _gain(quantity, effect)
    if p_holm < 1 - level:
        return "super-additive" if low > 0 else "sub-additive"
    return "additive" if -margin < low and high < margin else "not decided"


def _sentence(
    quantity: Quantity,
    f: arms.Factorial,
    verdict: str,
    effects: Mapping[str, Interval],
    margin: float,
) -> str:
    """An interaction in words that go no further than the intervals."""
    on = f"{f.first} and {f.second} on {quantity.title}"
    if verdict == "not known":
        return f"{on}: not known, as an arm has no value in two seeds or more."
    within = f"a factor {10**margin:.3g}" if quantity.log else f"{margin:g} nats"
    heads = {
        "not decided": "whether their effects add up is not decided",
        "additive": f"their effects add up to within {within}",
        "sub-additive": "sub-additive, together they do less than the sum of both",
        "super-additive": "super-additive, together they do more than the sum of both",
    }
    parts = [f"{on}: {heads[verdict]} (interaction {_told(quantity, effects['interaction'])})"]
    for one, other, name in (
        (f.second, f.first, "second_with_first"),
        (f.first, f.second, "first_with_second"),
    ):
        low, high = _gain(quantity, effects[name])
        told = _told(quantity, effects[name])
        if -margin < low and high < margin:
            parts.append(f"{one} adds nothing (within {within}) once {other} is on ({told})")
        elif low > 0:
            parts.append(f"{one} still helps once {other} is on ({told})")
        elif high < 0:
            parts.append(f"{one} harms once {other} is on ({told})")
        else:
            parts.append(f"what {one} adds once {other} is on is not decided ({told})")
    return "; ".join(parts) + "."


def _told(quantity: Quantity, effect: Interval) -> str:
    """An effect with its interval: '+0.12 [-0.30, 0.55] nats', 'x1.8 [0.9, inf]'."""
    low, high = quantity.natural(effect.low), quantity.natural(effect.high)
    if quantity.log:
        value = "" if np.isnan(effect.value) else f"×{quantity.natural(effect.value):.3g} "
        return f"{value}[{low:.3g}, {high:.3g}]".replace("inf", "∞")
    return f"{effect.value:+.2f} [{low:.2f}, {high:.2f}] nats".replace("-", "−")


# ------------------------------------------------------------------ all together


def summarise(cells: pd.DataFrame, margins: Margins, level: float = LEVEL) -> dict[str, Any]:
    """The `stabilisers` of summary.json: baseline, ranking, cost and interactions.

    Numbers that are not finite are still NaN or infinite here.
    """
    present = arms.names(cells)
    values = by_seed(cells, margins)
    step = estimators.curves(arms.by_arm(cells)).step
    ranked = ranking(values, present[0], step, level)
    return {
        "baseline": present[0],
        "arms": present,
        "verdicts_on": arms.qk_norm_arms(cells),
        "level": level,
        "ranking": ranked.to_dict("records"),
        "cost_spread": cost_spread(cells).to_dict("records"),
        "interactions": interactions(values, margins, step, level),
    }
