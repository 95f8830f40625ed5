"""What the benchmarks share: alternating runs, medians of ratios, a table and its JSON."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def options_of(doc: str | None, quick: str) -> argparse.ArgumentParser:
    """A parser of what all of them take: rounds, a quick mode, a file for the figures.

    Args:
        doc: the benchmark's docstring; its first line is the description.
        quick: what its quick mode is.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    return parser


def alternate(ways: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Runs every way once a round, for so many rounds; a disturbance hits all of them alike.

    Args:
        ways: name to a function that runs the way once and returns its figure.
        repeats: rounds; the ways' order turns with each.
    """
    names = list(ways)
    figures: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            figures[name].append(ways[name]())
    return figures


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over rounds of ours / theirs."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def show(figures: Mapping[str, float], path: Path | None) -> None:
    """Prints name and figure, a line each, and writes them as JSON if asked."""
    for name, value in figures.items():
        print(f"{name:<58} {value:>12,.3f}")
    if path is not None:
        path.write_text(json.dumps(dict(figures), indent=1) + "\n", encoding="utf-8")
