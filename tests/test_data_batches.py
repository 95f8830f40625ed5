"""Windows: pure functions of (seed, step), inside the split, reaching every token."""

import hashlib
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tune_study.config import ConfigError
from tune_study.data import Batches, validation_windows
from tune_study.data.tokenizers import byte_tokenizer

COUNT = np.arange(1000, dtype=np.uint16)  # token i is i: a window shows where it was cut
bounded = settings(max_examples=100, deadline=None, derandomize=True)


def test_a_batch_is_a_pure_function_of_seed_and_step() -> None:
    batches = Batches(COUNT, seed=7, windows=5, context=8)
    late = batches.at(12345)
    batches.at(3)
    assert np.array_equal(late, Batches(COUNT, 7, 5, 8).at(12345))
    assert not np.array_equal(late, batches.at(12346))
    assert not np.array_equal(late, Batches(COUNT, 8, 5, 8).at(12345))


def test_batches_do_not_change() -> None:
    # The data order is part of every result.
    batches = Batches(COUNT, seed=0, windows=16, context=32)
    digest = hashlib.sha256(batches.range(0, 50).astype("<i8").tobytes()).hexdigest()
    assert digest[:16] == "56753b8adee8348b"


@bounded
@given(
    seed=st.integers(0, 2**64),
    start=st.integers(0, 10**9),
    steps=st.integers(1, 9),
    windows=st.integers(1, 9),
    context=st.integers(1, 20),
)
def test_a_range_is_its_steps_stacked(
    seed: int, start: int, steps: int, windows: int, context: int
) -> None:
    batches = Batches(COUNT, seed, windows, context)
    many = batches.range(start, start + steps)
    assert many.shape == (steps, windows, context + 1)
    assert many.dtype == np.int64
    for i in range(steps):
        assert np.array_equal(many[i], batches.at(start + i))


@bounded
@given(size=st.integers(2, 60), context=st.integers(1, 59), seed=st.integers(0, 100))
def test_windows_lie_inside_the_split_and_reach_every_token(
    size: int, context: int, seed: int
) -> None:
    # A split is a file of its own, so a window that stays inside its array crosses none.
    tokens = np.arange(100, 100 + size, dtype=np.uint16)
    if context + 1 > size:
        with pytest.raises(ConfigError, match=f"Give at most {size - 1}"):
            Batches(tokens, seed, 4, context)
        return
    drawn = Batches(tokens, seed, 64, context).range(0, 30)
    assert (np.diff(drawn, axis=-1) == 1).all()  # 1,920 draws of at most 59 starts
    assert np.array_equal(np.unique(drawn), tokens)


LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=12)


@bounded
@given(train=LENGTHS, validation=LENGTHS, context=st.integers(1, 8))
def test_no_window_crosses_a_split_whatever_the_documents(
    train: list[int], validation: list[int], context: int
) -> None:
    tokenizer = byte_tokenizer()
    one = tokenizer.encode_documents(["a" * length for length in train])
    other = tokenizer.encode_documents(["b" * length for length in validation])
    stream = bytes(np.where(one == 256, 0, one).astype(np.uint8))
    if len(one) > context:
        for window in Batches(one, seed=0, windows=8, context=context).range(0, 4).reshape(32, -1):
            assert bytes(np.where(window == 256, 0, window).astype(np.uint8)) in stream
    if len(other) > context:
        held_out = validation_windows(other, len(other) // (context + 1), context)
        assert set(held_out.ravel()) <= {ord("b"), 256}
        # As many as fit leave out fewer tokens than one window has.
        assert len(other) - held_out.size <= context


def test_starts_are_uniform() -> None:
    starts = Batches(COUNT, seed=1, windows=50, context=900).range(0, 200)[:, :, 0]
    counts = np.bincount(starts.ravel(), minlength=100)
    assert len(counts) == 100
    chi2 = ((counts - 100.0) ** 2 / 100).sum()
    assert 50 < chi2 < 160  # 99 degrees of freedom: mean 99, standard deviation 14


@bounded
@given(size=st.integers(1, 400), windows=st.integers(1, 40), context=st.integers(1, 40))
def test_validation_windows_are_disjoint_and_spread(size: int, windows: int, context: int) -> None:
    tokens = np.arange(size, dtype=np.uint16)
    fit = size // (context + 1)
    if windows > fit:
        with pytest.raises(ConfigError, match=rf"only {fit} windows.*Give at most {fit}"):
            validation_windows(tokens, windows, context)
        return
    cut = validation_windows(tokens, windows, context)
    assert cut.shape == (windows, context + 1)
    assert cut.dtype == np.int64
    assert (np.diff(cut, axis=1) == 1).all()
    assert len(np.unique(cut)) == cut.size  # disjoint
    gaps = np.diff(cut[:, 0])
    assert gaps.size == 0 or gaps.max() - gaps.min() <= 1  # evenly
    assert size - cut[-1, 0] >= size // windows


def test_memory_stays_flat() -> None:
    batches = Batches(COUNT, seed=0, windows=16, context=32)
    tracemalloc.start()
    batches.at(0)
    before = tracemalloc.get_traced_memory()[0]
    for step in range(2_000):
        batches.at(step)
    growth = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert growth < 2_000  # under one byte a batch
