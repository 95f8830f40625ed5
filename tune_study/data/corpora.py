"""Where documents come from: one small interface, four corpora.

A corpus is its two splits, each an iterator over raw documents that can be started any
number of times and holds few documents at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from tune_study.config import ConfigError, DataConfig
from tune_study.data.process import Tell
from tune_study.data.stories import stories, tell

Split = Literal["train", "validation"]
SPLITS: tuple[Split, Split] = ("train", "validation")
SUFFIXES = (".txt", ".jsonl", ".parquet")

TINYSTORIES = "roneneldan/TinyStories"
TINYSTORIES_REVISION = "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"

SYNTHETIC_DOCUMENTS = {"train": 20_000, "validation": 2_000}

BLOCK = 4 << 20
"""Bytes read at a time."""
LONGEST = 64 << 20
"""Bytes a document may have; it bounds memory and catches a wrong `document_end`."""


@dataclass(frozen=True)
class Corpus:
    """Documents of both splits, and where they come from.

    Attributes:
        name: for people; part of the folder's name.
        documents: the raw documents of a split: text, or bytes that should be UTF-8.
        files: the local files of each split, in reading order.
        tell: the random process that made the documents, where that is known.
    """

    name: str
    documents: Callable[[Split], Iterator[str | bytes]]
    files: dict[Split, list[Path]] = field(default_factory=lambda: {s: [] for s in SPLITS})
    tell: Tell | None = None


def open_corpus(config: DataConfig) -> Corpus:
    """The corpus that a configuration names. Reads no text yet.

    Raises:
        ConfigError: if a local path does not exist or holds no text file.
    """
    limits = {
        "train": config.train_documents,
        "validation": config.validation_documents,
    }
    match config.corpus:
        case "synthetic":
            return _synthetic(config.seed, limits)
        case "text":
            return _local(config, limits)
        case "tinystories":
            return _hosted(
                TINYSTORIES, None, TINYSTORIES_REVISION, ("train", "validation"), "text", limits
            )
        case "huggingface":
            assert config.dataset is not None
            assert config.revision is not None
            splits = (config.train_split, config.validation_split)
            return _hosted(
                config.dataset, config.subset, config.revision, splits, config.column, limits
            )


def _synthetic(seed: int, limits: dict[str, int | None]) -> Corpus:
    counts = {split: limits[split] or SYNTHETIC_DOCUMENTS[split] for split in SPLITS}

    def documents(split: Split) -> Iterator[str]:
        return (text for text, _ in islice(stories(seed, split), counts[split]))

    return Corpus(
        name="synthetic",
        documents=documents,
        tell=tell,
    )


def _local(config: DataConfig, limits: dict[str, int | None]) -> Corpus:
    assert config.train is not None
    assert config.validation is not None
    files: dict[Split, list[Path]] = {
        "train": list(local_files("train", config.train)),
        "validation": list(local_files("validation", config.validation)),
    }

    def documents(split: Split) -> Iterator[str | bytes]:
        every = (
            document
            for path in files[split]
            for document in read_documents(path, config.document_end, config.column)
        )
        return islice(every, limits[split])

    first = files["train"][0] if files["train"] else Path(str(config.train))
    return Corpus(
        name=config.name or first.stem,
        documents=documents,
        files=files,
    )


def local_files(setting: str, paths: str | Iterable[str]) -> Iterator[Path]:
    """The text files that paths name: a folder stands for those in it, in order of name.

    Raises:
        ConfigError: if a path does not exist, is of no known kind, or names no file.
    """
    for given in [paths] if isinstance(paths, str) else paths:
        path = Path(given).expanduser().resolve()
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
        elif path.is_file() and path.suffix in SUFFIXES:
            found = [path]
        else:
            why = "is of no known kind" if path.exists() else "does not exist"
            raise ConfigError(
                f"data.{setting} = {given!r}: {why}. "
                f"Give a file ({', '.join(SUFFIXES)}), or a folder of such files."
            )
        if not found:
            raise ConfigError(
                f"data.{setting} = {given!r}: holds no {', '.join(SUFFIXES)} file. "
                "Give a folder that does."
            )
        yield from found


def read_documents(path: Path, document_end: str | None, column: str) -> Iterator[str | bytes]:
    """Documents of one file, by its suffix.

    Raises:
        ConfigError: naming file and place, if the file is not what its suffix says, has no
            such column, or has a document longer than `LONGEST`.
    """
    if path.suffix == ".jsonl":
        return _json_documents(path, column)
    if path.suffix == ".parquet":
        return _parquet_documents(path, column)
    if document_end is None:
        return (line.rstrip(b"\r\n") for line in _lines(path))
    return _text_documents(path, document_end)


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=BLOCK) as file:
        while line := file.readline(LONGEST):
            if len(line) == LONGEST:
                raise _too_long(path, "a line")
            yield line


def _text_documents(path: Path, document_end: str) -> Iterator[bytes]:
    """Text between lines that are exactly the marker; the line break before it is no text."""
    marker = b"\n" + document_end.encode()
    rest = b"\n"  # always begins with the line break before a document
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            # Only whole lines are searched; a marker cut in two waits for its other half.
            lines, newline, cut = (rest + block).rpartition(b"\n")
            *documents, last = _split_at(marker, lines)
            yield from map(_without_line_breaks, documents)
            rest = last + newline + cut
            if len(rest) > LONGEST:
                raise _too_long(path, f"a document without a line {document_end!r}")
    *documents, last = _split_at(marker, rest)
    yield from map(_without_line_breaks, documents)
    if last.strip():
        yield _without_line_breaks(last.removesuffix(b"\n"))


def _split_at(marker: bytes, lines: bytes) -> list[bytes]:
    """Parts between lines equal to the marker; a line that only begins with it is text."""
    parts: list[bytes] = []
    for part in lines.split(marker):
        if part[:1] in (b"\n", b"") or part[:2] in (b"\r\n", b"\r") or not parts:
            parts.append(part)
        else:
            parts[-1] += marker + part
    return parts


def _without_line_breaks(part: bytes) -> bytes:
    """A part without the line break it begins with, and without half of one at its end."""
    return part[2 if part[:1] == b"\r" else 1 :].removesuffix(b"\r")


def _too_long(path: Path, what: str) -> ConfigError:
    return ConfigError(
        f"{path}: has {what} in its first {LONGEST >> 20} MiB. Set data.document_end to the "
        "line that ends a document, or to null for one document a line."
    )


def _json_documents(path: Path, column: str) -> Iterator[str]:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            raise ConfigError(
                f"{path}, line {number}: is not JSON. Give one object a line."
            ) from None
        text = row.get(column) if isinstance(row, dict) else None
        if not isinstance(text, str):
            known = ", ".join(map(repr, row)) if isinstance(row, dict) else "no object"
            raise ConfigError(
                f"{path}, line {number}: has no text under {column!r} (has: {known}). "
                "Set data.column to the field that holds the text."
            )
        yield text


def _parquet_documents(path: Path, column: str) -> Iterator[str]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid:
        raise ConfigError(f"{path}: is not a Parquet file. Give one that is.") from None
    with file:
        _check_column(str(path), column, file.schema_arrow)
        for batch in file.iter_batches(batch_size=1024, columns=[column]):
            yield from (text or "" for text in batch.column(0).to_pylist())


def _check_column(where: str, column: str, schema: Any) -> None:
    """Raises ConfigError unless an Arrow schema has the column, as text."""
    import pyarrow

    kinds = {name: schema.field(name).type for name in schema.names}
    kind = kinds.get(column)
    if kind is None or not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        columns = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        raise ConfigError(
            f"{where}: has no text column {column!r} (has: {columns}). "
            "Set data.column to the column that holds the text."
        )


def _hosted(
    dataset: str,
    subset: str | None,
    revision: str,
    splits: tuple[str, str],
    column: str,
    limits: dict[str, int | None],
) -> Corpus:
    names = dict(zip(SPLITS, splits, strict=True))

    def documents(split: Split) -> Iterator[str]:
        data = load_hosted(dataset, subset, revision, names[split])
        _check_column(f"data.dataset = {dataset!r}", column, data.features.arrow_schema)
        tables = data.with_format("arrow").iter(batch_size=1024)
        every = (text or "" for table in tables for text in table[column].to_pylist())
        return islice(every, limits[split])

    return Corpus(
        name=dataset.rpartition("/")[2],
        documents=documents,
    )


def load_hosted(dataset: str, subset: str | None, revision: str, split: str) -> Any:
    """One split of a data set on the Hugging Face hub, through its cache on disk.

    Returns:
        datasets.Dataset: memory-mapped, not in memory.

    Raises:
        ConfigError: if it is neither in the cache nor within reach, or has no such split.
    """
    import datasets
    from huggingface_hub.utils import logging

    if Path(dataset).exists():
        # The library would take this folder instead, and the revision would mean nothing.
        raise ConfigError(
            f"data.dataset = {dataset!r}: is a path here. Move it, or use it as data.corpus=text."
        )
    datasets.disable_progress_bars()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # without a network, it tells of every attempt
    try:
        return datasets.load_dataset(dataset, subset, split=split, revision=revision)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise ConfigError(
            f"data set {dataset!r}, revision {revision}, split {split!r}: cannot be loaded here "
            f"({type(error).__name__}: {reason}). Where there is a network run `python -m "
            "tune_study prepare STUDY` and copy the folder that it names to the same place "
            "here, or give the text as local files: data.corpus=text."
        ) from None
    finally:
        logging.set_verbosity(verbosity)
