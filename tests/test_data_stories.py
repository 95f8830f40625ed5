"""The built-in corpus: exact probabilities, exact entropy, replay."""

import math
import random
import statistics
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tune_study.data import process
from tune_study.data.process import Table, Teller
from tune_study.data.stories import stories, tell

TOSS = Table({"heads": 1, "tails": 1})
DIE = Table(["one", "two", "three", "four"])
COLOUR = Table({"red": 3, "blue": 1})


def coin_then_die(t: Teller) -> None:
    """Heads: a four-sided die. Tails: nothing more."""
    t.say("It fell on ")
    if t.branch(TOSS) == "heads":
        t.say(" and ")
        t.word(DIE)
    t.say(".")


def test_entropy_by_hand() -> None:
    # H = H(coin) + 1/2 H(die) = ln 2 + 1/2 ln 4 = 2 ln 2.
    assert process.entropy(coin_then_die) == pytest.approx(2 * math.log(2), abs=1e-12)


def test_probability_by_hand() -> None:
    log_p, choices = process.read(coin_then_die, "It fell on heads and three.")
    assert log_p == pytest.approx(math.log(1 / 8))
    assert choices == ["heads", "three"]
    assert process.read(coin_then_die, "It fell on tails.")[0] == pytest.approx(math.log(1 / 2))


@pytest.mark.parametrize(
    "text", ["It fell on its side.", "It fell on heads.", "It fell on tails. And?", "Once"]
)
def test_a_text_of_another_process_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="text"):
        process.read(coin_then_die, text)


def test_an_option_that_begins_another_is_refused() -> None:
    with pytest.raises(ValueError, match="'Tom' begins option 'Tommy'"):
        Table(["Tommy", "Anna", "Tom"])


def test_what_depends_on_a_word_fails_instead_of_giving_a_wrong_entropy() -> None:
    def depends(t: Teller) -> None:
        t.word({"red": DIE, "blue": TOSS}[t.word(COLOUR)])

    process.write(depends, random.Random(0))  # it can be told ...
    with pytest.raises(KeyError):  # ... but its entropy is not claimed
        process.entropy(depends)


def test_branches_are_all_ways_and_sum_to_one() -> None:
    total = math.fsum(math.exp(walk.log_probability) for walk in process.branches(tell))
    assert total == pytest.approx(1, abs=1e-12)


def test_exact_entropy_is_the_mean_of_minus_log_p() -> None:
    exact = process.entropy(tell)
    sample = [-log_p for _, log_p in islice(stories(3, "train"), 10_000)]
    error = statistics.stdev(sample) / math.sqrt(len(sample))
    assert error < 0.0012 * exact
    # Four standard errors: a right value fails for 1 seed in 16,000, and the seed is fixed.
    assert abs(statistics.fmean(sample) - exact) < 4 * error


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 10**9))
def test_reading_a_story_gives_its_choices_and_probability(seed: int) -> None:
    story, log_p = process.write(tell, random.Random(seed))
    read_log_p, choices = process.read(tell, story)
    assert read_log_p == pytest.approx(log_p, abs=1e-9)
    at = -1
    for choice in choices:  # in order, and all of them are in the text
        at = story.index(choice, at + 1)


def test_streams_repeat_and_differ() -> None:
    def head(seed: int, split: str) -> list[str]:
        return [text for text, _ in islice(stories(seed, split), 20)]

    assert head(0, "train") == head(0, "train")
    assert head(0, "train") != head(1, "train")
    assert head(0, "train") != head(0, "validation")


def test_stories_do_not_change() -> None:
    # The corpus is part of every result: another one needs another manifest.FORMAT.
    assert next(stories(0, "train"))[0] == (
        "Long ago there was a little boy named Leo. He lived in a hut near the sea. Leo had a "
        "boat. It was fast. One sunny day he walked to the beach to sail it. But soon the boat "
        "floated away. Leo looked in the sand and in a big shell, but it was not there. He was "
        'worried. Then a crab named Tilly came by. "Do not worry," said Tilly. "I will help '
        'you." Tilly looked behind a rock and found the fast boat. Leo was happy. "Thank you, '
        'Tilly!" he said. They played until dinner was ready.'
    )


def test_stories_hang_together() -> None:
    for text, _ in islice(stories(1, "train"), 300):
        name = text.split(" named ")[1].split(".")[0]
        thing, look = text.split(". It was ")[0].rsplit(" ", 1)[1], text.split(". It was ")[1]
        look = look.split(".")[0]
        assert text.count(name) >= 3
        they = "she" if (" girl " in text or " rabbit " in text) else "he"
        assert text.split(". ")[1].startswith(f"{they.capitalize()} lived")
        if " and found the " in text:  # what is found is what was lost
            assert f"But soon the {thing} " in text
            assert f" and found the {look} {thing}." in text
