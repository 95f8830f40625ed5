"""Readers of text: documents, repairs, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tune_study.config import ConfigError, DataConfig
from tune_study.data import corpora, open_tokens, prepare
from tune_study.data.corpora import local_files, open_corpus, read_documents
from tune_study.data.text import Found, clean, fingerprint

END = "<|endoftext|>"


def documents(path: Path, end: str | None = END, column: str = "text") -> list[str]:
    found = Found()
    return [clean(document, found) for document in read_documents(path, end, column)]


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a\nb\n<|endoftext|>\nc\n<|endoftext|>\n", ["a\nb", "c"]),
        ("a\n<|endoftext|>\nc", ["a", "c"]),  # no end after the last
        ("a\n<|endoftext|>\nc\n", ["a", "c"]),
        ("a\n<|endoftext|>", ["a"]),  # no line break after the last end
        ("a\r\nb\r\n<|endoftext|>\r\nc\r\n<|endoftext|>\r\n", ["a\r\nb", "c"]),
        ("<|endoftext|>\na\n<|endoftext|>\n<|endoftext|>\n", ["", "a", ""]),
        ("a <|endoftext|>\n<|endoftext|> b\n<|endoftext|>\n", ["a <|endoftext|>\n<|endoftext|> b"]),
        ("\n\na\n\n<|endoftext|>\n", ["\n\na\n"]),
        ("\n<|endoftext|>\n", [""]),
        ("", []),
    ],
)
def test_end_of_text_lines(tmp_path: Path, content: str, expected: list[str]) -> None:
    assert documents(write(tmp_path / "a.txt", content)) == expected


LINE = st.sampled_from(["a", "", "b c", END, f"{END} x", f"x {END}", "é", "\r"])


@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(lines=st.lists(LINE), block=st.integers(1, 40), newline=st.sampled_from(["\n", "\r\n"]))
@example(lines=[END, END, "a", END], block=1, newline="\n")
def test_blocks_cut_anywhere_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str], block: int, newline: str
) -> None:
    # The rule once more, line by line: documents are the lines between lines that are END.
    lines = [*lines, "last", END]
    expected, current = [], []
    for line in lines:
        if line == END:
            expected.append(newline.join(current))
            current = []
        else:
            current.append(line)
    path = write(tmp_path / "a.txt", "".join(line + newline for line in lines))
    monkeypatch.setattr(corpora, "BLOCK", block)
    read = documents(path)
    assert [text.rstrip("\r") for text in read] == [text.rstrip("\r") for text in expected]


def test_one_document_a_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", f"one\n\ntwo {END}\r\nthree")
    assert documents(path, end=None) == ["one", "", f"two {END}", "three"]


def test_json_lines_and_parquet(tmp_path: Path) -> None:
    texts = ["one\ntwo", "", "é 😀", END]
    rows = [json.dumps({"id": i, "story": text}) for i, text in enumerate(texts)]
    path = write(tmp_path / "a.jsonl", "\n".join(rows) + "\n\n")
    assert documents(path, column="story") == texts
    pd.DataFrame({"id": range(4), "story": [*texts[:3], None]}).to_parquet(tmp_path / "a.parquet")
    assert documents(tmp_path / "a.parquet", column="story") == [*texts[:3], ""]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": \n', r"a\.jsonl, line 2: is not JSON"),
        ("a.jsonl", '{"story": "a"}\n', r"line 1: has no text under 'text' \(has: 'story'\)"),
        ("a.jsonl", '{"text": 3}\n', "line 1: has no text under 'text'"),
        ("a.jsonl", "[1]\n", "line 1: has no text under 'text'"),
        ("a.parquet", "no parquet", "is not a Parquet file"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        documents(write(tmp_path / name, content))


def test_a_missing_parquet_column_is_named(tmp_path: Path) -> None:
    pd.DataFrame({"story": ["a"], "n": [1]}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"no text column 'text' \(has: story .*, n \(int64\)\)"):
        documents(tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="no text column 'n'"):
        documents(tmp_path / "a.parquet", column="n")


def test_a_file_without_end_lines_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpora, "LONGEST", 100)
    monkeypatch.setattr(corpora, "BLOCK", 64)
    path = write(tmp_path / "a.txt", "some words\n" * 20)
    with pytest.raises(ConfigError, match=r"a document without a line '<|endoftext|>'"):
        documents(path)
    assert len(documents(path, end=None)) == 20


def test_folders_and_lists(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.jsonl", "deep/c.parquet", "README.md"):
        write(tmp_path / name, "x")
    names = [path.name for path in local_files("train", str(tmp_path))]
    assert names == ["a.jsonl", "b.txt", "c.parquet"]
    one_by_one = [str(tmp_path / "b.txt"), str(tmp_path / "deep")]
    assert [path.name for path in local_files("train", one_by_one)] == ["b.txt", "c.parquet"]


def test_paths_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.pdf", "x")
    (tmp_path / "empty").mkdir()
    for given_path, why in (
        ("missing.txt", "does not exist"),
        ("a.pdf", "is of no known kind"),
        ("empty", "holds no .txt, .jsonl, .parquet file"),
    ):
        with pytest.raises(ConfigError, match=rf"^data\.train = '.*': {why}"):
            list(local_files("train", str(tmp_path / given_path)))


def test_repairs_are_counted() -> None:
    found = Found()
    assert clean(b"caf\xe9 \xff", found) == "caf\ufffd \ufffd"
    assert (found.repaired, found.replacement_characters) == (2, 0)
    assert clean("\ud83d\ude00 \ud83d", found) == "😀 \ufffd"  # a pair is joined, a half is not
    assert (found.repaired, found.replacement_characters) == (3, 0)
    assert clean("was \ufffd".encode(), found) == "was \ufffd"
    assert clean("was \ufffd", found) == "was \ufffd"
    assert (found.repaired, found.replacement_characters) == (3, 2)


def test_mangled_characters_are_counted_and_left() -> None:
    found = Found()
    mangled = "“Oh”, said Zoë’s café".encode().decode("cp1252", errors="replace")
    assert clean(mangled.replace("\ufffd", "\x9d"), found) == mangled.replace("\ufffd", "\x9d")
    assert found.mangled == 5  # two double quotes, an e with dots, an apostrophe, an e acute
    sound = Found()
    text = "“Oh”, said Zoë’s café – naïve, “Ça va?” Å, 世界 😀, «à»"
    assert clean(text, sound) == text
    assert sound == Found()


def test_equal_documents_share_a_fingerprint() -> None:
    assert fingerprint(" a b\n") == fingerprint("a b")
    assert fingerprint("a b") != fingerprint("a  b")


class FakeHub:
    """Stands for the hub: what `datasets` would load, made from rows given here."""

    def __init__(self, folder: Path, splits: dict[str, list[str | None]], column: str) -> None:
        self.load = datasets.load_dataset
        self.asked: list[tuple[Any, ...]] = []
        self.files = {split: str(folder / f"{split}.parquet") for split in splits}
        self.cache = str(folder / "cache")
        for split, rows in splits.items():
            pd.DataFrame({column: pd.Series(rows, dtype="str")}).to_parquet(self.files[split])

    def load_dataset(self, name: str, subset: str | None, *, split: str, revision: str) -> Any:
        self.asked.append((name, subset, split, revision))
        if split not in self.files:
            raise ValueError(f'Unknown split "{split}". Should be one of {list(self.files)}.')
        return self.load(
            "parquet", data_files=self.files, split=split, cache_dir=self.cache, revision=None
        )


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    hub = FakeHub(tmp_path, {"train": ["one", None, "two\n"], "validation": ["three"]}, "text")
    monkeypatch.setattr(datasets, "load_dataset", hub.load_dataset)
    monkeypatch.setattr(datasets, "disable_progress_bars", lambda: None)
    return hub


def test_tinystories_is_loaded_at_the_pinned_revision(hub: FakeHub) -> None:
    corpus = open_corpus(DataConfig(corpus="tinystories"))
    assert list(corpus.documents("train")) == ["one", "", "two\n"]
    assert list(corpus.documents("validation")) == ["three"]
    assert hub.asked == [
        ("roneneldan/TinyStories", None, split, "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64")
        for split in ("train", "validation")
    ]


def test_any_hosted_data_set(hub: FakeHub) -> None:
    settings = {"corpus": "huggingface", "dataset": "who/what", "revision": "abc"}
    corpus = open_corpus(DataConfig(**settings, validation_split="train", train_documents=1))
    assert list(corpus.documents("train")) == ["one"]
    assert list(corpus.documents("validation")) == ["one", "", "two\n"]
    assert hub.asked[0] == ("who/what", None, "train", "abc")
    assert corpus.name == "what"
    with pytest.raises(ConfigError, match=r"Unknown split \"test\"\. Should be one of"):
        list(open_corpus(DataConfig(**settings, train_split="test")).documents("train"))
    with pytest.raises(ConfigError, match="no text column 'story'"):
        list(open_corpus(DataConfig(**settings, column="story")).documents("train"))


def test_after_preparation_the_hub_is_not_asked_again(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DataConfig(corpus="tinystories", tokenizer="bytes")
    folder = prepare(config, tmp_path / "root", lambda line: None)
    assert folder.name.startswith("TinyStories-bytes-")
    monkeypatch.setattr("datasets.load_dataset", pytest.fail)
    assert prepare(config, tmp_path / "root", lambda line: None) == folder
    tokens = open_tokens(config, tmp_path / "root")
    assert tokens.tokenizer.decode(tokens.train) == "onetwo\n"
    assert tokens.manifest.train.empty == 1
    assert tokens.manifest.settings["revision"] == "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"
    # Brought over to a machine without a network, the folder is found as it is.
    shutil.copytree(folder, tmp_path / "elsewhere" / folder.name)
    assert open_tokens(config, tmp_path / "elsewhere").folder.name == folder.name


def test_without_a_network_one_line_says_what_to_do(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'roneneldan/TinyStories' on the Hub\nmore")

    monkeypatch.setattr("datasets.load_dataset", offline)
    with pytest.raises(ConfigError, match=r"tune_study prepare STUDY.*copy the folder") as caught:
        list(open_corpus(DataConfig(corpus="tinystories")).documents("train"))
    assert "\n" not in str(caught.value)


def test_a_folder_of_the_data_sets_name_is_refused(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "roneneldan" / "TinyStories").mkdir(parents=True)
    with pytest.raises(ConfigError, match="is a path here"):
        list(open_corpus(DataConfig(corpus="tinystories")).documents("train"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"corpus": "text"}, "train: missing with corpus 'text'"),
        ({"corpus": "text", "train": "a.txt"}, "validation: missing with corpus 'text'"),
        ({"corpus": "huggingface", "dataset": "a/b"}, "revision: missing"),
        ({"train": "a.txt"}, "train = 'a.txt': has no effect with corpus 'synthetic'"),
        ({"tokenizer": "bytes", "vocab_size": 512}, "vocab_size = 512: has no effect"),
        ({"tokenizer": "gpt2", "gpt2_vocab": "a"}, "only one of the two is set"),
        ({"corpus": "tinystories", "seed": 1}, "seed = 1: has no effect"),
        ({"vocab_size": 256}, "vocab_size = 256"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataConfig(**settings)
