"""A bundle on disk: a folder of results with its manifest, or the same as one .tar.gz.

    README.md       what it is, and the commands that made it
    manifest.json   SHA-256 and size of every other file; versions, hardware, what is left out
    study.json      the study, its tokens' manifest, the versions it was swept with
    config.yaml     the study alone, as `sweep` takes it
    config.json     every cell's settings as resolved, and its identity
    cells.parquet, history.parquet, summary.json, figures/     as in a report
    index.html, macros.tex, tables/, calibration/, replays/    as in the study's folder
    tune/           rows and errors as the cells reported them, without checkpoints

A small bundle, as those in results/, leaves out what `left_out` in its manifest lists.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from shutil import disk_usage
from typing import Any

from pydantic import Field, field_validator

from tune_study.files import whole, write_whole
from tune_study.settings import Config, ConfigError

FORMAT = 1
"""Raised when a bundle of before cannot be read as one of now."""

MANIFEST = "manifest.json"
STUDY, CONFIG, CELLS, HISTORY = "study.json", "config.json", "cells.parquet", "history.parquet"
SUMMARY, README, LOGS, YAML = "summary.json", "README.md", "tune", "config.yaml"
SUFFIXES = (".tar.gz", ".tgz")

RATIO = 100
"""Bytes that a byte of an archive may unpack to: the pilot's comes to 3.4, gzip allows 1,032."""

SMALL_BYTES = 64 * 2**20
"""What an archive may unpack to whatever its own size."""


class File(Config):
    """One file of a bundle as it was packed."""

    sha256: str = Field(pattern="^[0-9a-f]{64}$", description="64 hex digits")
    bytes: int = Field(ge=0)


class Status(Config):
    """How far the study was when it was packed.

    `problems` has a line for each thing that a reader must know of: a sweep that was running,
    cells without a result, files found damaged. It is empty for a complete study.
    """

    complete: bool
    running: bool
    problems: tuple[str, ...]
    damage: tuple[str, ...]


class Hardware(Config):
    """What some of the cells ran on."""

    device: str = Field(description="name with the CPU's instructions, such as cpu (x86_64, AVX2)")
    precision: str
    threads: int
    cells: int


class Manifest(Config):
    """What a bundle holds. `versions` are the sweep's, `packed_with` those that packed it."""

    format: int
    study: str
    status: Status
    left_out: tuple[str, ...]
    commands: tuple[str, ...]
    trainer_version: int
    versions: dict[str, str]
    packed_with: dict[str, str]
    hardware: tuple[Hardware, ...]
    data: dict[str, Any] = Field(description="name, checksum and files of the tokens and the text")
    files: dict[str, File]

    @field_validator("files")
    @classmethod
    def _inside(cls, files: dict[str, File]) -> dict[str, File]:
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or name == MANIFEST:
                raise ValueError(f"{name!r}: lies outside of the bundle")
        return files


def files_in(folder: Path) -> dict[str, Path]:
    """All files beneath a folder but its manifest, by their path in it, sorted."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    return {
        name: path
        for name, path in sorted(found.items())
        if name != MANIFEST and (path.is_symlink() or not path.is_dir())
    }


def seal(folder: Path, **content: Any) -> Manifest:
    """Writes the manifest of what lies in the folder; `content` are its other fields."""
    files = {
        name: {"sha256": sha256(path), "bytes": path.stat().st_size}
        for name, path in files_in(folder).items()
    }
    manifest = Manifest(format=FORMAT, files=files, **content)
    text = json.dumps(manifest.model_dump(mode="json"), indent=1, allow_nan=False)
    write_whole(folder / MANIFEST, text + "\n")
    return manifest


def read(folder: Path) -> Manifest:
    """The manifest of a bundle's folder.

    Raises:
        ConfigError: if there is none, or it cannot be read.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError
    except FileNotFoundError:
        raise ConfigError(
            f"{folder}: is no bundle, {MANIFEST} is missing. "
            "Give a folder or an archive that `bundle` wrote."
        ) from None
    except (OSError, ValueError):
        raise ConfigError(f"{path}: is damaged. Get the bundle again.") from None
    if content.get("format") != FORMAT:
        raise ConfigError(
            f"{path}: is of format {content.get('format')!r}, not {FORMAT}. Use the version of the "
            "code that its README.md names."
        )
    return Manifest(**content)


def is_bundle(folder: Path) -> bool:
    """Whether a folder holds a bundle's tables rather than a study that was swept in it."""
    return (folder / MANIFEST).is_file() and (folder / CELLS).is_file()


