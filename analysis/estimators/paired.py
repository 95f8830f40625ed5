"""Off against another arm, seed by seed: gains, and where QK-norm is needed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.estimators.grid import (
    LR_KEYS,
    Array,
    Curves,
    Flags,
    curves,
    groups,
    implied,
    none_of,
    with_counts,
)
from analysis.estimators.stability import log_interval
from analysis.intervals import LEVEL, holm, t_bounds, t_factor, t_test
from tune_study.components import OFF
from tune_study.config import ConfigError


@dataclass(frozen=True)
class Pairs:
    """Off and one other arm, cell by cell: rows (depth, seed), columns learning rates.

    Attributes:
        arm: the other arm.
        keys: depth and seed of each row; only seeds that occur in both arms.
        lr: the grid, ascending, shape (L,).
        off, on: curves of the two arms, in the rows' order.
    """

    arm: str
    keys: pd.DataFrame
    lr: Array
    off: Curves
    on: Curves

    @property
    def gain(self) -> Array:
        """loss(off) - loss(on), both at most l0; above 0 where QK-norm helps; NaN if unknown."""
        return self.off.clamped - self.on.clamped


def arms(cells: pd.DataFrame) -> list[str]:
    """The arms other than off, sorted."""
    return sorted(set(cells["qk_norm"].unique()) - {OFF})


def pairs(cells: pd.DataFrame, arm: str) -> Pairs:
    """Off and `arm` side by side, same depth, seed and learning rate.

    Raises:
        ConfigError: if an arm is not in the table or the two share no (depth, seed).
    """
    return pair(curves(cells), arm)


def pair(grid: Curves, arm: str) -> Pairs:
    """The same of cells that are arrays already."""
    known = grid.keys["qk_norm"].unique().tolist()
    for name in (OFF, arm):
        if name not in known:
            raise ConfigError(
                f"qk_norm = {name!r}: no cell of this arm, so nothing to pair. "
                f"Arms: {', '.join(sorted(known))}."
            )
    keys = grid.keys.reset_index(names="row")
    off, on = (keys[keys["qk_norm"] == name] for name in (OFF, arm))
    both = off.merge(on, on=["depth", "seed"], suffixes=("_off", "_on"))
    if both.empty:
        raise ConfigError(
            f"qk_norm: off and {arm} share no depth and seed, so nothing can be paired. "
            "Run both arms with the same seeds."
        )
    rows = [both[name].to_numpy() for name in ("row_off", "row_on")]
    return Pairs(arm, both[["depth", "seed"]], grid.lr, *(grid.rows(each) for each in rows))


def paired_by_lr(cells: pd.DataFrame, level: float = LEVEL) -> pd.DataFrame:
    """The paired difference of losses at each (depth, lr), for each arm other than off.

    The gain of a seed is loss(off) - loss(on), both at most the loss at init; above 0 where
    QK-norm helps. p is of a two-sided paired t test of no difference; as every learning rate
    is tested, p_holm is what counts: Holm's adjustment over all cells of the arm.

    Returns:
        DataFrame: depth, qk_norm (the arm off is compared with), lr, gain (mean over the pairs
        that are known), low, high (t interval), n, n_asked, p, p_holm, significant (p_holm
        below 1 - level).
    """
    tables = []
    for arm in arms(cells):
        both = pairs(cells, arm)
        tall = pd.DataFrame(
            {
                "depth": np.repeat(both.keys["depth"].to_numpy(), len(both.lr)),
                "qk_norm": arm,
                "lr": np.tile(both.lr, len(both.keys)),
                "gain": both.gain.ravel(),
            }
        )
        table = tall.groupby(LR_KEYS, sort=True)["gain"].agg(["mean", "std", "count", "size"])
        table = table.reset_index().rename(
            columns={"mean": "gain", "count": "n", "size": "n_asked"}
        )
        half = table["std"] * t_factor(table["n"], level)
        table["low"], table["high"] = table["gain"] - half, table["gain"] + half
        table["p"] = t_test(table["gain"], table["std"], table["n"])
        table["p_holm"] = holm(table["p"])
        table["significant"] = table["p_holm"] < 1 - level
        order = [*LR_KEYS, "gain", "low", "high", "n", "n_asked", "p", "p_holm", "significant"]
        tables.append(table[order])
    if not tables:
        raise ConfigError("qk_norm: only 'off' in the table. Add an arm with QK-norm.")
    return pd.concat(tables, ignore_index=True)


def necessity_by_seed(cells: pd.DataFrame, margin: float) -> pd.DataFrame:
    """Necessity threshold of each (depth, seed), for each arm other than off, as a bin.

    QK-norm is needed at a learning rate where off is unstable and on is stable, or where
    loss(off) - loss(on) > `margin`. The threshold is the lowest LR from which on it is needed
    at every LR up to on's maximum stable LR; beyond that, QK-norm does not help either. It
    lies in (low, high]: not needed at `low`, needed from `high`. Cells without evidence widen
    the bin.

    Returns:
        DataFrame: depth, qk_norm, seed, low (0 if needed everywhere), high (inf if not even
        at on's maximum stable LR), censored ("" | "below" | "above"), monotone, reason. Where
        on is nowhere stable, low = 0, high = inf and the reason says so.
    """
    tables = []
    for arm in arms(cells):
        both = pairs(cells, arm)
        needed, needless, domain = _need(both, margin)
        low, high = necessity_bins(both, margin)
        stable, _ = implied(both.on)
        table = both.keys.copy()
        table.insert(1, "qk_norm", arm)
        table["low"], table["high"] = low, high
        empty = none_of(domain & stable)
        table["censored"] = np.select(
            [empty, (low == 0) & np.isfinite(high), (low > 0) & np.isinf(high)],
            ["", "below", "above"],
            "",
        )
        seen = np.logical_or.accumulate(needed & domain & stable, axis=1)
        table["monotone"] = none_of(seen & needless & domain)
        lost = (both.off.unknown | both.on.unknown).sum(axis=1)
        table["reason"] = [
            f"{arm} has no stable cell below its first unstable one"
            if nowhere
            else (f"{n} of {len(both.lr)} pairs without evidence" if n else "")
            for nowhere, n in zip(empty, lost, strict=True)
        ]
        tables.append(with_counts(table, both.off.state, both.on.state))
    if not tables:
        raise ConfigError("qk_norm: only 'off' in the table. Add an arm with QK-norm.")
    return pd.concat(tables, ignore_index=True)


def necessity_bins(both: Pairs, margin: float) -> tuple[Array, Array]:
    """The bin (low, high] of each row's necessity threshold: 0 and inf where it is open."""
    needed, needless, domain = _need(both, margin)
    stable, _ = implied(both.on)
    low, high = _onset(both.lr, needed, needless, domain, stable)
    nowhere = none_of(domain & stable)
    return np.where(nowhere, 0.0, low), np.where(nowhere, np.inf, high)


def _need(both: Pairs, margin: float) -> tuple[Flags, Flags, Flags]:
    """Where QK-norm is needed, where it is known not to be, and up to where that counts."""
    (_, off_unstable), (on_stable, on_unstable) = implied(both.off), implied(both.on)
    with np.errstate(invalid="ignore"):
        needed = off_unstable | (on_stable & (both.gain > margin))
    ran = ~(both.off.unknown | both.on.unknown | both.off.untried | both.on.untried)
    # Where on has no evidence it may be stable, and the threshold lie there or above.
    return needed, ran & ~needed, np.logical_and.accumulate(~on_unstable, axis=1)


def _onset(
    lr: Array, needed: Flags, needless: Flags, domain: Flags, stable: Flags
) -> tuple[Array, Array]:
    """Bin (low, high] of the lowest lr from which on `needed` holds to the domain's top.

    `high` is a learning rate at which on is known to be stable.
    """
    run = np.logical_and.accumulate((needed | ~domain)[:, ::-1], axis=1)[:, ::-1]
    run = run & domain & stable
    high = np.where(run.any(axis=1), lr[run.argmax(axis=1)], np.inf)
    needless = needless & domain
    last = len(lr) - 1 - needless[:, ::-1].argmax(axis=1)
    low = np.where(needless.any(axis=1), lr[last], 0.0)
    return low, high


def necessity_threshold(cells: pd.DataFrame, margin: float, level: float = LEVEL) -> pd.DataFrame:
    """Necessity threshold of each depth, for each arm other than off.

    The lowest LR from which on, up to on's maximum stable LR in every seed, QK-norm is needed:
    off unstable and on stable in every seed, or the paired difference's interval above
    `margin`. The learning rates are tested from the highest down, and the first that does not
    pass ends it; in this fixed order each test may use the full level (Maurer et al. 1995).
    Beside it stands the mean over seeds of log threshold with its interval-censored interval.

    Returns:
        DataFrame: depth, qk_norm, value (NaN: not needed anywhere), censored ("below": needed
        at every LR; "above": nowhere up to `tested_to`), tested_to, low, high (interval over
        seeds, NaN if none), n, n_asked, note.
    """
    by_seed = necessity_by_seed(cells, margin)
    rows = []
    for arm in arms(cells):
        both = pairs(cells, arm)
        gain = both.gain
        (_, off_unstable), (on_stable, _) = implied(both.off), implied(both.on)
        for depth, at in groups(both.keys, "depth"):
            domain = np.logical_and.accumulate(on_stable[at].all(axis=0))
            always = (off_unstable[at] & on_stable[at]).all(axis=0)
            lower, _ = t_bounds(gain[at].T, level)
            with np.errstate(invalid="ignore"):
                needed = (always | (lower > margin)) & domain
            low, high = _onset(both.lr, needed[None], ~needed[None], domain[None], domain[None])
            seeds = by_seed[(by_seed["depth"] == depth) & (by_seed["qk_norm"] == arm)]
            spread = log_interval(seeds["low"], seeds["high"], both.on.step, level)
            found = bool(np.isfinite(high[0]))
            rows.append(
                {
                    "depth": depth,
                    "qk_norm": arm,
                    "value": high[0] if found else np.nan,
                    "censored": "above" if not found else "below" if low[0] == 0 else "",
                    "tested_to": both.lr[domain][-1] if domain.any() else np.nan,
                    "low": 10**spread.low,
                    "high": 10**spread.high,
                    "n": spread.n,
                    "n_asked": len(at),
                    "note": spread.note,
                }
            )
    return pd.DataFrame(rows)
