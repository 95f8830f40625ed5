"""Tokenizers: exact round trips, tiktoken = rustbpe, the known counts of GPT-2."""

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import rustbpe
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tune_study.config import ConfigError
from tune_study.data import workers
from tune_study.data.cells import CellEncoder
from tune_study.data.stories import stories
from tune_study.data.tokenizers import (
    GPT2_PATTERN,
    Tokenizer,
    byte_tokenizer,
    compacted,
    gpt2_tokenizer,
    train_bpe,
)

SHARED = Path(__file__).parents[1] / ".." / "shared" / "data"
GPT2_FILES = [SHARED / "gpt2_vocab.bpe", SHARED / "gpt2_encoder.json"]
needs_gpt2 = pytest.mark.skipif(
    not all(path.exists() for path in GPT2_FILES), reason="GPT-2's BPE files are not here"
)
bounded = settings(max_examples=150, deadline=None, derandomize=True)

# White space in all orders, so that merges of it exist and a wrong cut shows.
SPACES = [f"a{one}{two}{three}b" for one in " \n\t" for two in " \n\t" for three in " \n\t"]
STORIES = [text for text, _ in islice(stories(0, "train"), 500)] + 1000 * SPACES
BPE = train_bpe(iter(STORIES), 400)
assert {b"  ", b"\n "} <= set(BPE.pieces)

# Text of white space, letters, digits, marks and whatever else, dense in what is special.
SPECIAL = st.text(st.sampled_from("ab Z'st\n\r\t 12.,!é世😀\u0345\u2028\u3000\xa0\x85\x1c"))
TEXT = st.one_of(st.text(), SPECIAL)


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return gpt2_tokenizer(*map(str, GPT2_FILES))


@bounded
@given(TEXT)
@example("<|endoftext|>")
@example("a <|endoftext|>\n<|endoftext|>")
@example("\x00 \U0010ffff ﷽")
def test_round_trip(text: str) -> None:
    for tokenizer in (BPE, byte_tokenizer()):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.end_of_text not in ids  # the marker in a text is ordinary text
        assert len(tokenizer.encode_documents([text, ""])) == len(ids) + 2


@needs_gpt2
@bounded
@given(text=TEXT)
def test_round_trip_gpt2(gpt2: Tokenizer, text: str) -> None:
    ids = gpt2.encode(text)
    assert gpt2.decode(ids) == text
    assert gpt2.end_of_text not in ids


@bounded
@given(st.lists(TEXT))
@example(["a\n \nb", "a   b"])
@example(["a  b", "a \nb", " a", "a ", "", " ", "a b", "a's b"])
def test_encoding_by_cells_is_encoding_whole(texts: list[str]) -> None:
    whole = [i for text in texts for i in [*BPE.encoding.encode_ordinary(text), BPE.end_of_text]]
    for _ in range(2):  # once encoding the cells, once looking them up
        assert BPE.encode_documents(texts).tolist() == whole


def test_cells_are_forgotten_and_learned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tune_study.data.cells.MEMORY", 10)
    encoder = CellEncoder(BPE.encoding.encode_ordinary, BPE.end_of_text, np.dtype(np.uint16))
    for story in STORIES[:20]:
        assert encoder([story]).tolist() == BPE.encode_documents([story]).tolist()
        assert len(encoder._inner) <= 10


@pytest.mark.parametrize("helpers", [0, 2])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_helpers_keep_the_order(monkeypatch: pytest.MonkeyPatch, helpers: int, count: int) -> None:
    monkeypatch.setattr(workers, "ALONE", 1)
    chunks = [STORIES[3 * i : 3 * i + 3] for i in range(count)]
    encoded = list(workers.encode_in_order(BPE, iter(chunks), helpers))
    assert [ids.tolist() for ids in encoded] == [BPE.encode_documents(c).tolist() for c in chunks]


def trained(texts: list[str], size: int) -> rustbpe.Tokenizer:
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(texts), vocab_size=size, pattern=GPT2_PATTERN)
    return trainer


RUSTBPE = trained(STORIES, 399)


