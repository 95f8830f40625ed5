"""Token folders on disk: their names, how they are found again, verified and opened.

A folder `<name>-<tokenizer>-<hash>` holds the tokens of both splits as raw little-endian
arrays, the tokenizer, the manifest, and `sources.json`: which local files the text came
from. The hash covers everything that determines the bytes, the content of local files
included.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tune_study.config import ConfigError, DataConfig
from tune_study.data.corpora import (
    SPLITS,
    SYNTHETIC_DOCUMENTS,
    TINYSTORIES,
    TINYSTORIES_REVISION,
    Corpus,
    Split,
    open_corpus,
)
from tune_study.data.manifest import (
    FORMAT,
    MANIFEST,
    TOKENIZER,
    TOKENS,
    Manifest,
    file_sha256,
    tokens_checksum,
)
from tune_study.data.tokenizers import DEFAULT_BPE, Tokenizer

SOURCES = "sources.json"
REMEDY = "Run `python -m tune_study prepare STUDY`."


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
    return open_folder(_find(config, root, checksum), verify)


def open_folder(folder: Path, verify: bool = True) -> Tokens:
    """The tokens in a folder; `verify` and errors as of `open_tokens`."""
    if fault := fault_in(folder, verify):
        raise ConfigError(f"{folder}: {fault} {REMEDY}")
    manifest = Manifest.read(folder)
    maps = {s: np.memmap(folder / TOKENS[s], dtype=manifest.dtype, mode="r") for s in SPLITS}
    return Tokens(maps["train"], maps["validation"], manifest, folder)


@dataclass(frozen=True)
class File:
    """A local text file as it was when it was read."""

    path: Path
    size: int
    mtime_ns: int
    sha256: str


def _paths_given(config: DataConfig) -> list[str]:
    return [json.dumps(config.model_dump(mode="json")[split]) for split in SPLITS]


def hash_files(corpus: Corpus, root: Path, read: bool) -> dict[Split, list[File]]:
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
                sha256 = file_sha256(path)
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


def write_sources(folder: Path, config: DataConfig, files: dict[Split, list[File]]) -> None:
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
        write_durably(partial, json.dumps(merged, indent=1).encode())
        partial.replace(folder / SOURCES)


def text_is_gone(config: DataConfig) -> bool:
    if config.corpus != "text":
        return False
    given = [config.train, config.validation]
    paths = [p for ps in given for p in ([ps] if isinstance(ps, str) else ps or ())]
    return not any(Path(path).expanduser().exists() for path in paths)


def _find(config: DataConfig, root: Path, checksum: str | None) -> Path:
    """The folder of a configuration. Reads manifests and file times, no text, no tokens."""
    if checksum is not None or text_is_gone(config):
        found = find_by_paths(config, root, checksum)
        if found is None:
            which = f" with checksum {checksum[:12]}" if checksum else ""
            raise ConfigError(
                f"data: no tokens of this configuration{which} are under {root}. {REMEDY}"
            )
        return found
    corpus = open_corpus(config)
    folder = root / folder_name(config, corpus, hash_files(corpus, root, read=False))
    if not folder.exists():
        raise ConfigError(f"{folder}: does not exist. {REMEDY}")
    return folder


def find_by_paths(config: DataConfig, root: Path, checksum: str | None) -> Path | None:
    """The folder with the configuration's settings and paths, without a look at the text."""
    settings, given = settings_of(config), _paths_given(config)
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


def find_by_checksum(root: Path, checksum: str) -> Path | None:
    """A folder with these very tokens, whatever they were made from; None if there is none."""
    for path in sorted(Path(root).expanduser().resolve().glob(f"*/{MANIFEST}")):
        try:
            manifest = Manifest.read(path.parent)
        except ConfigError:
            continue
        if manifest.checksum == checksum:
            return path.parent
    return None


def fault_in(folder: Path, verify: bool = True) -> str:
    """Why the folder cannot be used, or nothing."""
    try:
        manifest = Manifest.read(folder)
    except ConfigError:
        return f"{MANIFEST} is missing, damaged or of another version."
    if manifest.format != FORMAT:
        return f"{MANIFEST} is of another version."
    for split, counts in (("train", manifest.train), ("validation", manifest.validation)):
        file = folder / TOKENS[split]
        size = counts.tokens * np.dtype(manifest.dtype).itemsize
        if not file.is_file() or file.stat().st_size != size:
            return f"{file.name} is missing or cut off."
        if verify and file_sha256(file) != manifest.sha256[split]:
            return f"{file.name} has been altered: its checksum is not the manifest's."
    tokenizer = folder / TOKENIZER
    if not tokenizer.is_file() or file_sha256(tokenizer) != manifest.tokenizer_sha256:
        return f"{TOKENIZER} is missing or has been altered."
    if tokens_checksum(manifest.tokenizer_sha256, manifest.sha256) != manifest.checksum:
        return f"{MANIFEST} has been altered: its checksums do not agree."
    return ""


def settings_of(config: DataConfig) -> dict[str, Any]:
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


def folder_name(config: DataConfig, corpus: Corpus, files: dict[Split, list[File]]) -> str:
    settings = settings_of(config)
    content = [(split, file.path.suffix, file.sha256) for split in SPLITS for file in files[split]]
    key = json.dumps([FORMAT, settings, content], sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    name = "".join(c if c.isalnum() or c in "._" else "_" for c in corpus.name)
    return f"{name}-{config.tokenizer}{settings['vocab_size'] or ''}-{digest}"


def write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        flush(file)


def flush(file: Any) -> None:
    """Onto the disk, so that the renaming cannot overtake the content."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Makes renamings in a folder last; Windows has no such call and needs none."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
