"""What a person sees while a sweep runs: one live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ray.tune import Callback
from ray.tune.experiment import Trial
from rich.console import Console, RenderableType
from rich.live import Live

from tune_study import view
from tune_study.board import TO_GO, Board

if TYPE_CHECKING:
    from tune_study.losses import Losses

LIVE_INTERVAL_S = 0.5
"""Seconds between two pictures on a terminal: drawing one takes as long as the study has cells."""

PLAIN_INTERVAL_S = 15.0
"""Seconds between plain lines when the output is not a terminal."""


class Progress(Callback):
    """Keeps the board of a study and shows it.

    Args:
        board: with what earlier starts found.
        at_once: cells at a time.
        console: where to write; standard output by default.

    Attributes:
        losses: cells that lost their node, where a sweep notes such.
    """

    losses: Losses | None = None

    def __init__(self, board: Board, at_once: int, console: Console | None = None) -> None:
        self.board, self.at_once = board, at_once
        self.console = console or Console(file=sys.stdout, highlight=False)
        self._last: dict[str, dict[str, Any]] = {}
        self._shown = 0.0
        self._live: Live | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles its callbacks with the experiment; a terminal is not part of that.
        return {k: v for k, v in self.__dict__.items() if k not in {"console", "_live", "losses"}}

    def setup(self, *args: Any, **info: Any) -> None:
        """Begins to show, when Tune does."""
        if self.console.is_terminal and self._live is None:
            self._live = Live(self._screen(), console=self.console, refresh_per_second=2)
            self._live.start()

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        self._show()

    def on_trial_start(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        cell = trial.config["cell"]
        self.board.begin(cell["label"], cell["last_step"], time.monotonic())

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict, **info: Any
    ) -> None:
        if trial.trial_id not in self._last:
            for why in result["checkpoints_skipped"]:
                self._say(f"{result['cell']}: {why}; went on from step {result['resumed_step']}")
        self._last[trial.trial_id] = result
        self.board.report(result["cell"], result, time.monotonic())

    def on_trial_complete(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        label = trial.config["cell"]["label"]
        cell, row = self.board.cells[label], self._last.pop(trial.trial_id, {})
        ended = "stable" if cell.step >= cell.steps else TO_GO
        self.board.end(label, row.get("verdict/state") or ended)

    def on_trial_error(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        label = trial.config["cell"]["label"]
        self._last.pop(trial.trial_id, None)
        if self.losses is not None and label in self.losses.labels:
            self.board.end(label, TO_GO)
            self._say(f"{label}: its node is gone; it goes on from its last checkpoint later")
            return
        self.board.end(label, "errored")
        self._say(f"{label}: errored")

    def go_on(self, labels: Iterable[str], lines: Iterable[str]) -> None:
        """Counts a search's next round in, and shows what the rounds so far have found.

        Args:
            labels: the cells of the next round.
            lines: what is known.
        """
        self.board.ask(labels)
        for line in lines:
            self._say(line)

    def close(self) -> None:
        """Stops showing and leaves the last state on the screen."""
        for label in self.board.running():
            self.board.end(label, TO_GO)
        if self._live is not None:
            self._live.update(self._screen())
            self._live.stop()
            self._live = None
        else:
            self._say(self._line())

    def _say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True)

    def _show(self) -> None:
        interval = PLAIN_INTERVAL_S if self._live is None else LIVE_INTERVAL_S
        if time.monotonic() - self._shown < interval:
            return
        if self._live is not None:
            self._live.update(self._screen())
        else:
            self._say(self._line())
        self._shown = time.monotonic()

    def _screen(self) -> RenderableType:
        left = view.time_left(self.board, self.at_once)
        return view.screen(self.board, left, self.console.width)

    def _line(self) -> str:
        return view.line(self.board, view.time_left(self.board, self.at_once))