@bounded
@given(TEXT)
def test_tiktoken_encodes_as_the_trainer_does(text: str) -> None:
    assert BPE.encode(text).tolist() == RUSTBPE.encode(text)


def test_bpe_by_hand() -> None:
    # Pieces: "ab" x 4, " ab" x 3, "b" x 1. Pairs: (a, b) 7 times, (" ", a) 3 times.
    # First merge: ab. Then (" ", ab) 3 times: " ab".
    tokenizer = train_bpe(iter(["ab ab ab", "ab ab", "ab", "ab", "b"]), 256 + 2 + 1)
    assert tokenizer.pieces[256:] == (b"ab", b" ab")
    assert tokenizer.encode("ab abb").tolist() == [256, 257, ord("b")]
    assert tokenizer.end_of_text == 258


def test_training_is_repeatable_and_size_exact() -> None:
    assert train_bpe(iter(STORIES), 400) == BPE
    assert train_bpe(iter(STORIES), 400).sha256 == BPE.sha256
    assert BPE.vocab_size == 400
    assert BPE.end_of_text == 399
    assert train_bpe(iter(STORIES), 401).sha256 != BPE.sha256


def test_a_text_too_small_for_the_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"vocab_size = 300: .* only 258\. Give at most"):
        train_bpe(iter(["aa"]), 300)


@pytest.mark.parametrize("size", [2**16, 2**16 + 1])
def test_the_narrowest_type_is_used(size: int) -> None:
    pieces = [bytes([i]) for i in range(256)]
    pieces += [bytes([65 + i // 65536, i // 256 % 256, i % 256]) for i in range(size - 257)]
    tokenizer = Tokenizer("bpe", tuple(pieces))
    assert tokenizer.vocab_size == size
    assert tokenizer.dtype == (np.uint16 if size == 2**16 else np.uint32)
    assert np.iinfo(tokenizer.dtype).max >= tokenizer.end_of_text


def test_files_keep_a_tokenizer() -> None:
    for tokenizer in (BPE, byte_tokenizer(), Tokenizer("gpt2-compact", BPE.pieces, (1, 5, 300))):
        text = tokenizer.to_json()
        assert Tokenizer.from_json(text) == tokenizer
        json.loads(text, parse_constant=pytest.fail)


def test_compact_by_hand() -> None:
    base = Tokenizer("gpt2", tuple(bytes([i]) for i in range(256)))
    counts = np.zeros(257, dtype=np.int64)
    counts[[ord("a"), ord("b"), ord("c"), 256]] = [5, 1, 3, 9]
    everything = compacted(base, counts, None)
    assert everything.kept == (97, 98, 99)
    assert everything.vocab_size == 5
    ids = everything.encode_documents(["cab", "x"])
    assert ids.tolist() == [2, 0, 1, 4, 3, 4]  # c a b end, unknown end
    assert everything.decode(ids) == "cab\ufffd"
    most = compacted(base, counts, 4)  # two of their own, the unknown, the end
    assert most.kept == (97, 99)
    assert most.encode("abc").tolist() == [0, 2, 1]


@needs_gpt2
def test_gpt2_known_ids(gpt2: Tokenizer) -> None:
    assert gpt2.encode("Hello world").tolist() == [15496, 995]
    assert gpt2.vocab_size == 50257
    assert gpt2.end_of_text == 50256


def test_gpt2_files_that_are_not_gpt2s_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gpt2_vocab = .*does not exist"):
        gpt2_tokenizer(str(tmp_path / "vocab.bpe"), str(tmp_path / "encoder.json"))
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\na b\n")
    with pytest.raises(ConfigError, match=r"gpt2_vocab = .*is not GPT-2's"):
        gpt2_tokenizer(str(tmp_path / "vocab.bpe"), str(tmp_path / "encoder.json"))


def test_without_a_network_gpt2_says_what_to_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline() -> dict:
        raise ConnectionError("no route")

    monkeypatch.setattr("tiktoken_ext.openai_public.gpt2", offline)
    with pytest.raises(ConfigError, match=r"Bring vocab\.bpe and encoder\.json") as caught:
        gpt2_tokenizer(None, None)
    assert "\n" not in str(caught.value)
