"""Corpus to tokens on disk, once.

A folder is built under another name and renamed when it is complete, so what bears its
name is whole, whenever the work was cut off.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout

from tune_study.config import ConfigError, DataConfig
from tune_study.data import manifest as m
from tune_study.data import process
from tune_study.data.corpora import SPLITS, Corpus, Split, open_corpus
from tune_study.data.manifest import MANIFEST, TOKENIZER, TOKENS, Manifest
from tune_study.data.store import (
    REMEDY,
    File,
    fault_in,
    find_by_paths,
    flush,
    folder_name,
    hash_files,
    settings_of,
    sync_folder,
    text_is_gone,
    write_durably,
    write_sources,
)
from tune_study.data.text import Found, clean, fingerprint
from tune_study.data.tokenizers import (
    DEFAULT_BPE,
    Tokenizer,
    byte_tokenizer,
    compacted,
    gpt2_tokenizer,
    train_bpe,
)
from tune_study.data.workers import encode_in_order

Say = Callable[[str], None]

SAMPLE = 64 << 20
"""Characters of training text, from its beginning, that train a BPE."""
CHUNK = 1 << 18
"""Characters encoded at a time."""


def prepare(config: DataConfig, root: Path, say: Say = print) -> Path:
    """Makes the token folder of a configuration, unless it is there and whole.

    Two at once: the second waits for the first, then finds its work done.

    Args:
        config: which text, cut into which tokens.
        root: the folder that holds the token folders; made if need be.
        say: gets lines for people: progress and the data report.

    Returns:
        The token folder.

    Raises:
        ConfigError: if text or tokenizer cannot be had, or cannot be used as asked.
    """
    root = Path(root).expanduser().resolve()
    root.mkdir(parents=True, exist_ok=True)
    if text_is_gone(config) and (found := find_by_paths(config, root, None)):
        say(f"{found.name}: the text is not here, its tokens are.")
        return found
    corpus = open_corpus(config)
    files = hash_files(corpus, root, read=True)
    folder = root / folder_name(config, corpus, files)
    with _locked(root / f".{folder.name}.lock", say):
        if fault := fault_in(folder):
            if folder.exists():
                say(f"{folder.name}: {fault} Building it anew.")
            partial = folder.with_name(f".{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)  # left by one that was killed
            partial.mkdir()
            try:
                _build(config, corpus, files, partial, folder, say)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        else:
            say(f"{folder.name}: unchanged.")
        write_sources(folder, config, files)
    return folder


@contextmanager
def _locked(path: Path, say: Say) -> Iterator[None]:
    """Holds a lock; says so if it must wait. The kernel frees it when its holder dies."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"{path.name}: held by another preparation; waiting for it.")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(
    config: DataConfig,
    corpus: Corpus,
    files: dict[Split, list[File]],
    partial: Path,
    folder: Path,
    say: Say,
) -> None:
    """Fills the empty folder `partial`, then renames it to `folder`."""
    started = time.monotonic()
    say(f"{folder.name}: preparing")
    if config.corpus in ("tinystories", "huggingface"):
        say("  fetching the text from huggingface.co or this machine's cache of it")
    validation = _Documents(corpus, "validation")
    validation_prints = {fingerprint(text) for text in validation}
    train = _Documents(corpus, "train", validation_prints)
    sample = 0

    def head() -> Iterator[str]:
        nonlocal sample
        characters = 0
        for text in train:
            yield text
            sample += 1
            characters += len(text)
            if characters >= SAMPLE:
                return

    match config.tokenizer:
        case "bpe":
            say("  training the tokenizer")
            tokenizer = train_bpe(head(), config.vocab_size or DEFAULT_BPE)
        case "bytes":
            tokenizer = byte_tokenizer()
        case _:
            tokenizer = gpt2_tokenizer(config.gpt2_vocab, config.gpt2_encoder)

    encoded = {
        split: _encode(tokenizer, documents, partial / TOKENS[split], say)
        for split, documents in (("train", train), ("validation", validation))
    }
    if config.tokenizer == "gpt2-compact":
        tokenizer = compacted(tokenizer, encoded["train"].counts, config.vocab_size)
        for split in SPLITS:
            encoded[split].compact(tokenizer, partial / TOKENS[split])
    write_durably(partial / TOKENIZER, tokenizer.to_json().encode())
    for split in SPLITS:
        if encoded[split].documents == 0:
            raise ConfigError(f"data.{split}: holds no document. Give text for both splits.")

    train_counts, validation_tokens = encoded["train"].counts, encoded["validation"].tokens
    h1 = m.unigram_entropy(train_counts)
    floor = entropy = None
    if corpus.tell is not None:
        log_p = [process.read(corpus.tell, text)[0] for text in validation]
        floor, entropy = -sum(log_p) / validation_tokens, process.entropy(corpus.tell)
    sha256: dict[str, str] = {split: encoded[split].sha256 for split in SPLITS}
    manifest = Manifest(
        format=m.FORMAT,
        corpus=corpus.name,
        settings=settings_of(config),
        sources=tuple(
            m.Source(split=split, name=file.path.name, size=file.size, sha256=file.sha256)
            for split in SPLITS
            for file in files[split]
        ),
        tokenizer=tokenizer.kind,
        tokenizer_sha256=tokenizer.sha256,
        tokenizer_sample=sample,
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        dtype=tokenizer.dtype.newbyteorder("<").str,
        sha256=sha256,
        checksum=m.tokens_checksum(tokenizer.sha256, sha256),
        unigram_entropy=h1,
        unigram_bits_per_byte=h1 * encoded["train"].tokens / (np.log(2) * train.text_bytes),
        bytes_per_token=validation.text_bytes / validation_tokens,
        loss_floor=floor,
        document_entropy=entropy,
        train=_report(train, encoded["train"], tokenizer),
        validation=_report(validation, encoded["validation"], tokenizer),
    )
    for file in (file for split in SPLITS for file in files[split]):
        stat = file.path.stat()
        if (stat.st_size, stat.st_mtime_ns) != (file.size, file.mtime_ns):
            raise ConfigError(f"{file.path}: changed while it was read. {REMEDY}")
    write_durably(partial / MANIFEST, manifest.to_json().encode())
    sync_folder(partial)
    if folder.exists():  # damaged; no one can be reading it: it is refused
        shutil.rmtree(folder)
    partial.rename(folder)
    sync_folder(folder.parent)
    for line in manifest.report():
        say(line)
    say(f"{folder.name}: ready after {time.monotonic() - started:.1f} s.")


