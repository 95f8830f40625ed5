"""What a sweep needs of the machine it runs on; each check is one line if it is not there."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from tune_study.config import ConfigError
from tune_study.disk import size

REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements.txt"

SOCKET = "ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
"""The longest path that Ray makes a Unix socket at, inside the folder for temporary files."""

SOCKET_LIMIT = 103 if sys.platform == "darwin" else 107
"""Bytes of a Unix socket's path (sun_path less its end, and Ray's check)."""

WORKER_BYTES, RAY_BYTES = 600 * 2**20, 700 * 2**20
"""Memory of a worker with a small model, PyTorch included, and of Ray and the sweep beside them
(measured resident: 0.5 GB and 0.6 GB)."""

PROXIES = ("http_proxy", "https_proxy", "all_proxy")
PROXY_WAIT_S = 3.0


def supported() -> str:
    """Python and platform.

    Raises:
        ConfigError: for a platform on which nothing is known to work.
    """
    system, machine = platform.system(), platform.machine()
    if (system, machine) not in {
        ("Linux", "x86_64"),
        ("Linux", "aarch64"),
        ("Darwin", "arm64"),
    }:
        raise ConfigError(
            f"platform {system} {machine}: not supported. Use Linux (x86_64, aarch64; on Windows "
            "within WSL 2) or macOS on Apple silicon."
        )
    return f"Python {platform.python_version()} on {system} {machine}"


def packages() -> str:
    """Versions against requirements.txt.

    Raises:
        ConfigError: naming what is missing or of another version.
    """
    wrong = []
    pins = re.findall(r"^([\w-]+)(?:\[\w+\])?==(\S+)", REQUIREMENTS.read_text("utf-8"), re.M)
    for name, pinned in pins:
        try:
            found = version(name).split("+")[0]
        except PackageNotFoundError:
            found = "missing"
        if found != pinned:
            wrong.append(f"{name} is {found}, not {pinned}")
    if wrong:
        raise ConfigError(
            f"packages: {'; '.join(wrong)}. "
            f"Run: {sys.executable} -m pip install -r {REQUIREMENTS.name}"
        )
    return f"{len(pins)} packages as in {REQUIREMENTS.name}"


def sockets() -> str:
    """Room for the paths of Ray's sockets.

    Raises:
        ConfigError: if the folder for temporary files lies too deep, or cannot be written.
    """
    named = [name for name in ("RAY_TMPDIR", "TMPDIR") if os.environ.get(name)]
    if sys.platform == "darwin":  # Ray takes /tmp there, whatever TMPDIR says
        named = [name for name in named if name == "RAY_TMPDIR"]
    folder = Path(os.environ[named[0]] if named else "/tmp")
    variable = named[0] if named else "RAY_TMPDIR"
    _writable(folder, f"give another folder by {variable}")
    length = len(os.fsencode(folder.resolve() / SOCKET))
    if length > SOCKET_LIMIT:
        raise ConfigError(
            f"{variable} = {folder}: too long by {length - SOCKET_LIMIT} bytes for the sockets "
            f"that Ray makes in it. Give a short one: {variable}=/tmp"
        )
    return (
        f"{folder} is short enough for Ray's sockets, {size(shutil.disk_usage(folder).free)} free"
    )


def writable(runs: Path, remedy: str) -> str:
    """The folder of all studies, or where it is to be made.

    Args:
        remedy: what to give if it cannot be.

    Raises:
        ConfigError: if nothing can be written there.
    """
    folder = existing(runs)
    _writable(folder, f"give {remedy}")
    return f"{folder} can be written, {size(shutil.disk_usage(folder).free)} free"


def memory(at_once: int) -> str:
    """Memory for so many workers.

    Raises:
        ConfigError: if there is too little.
    """
    needed, free = RAY_BYTES + at_once * WORKER_BYTES, _available()
    if free < needed:
        raise ConfigError(
            f"memory: {size(free)} available, about {size(needed)} needed for {at_once} cells at a "
            "time. End other programs, or give a smaller --max-concurrent."
        )
    return f"{size(free)} of memory available, about {size(needed)} needed"


def workers() -> int:
    """How many there is memory for."""
    return max(0, _available() - RAY_BYTES) // WORKER_BYTES


def home() -> str:
    """The home folder, which a sweep does not need.

    Raises:
        ConfigError: if it cannot be written.
    """
    folder = Path.home()
    _writable(
        folder,
        "a sweep does without; corpora and tokenizers that are downloaded need HF_HOME and "
        "TIKTOKEN_CACHE_DIR set to folders that can be written",
    )
    return f"{folder} can be written"


def proxies() -> str:
    """The proxies that the environment names.

    Raises:
        ConfigError: if nobody answers at one of them.
    """
    found = []
    for name in (*PROXIES, *(proxy.upper() for proxy in PROXIES)):
        if not (value := os.environ.get(name)):
            continue
        url = urlsplit(value if "//" in value else f"//{value}")
        where = f"{url.hostname}:{url.port or 80}"  # without a password that it may hold
        found.append(f"{name} answers at {where}")
        try:
            socket.create_connection((url.hostname, url.port or 80), PROXY_WAIT_S).close()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{name} = {where}: does not answer ({error}). Correct or unset it; a sweep does "
                "without, preparing a corpus from the network does not."
            ) from None
    return "; ".join(found) or "no proxy is set"


def existing(path: Path) -> Path:
    """The path, or what there is of it."""
    path = path.expanduser().absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _available() -> int:
    """Bytes of memory, within the limit of a control group if there is one."""
    free = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / f"memory.{name}").read_text() for name in ("max", "current"))
        return min(free, int(limit) - int(used))
    except (OSError, ValueError):
        return free


def _writable(folder: Path, remedy: str) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror}); {remedy}.") from None
