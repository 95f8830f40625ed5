"""Encoding in helper processes: the main process reads and counts while they encode.

Threads do not help here: looking up cells is Python's own work. A helper runs `main`;
it reads chunks from its standard input and ends when that ends, so a killed
preparation leaves none behind.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy.typing as npt

from tune_study.data.tokenizers import Tokenizer

ALONE = 64
"""Chunks encoded before helpers are started: small texts are done sooner without."""
MOST = 4
"""Helpers at most: reading the text keeps no more busy."""


def encode_in_order(
    tokenizer: Tokenizer, chunks: Iterator[list[str]], helpers: int | None = None
) -> Iterator[npt.NDArray]:
    """Token ids of each chunk of documents, in order; on several cores for long texts.

    Args:
        tokenizer: whose `encode_documents` to apply.
        chunks: lists of documents.
        helpers: how many processes; None for one fewer than cores, at most `MOST`.
    """
    if helpers is None:
        helpers = min((os.cpu_count() or 1) - 1, MOST)
    for chunk in islice(chunks, ALONE if helpers else None):
        yield tokenizer.encode_documents(chunk)
    first = next(chunks, None)
    if first is None:
        return
    workers = deque(_Worker(tokenizer) for _ in range(helpers))
    try:
        # Each has one chunk at a time, so that never both sides wait for the other to read.
        for chunk in chain([first], chunks):
            worker = workers[0]
            workers.rotate(-1)
            done = worker.receive() if worker.busy else None
            worker.send(chunk)
            if done is not None:
                yield done
        for worker in workers:
            if worker.busy:
                yield worker.receive()
    finally:
        for worker in workers:
            worker.close()


class _Worker:
    """One helper process."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        package_root = str(Path(__file__).parents[2])
        paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        self.busy = False
        self._write(tokenizer.to_json())

    def _write(self, message: Any) -> None:
        assert self._process.stdin is not None
        pickle.dump(message, self._process.stdin)
        self._process.stdin.flush()

    def send(self, texts: list[str]) -> None:
        self._write(texts)
        self.busy = True

    def receive(self) -> npt.NDArray:
        assert self._process.stdout is not None
        self.busy = False
        try:
            return pickle.load(self._process.stdout)
        except EOFError:
            raise RuntimeError("a process that encodes text was ended from outside") from None

    def close(self) -> None:
        """Ends the process, in the middle of a chunk if need be."""
        self._process.kill()
        self._process.communicate()


def main() -> None:
    """A helper: the tokenizer first, then texts in and token ids out until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process' to answer
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    tokenizer = Tokenizer.from_json(pickle.load(source))
    while True:
        try:
            texts = pickle.load(source)
        except EOFError:
            return
        pickle.dump(tokenizer.encode_documents(texts), sink, protocol=5)
        sink.flush()
