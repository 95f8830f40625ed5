"""The histories of many cells as columns: a study may have a million rows.

A large study is read by processes of its own, one a core, since Python parses JSON on one. They
are started by command, not forked: a script that calls `load` needs no guard, and threads that
Ray or torch have started do not matter.
"""

from __future__ import annotations

import gc
import itertools
import pickle
import signal
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tune_study.concurrency import cores
from tune_study.config import Criterion, TrialConfig
from tune_study.divergence import Row, Verdict
from tune_study.records import Record, ended

Array = NDArray[np.float64]
Asked = tuple[TrialConfig, Record]

NOTES, LOSSES = "nonfinite", "train/losses"
"""The two metrics that are not one number: a text, and the losses of single steps."""

NUMBERS = frozenset({int, float, type(None)})
"""Types a metric can have: null stands for what is not finite."""

NOT_METRICS = frozenset({"params", "threads", "timestamp", "training_iteration", "verdict/step"})
"""Numbers in a row that are not about training."""

BATCH_BYTES = 2**24
"""What a process reads at a time: some hundred cells, a small part of the result."""

LARGE_BYTES = 2**27
"""From here on a second of parsing is shared out; below, starting processes takes longer."""


@dataclass(frozen=True)
class History:
    """What is known of one cell's run without its rows.

    Attributes:
        rows: how many there are.
        first, last: of these, whole; empty where there is none.
        verdict: how the run ended; None if it did not.
        max_logit: largest attention logit at any report; NaN if there is none.
    """

    rows: int
    first: Row
    last: Row
    verdict: Verdict | None
    max_logit: float


@dataclass(frozen=True)
class Histories:
    """Some cells, and their rows one after the other as columns.

    Attributes:
        cells: in the order asked for.
        numbers: the metrics, of shape (rows,); NaN where one was not reported or not finite.
        notes: of each row which values were not finite.
        losses, n_losses: the loss of every single step, and how many belong to each row.
        damage: a line for each thing that was torn or missing.
    """

    cells: list[History]
    numbers: dict[str, Array]
    notes: list[str]
    losses: NDArray[np.float32]
    n_losses: NDArray[np.int64]
    damage: list[str]

    def step_losses(self) -> list[NDArray[np.float32]]:
        """The losses of single steps, one array a row."""
        ends = np.cumsum(self.n_losses).tolist()
        return [self.losses[start:end] for start, end in itertools.pairwise([0, *ends])]


def read(asked: Iterable[Asked], criterion: Criterion, large: bool) -> Iterator[Histories]:
    """The histories of cells in the order asked for, some at a time.

    Args:
        asked: may be worked out while the first are being read.
        large: whether it is worth while to start processes, as `is_large` says.

    Raises:
        RuntimeError: if a reading process ended; its own message is on stderr.
    """
    processes = cores() if large and sys.executable else 1
    if processes > 1:
        yield from _read_apart(_batches(asked), criterion, processes)
    else:
        for batch in _batches(asked):
            yield read_batch(batch, criterion)


def is_large(records: Iterable[Record]) -> bool:
    """Whether the results take longer to parse than processes to start."""
    return sum(_size(record) for record in records) >= LARGE_BYTES


def _batches(asked: Iterable[Asked]) -> Iterator[list[Asked]]:
    """The cells in lists of about BATCH_BYTES."""
    batch: list[Asked] = []
    size = 0
    for cell in asked:
        batch.append(cell)
        size += _size(cell[1])
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _size(record: Record) -> int:
    return sum(attempt.size for attempt in record.attempts)


# ---------------------------------------------------------------- other processes


def _read_apart(
    batches: Iterator[list[Asked]], criterion: Criterion, processes: int
) -> Iterator[Histories]:
    """Like read_batch on each, by so many processes."""
    with ExitStack() as stack:
        idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        for _ in range(processes):
            idle.put(stack.enter_context(_reader()))

        def ask(batch: list[Asked]) -> Histories:
            process = idle.get()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                pickle.dump((batch, criterion), process.stdin)
                process.stdin.flush()
                return pickle.load(process.stdout)
            except (EOFError, BrokenPipeError):
                raise RuntimeError("a process that reads results ended") from None
            finally:
                idle.put(process)

        pool = stack.enter_context(ThreadPoolExecutor(processes))
        yield from pool.map(ask, batches)


