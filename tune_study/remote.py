"""Studies in an object store: `--runs s3://bucket/prefix`, gs://, or what fsspec knows.

A sweep works in a folder of this machine, as ever: atomic files, appended rows and the lock of the
file system are not to be had in a store. The folder is mirrored there, every PUSH_EVERY_S
and at the end, and fetched from there by a start on another machine.

<uri>/<study>/...               the study's files, without Tune's own
<uri>/<study>/.claims/OWNER     who is at work in it; OWNER.over: who was, and was given up
<uri>/<study>/.last             the owner that wrote last: its folder here is ahead of the store

An owner is a folder of one machine. Credentials come from the environment and are never written.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pyarrow import fs

from tune_study.config import ConfigError
from tune_study.store import StudyFolder

PUSH_EVERY_S = 20.0
"""What a machine that is lost can cost a study in a store, beside the checkpoint interval."""

STALE_S = 120.0
"""A claim this much older than another is that of a machine that is gone. By the store's clock."""

TUNES_OWN = re.compile(r"tune/[^/]+/[^/]+")
"""Files directly in an experiment: snapshots for a restore that is never made."""

CHECKPOINT = re.compile(r"tune/[^/]+/[^/]+/checkpoint_|weights/")
"""What analysis does not need; sent after the rows it belongs to."""

AT_ONCE = 8
"""Files on their way."""

WORDS = 250
"""Characters of an error of the store that are shown."""


def is_uri(runs: str) -> bool:
    """Whether a study lies in a store, not in a folder."""
    return "://" in runs and not runs.startswith("file://")


def local(runs: str) -> Path:
    """The folder that a path or a file:// URI names."""
    return Path(urlsplit(runs).path if runs.startswith("file://") else runs)


def filesystem(uri: str) -> tuple[fs.FileSystem, str]:
    """The store of a URI, and the path in it.

    Raises:
        ConfigError: if nothing knows such a URI, or a package is missing.
    """
    parts = urlsplit(uri)
    path = f"{parts.netloc}{parts.path}".rstrip("/")
    try:
        if not parts.netloc:
            raise ValueError("it names no bucket")
        if parts.scheme == "s3" and not parts.query:
            return _s3(), path
        if parts.scheme in {"s3", "gs", "gcs", "abfs", "abfss", "hdfs"}:
            found, path = fs.FileSystem.from_uri(uri)
            return found, path.rstrip("/")
        import fsspec

        return fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem(parts.scheme))), path
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(_line(uri, error)) from None


