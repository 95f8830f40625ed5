"""Would another number of threads a cell be faster on this CPU? A measurement for `plan`.

Cells of the study's largest shape train at once, as many as their threads leave cores for: one
thread each, two, four, up to one cell with all cores. It is told, and changes nothing: the
threads are the study's, for with others a loss has other last bits, and a cell another identity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tune_study import cost, machine
from tune_study.concurrency import cores, several
from tune_study.config import TrialConfig
from tune_study.together import DiedError, Workers

if TYPE_CHECKING:
    from tune_study.sweep import Plan

FASTER = 1.1
"""Times the tokens/s of the study's choice that another must have to be worth a word."""

TRY_S = 1.0
"""For each choice, once all cells are warm; one step at least."""

STEP_TOKENS = 2048
"""Of a step at most. More would make the measurement longer and its ratios no other
(docs/performance.md)."""


@dataclass(frozen=True)
class Choice:
    """Cells at once, threads of each, and tokens/s of all of them together."""

    cells: int
    threads: int
    tokens_per_s: float


def choices(threads: int, cores: int, cells: int, workers: int) -> list[tuple[int, int]]:
    """What can be compared with the study's choice, as cells and threads, fewest threads first.

    Args:
        threads: of a cell, as the study says.
        cells: to run; more at once would not be used.
        workers: processes that there is memory for.
    """
    doubled = {2**n for n in range(cores.bit_length()) if 2**n <= cores}
    found = [(max(1, min(cores // n, cells)), n) for n in sorted(doubled | {cores, threads})]
    return [(at_once, n) for at_once, n in found if at_once <= workers or n == threads]


def measure(
    config: TrialConfig, vocab_size: int, pairs: Sequence[tuple[int, int]], seconds: float = TRY_S
) -> list[Choice]:
    """Tries each, with cells like `config`; those that do not fit into memory are left out."""
    short = config.replace(
        batch_size=max(1, min(config.batch_size, STEP_TOKENS // config.context)),
        grad_accum=1,
        val_windows=1,
        probe_windows=1,
        compile=False,  # for every number of threads anew
    )
    found: list[Choice] = []
    with Workers() as workers:
        for cells, threads in pairs:
            try:
                got = workers.measure(short.replace(threads=threads), vocab_size, cells, seconds)
            except DiedError:
                return found
            found.append(Choice(cells, threads, got.tokens_per_s))
    return found


def advice(found: Sequence[Choice], threads: int) -> str:
    """One line on what was measured; empty if there was nothing to compare.

    Args:
        threads: the study's.
    """
    ours = next((c for c in found if c.threads == threads), None)
    if ours is None or len(found) < 2:
        return ""
    best = max(found, key=lambda c: c.tokens_per_s)
    told = "; ".join(
        f"{several(c.cells, 'cell')} x {several(c.threads, 'thread')}: {c.tokens_per_s:,.0f}"
        for c in found
    )
    if best == ours:
        verdict = f"threads = {threads}, as the study says, is the fastest here."
    elif best.tokens_per_s < FASTER * ours.tokens_per_s:
        verdict = f"threads = {threads}, as the study says, is nearly the fastest here."
    else:
        verdict = (
            f"threads = {best.threads} is {best.tokens_per_s / ours.tokens_per_s:.1f} times as "
            f"fast here as the study's {threads}. Take it by --set threads={best.threads}; it "
            "makes other cells, whose losses have other last bits."
        )
    return f"Tokens/s of the largest cell: {told}. {verdict}"


def compared(plan: Plan, vocab_size: int, say: Callable[[str], None] = print) -> str:
    """The advice for a start, whose study's device and threads are settled; empty if there is none.

    Args:
        say: gets a line before seconds go by.
    """
    base = plan.study.base
    if base.device != "cpu" or not plan.todo:
        return ""
    pairs = choices(base.threads, cores(), len(plan.todo), machine.workers())
    if len(pairs) < 2:
        return ""
    say("Comparing numbers of threads ...")
    largest = cost.largest(plan.study, vocab_size)
    return advice(measure(largest, vocab_size, pairs), base.threads)
