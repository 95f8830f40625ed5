"""What the benchmarks share: alternating runs, medians of ratios, a table and its JSON."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


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


@contextmanager
def elsewhere(prepare: Callable[..., Callable[[], float]], *args: Any) -> Iterator[Any]:
    """A way that runs in a process of its own, whose settings no other way has touched.

    Args:
        prepare: called there with `args`; returns the way.

    Yields:
        a function that runs the way once, there, and returns its figure.
    """
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_answer, args=(there, prepare, args), daemon=True)
    process.start()
    there.close()  # so that a process that dies is an EOFError here

    def run() -> float:
        here.send(None)
        figure: float = here.recv()
        return figure

    try:
        yield run
    finally:
        here.close()
        process.join()


def _answer(there: Connection, prepare: Callable[..., Callable[[], float]], args: Any) -> None:
    way = prepare(*args)
    while True:
        try:
            there.recv()
        except EOFError:
            return
        there.send(way())


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over rounds of ours / theirs."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def show(figures: Mapping[str, float], path: Path | None) -> None:
    """Prints name and figure, a line each, and writes them as JSON if asked."""
    for name, value in figures.items():
        print(f"{name:<58} {value:>12,.3f}")
    if path is not None:
        path.write_text(json.dumps(dict(figures), indent=1) + "\n", encoding="utf-8")
