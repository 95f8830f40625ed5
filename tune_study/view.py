"""A study on a terminal: counts, time left, cells at work, and a map of what is stable.

Plain ASCII, so that it reads the same in a pipe; colours only where the console has them.
"""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from tune_study.board import RUNNING, STATES, TO_GO, UNTRIED, Board, Known

SIGNS = {
    "stable": ("o", "green"),
    "failed": ("x", "red"),
    "diverged": ("^", "magenta"),
    "mixed": ("%", "yellow"),
    "errored": ("!", "bold red"),
    RUNNING: ("*", "cyan"),
    TO_GO: (".", "bright_black"),
    UNTRIED: (" ", ""),
}
"""How a state is drawn on the map, and in which colour it is written anywhere."""

MAP_TITLE = 10
"""Columns of a map in front of its learning rates: 'depth 12  '."""


def screen(board: Board, left: str, width: int) -> Group:
    """The whole view.

    Args:
        left: the time left, in words; empty where nothing is running.
        width: of the console, in columns.
    """
    parts: list[Text | Table] = [_head(board, left, width), _counts(board)]
    if running := board.running():
        parts += [Text(), _at_work(running)]
    return Group(*parts, Text(), *_maps(board, width))


def line(board: Board, left: str) -> str:
    """All of it in one line, where the output is no terminal."""
    counts = "".join(
        f", {n} {state}" for state, n in board.counts().items() if state not in (RUNNING, TO_GO)
    )
    running = " | ".join(
        f"{label} step {cell.step} loss {number(cell.loss)}"
        for label, cell in board.running().items()
        if cell.step
    )
    return f"{board.done}/{board.total} cells{counts}; {left}. {running}"


def _head(board: Board, left: str, width: int) -> Text:
    done, total = board.done, board.total
    before, after = f"{board.study.name}  {done} of {total} cells ", f"  {left}" if left else ""
    room = max(10, min(40, width - len(before) - len(after) - 3))
    filled = room * done // max(total, 1)
    text = Text(no_wrap=True, overflow="crop")
    text.append(board.study.name, "bold").append(before[len(board.study.name) :])
    text.append(f"[{'#' * filled}{'-' * (room - filled)}]", "green").append(after)
    return text


def _counts(board: Board) -> Text:
    text = Text()
    for state, count in board.counts().items():
        text.append(", " if text else "").append(f"{count} {state}", SIGNS[state][1])
    return text


def _at_work(running: dict[str, Known]) -> Table:
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "right", "right"):
        table.add_column(justify=justify, no_wrap=True)
    table.add_row("running", "step", "loss", "tokens/s", style="bright_black")
    for label, cell in running.items():
        speed = "" if cell.tokens_per_s is None else f"{cell.tokens_per_s:,.0f}"
        loss = number(cell.loss) if cell.step else ""
        table.add_row(label, f"{cell.step}/{cell.steps}", loss, speed)
    return table


def _maps(board: Board, width: int) -> list[Text]:
    """A map an arm, as many side by side as there is room for, and what its signs mean."""
    lrs = sorted({cell.lr for cell in board.cells.values()})
    gap = " " if MAP_TITLE + 2 * len(lrs) <= width else ""
    size = MAP_TITLE + (1 + len(gap)) * len(lrs) + 2
    tiles = board.tiles()
    abreast = max(1, (width + 2) // size)
    lines: list[Text] = []
    arms = list(tiles)
    for first in range(0, len(arms), abreast):
        beside = arms[first : first + abreast]
        head = Text()
        for arm in beside:
            head.append(arm[: size - 2].ljust(size), "bold")
        lines.append(head)
        for depth in tiles[beside[0]]:
            row = Text()
            for arm in beside:
                row.append(f"depth {depth}".ljust(MAP_TITLE))
                for state in tiles[arm][depth]:
                    sign, style = SIGNS[state]
                    row.append(sign, style).append(gap)
                row.append("  ")
            row.rstrip()
            lines.append(row)
        lines.append(Text())
    meaning = Text(f"LR {lrs[0]:g} to {lrs[-1]:g}, left to right")
    seen = {state for by_depth in tiles.values() for row in by_depth.values() for state in row}
    for state in (*STATES, "mixed"):
        if state in seen:
            sign, style = SIGNS[state]
            meaning.append("; ").append(sign, style).append(f" {state}")
    return [*lines, meaning]


def number(value: float | None) -> str:
    """A loss for the eye; a value that was not finite says so."""
    return "not finite" if value is None else f"{value:.3f}"


def duration(seconds: float) -> str:
    """1h05m, 12m30s or 45s."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    if hours:
        return f"{hours}h{m:02d}m"
    return f"{m}m{s:02d}s" if m else f"{s}s"


def time_left(board: Board, at_once: int) -> str:
    """'25m18s left', that it is not known yet, or that nothing is left."""
    if not {RUNNING, TO_GO} & board.counts().keys():
        return "nothing left to run"
    seconds = board.seconds_left(at_once)
    if seconds is None:
        return "estimating time left"
    return f"{duration(seconds)} left" + (" in this round" if board.searching else "")


def plural(count: int, noun: str) -> str:
    """'1 thread', '2 threads'."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