def faults(folder: Path, manifest: Manifest) -> list[str]:
    """A line for each file that is missing, changed, or not in the manifest."""
    found = files_in(folder)
    lines = []
    for name, file in manifest.files.items():
        path = found.get(name)
        if path is None:
            lines.append(f"{name}: missing")
        elif path.is_symlink() or not path.is_file():
            lines.append(f"{name}: changed, it is no plain file")
        elif (size := path.stat().st_size) != file.bytes:
            lines.append(f"{name}: changed, {size:,} bytes instead of {file.bytes:,}")
        elif (digest := sha256(path)) != file.sha256:
            lines.append(f"{name}: changed, SHA-256 {digest[:12]} instead of {file.sha256[:12]}")
    lines += [
        f"{name}: extra, the manifest does not list it" for name in found.keys() - manifest.files
    ]
    return sorted(lines)


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pack(folder: Path, archive: Path) -> None:
    """Writes the folder as one archive; the same files give the same bytes."""
    names = [MANIFEST, *files_in(folder)]
    with (
        whole(archive) as out,
        gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=out, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name in names:
            entry = tarfile.TarInfo(f"{folder.name}/{name}")
            entry.size, entry.mode = (folder / name).stat().st_size, 0o644
            with (folder / name).open("rb") as file:
                tar.addfile(entry, file)


@contextmanager
def opened(bundle: Path) -> Iterator[Path]:
    """The folder of a bundle; that of an archive is temporary.

    Raises:
        ConfigError: if there is nothing, or it is no archive of one folder of plain files.
    """
    bundle = bundle.expanduser()
    if bundle.is_dir():
        yield bundle.resolve()
        return
    if not bundle.is_file():
        raise ConfigError(f"{bundle}: does not exist. Give a folder or an archive.")
    with tempfile.TemporaryDirectory(prefix="bundle-") as scratch:
        yield _unpacked(bundle, Path(scratch))


def _unpacked(archive: Path, into: Path) -> Path:
    """The one folder that the archive holds, unpacked."""
    damaged = f"{archive}: cannot be unpacked as a bundle"
    if not hasattr(tarfile, "data_filter"):
        raise ConfigError(f"{damaged}: this Python is too old for it. Update to the last 3.11.")
    most = max(SMALL_BYTES, RATIO * archive.stat().st_size)
    try:
        with (
            _Limited(archive, most) as content,
            tarfile.open(fileobj=content, mode="r|") as tar,
        ):
            _extract(tar, into)
    except (tarfile.FilterError, _RefusedError) as error:
        raise ConfigError(f"{damaged}: {error}. Do not use it.") from None
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise ConfigError(f"{damaged}: {error}. Get it again.") from None
    folders = list(into.iterdir())
    if len(folders) != 1 or not folders[0].is_dir():
        raise ConfigError(f"{damaged}: it holds no single folder. Give one that `bundle` wrote.")
    return folders[0]


class _RefusedError(Exception):
    """An archive that is not to be unpacked. Its text says why."""


class _Limited(gzip.GzipFile):
    """A packed file that gives no more than so many bytes: headers, too, are held in memory."""

    def __init__(self, path: Path, most: int) -> None:
        super().__init__(path)
        self._most, self._given = most, 0

    def read(self, size: int | None = -1) -> bytes:
        block = super().read(size)
        self._given += len(block)
        if self._given > self._most:
            raise _RefusedError(
                f"it holds more than {self._most:,} bytes, which is too much for its size"
            )
        return block


def _extract(tar: tarfile.TarFile, into: Path) -> None:
    """Unpacks what the manifest lists, at most at the sizes it says.

    It is the first entry where `bundle` made the archive; what comes before it is held against it
    when it comes.
    """
    manifest: Manifest | None = None
    before: dict[str, int] = {}
    for entry in tar:
        if entry.isdir():
            continue
        if entry.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            raise _RefusedError(f"{entry.name} is no plain file")
        path = PurePosixPath(entry.name)
        name = PurePosixPath(*path.parts[1:]).as_posix()
        if manifest is not None:
            _declared(manifest, name, entry.size)
        tar.extract(entry, into, filter="data")
        if manifest is not None:
            continue
        if name != MANIFEST or len(path.parts) != 2 or path.is_absolute():
            before[name] = entry.size
        else:
            manifest = read(into / path.parent)
            for earlier, size in before.items():
                _declared(manifest, earlier, size)
            needed, free = sum(f.bytes for f in manifest.files.values()), disk_usage(into).free
            if needed > free:
                raise ConfigError(
                    f"{into.parent}: {free:,} bytes free, {needed:,} needed to unpack the bundle. "
                    "Give another folder by TMPDIR."
                )


def _declared(manifest: Manifest, name: str, size: int) -> None:
    """Refuses what the manifest does not list, or not at this size."""
    file = manifest.files.get(name)
    if file is None:
        raise _RefusedError(f"it holds {name}, which its manifest does not list")
    if size > file.bytes:
        raise _RefusedError(f"{name} has {size:,} bytes, {file.bytes:,} by its manifest")
