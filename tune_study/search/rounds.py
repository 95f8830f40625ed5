"""All lines of a study: which cells the next round runs, from the ends of those before.

A round is a function of the set of cells that earlier rounds ran and how they ended, never of the
order in which they ended, and begins when the round before has ended. So a search that was cut
off, at any moment, goes on with the same cells as one that was not.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from tune_study.components import OFF
from tune_study.config import Criterion, Search
from tune_study.search import best, edge
from tune_study.search.ends import End, Group, Known, Line, Place

SPREAD_SEEDS, SPREAD_DEPTHS = 1.5, 3.0
"""How far apart, in learning rates, edges of one depth over seeds and of one seed over depths are
taken to lie: where to look first, until the cells say otherwise."""

COARSE: tuple[int, ...] = (4, 2, 1)
FINE: tuple[int, ...] = (2, 1)
"""Steps in which the lowest loss is enclosed on the first line of an arm, and on later ones."""

NEARBY: tuple[int, ...] = (4,)
"""The same where no more is wanted of it than to judge failure by."""

NEAR_EDGE = 4
"""Learning rates below off's edge whose cells tell where an arm begins to be needed. On the dense
pilot it gave the slope of the threshold over depth that the whole grid gives (docs/edge.md)."""


@dataclass(frozen=True)
class Edge:
    """What a search knows of one line.

    Attributes:
        low, high: places by the contiguous rule over the cells run, as `edge.bracket`.
        sure: belief that the edge lies within one step of where it is most believed to.
        decided: nothing more is to be run.
    """

    line: Line
    low: int
    high: int
    sure: float
    decided: bool
    cells: int


class Rounds:
    """The rounds of one study's search.

    Args:
        lines: every (depth, arm, seed); the first seed and depth are searched first and tell the
            others where to look.
        lrs: learning rates, ascending.
        rules: what to search for, and how sure to be.
        criterion: when a cell failed.
    """

    def __init__(
        self,
        lines: Sequence[Line],
        lrs: Sequence[float],
        rules: Search,
        criterion: Criterion,
    ) -> None:
        self.lines, self.lrs, self.rules = tuple(lines), tuple(lrs), rules
        self.criterion = criterion
        self.depths = tuple(dict.fromkeys(line.depth for line in lines))
        self.seeds = tuple(dict.fromkeys(line.seed for line in lines))
        self.peers = self._peers()

    def next(self, ends: Mapping[Place, End]) -> list[Place]:
        """The cells of the next round, none of them in `ends`; empty if the search is over.

        The learning rates that all lines run are one round, the first.
        """
        shared = [(line, at) for line in self.lines for at in self.shared if (line, at) not in ends]
        if shared:
            return shared
        state = _State(self, self.known(ends))
        return state.ranked()[: self.rules.batch]

    def edges(self, ends: Mapping[Place, End]) -> list[Edge]:
        """What is known of every line."""
        return _State(self, self.known(ends)).edges()

    @property
    def shared(self) -> range:
        """Places that every line runs, whatever is found there."""
        return range(0, len(self.lrs) if self.rules.every else 0, self.rules.every or 1)

    def _peers(self) -> dict[Group, set[Group]]:
        """By group those whose lowest loss it is judged by as well as by its own.

        In a search for edges alone few cells of a group lie near its lowest loss. Its depth's other
        seeds, or before them the first group, have reached what it would reach.
        """
        if self.rules.best_lr or self.shared:
            return {}
        groups = {line.group for line in self.lines}
        first = self.lines[0].group
        return {
            (depth, seed): {at for at in groups if at[0] == depth}
            | ({first} if seed == self.seeds[0] else set())
            for depth, seed in groups
        }

    def known(self, ends: Mapping[Place, End]) -> Known:
        """The ends, judged. A group that is contested, and has no reference left to run, is judged
        by its own lowest loss alone, as it will be in the study's tables."""
        known = Known(ends, self.lrs, self.criterion, self.peers)
        alone = {group for group in known.contested if self.reference(known, group) is None}
        if not alone:
            return known
        peers = {group: peers for group, peers in self.peers.items() if group not in alone}
        return Known(ends, self.lrs, self.criterion, peers)

    def reference(self, known: Known, group: Group) -> Place | None:
        """The next cell of a group that may give it a lowest loss of its own to be judged by: where
        the group searched before it has its lowest, then NEARBY; None if they have run."""
        first = self.lines[0].group
        taught = (group[0], self.seeds[0])
        teacher = first if group == taught else taught
        lowest = min(
            (
                (loss, line.arm, place)
                for line, losses in known.losses.items()
                if line.group == teacher != group
                for place, loss in losses.items()
            ),
            default=None,
        )
        if lowest is None:
            return None
        line, place = Line(group[0], lowest[1], group[1]), lowest[2]
        tried, losses = known.tried.get(line, set()), known.losses.get(line, {})
        if place not in tried:
            return line, place
        stable = known.stable.get(line, {})
        further = best.next_place(losses, stable, len(self.lrs), NEARBY, tried)
        return None if further is None else (line, further)

    def teacher(self, line: Line) -> Line | None:
        """The line that is searched before this one, and tells it where to look; none where the
        cells that all lines run have told each of them."""
        if self.shared:
            return None
        if line.seed != self.seeds[0]:
            return Line(line.depth, line.arm, self.seeds[0])
        if line.depth != self.depths[0]:
            return Line(self.depths[0], line.arm, line.seed)
        return None


