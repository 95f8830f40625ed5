"""Corpus to tokens on disk, once; and tokens on disk to arrays, verified.

A folder `<name>-<tokenizer>-<hash>` holds the tokens of both splits as raw little-endian
arrays, the tokenizer, the manifest, and `sources.json`: which local files the text came
from. The hash covers everything that determines the bytes, the content of local files
included. A folder is built under another name and renamed when it is complete, so what
bears its name is whole, whenever the work was cut off.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout

from tune_study.config import ConfigError, DataConfig
from tune_study.data import manifest as m
from tune_study.data import process
from tune_study.data.corpora import (
    SPLITS,
    SYNTHETIC_DOCUMENTS,
    TINYSTORIES,
    TINYSTORIES_REVISION,
    Corpus,
    Split,
    open_corpus,
)
from tune_study.data.manifest import MANIFEST, TOKENIZER, TOKENS, Manifest
from tune_study.data.stories import tell
from tune_study.data.text import Found, clean, fingerprint
from tune_study.data.tokenizers import (
    Tokenizer,
    byte_tokenizer,
    compacted,
    gpt2_tokenizer,
    train_bpe,
)

Say = Callable[[str], None]

SOURCES = "sources.json"
REMEDY = "Run `python -m tune_study prepare STUDY`."
DEFAULT_BPE = 512
SAMPLE = 64 << 20
"""Characters of training text, from its beginning, that train a BPE."""
CHUNK = 1 << 18
"""Characters encoded at a time."""


@dataclass(frozen=True)
class Tokens:
    """Both splits' token ids, read-only and mapped from disk, and what they are."""

    train: np.memmap
    validation: np.memmap
    manifest: Manifest
    folder: Path

    @property
    def vocab_size(self) -> int:
        """Number of ids, the end of text included."""
        return self.manifest.vocab_size

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens."""
        return Tokenizer.from_json((self.folder / TOKENIZER).read_text(encoding="utf-8"))


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
    if _text_is_gone(config) and (found := _find_by_paths(config, root, None)):
        say(f"{found.name}: the text is not here, its tokens are.")
        return found
    corpus = open_corpus(config)
    files = _file_hashes(corpus, root, read=True)
    folder = root / _folder_name(config, corpus, files)
    with _locked(root / f".{folder.name}.lock", say):
        if fault := _fault(folder):
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
        _write_sources(folder, config, files)
    return folder


def open_tokens(
    config: DataConfig, root: Path, verify: bool = True, checksum: str | None = None
) -> Tokens:
    """The prepared tokens of a configuration.

    Args:
        config: which text, cut into which tokens.
        root: the folder that holds the token folders.
        verify: read all tokens and compare their checksum, about a second for each GB. A
            sweep verifies once; its trials only compare sizes.
        checksum: take exactly these tokens, even if the text has changed since. A sweep
            records the checksum; its trials ask for it.

    Raises:
        ConfigError: if there are none, or they are not what their manifest says.
    """
    root = Path(root).expanduser().resolve()
    folder = _find(config, root, checksum)
    if fault := _fault(folder, verify):
        raise ConfigError(f"{folder}: {fault} {REMEDY}")
    manifest = Manifest.read(folder)
    maps = {s: np.memmap(folder / TOKENS[s], dtype=manifest.dtype, mode="r") for s in SPLITS}
    return Tokens(maps["train"], maps["validation"], manifest, folder)


def _settings(config: DataConfig) -> dict[str, Any]:
    """What determines the tokens beside the content of files, defaults filled in."""
    settings = config.model_dump(
        mode="json", exclude={"train", "validation", "gpt2_vocab", "gpt2_encoder"}
    )
    if config.corpus == "synthetic":
        for split in SPLITS:
            settings[f"{split}_documents"] = (
                settings[f"{split}_documents"] or SYNTHETIC_DOCUMENTS[split]
            )
    if config.corpus == "tinystories":
        settings |= {"dataset": TINYSTORIES, "revision": TINYSTORIES_REVISION}
    if config.tokenizer == "bpe":
        settings["vocab_size"] = config.vocab_size or DEFAULT_BPE
    return settings


def _folder_name(config: DataConfig, corpus: Corpus, files: dict[Split, list[File]]) -> str:
    settings = _settings(config)
    content = [(split, file.path.suffix, file.sha256) for split in SPLITS for file in files[split]]
    key = json.dumps([m.FORMAT, settings, content], sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    name = "".join(c if c.isalnum() or c in "._" else "_" for c in corpus.name)
    return f"{name}-{config.tokenizer}{settings['vocab_size'] or ''}-{digest}"


# --- Where the text comes from, and which folder belongs to it -------------------------


@dataclass(frozen=True)
class File:
    """A local text file as it was when it was read."""

    path: Path
    size: int
    mtime_ns: int
    sha256: str


def _paths_given(config: DataConfig) -> list[str]:
    return [json.dumps(config.model_dump(mode="json")[split]) for split in SPLITS]


def _file_hashes(corpus: Corpus, root: Path, read: bool) -> dict[Split, list[File]]:
    """The corpus' local files and their hashes.

    A file whose path, size and time of change are known from an earlier preparation is
    not read again, as in git's index.

    Raises:
        ConfigError: if a file is not known and `read` is false.
    """
    known = {
        (file["path"], file["size"], file["mtime_ns"]): file["sha256"]
        for sources in _all_sources(root)
        for file in sources["files"]
    }
    hashed: dict[Split, list[File]] = {split: [] for split in SPLITS}
    for split, paths in corpus.files.items():
        for path in paths:
            stat = path.stat()
            sha256 = known.get((str(path), stat.st_size, stat.st_mtime_ns))
            if sha256 is None:
                if not read:
                    raise ConfigError(
                        f"{path}: is not prepared, or has changed since it was. {REMEDY}"
                    )
                sha256 = m.file_sha256(path)
            hashed[split].append(File(path, stat.st_size, stat.st_mtime_ns, sha256))
    return hashed


def _all_sources(root: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(root.glob(f"*/{SOURCES}")):
        yield _read_sources(path.parent)


def _read_sources(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / SOURCES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"given": [], "files": []}


def _write_sources(folder: Path, config: DataConfig, files: dict[Split, list[File]]) -> None:
    """Adds to `sources.json` what was not in it, in one step."""
    sources = _read_sources(folder)
    now = [
        {"path": str(f.path), "size": f.size, "mtime_ns": f.mtime_ns, "sha256": f.sha256}
        for split in SPLITS
        for f in files[split]
    ]
    paths = {file["path"] for file in now}
    merged = {
        "given": sorted({*map(tuple, sources["given"]), tuple(_paths_given(config))}),
        "files": [file for file in sources["files"] if file["path"] not in paths] + now,
    }
    if json.loads(json.dumps(merged)) != sources:
        partial = folder / f".{SOURCES}.partial"
        _write(partial, json.dumps(merged, indent=1).encode())
        partial.replace(folder / SOURCES)


def _text_is_gone(config: DataConfig) -> bool:
    if config.corpus != "text":
        return False
    given = [config.train, config.validation]
    paths = [p for ps in given for p in ([ps] if isinstance(ps, str) else ps or ())]
    return not any(Path(path).expanduser().exists() for path in paths)


def _find(config: DataConfig, root: Path, checksum: str | None) -> Path:
    """The folder of a configuration. Reads manifests and file times, no text, no tokens."""
    if checksum is not None or _text_is_gone(config):
        found = _find_by_paths(config, root, checksum)
        if found is None:
            which = f" with checksum {checksum[:12]}" if checksum else ""
            raise ConfigError(
                f"data: no tokens of this configuration{which} are under {root}. {REMEDY}"
            )
        return found
    corpus = open_corpus(config)
    folder = root / _folder_name(config, corpus, _file_hashes(corpus, root, read=False))
    if not folder.exists():
        raise ConfigError(f"{folder}: does not exist. {REMEDY}")
    return folder


def _find_by_paths(config: DataConfig, root: Path, checksum: str | None) -> Path | None:
    """The folder with the configuration's settings and paths, without a look at the text."""
    settings, given = _settings(config), _paths_given(config)
    found = []
    for path in sorted(root.glob(f"*/{MANIFEST}")):
        try:
            manifest = Manifest.read(path.parent)
        except ConfigError:
            continue
        if (
            manifest.settings == settings
            and given in _read_sources(path.parent)["given"]
            and checksum in (None, manifest.checksum)
        ):
            found.append(path.parent)
    if len(found) > 1:
        names = ", ".join(folder.name for folder in found)
        raise ConfigError(f"data: {names} all fit this configuration. Delete all but one.")
    return found[0] if found else None


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


