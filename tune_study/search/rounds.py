"""All lines of a study: which cells the next round runs, from the ends of those before.

A round is a function of the set of cells that earlier rounds ran and how they ended, never of the
order in which they ended, and begins when the round before has ended. So a search that was cut
off, at any moment, goes on with the same cells as one that was not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy import special

from tune_study.components import OFF
from tune_study.config import Criterion, Search
from tune_study.divergence import LEARNED, Finish, failed, normalised_loss
from tune_study.search import best, edge

SPREAD_SEEDS, SPREAD_DEPTHS = 1.5, 3.0
"""How far apart, in learning rates, edges of one depth over seeds and of one seed over depths are
taken to lie: where to look first, until the cells say otherwise."""

COARSE: tuple[int, ...] = (4, 2, 1)
FINE: tuple[int, ...] = (1,)
"""Steps in which the lowest loss is enclosed on the first line of an arm, and on later ones."""

CLOSE = 0.05
"""Share of the way from the lowest loss to the unigram entropy within which a group's own lowest
loss is near enough to judge failure by."""

NEAR_EDGE = 4
"""Learning rates below off's edge whose cells tell where an arm begins to be needed. On the dense
pilot it gave the slope of the threshold over depth that the whole grid gives (docs/edge.md)."""


@dataclass(frozen=True, order=True)
class Line:
    """One (depth, arm, seed)."""

    depth: int
    arm: str
    seed: int

    @property
    def group(self) -> tuple[int, int]:
        """Lines whose cells are judged together: one depth and seed."""
        return self.depth, self.seed


Place = tuple[Line, int]
"""A cell: its line, and the number of its learning rate."""


@dataclass(frozen=True)
class End:
    """How a cell ended.

    Attributes:
        loss: its last validation loss; None if it is not finite.
        entropy: unigram entropy of its data.
        diverged: whether it diverged.
        lost: it has no result and will not get one; no evidence.
    """

    loss: float | None = None
    entropy: float = math.nan
    diverged: bool = False
    lost: bool = False


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


@dataclass(frozen=True)
class Known:
    """The ends of cells, judged.

    Attributes:
        stable, losses: verdicts, and losses of stable cells, by line and place.
        tried: places of each line that were run.
        learned: groups of which a cell has learned from context.
        excused: lines with a cell that is no better than a failed one, but lies below the line's
            best so far, and so counts as slow.
    """

    ends: Mapping[Place, End]
    lrs: Sequence[float]
    criterion: Criterion
    stable: dict[Line, dict[int, bool]] = field(default_factory=dict)
    losses: dict[Line, dict[int, float]] = field(default_factory=dict)
    tried: dict[Line, set[int]] = field(default_factory=dict)
    learned: set[tuple[int, int]] = field(default_factory=set)
    excused: set[Line] = field(default_factory=set)

    def __post_init__(self) -> None:
        groups: dict[tuple[int, int], list[Place]] = {}
        for (line, place), end in sorted(self.ends.items(), key=lambda item: item[0]):
            self.tried.setdefault(line, set()).add(place)
            if end.diverged:
                self.stable.setdefault(line, {})[place] = False
            elif not end.lost and end.loss is not None:
                groups.setdefault(line.group, []).append((line, place))
        for group, cells in groups.items():
            self._judge(group, cells)

    @property
    def entropy(self) -> float:
        """Unigram entropy of the data; NaN before any cell has a result."""
        return next((end.entropy for end in self.ends.values() if not end.lost), math.nan)

    def _judge(self, group: tuple[int, int], cells: list[Place]) -> None:
        """As `divergence.failed`; where nothing has learned, ends say nothing about the edge."""
        losses = [self.ends[cell].loss or math.nan for cell in cells]
        entropy = self.ends[cells[0]].entropy
        if min(losses) >= (1 - LEARNED) * entropy:
            return
        self.learned.add(group)
        finishes = [
            Finish(self.lrs[place], line.arm, loss)
            for (line, place), loss in zip(cells, losses, strict=True)
        ]
        verdicts = failed(finishes, entropy, self.criterion)
        at = [normalised_loss(loss, min(losses), entropy) for loss in losses]
        margin = self.criterion.failed_margin
        learned = {line for (line, _), share in zip(cells, at, strict=True) if share <= margin}
        for (line, place), loss, share, verdict in zip(cells, losses, at, verdicts, strict=True):
            # A line none of whose cells has learned lies above its edge, as far as is known: its
            # cells must not pass for slow ones below their own best.
            stable = verdict.state == "stable" and line in learned
            if stable and share > margin:
                self.excused.add(line)
            self.stable.setdefault(line, {})[place] = stable
            if stable:
                self.losses.setdefault(line, {})[place] = loss


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

    def next(self, ends: Mapping[Place, End]) -> list[Place]:
        """The cells of the next round, none of them in `ends`; empty if the search is over.

        The learning rates that all lines run are one round, the first.
        """
        shared = [(line, at) for line in self.lines for at in self.shared if (line, at) not in ends]
        if shared:
            return shared
        state = _State(self, Known(ends, self.lrs, self.criterion))
        return state.ranked()[: self.rules.batch]

    def edges(self, ends: Mapping[Place, End]) -> list[Edge]:
        """What is known of every line."""
        return _State(self, Known(ends, self.lrs, self.criterion)).edges()

    @property
    def shared(self) -> range:
        """Places that every line runs, whatever is found there."""
        return range(0, len(self.lrs) if self.rules.every else 0, self.rules.every or 1)

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
        if self.rules.best_lr or self.rounds.teacher(line) is None:
            place = self._lowest(line, COARSE if self._hint(line) is None else FINE)
            if place is not None:
                return place
        elif line == self._reference(line.group) and self._unlearned(line.group):
            place = self._hint(line)
            if place is None or place in tried:
                place = self._anywhere(tried)
            if place is not None:
                return place
        before = self._prior(line)
        rules = self.rules
        place = edge.next_place(stable, before, rules.error, rules.confidence, tried, rules.beneath)
        # A cell that learned nothing passes for slow below the line's best cell so far; and failure
        # is judged by the lowest loss of the group.
        doubtful = line in self.known.excused or (
            line == self._reference(line.group) and self._far_from_best(line)
        )
        if place is None and doubtful:
            hint = self._hint(line)
            return None if hint in tried else hint
        return place

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
        if not self.rules.best_lr:
            steps = steps[:-1]  # near the lowest loss is enough to judge failure by
        losses, stable = self.known.losses.get(line, {}), self.known.stable.get(line, {})
        return best.next_place(losses, stable, self.size, steps, tried)

    def _anywhere(self, tried: Collection[int]) -> int | None:
        """The middle, the quarters, the eighths, ...: where nothing is known."""
        return next((place for place in _halves(self.size) if place not in tried), None)

    def _unlearned(self, group: tuple[int, int]) -> bool:
        """Whether cells of a group have run, and none of them has learned."""
        ran = any(line.group == group for line in self.known.tried)
        return ran and group not in self.known.learned

    def _far_from_best(self, line: Line) -> bool:
        """Whether the group's lowest loss lies so far above those of other groups that failure,
        which is judged by it, may be judged otherwise with a better one."""
        own, others = math.inf, math.inf
        for at, losses in self.known.losses.items():
            lowest = min(losses.values(), default=math.inf)
            if at.group == line.group:
                own = min(own, lowest)
            else:
                others = min(others, lowest)
        return own - others > CLOSE * (self.known.entropy - others)

    def _like(self, line: Line) -> tuple[list[Line], float]:
        """Lines begun that may tell where this one's edge and lowest loss lie, and how far off."""
        begun = [at for at in self.known.stable if at.arm == line.arm and at != line]
        same_depth = [at for at in begun if at.depth == line.depth]
        if same_depth:
            return same_depth, SPREAD_SEEDS
        return [at for at in begun if at.seed == line.seed], SPREAD_DEPTHS

    def _prior(self, line: Line) -> edge.Array:
        like, spread = self._like(line)
        highs = [edge.bracket(self.known.stable[at], self.size)[1] for at in like]
        return edge.prior(self.size, highs, spread)

    def _hint(self, line: Line) -> int | None:
        """Where lines like it have their lowest loss: the median."""
        like, _ = self._like(line)
        places = [min(x, key=x.__getitem__) for at in like if (x := self.known.losses.get(at))]
        return int(np.median(places)) if places else None

    def _reference(self, group: tuple[int, int]) -> Line:
        """The line of a group that has its lowest loss, or is expected to have it."""
        lines = [line for line in self.rounds.lines if line.group == group]

        def lowest(line: Line) -> float:
            like, _ = self._like(line)
            found = [self.known.losses.get(at, {}) for at in (line, *like)]
            return min((loss for losses in found for loss in losses.values()), default=math.inf)

        return min(lines, key=lowest)

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


