"""Where one line's loss is lowest: a search of shrinking steps among the cells that are stable."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tune_study.search.edge import bracket


def next_place(
    losses: Mapping[int, float],
    stable: Mapping[int, bool],
    size: int,
    steps: Sequence[int],
    tried: Collection[int] = (),
) -> int | None:
    """The place to run next, or None if the lowest loss is enclosed.

    The best cell so far is enclosed by cells on either side, at most one step away, with each step
    in turn, the largest first; a better one takes its place. No cell above an unstable one is run.

    Args:
        losses: final loss of the stable cells, by place.
        stable: verdict by place.
        size: learning rates of the line.
        steps: most distant neighbours, such as (4, 2, 1).
        tried: places not to be asked for, though they have no verdict.
    """
    if not losses:
        return None
    at = min(losses, key=lambda place: (losses[place], place))
    _, unstable = bracket({p: v for p, v in stable.items() if v or p > at}, size)
    ran = {*stable, *tried}
    for step in steps:
        for side in (-1, 1):
            near = [at + side * away for away in range(1, step + 1)]
            if 0 <= near[-1] < min(size, unstable) and ran.isdisjoint(near):
                return near[-1]
    return None
