"""What a search has found so far, in lines for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from tune_study.search.course import Course
from tune_study.search.rounds import Edge


def lines(course: Course, lrs: Sequence[float]) -> list[str]:
    """One line on the rounds so far, and one on each arm: its edges, depth by depth."""
    edges = [edge for edge in course.edges() if edge.cells]
    decided = sum(edge.decided for edge in edges)
    rounds = sum(set(batch) <= course.ends.keys() for batch in course.batches)
    given = f" ({len(course.given)} by a grid before)" if course.given else ""
    head = (
        f"round {rounds}: {len(course.ends)} cells run{given}, {decided} of {len(edges)} edges "
        f"decided of those begun; {len(course.due)} cells next"
    )
    text = [head]
    for arm in dict.fromkeys(edge.line.arm for edge in edges):
        own = [edge for edge in edges if edge.line.arm == arm]
        parts = [
            _depth([edge for edge in own if edge.line.depth == depth], lrs)
            for depth in dict.fromkeys(edge.line.depth for edge in own)
        ]
        text.append(f"  {arm}: " + "; ".join(parts))
    return text


def _depth(edges: list[Edge], lrs: Sequence[float]) -> str:
    """'depth 2 stable up to 0.056-0.075, unstable from 0.075-0.1 (3 of 4 decided)'."""
    lows = [lrs[edge.low] if edge.low >= 0 else 0.0 for edge in edges]
    highs = [lrs[edge.high] if edge.high < len(lrs) else float("inf") for edge in edges]
    decided = sum(edge.decided for edge in edges)
    return (
        f"depth {edges[0].line.depth} stable up to {_range(lows)}, unstable from {_range(highs)} "
        f"({decided} of {len(edges)} decided)"
    )


def _range(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.3g}" if low == high else f"{low:.3g}-{high:.3g}"
