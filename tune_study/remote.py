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
import os
import re
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tune_study.config import ConfigError
from tune_study.objects import Prefix, cannot, is_uri, local
from tune_study.store import HELD, StudyFolder, this_process

PUSH_EVERY_S = 20.0
"""What a machine that is lost can cost a study in a store, beside the checkpoint interval."""

STALE_S = 120.0
"""A claim this much older than another is that of a machine that is gone. By the store's clock; for
one that only reads, and has no claim to compare with, by its own."""

TUNES_OWN = re.compile(r"tune/[^/]+/[^/]+")
"""Files directly in an experiment: snapshots for a restore that is never made."""

CHECKPOINT = re.compile(r"tune/[^/]+/[^/]+/checkpoint_|weights/")
"""What analysis does not need; sent after the rows it belongs to."""

WEIGHTS = "weights/"
"""Of those, what tells by being there that a cell is done."""

OWNER = ".owner"
"""File in a folder here with its name as an owner."""

AT_ONCE = 8
"""Files on their way."""


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
        self.store = Prefix(runs, name)
        self.owner = self._words = ""
        self.fault = self.behind = ""
        self._sent: dict[str, tuple[int, int]] = {}
        self._there: set[str] = set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------ claims

    def claim(self, owner: str) -> None:
        """Takes the study for an owner.

        Who claims writes first and looks then; so of two at once at least one sees the other,
        and gives way.

        Raises:
            ConfigError: if another one has it, or the store cannot be used.
        """
        self.owner, self._words = owner, this_process()
        try:
            self.store.write(f".claims/{owner}", self._words.encode())
            claims = {info.base_name: info for info in self.store.list(".claims")}
            mine = claims.pop(owner)
            for name, info in claims.items():
                if name.endswith(".over"):
                    continue
                if info.mtime is None or (mine.mtime - info.mtime).total_seconds() < STALE_S:
                    self.store.delete(f".claims/{owner}")
                    raise ConfigError(self._taken(name))
                self.store.write(f".claims/{name}.over", b"")
                self.store.delete(f".claims/{name}")
            if f"{owner}.over" in claims:
                self.store.delete(f".claims/{owner}.over")
        except OSError as error:
            raise ConfigError(cannot(self.uri, error)) from None

    def _taken(self, name: str) -> str:
        return (
            f"{self.uri}: a sweep of this study is running "
            f"({self.store.read(f'.claims/{name}').decode()}). Wait for it; if it is gone, its "
            f"claim lapses within {STALE_S:g} s."
        )

    def holder(self) -> str:
        """The sweep that is at work in the study now, in words; empty for none.

        Raises:
            ConfigError: if the store cannot be used.
        """
        try:
            for info in self.store.list(".claims"):
                age = 0.0
                if info.mtime is not None:
                    age = (datetime.now(UTC) - info.mtime).total_seconds()
                if not info.base_name.endswith(".over") and age < STALE_S:
                    return self.store.read(f".claims/{info.base_name}").decode()
        except FileNotFoundError:  # given back meanwhile
            pass
        except OSError as error:
            raise ConfigError(cannot(self.uri, error)) from None
        return ""

    def _renew(self) -> bool:
        """Says that we are still there; false if we were given up meanwhile."""
        if self.store.exists(f".claims/{self.owner}.over"):
            self.fault = f"{self.uri}: was taken over by another machine."
            return False
        self.store.write(f".claims/{self.owner}", self._words.encode())
        return True

    # ------------------------------------------------------------- to and fro

    def pull(self, everything: bool = True) -> list[str]:
        """Makes the folder what the store has, in place of what it was.

        Args:
            everything: also checkpoints and weights, which only a sweep needs.

        Returns:
            names of the files that were left out.

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
            return sorted(set(found) - set(wanted))
        except OSError as error:
            raise ConfigError(cannot(self.uri, error)) from None

    def _fetch(self, name: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.store.read(name))
        self._sent[name] = _state(path)

    def last(self) -> str:
        """The owner that wrote last; empty for none."""
        try:
            return self.store.read(".last").decode() if self.store.exists(".last") else ""
        except OSError as error:
            raise ConfigError(cannot(self.uri, error)) from None

    def begin(self) -> None:
        """From now on the folder here is ahead; sends what changes, until `close`."""
        try:
            self._there |= set(self._files())
            self.store.write(".last", self.owner.encode())
        except OSError as error:
            raise ConfigError(cannot(self.uri, error)) from None
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
                self.store.delete(name)
                self._there.discard(name)
                self._sent.pop(name, None)
            self.behind = ""
        except OSError as error:  # tried again
            self.behind = cannot(self.uri, error)

    def close(self) -> None:
        """Sends the rest and gives the study free."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.push()
        if not self.fault:
            try:
                self.store.delete(f".claims/{self.owner}")
            except OSError as error:
                self.behind = self.behind or cannot(self.uri, error)

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
        self.store.write(name, content)
        self._there.add(name)
        self._sent[name] = state

    def _files(self) -> list[str]:
        """Names of the study's files there."""
        found = self.store.list(recursive=True)
        names = (info.path.removeprefix(f"{self.store.base}/") for info in found)
        return [name for name in names if not name.startswith(".")]


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
    folder = _copy(runs, name)[0]
    if not folder.exists():
        raise ConfigError(f"{runs.rstrip('/')}/{name}: holds no study.")
    return folder


