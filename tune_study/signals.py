"""Signals that ask a process to end: Ctrl-C, SIGTERM, and a terminal that was closed."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Handler = Callable[[int, Any], Any]


@contextmanager
def kept() -> Iterator[dict[int, Any]]:
    """The handlers as they are, which are set again at the end, whoever changes them meanwhile.

    A signal that is ignored here, as under nohup, is left out and stays ignored.
    """
    asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before: dict[int, Any] = {
        n: signal.getsignal(n) for n in asked if signal.getsignal(n) != signal.SIG_IGN
    }
    try:
        yield before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Calls `handler` for them."""
    with kept() as before:
        for number in before:
            signal.signal(number, handler)
        yield


@contextmanager
def orderly(halt: Callable[[], None], at_once: dict[int, Any]) -> Iterator[Callable[[], bool]]:
    """The first calls `halt`, the second the handler in `at_once`; yields whether one came."""
    seen: list[int] = []

    def handler(number: int, frame: Any) -> None:
        if seen:
            deliver(number, at_once)
        seen.append(number)
        halt()

    with handling(handler):
        yield lambda: bool(seen)


def deliver(number: int, handlers: dict[int, Any]) -> None:
    """Answers a signal by one of these handlers; by KeyboardInterrupt if it has none in Python."""
    handler = handlers.get(number)
    (handler if callable(handler) else signal.default_int_handler)(number, None)
