"""Where one line's edge of stability lies: what is believed, and which cell to run next.

A line is one (depth, arm, seed) with its learning rates, numbered from the lowest. Its edge e is
the number of the lowest unstable one: cells below e are stable, cells from e on are not. A verdict
may be wrong, and running the cell again would only repeat it, since a cell is deterministic; so
doubt is settled by neighbours. This is probabilistic bisection (Horstein 1963; Waeber, Frazier and
Henderson 2013) in which each place is asked at most once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

FLOOR = 0.15
"""Share of the belief that is even over all places, whatever other lines say."""

TRUST = 0.9
"""Belief that the edge is no higher than one above the lowest unstable cell, from which on no cell
above it is run: by the contiguous rule none of them can move the edge."""


def prior(size: int, near: Sequence[float] = (), spread: float = 2.0) -> Array:
    """Belief about the edge before this line has any cell, shape (size + 1,).

    Args:
        size: learning rates of the line.
        near: edges of lines like it; two-sided exponential around their median.
        spread: mean distance, in learning rates, from that median.
    """
    even = np.full(size + 1, 1 / (size + 1))
    if not near:
        return even
    peak = np.exp(-np.abs(np.arange(size + 1) - np.median(near)) / spread)
    return FLOOR * even + (1 - FLOOR) * peak / peak.sum()


def belief(stable: Mapping[int, bool], before: Array, error: float) -> Array:
    """Belief about the edge given verdicts, shape (size + 1,).

    Args:
        stable: verdict by place.
        before: as `prior` gives it.
        error: share of verdicts that are wrong.
    """
    places = np.arange(len(before))
    log = np.log(before)
    for place, verdict in stable.items():
        agrees = (place < places) == verdict
        log = log + np.where(agrees, np.log1p(-error), np.log(error))
    weight = np.exp(log - log.max())
    return np.asarray(weight / weight.sum())


def within_one(after: Array) -> tuple[int, float]:
    """The place with the most belief at it and its two neighbours, and how much that is."""
    padded = np.concatenate([[0.0], after, [0.0]])
    around = padded[:-2] + padded[1:-1] + padded[2:]
    # Of places equally good the one believed in most itself; rounding must not decide.
    at = int(np.lexsort((-after.round(12), -around.round(12)))[0])
    return at, float(around[at])


def bracket(stable: Mapping[int, bool], size: int) -> tuple[int, int]:
    """The contiguous rule over the cells run: highest place up to which all are stable, -1 for
    none; and the lowest unstable place, `size` for none."""
    unstable = min((place for place, verdict in stable.items() if not verdict), default=size)
    below = [place for place, verdict in stable.items() if verdict and place < unstable]
    return max(below, default=-1), unstable


def next_place(
    stable: Mapping[int, bool],
    before: Array,
    error: float,
    confidence: float,
    tried: Collection[int] = (),
    beneath: int = 1,
    sound: Collection[int] = (),
) -> int | None:
    """The place to run next, or None if the edge is known.

    It is known when `confidence` of the belief lies within one step, and the cells next to the
    edge by the contiguous rule have run: the unstable one, and stable ones below it down to a sound
    one, `beneath` of them at most.

    Args:
        stable: verdict by place.
        before: as `prior` gives it.
        error: share of verdicts that are wrong.
        confidence: belief within one step that suffices.
        tried: places not to be asked for, though they have no verdict.
        beneath: most stable cells in a row that the edge must stand on.
        sound: stable places that learned about as well as any; an edge that stands on one of them
            needs no more below.
    """
    size = len(before) - 1
    free = [place for place in range(size) if place not in stable and place not in tried]
    after = belief(stable, before, error)
    low, high = bracket(stable, size)
    if after[: high + 2].sum() >= TRUST:
        free = [place for place in free if place < high]
        after[high + 2 :] = 0
        after /= after.sum()
    if within_one(after)[1] < confidence and free:
        # The chance that the next verdict is `stable`; near a half it tells the most.
        above = 1 - np.cumsum(after)
        place = min(free, key=lambda place: (abs(above[place] - 0.5).round(12), place))
        # A verdict that is surer than verdicts are tells nothing.
        if error < above[place] < 1 - error:
            return place
    inside = [place for place in free if low < place < high]
    if inside:
        return min(inside, key=lambda place: (abs(2 * place - low - high), place))
    # An unstable cell just below would be the edge by the contiguous rule.
    stand = range(low, max(-1, low - beneath), -1)
    shaky = [place for place in stand if place in stable and place not in sound]
    for place in stand:
        if place in free:
            return place
        if place in sound and place < min(shaky, default=size):
            break
    return None
