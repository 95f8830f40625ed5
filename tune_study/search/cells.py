"""A study's cells as places of its search, and the other way round."""

from __future__ import annotations

from collections.abc import Callable

from tune_study.config import Criterion, Study, TrialConfig
from tune_study.divergence import Row
from tune_study.records import ended
from tune_study.search.course import Course
from tune_study.search.ends import End, Line, Place
from tune_study.search.rounds import Rounds


class Lattice:
    """The cells a search chooses from: every combination of the study's axes."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.lrs = tuple(sorted(study.axis("lr")))
        at = {lr: place for place, lr in enumerate(self.lrs)}
        self.configs: dict[Place, TrialConfig] = {}
        for config in study.cells():
            line = Line(config.depth, config.arm, config.seed)
            self.configs[line, at[config.lr]] = config
        self.places = {config.label: place for place, config in self.configs.items()}

    def course(self, end: Callable[[TrialConfig], End | None]) -> Course:
        """The study's search as far as the cells that have ended take it.

        Args:
            end: how a cell ended; None if it did not.
        """
        rules = self.study.search
        assert rules is not None
        lines = list(dict.fromkeys(line for line, _ in self.configs))
        rounds = Rounds(lines, self.lrs, rules, self.study.criterion)
        given: list[Place] = []
        if rules.given:
            grid = self.study.replace(axes=rules.given, search=None)
            labels = {config.label for config in grid.cells()}
            given = [place for label, place in self.places.items() if label in labels]
        return Course(rounds, lambda place: end(self.configs[place]), rules.cells, given)


def end_of(rows: list[Row], config: TrialConfig, criterion: Criterion) -> End | None:
    """How a cell ended by what it reported; None if it has not."""
    verdict = ended(rows, config, criterion)
    if verdict is None:
        return None
    last = rows[-1]
    return End(last["val/loss"], last["data/unigram_entropy"], verdict.state == "diverged")
