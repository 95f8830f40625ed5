"""What a person sees while a sweep runs: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

from ray.tune import Callback
from ray.tune.experiment import Trial
from rich.console import Console
from rich.live import Live
from rich.text import Text

PLAIN_INTERVAL_S = 15.0
"""Seconds between plain lines when the output is not a terminal."""


class Progress(Callback):
    """Counts cells and optimiser steps, and estimates the time left from the speed so far.

    A diverged cell stops early: all its steps count as done, so the estimate learns from it.

    Args:
        total: cells of the study.
        done: cells that earlier starts finished.
        steps: optimiser steps still to run over all cells.
        console: where to write; standard output by default.
    """

    def __init__(self, total: int, done: int, steps: int, console: Console | None = None) -> None:
        self.total, self.done, self.steps = total, done, steps
        self.console = console or Console(file=sys.stdout, highlight=False)
        self.states: Counter[str] = Counter()
        self.last: dict[str, dict[str, Any]] = {}
        self.steps_done = 0
        self.started = time.monotonic()
        self._printed = 0.0
        self._live: Live | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles its callbacks with the experiment; a terminal is not part of that.
        return {k: v for k, v in self.__dict__.items() if k not in {"console", "_live"}}

    def setup(self, *args: Any, **info: Any) -> None:
        """Begins to show, when Tune does."""
        self.started = time.monotonic()
        if self.console.is_terminal:
            self._live = Live(self._line(), console=self.console, refresh_per_second=4)
            self._live.start()

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        self._show()

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict, **info: Any
    ) -> None:
        if trial.trial_id not in self.last:
            for why in result["checkpoints_skipped"]:
                self._say(f"{result['cell']}: {why}; went on from step {result['resumed_step']}")
        before = self.last.get(trial.trial_id, {}).get("step", trial.config["cell"]["last_step"])
        self.steps_done += max(0, result["step"] - before)
        self.last[trial.trial_id] = result

    def on_trial_complete(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        row = self.last.pop(trial.trial_id, None)
        if row is None:
            return
        steps = trial.config["cell"]["steps"]
        state = row.get("verdict/state") or ("finished" if row["step"] >= steps else "cut off")
        if state != "cut off":
            self.done += 1
            self.steps_done += steps - row["step"]
        self.states[state] += 1

    def on_trial_error(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        self.last.pop(trial.trial_id, None)
        self.states["errored"] += 1
        self._say(f"{trial.config['cell']['label']}: errored")

    def go_on(self, total: int, steps: int, lines: list[str]) -> None:
        """Counts a search's next round in, and shows what the rounds so far have found.

        Args:
            total: cells asked for so far.
            steps: optimiser steps of the next round.
            lines: what is known.
        """
        self.total, self.steps = total, self.steps + steps
        for line in lines:
            self._say(line)

    def close(self) -> None:
        """Stops showing and leaves the last state on the screen."""
        if self._live is not None:
            self._live.update(self._line())
            self._live.stop()
            self._live = None
        else:
            self.console.print(self._line(), soft_wrap=True)

    def eta_s(self) -> float | None:
        """Seconds left at the speed so far; None before the first steps are done."""
        if not self.steps_done:
            return None
        elapsed = time.monotonic() - self.started
        return elapsed * max(0, self.steps - self.steps_done) / self.steps_done

    def _say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True)

    def _show(self) -> None:
        if self._live is not None:
            self._live.update(self._line())
        elif time.monotonic() - self._printed >= PLAIN_INTERVAL_S:
            self._printed = time.monotonic()
            self.console.print(self._line(), soft_wrap=True)

    def _line(self) -> Text:
        eta = self.eta_s()
        left = "estimating time left" if eta is None else f"{duration(eta)} left"
        states = "".join(f", {n} {state}" for state, n in self.states.items() if n)
        running = " | ".join(
            f"{row['cell']} step {row['step']} loss {number(row['val/loss'])}"
            for row in self.last.values()
        )
        return Text(f"{self.done}/{self.total} cells{states}; {left}. {running}")


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