class _Documents:
    """The documents of a split that become tokens; counts what the rules of `text` did.

    Can be iterated any number of times; the counts are those of the last time.
    """

    def __init__(self, corpus: Corpus, split: Split, exclude: Iterable[bytes] = ()) -> None:
        self._corpus, self._split, self._exclude = corpus, split, frozenset(exclude)

    def __iter__(self) -> Iterator[str]:
        self.found, self.empty, self.excluded, self.text_bytes = Found(), 0, 0, 0
        self.first_lines: list[str] = []
        self._hashes = array("Q")
        for raw in self._corpus.documents(self._split):
            text = clean(raw, self.found)
            if not text or text.isspace():
                self.empty += 1
                continue
            print_ = fingerprint(text)
            if print_ in self._exclude:
                self.excluded += 1
                continue
            if len(self.first_lines) < 3:
                self.first_lines.append(text.strip().splitlines()[0][:100])
            self.text_bytes += len(text) if text.isascii() else len(text.encode())
            self._hashes.append(int.from_bytes(print_[:8], "little"))
            yield text

    @property
    def duplicates(self) -> int:
        # 8 bytes a document: among a million, 3e-8 expected false ones.
        return len(self._hashes) - len(np.unique(np.frombuffer(self._hashes, dtype=np.uint64)))


@dataclass
class _Encoded:
    """What encoding a split gave, beside the file."""

    counts: npt.NDArray[np.int64]
    documents: int = 0
    tokens: int = 0
    shortest: int = 0
    longest: int = 0
    sha256: str = ""

    def compact(self, tokenizer: Tokenizer, path: Path) -> None:
        """Rewrites the file from GPT-2's ids to the compact ones, block by block."""
        before = np.memmap(path, dtype="<u2", mode="r")
        self.counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
        digest = hashlib.sha256()
        partial = path.with_suffix(".compact")
        with partial.open("wb") as file:
            for start in range(0, len(before), 1 << 22):
                ids = tokenizer.compact(before[start : start + (1 << 22)])
                self.counts += np.bincount(ids, minlength=tokenizer.vocab_size)
                data = ids.astype("<u2").tobytes()
                digest.update(data)
                file.write(data)
            flush(file)
        partial.replace(path)
        self.sha256 = digest.hexdigest()


def _encode(tokenizer: Tokenizer, documents: _Documents, path: Path, say: Say) -> _Encoded:
    """Writes a split's tokens, and counts."""
    result = _Encoded(np.zeros(tokenizer.vocab_size, dtype=np.int64), shortest=2**62)
    digest = hashlib.sha256()
    little = tokenizer.dtype.newbyteorder("<")
    started = told = time.monotonic()
    with path.open("wb") as file:
        for ids in encode_in_order(tokenizer, _chunks(documents)):
            lengths = np.diff(np.flatnonzero(ids == tokenizer.end_of_text), prepend=-1)
            result.documents += len(lengths)
            result.shortest = min(result.shortest, int(lengths.min()))
            result.longest = max(result.longest, int(lengths.max()))
            result.tokens += len(ids)
            result.counts += np.bincount(ids, minlength=tokenizer.vocab_size)
            data = ids.astype(little, copy=False).tobytes()
            digest.update(data)
            file.write(data)
            if time.monotonic() - told > 10:
                told = time.monotonic()
                done = documents.text_bytes / 1e6
                say(f"  {path.stem}: {done:,.0f} MB of text, {done / (told - started):.1f} MB/s")
        flush(file)
    result.sha256 = digest.hexdigest()
    return result


def _chunks(documents: Iterable[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    size = 0
    for text in documents:
        chunk.append(text)
        size += len(text)
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _report(documents: _Documents, encoded: _Encoded, tokenizer: Tokenizer) -> m.SplitReport:
    unknown = tokenizer.unknown
    return m.SplitReport(
        documents=encoded.documents,
        tokens=encoded.tokens,
        text_bytes=documents.text_bytes,
        empty=documents.empty,
        duplicates=documents.duplicates,
        in_validation=documents.excluded,
        repaired=documents.found.repaired,
        replacement_characters=documents.found.replacement_characters,
        mangled=documents.found.mangled,
        distinct_ids=int(np.count_nonzero(encoded.counts)),
        unknown=0 if unknown is None else int(encoded.counts[unknown]),
        shortest=encoded.shortest,
        longest=encoded.longest,
        first_lines=tuple(documents.first_lines),
    )
