"""How the cells of a search ended, and what is judged of them so far."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tune_study.config import Criterion
from tune_study.divergence import LEARNED, Finish, failed, normalised_loss

SOUND = 0.5
"""Share of `failed_margin` below which a stable cell's normalised loss is far from failure. Nearer
to the margin stable and failed cells lie side by side (docs/edge.md)."""


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


Group = tuple[int, int]
"""Depth and seed."""

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
class Known:
    """The ends of cells, judged.

    Args:
        peers: groups whose lowest loss a group is judged by as well as by its own.

    Attributes:
        stable, losses: verdicts, and losses of stable cells, by line and place.
        sound: stable places of each line whose loss is far from failure.
        tried: places of each line that were run.
        learned: groups that have cells, and of which, or of whose peers, one has learned from
            context.
        contested: groups with a verdict that is another by their own lowest loss alone.
        excused: lines with a cell that is no better than a failed one, but lies below the line's
            best so far, and so counts as slow.
    """

    ends: Mapping[Place, End]
    lrs: Sequence[float]
    criterion: Criterion
    peers: Mapping[Group, Collection[Group]] = field(default_factory=dict)
    stable: dict[Line, dict[int, bool]] = field(default_factory=dict)
    losses: dict[Line, dict[int, float]] = field(default_factory=dict)
    sound: dict[Line, set[int]] = field(default_factory=dict)
    tried: dict[Line, set[int]] = field(default_factory=dict)
    learned: set[Group] = field(default_factory=set)
    contested: set[Group] = field(default_factory=set)
    excused: set[Line] = field(default_factory=set)

    def __post_init__(self) -> None:
        groups: dict[Group, dict[Place, float]] = {}
        for (line, place), end in sorted(self.ends.items(), key=lambda item: item[0]):
            self.tried.setdefault(line, set()).add(place)
            if end.diverged:
                self.stable.setdefault(line, {})[place] = False
            elif not end.lost and end.loss is not None:
                groups.setdefault(line.group, {})[line, place] = end.loss
        lowest = {group: min(losses.values()) for group, losses in groups.items()}
        for group, losses in groups.items():
            reached = (lowest.get(peer, math.inf) for peer in self.peers.get(group, ()))
            self._judge(group, losses, min(reached, default=math.inf))

    @property
    def entropy(self) -> float:
        """Unigram entropy of the data; NaN before any cell has a result."""
        return next((end.entropy for end in self.ends.values() if not end.lost), math.nan)

    def _judge(self, group: Group, losses: Mapping[Place, float], reached: float) -> None:
        """As `divergence.failed`; where nothing has learned, ends say nothing about the edge.

        Args:
            losses: of the group's cells that did not diverge.
            reached: the lowest loss of the group's peers.
        """
        entropy, margin = self.entropy, self.criterion.failed_margin
        lowest = min(reached, *losses.values())
        if lowest >= (1 - LEARNED) * entropy:
            return
        self.learned.add(group)
        finishes = [
            Finish(self.lrs[place], line.arm, loss) for (line, place), loss in losses.items()
        ]
        states, alone = (
            [verdict.state for verdict in failed(finishes, entropy, self.criterion, best)]
            for best in (reached, math.inf)
        )
        if states != alone:
            self.contested.add(group)
        shares = {cell: normalised_loss(loss, lowest, entropy) for cell, loss in losses.items()}
        learned = {line for (line, _), share in shares.items() if share <= margin}
        for (line, place), state in zip(losses, states, strict=True):
            share = shares[line, place]
            # A line none of whose cells has learned lies above its edge, as far as is known: its
            # cells must not pass for slow ones below their own best.
            stable = state == "stable" and line in learned
            self.stable.setdefault(line, {})[place] = stable
            if stable:
                self.losses.setdefault(line, {})[place] = losses[line, place]
                if share > margin:
                    self.excused.add(line)
                elif share < SOUND * margin:
                    self.sound.setdefault(line, set()).add(place)
