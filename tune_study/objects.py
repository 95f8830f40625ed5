"""Object stores: what a URI such as s3://bucket/prefix names, and the files beneath it.

A store has files that are written and read whole, listed and deleted; nothing is appended to,
locked or renamed. Credentials come from the environment and are never written.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from pyarrow import fs

from tune_study.config import ConfigError

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
        raise ConfigError(cannot(uri, error)) from None


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


def cannot(uri: str, error: Exception) -> str:
    """One line for a URI that cannot be used."""
    why = " ".join(str(error).split())
    why = why if len(why) <= WORDS else why[:WORDS] + "..."
    return f"--runs {uri}: cannot be used ({why}). Correct it, or the credentials and endpoint."


class Prefix:
    """The files beneath a path in a store; names are relative to it. Errors are OSErrors.

    Args:
        uri: of the path, or of one above it.
        below: what it lies at beneath the URI.

    Raises:
        ConfigError: if nothing knows such a URI, or a package is missing.
    """

    def __init__(self, uri: str, below: str = "") -> None:
        self.store, base = filesystem(uri)
        self.base = f"{base}/{below}".rstrip("/")
        # These have no folders: none has to be made, and none is left behind.
        self.flat = isinstance(self.store, fs.S3FileSystem | fs.GcsFileSystem)

    def list(self, name: str = "", recursive: bool = False) -> list[fs.FileInfo]:
        """The files there; none if there is no such folder."""
        at = f"{self.base}/{name}".rstrip("/")
        selector = fs.FileSelector(at, allow_not_found=True, recursive=recursive)
        return [i for i in self.store.get_file_info(selector) if i.type == fs.FileType.File]

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        return bool(self.store.get_file_info(f"{self.base}/{name}").type == fs.FileType.File)

    def read(self, name: str) -> bytes:
        """A file's content."""
        with self.store.open_input_stream(f"{self.base}/{name}") as stream:
            return bytes(stream.read())

    def write(self, name: str, content: bytes) -> None:
        """Puts a file there, in place of what there was."""
        path = f"{self.base}/{name}"
        if not self.flat:
            self.store.create_dir(path.rpartition("/")[0], recursive=True)
        with self.store.open_output_stream(path) as stream:
            stream.write(content)

    def delete(self, name: str) -> None:
        """Deletes a file, if it is there."""
        with suppress(FileNotFoundError):
            self.store.delete_file(f"{self.base}/{name}")


def check(uri: str) -> str:
    """Writes, lists, reads and deletes a file there, and says so.

    Raises:
        ConfigError: naming what could not be done.
    """
    doing, store = "", Prefix(uri)
    name, content = f".probe-{secrets.token_hex(8)}", b"x"
    try:
        doing = "writing"
        store.write(name, content)
        doing = "listing"
        listed = name in {info.base_name for info in store.list()}
        doing = "reading"
        same = store.read(name) == content
        doing = "deleting"
        store.delete(name)
        if not listed or not same:
            raise OSError("what was just written is not there: the store is not consistent")
    except OSError as error:
        if doing in ("listing", "reading"):
            with suppress(OSError):
                store.delete(name)
        raise ConfigError(cannot(uri, OSError(f"{doing}: {error}"))) from None
    return f"{uri} can be written, listed, read, deleted from"