class _State:
    """One moment of a search: what every line wants next."""

    def __init__(self, rounds: Rounds, known: Known) -> None:
        self.rounds, self.known, self.rules = rounds, known, rounds.rules
        self.size = len(rounds.lrs)
        self.wanted: dict[Line, int | None] = {}
        self.waiting: set[Line] = set()
        # Teachers stand before their pupils: by seed, then depth.
        order = sorted(
            rounds.lines,
            key=lambda at: (rounds.seeds.index(at.seed), rounds.depths.index(at.depth)),
        )
        for line in order:
            teacher = rounds.teacher(line)
            if teacher in self.waiting or self.wanted.get(teacher or line) is not None:
                self.waiting.add(line)
            else:
                self.wanted[line] = self._want(line)
        if self.rules.threshold:
            for line in order:
                off = Line(line.depth, OFF, line.seed)
                # An edge is known before its neighbourhood is looked at in another arm.
                if line.arm != OFF and {self.wanted.get(at, -1) for at in (line, off)} == {None}:
                    self.wanted[line] = self._beside(line, off)

    def edges(self) -> list[Edge]:
        """As `Rounds.edges`."""
        found = []
        for line in self.rounds.lines:
            stable = self.known.stable.get(line, {})
            _, sure = edge.within_one(edge.belief(stable, self._prior(line), self.rules.error))
            decided = line not in self.waiting and self.wanted[line] is None
            low, high = edge.bracket(stable, self.size)
            cells = len(self.known.tried.get(line, ()))
            found.append(Edge(line, low, high, sure, decided, cells))
        return found

    def ranked(self) -> list[Place]:
        """The cells wanted: of lines begun first, then where a further seed narrows most."""
        places = [(line, place) for line, place in self.wanted.items() if place is not None]

        def rank(cell: Place) -> tuple[bool, float]:
            begun = cell[0] in self.known.tried
            return not begun, 0.0 if begun else -self._gain(cell[0])

        return sorted(places, key=rank)

    def _want(self, line: Line) -> int | None:
        """The next place of a line, or None if it is done."""
        stable = self.known.stable.get(line, {})
        tried = self.known.tried.get(line, set())
        if (due := next((at for at in self.rounds.shared if at not in tried), None)) is not None:
            return due
        if (place := self._before_edge(line)) is not None:
            return place
        rules, sound = self.rules, self.known.sound.get(line, ())
        place = edge.next_place(
            stable, self._prior(line), rules.error, rules.confidence, tried, rules.beneath, sound
        )
        return self._doubted(line) if place is None else place

    def _before_edge(self, line: Line) -> int | None:
        """The next place of what comes before the line's edge: its lowest loss, if that is sought,
        or what it takes to judge its group by."""
        if self.rules.best_lr:
            return self._lowest(line, COARSE if self._hint(line) is None else FINE)
        if self.rounds.shared or line.seed != self.rounds.seeds[0]:
            return None
        if line == self.rounds.lines[0]:
            return self._lowest(line, NEARBY)
        return None if line in self.known.tried else self._reference(line)

    def _reference(self, line: Line) -> int | None:
        """The place of its group's next reference, if that is one of this line."""
        cell = self.rounds.reference(self.known, line.group)
        return cell[1] if cell and cell[0] == line else None

    def _doubted(self, line: Line) -> int | None:
        """A place of a line whose edge is known that may change how its cells are judged."""
        if self.rounds.shared:
            return None
        if line in self.known.excused:
            # A cell that learned nothing passes for slow below the line's best cell so far. With
            # one that learned below it, it does not.
            group = [at for at in self.rounds.lines if at.group == line.group]
            _, place = min((x, at) for other in group for at, x in self._losses(other).items())
            return None if place in self.known.tried[line] else place
        return self._reference(line) if line.group in self.known.contested else None

    def _beside(self, line: Line, off: Line) -> int | None:
        """The next place near off's edge that off ran and this line did not."""
        _, high = edge.bracket(self.known.stable.get(off, {}), self.size)
        near = {at for at in self.known.tried.get(off, ()) if high - NEAR_EDGE <= at <= high}
        return max(near - self.known.tried.get(line, set()), default=None)

    def _lowest(self, line: Line, steps: tuple[int, ...]) -> int | None:
        """The next place on the way to the line's lowest loss, or None if it is found."""
        tried, hint = self.known.tried.get(line, set()), self._hint(line)
        if hint is not None and hint not in tried:
            return hint
        if line.group not in self.known.learned:
            return self._anywhere(tried)
        stable = self.known.stable.get(line, {})
        return best.next_place(self._losses(line), stable, self.size, steps, tried)

    def _anywhere(self, tried: Collection[int]) -> int | None:
        """The middle, the quarters, the eighths, ...: where nothing is known."""
        return next((place for place in _halves(self.size) if place not in tried), None)

    def _losses(self, line: Line) -> Mapping[int, float]:
        """Final losses of a line's stable cells, by place."""
        return self.known.losses.get(line, {})

    def _like(self, lines: Collection[Line], line: Line) -> tuple[list[Line], float]:
        """Of some lines those that may tell where this one's edge and lowest loss lie, and how far
        off: its arm's at its depth, or else those of its seed."""
        arm = [at for at in lines if at.arm == line.arm and at != line]
        same_depth = [at for at in arm if at.depth == line.depth]
        if same_depth:
            return same_depth, SPREAD_SEEDS
        return [at for at in arm if at.seed == line.seed], SPREAD_DEPTHS

    def _prior(self, line: Line) -> edge.Array:
        closed = {
            at: high
            for at, stable in self.known.stable.items()
            for low, high in [edge.bracket(stable, self.size)]
            if high - low == 1  # one that is still open says little of where others lie
        }
        like, spread = self._like(closed, line)
        return edge.prior(self.size, [closed[at] for at in like], spread)

    def _hint(self, line: Line) -> int | None:
        """Where lines like it have their lowest loss: the median."""
        like, _ = self._like(self.known.stable, line)
        places = [min(x, key=x.__getitem__) for at in like if (x := self.known.losses.get(at))]
        return int(np.median(places)) if places else None

    def _gain(self, line: Line) -> float:
        """By how much the interval of the mean edge narrows, with one more seed of this line's
        depth and arm; in learning rates."""
        places = [
            edge.bracket(self.known.stable[at], self.size)[1]
            for at in self.known.stable
            if (at.depth, at.arm) == (line.depth, line.arm)
        ]
        n = len(places)
        if n < 2:
            return float(self.size) / (n + 1)
        # A bracket is one step wide, so edges in the same one still differ.
        spread = math.sqrt(float(np.var(places, ddof=1)) + 1 / 12)
        now, then = (special.stdtrit(k - 1, 0.975) / math.sqrt(k) for k in (n, n + 1))
        return float(spread * (now - then))


def _halves(size: int) -> Iterator[int]:
    """Every place: the middle, the quarters, the eighths, ..."""
    seen: set[int] = set()
    parts = 2
    while len(seen) < size:
        for k in range(1, parts, 2):
            place = size * k // parts
            if place not in seen:
                seen.add(place)
                yield place
        parts *= 2
