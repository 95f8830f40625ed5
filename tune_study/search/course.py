"""A search as far as it has come, cell by cell."""

from __future__ import annotations

from collections.abc import Callable, Collection

from tune_study.search.ends import End, Place
from tune_study.search.rounds import Edge, Rounds


class Course:
    """A search as far as it has come: rounds run, and the one that is due.

    Args:
        rounds: the search.
        ended: how a cell ended in an earlier start of the study; None if it did not. Asked of a
            cell when its round comes: what else is known decides nothing.
        cells: most cells to run altogether beyond those given, or None.
        given: cells known before the first round, all of which have ended; evidence throughout.
    """

    def __init__(
        self,
        rounds: Rounds,
        ended: Callable[[Place], End | None],
        cells: int | None = None,
        given: Collection[Place] = (),
    ) -> None:
        self._rounds, self._ended = rounds, ended
        self.ends: dict[Place, End] = {
            cell: end for cell in given if (end := ended(cell)) is not None
        }
        self.given = tuple(self.ends)
        self._most = None if cells is None else cells + len(self.given)
        self.due: list[Place] = []
        self.batches: list[list[Place]] = []
        self._go_on()

    @property
    def asked(self) -> list[Place]:
        """The cells given, and those of all rounds so far, in order."""
        return [*self.given, *(cell for batch in self.batches for cell in batch)]

    def tell(self, cell: Place, end: End) -> None:
        """Takes the end of a cell that is due; with the last of a round, the next one is due."""
        self.due.remove(cell)
        self._told[cell] = end
        if not self.due:
            self.ends |= self._told
            self._go_on()

    def edges(self) -> list[Edge]:
        """What is known of every line by the rounds that have ended."""
        return self._rounds.edges(self.ends)

    def _go_on(self) -> None:
        while not self.due:
            batch = self._rounds.next(self.ends)
            if self._most is not None:
                batch = batch[: max(0, self._most - len(self.ends))]
            if not batch:
                return
            self.batches.append(batch)
            self._told = {cell: end for cell in batch if (end := self._ended(cell)) is not None}
            self.due = [cell for cell in batch if cell not in self._told]
            if not self.due:
                self.ends |= self._told