def _fault(folder: Path, verify: bool = True) -> str:
    """Why the folder cannot be used, or nothing."""
    try:
        manifest = Manifest.read(folder)
    except ConfigError:
        return f"{MANIFEST} is missing, damaged or of another version."
    if manifest.format != m.FORMAT:
        return f"{MANIFEST} is of another version."
    for split, counts in (("train", manifest.train), ("validation", manifest.validation)):
        file = folder / TOKENS[split]
        size = counts.tokens * np.dtype(manifest.dtype).itemsize
        if not file.is_file() or file.stat().st_size != size:
            return f"{file.name} is missing or cut off."
        if verify and m.file_sha256(file) != manifest.sha256[split]:
            return f"{file.name} has been altered: its checksum is not the manifest's."
    tokenizer = folder / TOKENIZER
    if not tokenizer.is_file() or m.file_sha256(tokenizer) != manifest.tokenizer_sha256:
        return f"{TOKENIZER} is missing or has been altered."
    if m.tokens_checksum(manifest.tokenizer_sha256, manifest.sha256) != manifest.checksum:
        return f"{MANIFEST} has been altered: its checksums do not agree."
    return ""


# --- Building a folder -------------------------------------------------------------------


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
    _write(partial / TOKENIZER, tokenizer.to_json().encode())
    for split in SPLITS:
        if encoded[split].documents == 0:
            raise ConfigError(f"data.{split}: holds no document. Give text for both splits.")

    train_counts, validation_tokens = encoded["train"].counts, encoded["validation"].tokens
    h1 = m.unigram_entropy(train_counts)
    log_probability, floor = corpus.log_probability, None
    if log_probability is not None:
        floor = -sum(map(log_probability, _Documents(corpus, "validation"))) / validation_tokens
    sha256: dict[str, str] = {split: encoded[split].sha256 for split in SPLITS}
    manifest = Manifest(
        format=m.FORMAT,
        corpus=corpus.name,
        settings=_settings(config),
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
        unigram_bits_per_byte=h1
        * encoded["train"].tokens
        / (np.log(2) * encoded["train"].text_bytes),
        bytes_per_token=encoded["validation"].text_bytes / validation_tokens,
        loss_floor=floor,
        document_entropy=process.entropy(tell) if config.corpus == "synthetic" else None,
        train=_report(train, encoded["train"], tokenizer),
        validation=_report(validation, encoded["validation"], tokenizer),
    )
    for file in (file for split in SPLITS for file in files[split]):
        stat = file.path.stat()
        if (stat.st_size, stat.st_mtime_ns) != (file.size, file.mtime_ns):
            raise ConfigError(f"{file.path}: changed while it was read. {REMEDY}")
    _write(partial / MANIFEST, manifest.to_json().encode())
    _sync(partial)
    if folder.exists():  # damaged; no one can be reading it: it is refused
        shutil.rmtree(folder)
    partial.rename(folder)
    _sync(folder.parent)
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
        self.found, self.empty, self.excluded = Found(), 0, 0
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
    text_bytes: int = 0
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
            _flush(file)
        partial.replace(path)
        self.sha256 = digest.hexdigest()