def _s3() -> fs.FileSystem:
    """S3, or what AWS_ENDPOINT_URL names; region, keys and profile as the AWS tools have them."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    at = urlsplit(endpoint) if endpoint else None
    return fs.S3FileSystem(
        endpoint_override=at.netloc if at else None,
        scheme=at.scheme if at else None,
        region=os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
        connect_timeout=5,
        request_timeout=30,
    )


def _line(uri: str, error: Exception) -> str:
    why = " ".join(str(error).split())
    why = why if len(why) <= WORDS else why[:WORDS] + "..."
    return f"--runs {uri}: cannot be used ({why}). Correct it, or the credentials and endpoint."


class Mirror:
    """One study in a store, and its folder here.

    Args:
        runs: the URI of all studies.
        name: the study's.
        folder: here; made if need be.

    Attributes:
        fault: why it is no longer ours to write; empty if it is.
        behind: why what is there is not all that is here; empty if it is.
    """

    def __init__(self, runs: str, name: str, folder: Path) -> None:
        self.uri = f"{runs.rstrip('/')}/{name}"
        self.folder = folder
        self.store, base = filesystem(runs)
        self.base = f"{base}/{name}"
        self.owner = ""
        self.fault = self.behind = ""
        self._sent: dict[str, tuple[int, int]] = {}
        self._there: set[str] = set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._flat = isinstance(self.store, fs.S3FileSystem | fs.GcsFileSystem)

    # ------------------------------------------------------------------ claims

    def claim(self, owner: str) -> None:
        """Takes the study for an owner.

        Who claims writes first and looks then; so of two at once at least one sees the other,
        and gives way.

        Raises:
            ConfigError: if another one has it, or the store cannot be used.
        """
        self.owner = owner
        try:
            self._write(f".claims/{owner}", self._who())
            claims = {info.base_name: info for info in self._list(".claims")}
            mine = claims.pop(owner)
            for name, info in claims.items():
                if name.endswith(".over"):
                    continue
                if info.mtime is None or (mine.mtime - info.mtime).total_seconds() < STALE_S:
                    self._delete(f".claims/{owner}")
                    raise ConfigError(self._taken(name))
                self._write(f".claims/{name}.over", b"")
                self._delete(f".claims/{name}")
            if f"{owner}.over" in claims:
                self._delete(f".claims/{owner}.over")
        except OSError as error:
            raise ConfigError(_line(self.uri, error)) from None

    def _who(self) -> bytes:
        return json.dumps({"process": os.getpid(), "host": platform.node()}).encode()

    def _taken(self, name: str) -> str:
        who = json.loads(self._read(f".claims/{name}"))
        return (
            f"{self.uri}: a sweep of this study is running (process {who['process']} on "
            f"{who['host']}). Wait for it; if it is gone, its claim lapses within {STALE_S:g} s."
        )

    def _renew(self) -> bool:
        """Says that we are still there; false if we were given up meanwhile."""
        if self._exists(f".claims/{self.owner}.over"):
            self.fault = f"{self.uri}: was taken over by another machine."
            return False
        self._write(f".claims/{self.owner}", self._who())
        return True

    # ------------------------------------------------------------- to and fro

    def pull(self, everything: bool = True) -> None:
        """Makes the folder what the store has, in place of what it was.

        Args:
            everything: also checkpoints and weights, which only a sweep needs.

        Raises:
            ConfigError: if the store cannot be used.
        """
        try:
            found = self._files()
            wanted = [name for name in found if everything or not CHECKPOINT.match(name)]
            for path in self.folder.glob("[!.]*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(self._fetch, wanted))
        except OSError as error:
            raise ConfigError(_line(self.uri, error)) from None

    def _fetch(self, name: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self._read(name))
        self._sent[name] = _state(path)

    def last(self) -> str:
        """The owner that wrote last; empty for none."""
        try:
            return self._read(".last").decode() if self._exists(".last") else ""
        except OSError as error:
            raise ConfigError(_line(self.uri, error)) from None

    def begin(self) -> None:
        """From now on the folder here is ahead; sends what changes, until `close`."""
        try:
            self._there |= set(self._files())
            self._write(".last", self.owner.encode())
        except OSError as error:
            raise ConfigError(_line(self.uri, error)) from None
        self._thread = threading.Thread(target=self._keep_sending, daemon=True)
        self._thread.start()

    def _keep_sending(self) -> None:
        while not self._stop.wait(PUSH_EVERY_S):
            self.push()

    def push(self) -> None:
        """Sends what is new or other, rows before checkpoints, and deletes what is gone here."""
        try:
            if self.fault or not self._renew():
                return
            here = dict(self._here())
            changed = [name for name, state in here.items() if self._sent.get(name) != state]
            for late in (False, True):
                names = [name for name in changed if bool(CHECKPOINT.match(name)) is late]
                with ThreadPoolExecutor(AT_ONCE) as pool:
                    list(pool.map(self._send, names))
            for name in sorted(self._there - here.keys()):
                self._delete(name)
                self._there.discard(name)
                self._sent.pop(name, None)
            self.behind = ""
        except OSError as error:  # tried again
            self.behind = _line(self.uri, error)

    def close(self) -> None:
        """Sends the rest and gives the study free."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.push()
        if not self.fault:
            try:
                self._delete(f".claims/{self.owner}")
            except OSError as error:
                self.behind = self.behind or _line(self.uri, error)

    def _here(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            if "/." in f"/{name}" or TUNES_OWN.fullmatch(name):
                continue
            try:
                if path.is_file():
                    yield name, _state(path)
            except FileNotFoundError:
                continue  # a checkpoint that has just been deleted

    def _send(self, name: str) -> None:
        path = self.folder / name
        try:
            state, content = _state(path), path.read_bytes()
        except FileNotFoundError:
            return
        if path.name == "result.json":
            content = content[: content.rfind(b"\n") + 1]  # a row that is being written comes later
        self._write(name, content)
        self._there.add(name)
        self._sent[name] = state

    # -------------------------------------------------------------- the store

    def _files(self) -> list[str]:
        """Names of the study's files there."""
        found = self._list("", recursive=True)
        names = (info.path.removeprefix(f"{self.base}/") for info in found)
        return [name for name in names if not name.startswith(".")]

    def _list(self, name: str, recursive: bool = False) -> list[fs.FileInfo]:
        at = f"{self.base}/{name}".rstrip("/")
        selector = fs.FileSelector(at, allow_not_found=True, recursive=recursive)
        return [i for i in self.store.get_file_info(selector) if i.type == fs.FileType.File]

    def _exists(self, name: str) -> bool:
        return bool(self.store.get_file_info(f"{self.base}/{name}").type == fs.FileType.File)

    def _read(self, name: str) -> bytes:
        with self.store.open_input_stream(f"{self.base}/{name}") as stream:
            return bytes(stream.read())

    def _write(self, name: str, content: bytes) -> None:
        path = f"{self.base}/{name}"
        if not self._flat:
            self.store.create_dir(path.rpartition("/")[0], recursive=True)
        with self.store.open_output_stream(path) as stream:
            stream.write(content)

    def _delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self.store.delete_file(f"{self.base}/{name}")


@contextmanager
def working(runs: str, name: str) -> Iterator[tuple[StudyFolder, Mirror | None]]:
    """The folder to sweep a study in, locked; of one in a store, its claim, kept up to date.

    Raises:
        ConfigError: if another sweep has it, or the store cannot be used.
    """
    if not is_uri(runs):
        folder = StudyFolder(local(runs), name)
        with folder.lock():
            yield folder, None
        return
    folder = StudyFolder(cache(runs), name)
    with folder.lock():
        mirror = Mirror(runs, name, folder.path)
        mirror.claim(_owner(folder.path))
        if mirror.last() != mirror.owner:
            mirror.pull()
        mirror.begin()
        try:
            yield folder, mirror
        finally:
            mirror.close()


def fetched(runs: str, name: str) -> StudyFolder:
    """A copy of a study for reading, until this process ends; of one in a folder, itself.

    Raises:
        ConfigError: if the store cannot be used.
    """
    if not is_uri(runs):
        return StudyFolder(local(runs), name)
    temporary = tempfile.mkdtemp(prefix="tune-study-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    folder = StudyFolder(Path(temporary), name)
    folder.path.mkdir()
    Mirror(runs, name, folder.path).pull(everything=False)
    if not folder.exists():
        raise ConfigError(f"{runs.rstrip('/')}/{name}: holds no study.")
    return folder


def send_report(runs: str, folder: StudyFolder) -> str:
    """Sends the report of a study that was fetched; returns where it is.

    Raises:
        ConfigError: if the store cannot be used.
    """
    mirror = Mirror(runs, folder.path.name, folder.path)
    names = [name for name, _ in mirror._here() if name.startswith("report/")]
    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(mirror._send, names))
    except OSError as error:
        raise ConfigError(_line(mirror.uri, error)) from None
    return f"{mirror.uri}/report/index.html"


def cache(runs: str) -> Path:
    """Where studies of a store are worked on here."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tune_study"
    folder = root / hashlib.sha256(runs.rstrip("/").encode()).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be made ({error.strerror}). Give another place by XDG_CACHE_HOME."
        ) from None
    return folder


def _owner(folder: Path) -> str:
    """The name of a folder here, made up once."""
    file = folder / ".owner"
    if not file.is_file():
        file.write_text(secrets.token_hex(8), encoding="utf-8")
    return file.read_text(encoding="utf-8")


def _state(path: Path) -> tuple[int, int]:
    stat: Any = path.stat()
    return stat.st_size, stat.st_mtime_ns