def outline(runs: str, name: str) -> StudyFolder:
    """What tells how far a study is, begun or not; of one in a folder, itself.

    That is the folder of this machine if it is ahead of the store, and else a copy, in which empty
    files stand for the weights that are kept.

    Raises:
        ConfigError: if the store cannot be used.
    """
    if not is_uri(runs):
        return StudyFolder(local(runs), name)
    here = StudyFolder(place(runs), name)
    owner = here.path / OWNER
    if owner.is_file() and Mirror(runs, name, here.path).last() == owner.read_text("utf-8"):
        return here
    folder, weights = _copy(runs, name)
    for file in weights:
        (folder.path / file).parent.mkdir(exist_ok=True)
        (folder.path / file).touch()
    return folder


def _copy(runs: str, name: str) -> tuple[StudyFolder, list[str]]:
    """A temporary copy without checkpoints and weights, and the names of the weights."""
    temporary = tempfile.mkdtemp(prefix="tune-study-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    folder = StudyFolder(Path(temporary), name)
    folder.path.mkdir()
    mirror = Mirror(runs, name, folder.path)
    holder = mirror.holder()  # first: what it then wrote is in the copy
    left_out = mirror.pull(everything=False)
    (folder.path / HELD).write_text(holder, encoding="utf-8")
    return folder, [file for file in left_out if file.startswith(WEIGHTS)]


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
        raise ConfigError(cannot(mirror.uri, error)) from None
    return f"{mirror.uri}/report/index.html"


def beside(runs: str, name: str, file: str, here: str) -> Path:
    """Where a file made of a study goes if nobody says: into the study's folder.

    Of one in a store it is `here`, in the current folder: in the one that is mirrored it would be
    sent, and deleted when the study is fetched again.
    """
    return Path(here) if is_uri(runs) else StudyFolder(local(runs), name).path / file


def place(runs: str) -> Path:
    """The folder of this machine that studies are worked on in; it may not be there yet."""
    if not is_uri(runs):
        return local(runs)
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tune_study"
    return root / hashlib.sha256(runs.rstrip("/").encode()).hexdigest()[:16]


def cache(runs: str) -> Path:
    """The same of a store, made.

    Raises:
        ConfigError: if it cannot be.
    """
    folder = place(runs)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be made ({error.strerror}). Give another place by XDG_CACHE_HOME."
        ) from None
    return folder


def _owner(folder: Path) -> str:
    """The name of a folder here, made up once."""
    file = folder / OWNER
    if not file.is_file():
        file.write_text(secrets.token_hex(8), encoding="utf-8")
    return file.read_text(encoding="utf-8")


def _state(path: Path) -> tuple[int, int]:
    stat: Any = path.stat()
    return stat.st_size, stat.st_mtime_ns