class Course:
    """A search as far as it has come: rounds run, and the one that is due.

    Args:
        rounds: the search.
        ended: how a cell ended in an earlier start of the study; None if it did not. Asked of a
            cell when its round comes: what else is known decides nothing.
        cells: most cells to run altogether, or None.
    """

    def __init__(
        self, rounds: Rounds, ended: Callable[[Place], End | None], cells: int | None = None
    ) -> None:
        self._rounds, self._ended, self._most = rounds, ended, cells
        self.ends: dict[Place, End] = {}
        self.due: list[Place] = []
        self.batches: list[list[Place]] = []
        self._go_on()

    @property
    def asked(self) -> list[Place]:
        """The cells of all rounds so far, in order."""
        return [cell for batch in self.batches for cell in batch]

    def tell(self, cell: Place, end: End) -> None:
        """Takes the end of a cell that is due; with the last of a round, the next one is due."""
        self.due.remove(cell)
        self._told[cell] = end
        if not self.due:
            self.ends |= self._told
            self._go_on()

    def edges(self) -> list[Edge]:
        """What is known of every line by the rounds that have ended."""
        return self._rounds.edges(self.ends)

    def _go_on(self) -> None:
        while not self.due:
            batch = self._rounds.next(self.ends)
            if self._most is not None:
                batch = batch[: max(0, self._most - len(self.ends))]
            if not batch:
                return
            self.batches.append(batch)
            self._told = {cell: end for cell in batch if (end := self._ended(cell)) is not None}
            self.due = [cell for cell in batch if cell not in self._told]
            if not self.due:
                self.ends |= self._told