def _encode(tokenizer: Tokenizer, documents: _Documents, path: Path, say: Say) -> _Encoded:
    """Writes a split's tokens, and counts."""
    result = _Encoded(np.zeros(tokenizer.vocab_size, dtype=np.int64), shortest=2**62)
    digest = hashlib.sha256()
    little = tokenizer.dtype.newbyteorder("<")
    started = told = time.monotonic()
    with path.open("wb") as file:
        for texts in _chunks(documents):
            ids = tokenizer.encode_documents(texts)
            lengths = np.diff(np.flatnonzero(ids == tokenizer.end_of_text), prepend=-1)
            result.documents += len(lengths)
            result.shortest = min(result.shortest, int(lengths.min()))
            result.longest = max(result.longest, int(lengths.max()))
            result.tokens += len(ids)
            result.text_bytes += sum(_utf8_length(text) for text in texts)
            result.counts += np.bincount(ids, minlength=tokenizer.vocab_size)
            data = ids.astype(little, copy=False).tobytes()
            digest.update(data)
            file.write(data)
            if time.monotonic() - told > 10:
                told = time.monotonic()
                rate = result.text_bytes / 1e6 / (told - started)
                say(f"  {path.stem}: {result.text_bytes / 1e6:,.0f} MB of text, {rate:.1f} MB/s")
        _flush(file)
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


def _utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _report(documents: _Documents, encoded: _Encoded, tokenizer: Tokenizer) -> m.SplitReport:
    unknown = tokenizer.unknown
    return m.SplitReport(
        documents=encoded.documents,
        tokens=encoded.tokens,
        text_bytes=encoded.text_bytes,
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


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        _flush(file)


def _flush(file: Any) -> None:
    """Onto the disk, so that the renaming cannot overtake the content."""
    file.flush()
    os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Makes renamings in a folder last; Windows has no such call and needs none."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
