"""Random texts whose entropy is known exactly.

A text is told by a function `tell`, which says fixed text and makes choices. There are
two kinds of choice:

- `branch`: what is chosen shapes what can follow (the place decides which animals live
  there). `tell` may look at its text.
- `word`: what is chosen is only repeated later, letter by letter (a name). Nothing else
  depends on it, so its entropy is that of its table, whatever was drawn.

At every choice no option is the beginning of another, so the text says which was taken:
a text can be read back (`read`), its probability is the product of the choices', and the
entropy of the process is a finite sum over the branches (`entropy`): what no model can
beat, on average, on texts it has not seen.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol


class Table:
    """Options of one choice and their probabilities, given as relative weights.

    Raises:
        ValueError: if one option begins with another, so that text could not tell them apart.
    """

    def __init__(self, options: Mapping[str, float] | Sequence[str]) -> None:
        weights = options if isinstance(options, Mapping) else dict.fromkeys(options, 1.0)
        total = sum(weights.values())
        self.texts = tuple(weights)
        self.logs = tuple(math.log(weight / total) for weight in weights.values())
        # Where one option ends and the next begins; the last needs no end.
        self.bounds = [w / total for w in itertools.accumulate(weights.values())][:-1]
        self.entropy = -sum(math.exp(log) * log for log in self.logs)
        for one, other in itertools.pairwise(sorted(self.texts)):
            if other.startswith(one):
                raise ValueError(f"option {one!r} begins option {other!r}")

    def draw(self, uniform: float) -> int:
        """Index of the option that a uniform number of [0, 1) falls to."""
        return bisect.bisect_right(self.bounds, uniform)

    def find(self, text: str, start: int) -> int:
        """Index of the option that stands in `text` at `start`; -1 if none does."""
        return next((i for i, t in enumerate(self.texts) if text.startswith(t, start)), -1)


class Teller(Protocol):
    """Who decides at the choices, and what becomes of the text."""

    def say(self, text: str) -> None: ...
    def branch(self, table: Table) -> str: ...
    def word(self, table: Table) -> str: ...


Tell = Callable[[Teller], None]


class Writer:
    """Draws every choice; collects the text and its log-probability in nats."""

    def __init__(self, generator: random.Random) -> None:
        self._uniform = generator.random
        self._parts: list[str] = []
        self.say = self._parts.append
        self.log_probability = 0.0

    def word(self, table: Table) -> str:
        index = table.draw(self._uniform())
        self.log_probability += table.logs[index]
        self.say(table.texts[index])
        return table.texts[index]

    branch = word

    @property
    def text(self) -> str:
        return "".join(self._parts)


class Reader:
    """Follows a given text and finds the choices that made it.

    Raises:
        ValueError: where the text is none that could have been told.
    """

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self.log_probability = 0.0
        self.choices: list[str] = []

    def say(self, text: str) -> None:
        if not self._text.startswith(text, self._at):
            raise ValueError(
                f"no text of this process has {self._text[self._at : self._at + 20]!r} here"
            )
        self._at += len(text)

    def word(self, table: Table) -> str:
        index = table.find(self._text, self._at)
        if index < 0:
            raise ValueError(
                f"no text of this process has {self._text[self._at : self._at + 20]!r} here"
            )
        self.log_probability += table.logs[index]
        self._at += len(table.texts[index])
        self.choices.append(table.texts[index])
        return table.texts[index]

    branch = word

    @property
    def finished(self) -> bool:
        return self._at == len(self._text)


class Branch:
    """Walks one combination of branches and sums the entropy of the words on its way.

    A word is handed back as a placeholder: a story that let anything depend on it would
    break here instead of getting a wrong entropy.
    """

    def __init__(self, path: list[int]) -> None:
        self._path, self._at = path, 0
        self.sizes: list[int] = []
        self.log_probability = 0.0
        self.word_entropy = 0.0

    def say(self, text: str) -> None: ...

    def branch(self, table: Table) -> str:
        if self._at == len(self._path):
            self._path.append(0)
        index = self._path[self._at]
        self._at += 1
        self.sizes.append(len(table.texts))
        self.log_probability += table.logs[index]
        return table.texts[index]

    def word(self, table: Table) -> str:
        self.word_entropy += table.entropy
        return "\0"


def write(tell: Tell, generator: random.Random) -> tuple[str, float]:
    """One text and its log-probability in nats."""
    writer = Writer(generator)
    tell(writer)
    return writer.text, writer.log_probability


def read(tell: Tell, text: str) -> tuple[float, list[str]]:
    """Log-probability in nats of a text, and the choices that made it.

    Raises:
        ValueError: if the process cannot make this text.
    """
    reader = Reader(text)
    tell(reader)
    if not reader.finished:
        raise ValueError("the text goes on after its end")
    return reader.log_probability, reader.choices


def branches(tell: Tell) -> Iterator[Branch]:
    """Every combination of branches, each walked to its end."""
    path: list[int] = []
    while True:
        walk = Branch(path)
        tell(walk)
        yield walk
        while path and path[-1] + 1 == walk.sizes[len(path) - 1]:
            path.pop()
        if not path:
            return
        path[-1] += 1


def entropy(tell: Tell) -> float:
    """Entropy of one text in nats: exact, by the chain rule.

    H = sum over branch combinations b of p(b) (-ln p(b) + entropy of the words on b).
    """
    return math.fsum(
        math.exp(walk.log_probability) * (walk.word_entropy - walk.log_probability)
        for walk in branches(tell)
    )
