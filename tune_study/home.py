"""The disk of the machine a sweep was started on, seen from every node of its cluster.

The study's folder and the tokens lie there, and a cluster need not share a disk. So checkpoints are
written to it, and tokens and earlier checkpoints read from it, through one actor on that machine.
For Tune it is a storage like any other: a pyarrow filesystem with the same paths.
"""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import ray
from filelock import FileLock
from pyarrow.fs import (
    FileInfo,
    FileSelector,
    FileSystemHandler,
    FileType,
    LocalFileSystem,
    PyFileSystem,
    copy_files,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

ACTOR = "home"
"""Its name; a cluster job has a namespace of its own."""

CHUNK = 8 * 2**20
"""Bytes in one message."""


def filesystem(folder: Path) -> PyFileSystem:
    """Starts the actor on this machine; its filesystem can be handed to tasks and actors.

    Args:
        folder: one that exists, to see that the actor has the same disk.

    Raises:
        RuntimeError: if it has another disk, as in a container of its own.
    """
    node = ray.get_runtime_context().get_node_id()
    here = NodeAffinitySchedulingStrategy(node, soft=False)
    # Started again after a crash, and asked again: what it does can be done twice.
    actor: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Disk)
    handle = actor.options(name=ACTOR, get_if_exists=True, scheduling_strategy=here).remote()
    stat = folder.stat()
    if ray.get(handle.place.remote(str(folder))) != (stat.st_dev, stat.st_ino):
        raise RuntimeError(f"{folder} is another one for Ray's processes on this machine")
    _kept.append(handle)
    return PyFileSystem(Home(node))


_kept: list[Any] = []
"""An actor ends with its last handle; the workers find it by name."""


def at_home(node: str) -> bool:
    """Whether this process runs on that node."""
    return bool(ray.get_runtime_context().get_node_id() == node)


@contextmanager
def fetched(folder: str, node: str | None) -> Iterator[Path]:
    """A folder of that node's to read; itself where there is no node, or it is this one."""
    if node is None or at_home(node):
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory() as here:
        copy_files(folder, here, source_filesystem=PyFileSystem(Home(node)))
        yield Path(here)


def fetched_once(folder: str, node: str) -> Path:
    """A copy of a folder of that node's, shared by the processes of this one; returns its parent.

    It lies with the code that Ray has unpacked here, and goes when that does.
    """
    parent = Path(__file__).resolve().parent.parent / "fetched"
    parent.mkdir(exist_ok=True)
    copy = parent / Path(folder).name
    with FileLock(parent / ".lock"):
        if not copy.exists():
            partial = parent / ".partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            copy_files(folder, str(partial), source_filesystem=PyFileSystem(Home(node)))
            partial.rename(copy)
    return parent


class Disk:
    """The actor: what is done there."""

    def __init__(self) -> None:
        self._disk = LocalFileSystem()

    def place(self, path: str) -> tuple[int, int] | None:
        """What tells a folder from another one under the same name; None if it is not there."""
        try:
            stat = Path(path).stat()
        except OSError:
            return None
        return stat.st_dev, stat.st_ino

    def do(self, name: str, *args: Any) -> None:
        """Calls a method of the filesystem that returns nothing."""
        getattr(self._disk, name)(*args)

    def infos(self, paths: list[str]) -> list[tuple[str, int, int | None, int | None]]:
        """Path, type, size and time of change in ns of files and folders, there or not."""
        return [_plain(info) for info in self._disk.get_file_info(paths)]

    def listing(self, base: str, missing_ok: bool, recursive: bool) -> list[tuple]:
        """The same of what is in a folder."""
        selector = FileSelector(base, allow_not_found=missing_ok, recursive=recursive)
        return [_plain(info) for info in self._disk.get_file_info(selector)]

    def read(self, path: str, at: int, size: int) -> bytes:
        """Bytes of a file."""
        with open(path, "rb") as file:
            file.seek(at)
            return file.read(size)

    def write(self, path: str, at: int, content: bytes) -> None:
        """Puts bytes into a file; those at 0 make it anew."""
        with open(path, "r+b" if at else "wb") as file:
            file.seek(at)
            file.write(content)


class Home(FileSystemHandler):
    """The pyarrow filesystem: on the machine itself its disk, elsewhere the actor's."""

    def __init__(self, node: str) -> None:
        self.node = node
        self._disk = LocalFileSystem()

    def __reduce__(self) -> tuple[Any, ...]:
        return Home, (self.node,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Home) and other.node == self.node

    __hash__ = None  # type: ignore[assignment]

    @property
    def here(self) -> bool:
        """Whether this process runs on the machine itself."""
        return at_home(self.node)

    def _do(self, name: str, *args: Any) -> None:
        if self.here:
            getattr(self._disk, name)(*args)
        else:
            _ask("do", name, *args)

    def get_type_name(self) -> str:
        return "home"

    def normalize_path(self, path: str) -> str:
        return path

    def create_dir(self, path: str, recursive: bool) -> None:
        self._do("create_dir", path)  # with its parents, whatever is asked

    def delete_dir(self, path: str) -> None:
        self._do("delete_dir", path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        self._do("delete_dir_contents", path)

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError

    def delete_file(self, path: str) -> None:
        self._do("delete_file", path)

    def move(self, src: str, dest: str) -> None:
        self._do("move", src, dest)

    def copy_file(self, src: str, dest: str) -> None:
        self._do("copy_file", src, dest)

    def get_file_info(self, paths: list[str]) -> list[FileInfo]:
        if self.here:
            return list(self._disk.get_file_info(paths))
        return [_info(*found) for found in _ask("infos", paths)]

    def get_file_info_selector(self, selector: FileSelector) -> list[FileInfo]:
        if self.here:
            return list(self._disk.get_file_info(selector))
        wanted = selector.base_dir, selector.allow_not_found, selector.recursive
        return [_info(*found) for found in _ask("listing", *wanted)]

    def open_input_stream(self, path: str) -> Any:
        return self.open_input_file(path)

    def open_input_file(self, path: str) -> Any:
        if self.here:
            return self._disk.open_input_file(path)
        size = self.get_file_info([path])[0].size
        if size is None:
            raise FileNotFoundError(path)
        return pyarrow.PythonFile(io.BufferedReader(_Read(path, size), CHUNK), mode="r")

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        if self.here:
            return self._disk.open_output_stream(path)
        return pyarrow.PythonFile(io.BufferedWriter(_Write(path), CHUNK), mode="w")

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        raise NotImplementedError


class _Read(io.RawIOBase):
    """A file there, read in pieces."""

    def __init__(self, path: str, size: int) -> None:
        self._path, self._size, self._at = path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        content = _ask("read", self._path, self._at, len(buffer))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


class _Write(io.RawIOBase):
    """A file there, written in pieces."""

    def __init__(self, path: str) -> None:
        self._path, self._at = path, 0
        _ask("write", path, 0, b"")  # an empty file is one, too

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        _ask("write", self._path, self._at, bytes(content))
        self._at += len(content)
        return len(content)


def _ask(name: str, *args: Any) -> Any:
    return ray.get(getattr(ray.get_actor(ACTOR), name).remote(*args))


def _plain(info: FileInfo) -> tuple[str, int, int | None, int | None]:
    return info.path, info.type.value, info.size, info.mtime_ns


def _info(path: str, kind: int, size: int | None, mtime_ns: int | None) -> FileInfo:
    return FileInfo(path, FileType(kind), size=size, mtime_ns=mtime_ns)