@contextmanager
def _reader() -> Iterator[subprocess.Popen[bytes]]:
    """A process that answers requests on its stdin; it has nothing to lose at the end."""
    root = str(Path(__file__).resolve().parents[1])
    code = (
        f"import sys; sys.path.insert(0, {root!r})\n"
        "from tune_study.histories import serve; serve(sys.stdin.buffer, sys.stdout.buffer)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        yield process
    finally:
        process.kill()
        with suppress(BrokenPipeError):
            process.communicate()


def serve(requests: Any, answers: Any) -> None:
    """Reads batches for another process, which ends this one by closing `requests`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the other's to handle
    gc.disable()  # rows have no cycles, and looking for some takes a fifth of the time
    while True:
        try:
            batch, criterion = pickle.load(requests)
        except EOFError:
            return
        pickle.dump(read_batch(batch, criterion), answers, protocol=5)
        answers.flush()


# --------------------------------------------------------------- rows to columns


def read_batch(batch: Sequence[Asked], criterion: Criterion) -> Histories:
    """The histories of a few cells."""
    cells: list[History] = []
    tables: list[dict[str, Array]] = []
    notes: list[str] = []
    losses: list[NDArray[np.float32]] = []
    n_losses: list[int] = []
    damage: list[str] = []
    for config, record in batch:
        rows = record.history(config, damage)
        cells.append(
            History(
                rows=len(rows),
                first=rows[0] if rows else {},
                last=rows[-1] if rows else {},
                verdict=ended(rows, config, criterion),
                max_logit=_largest([row["attn/max_logit"] for row in rows]),
            )
        )
        tables.append(_columns(rows))
        notes += [row.get(NOTES, "") for row in rows]
        steps = [row.get(LOSSES, []) for row in rows]
        losses.append(_concatenated(steps))
        n_losses += [len(one) for one in steps]
    return Histories(
        cells=cells,
        numbers=_joined(tables, [cell.rows for cell in cells]),
        notes=notes,
        losses=np.concatenate(losses),
        n_losses=np.array(n_losses, dtype=np.int64),
        damage=damage,
    )


def _largest(values: Iterable[float | None]) -> float:
    return max((value for value in values if value is not None), default=np.nan)


def _columns(rows: list[Row]) -> dict[str, Array]:
    """The numbers in the rows of one cell, by key.

    A version of the code may have added a metric since the cell began: where a row lacks what
    the first or the last row has, there is NaN.
    """
    if not rows:
        return {}
    first, last = rows[0], rows[-1]
    names = [
        name
        for name, value in {**last, **first}.items()
        if type(value) in NUMBERS and name not in NOT_METRICS
    ]
    # Null at either end is null nearly everywhere, and makes converting slow.
    common = [n for n in names if first.get(n) is not None and last.get(n) is not None]
    table = dict(zip(common, _matrix(rows, common).T, strict=True))
    for name in set(names) - set(common):
        table[name] = np.array([row.get(name) for row in rows], dtype=np.float64)
    return table


def _matrix(rows: list[Row], names: list[str]) -> Array:
    """Some numbers of every row, shape (rows, names); NaN for null and where one is lacking."""
    if len(names) > 1:  # with one, itemgetter gives no tuple
        pack, every = struct.Struct(f"{len(names)}d").pack, itemgetter(*names)
        try:
            content = b"".join([pack(*every(row)) for row in rows])
            return np.frombuffer(content).reshape(len(rows), len(names))
        except (KeyError, struct.error):
            pass
    return np.array([[row.get(name) for name in names] for row in rows], dtype=np.float64)


def _concatenated(lists: list[list[float | None]]) -> NDArray[np.float32]:
    """The values of all lists one after the other; None becomes NaN."""
    values = list(itertools.chain.from_iterable(lists))
    try:
        return np.frombuffer(struct.pack(f"{len(values)}f", *values), np.float32)
    except (struct.error, OverflowError):
        with np.errstate(over="ignore"):
            return np.array(values, dtype=np.float64).astype(np.float32)


def _joined(tables: Sequence[dict[str, Array]], counts: Sequence[int]) -> dict[str, Array]:
    """Columns one below the other; NaN for the rows of a cell that lacks one."""
    names = dict.fromkeys(itertools.chain.from_iterable(tables))
    columns = {name: np.full(sum(counts), np.nan) for name in names}
    start = 0
    for table, count in zip(tables, counts, strict=True):
        for name, values in table.items():
            columns[name][start : start + count] = values
        start += count
    return columns
