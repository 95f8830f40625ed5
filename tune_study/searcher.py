"""A search of cells as Tune runs it: what the rounds ask for, and how the cells ended."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from ray.tune.search import Searcher

from tune_study.search.course import Course
from tune_study.search.ends import End, Place
from tune_study.turns import Stateless


class CellSearcher(Stateless):
    """Hands Tune the cells of one round, and those of the next when all of them have ended.

    Nothing of it is saved: what has ended stands in the study's folder, from which every start
    works out anew how far the search has come.

    Args:
        course: the search.
        config: the part of a trial's config that says which cell it is.
        end: how a cell ended, by its reports; None if it was cut off.
        round_ended: called when a round has ended.
        lost: labels of cells that lost their node; a round that lacks one does not end, and what
            is left of it is asked for anew.
    """

    def __init__(
        self,
        course: Course,
        config: Callable[[Place], dict[str, Any]],
        end: Callable[[Place], End | None],
        round_ended: Callable[[], None],
        lost: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.course = course
        self._config, self._end, self._round_ended = config, end, round_ended
        self._lost = lost
        self._running: dict[str, Place] = {}
        self._waiting = list(course.due)

    def suggest(self, trial_id: str) -> Any:
        """The next cell of the round; None while cells of it run; FINISHED after the last."""
        if not self._waiting:
            return None if self._running else Searcher.FINISHED
        self._running[trial_id] = self._waiting.pop(0)
        return {"cell": self._config(self._running[trial_id])}

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Takes a cell's end; one that errored is no evidence, and tried again by another start."""
        place = self._running.pop(trial_id)
        if error and self._config(place)["label"] in self._lost:
            return
        end = End(lost=True) if error else self._end(place)
        if end is None:
            return  # cut off: the sweep is ending
        rounds = len(self.course.batches)
        self.course.tell(place, end)
        if len(self.course.batches) > rounds or not self.course.due:
            self._waiting = list(self.course.due)
            self._round_ended()
