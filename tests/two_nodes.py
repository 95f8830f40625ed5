"""A Ray cluster of two nodes on this machine, each with a folder, ports and a core of its own."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.faults.study import ROOT, wait_for
from tests.faults.suite import can_mount

START = [
    *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"),
    *("--object-store-memory=80000000", "--disable-usage-stats"),
]

STARTED = "Ray runtime started."

SOON = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_agent_register_timeout_ms": "120000",
    "RAY_py_gcs_connect_timeout_s": "2",
}
"""The head misses a node within seconds, a wrong token is refused as soon, and a machine with other
work on it may take its time to start."""


@dataclass
class TwoNodes:
    """The cluster.

    Attributes:
        address: of its head.
        environment: with the token, for those who may use it.
        head, second: what started each node; the processes of it are its children.
        apart: whether the second sees another content in the folders that were to be hidden.
    """

    address: str
    environment: dict[str, str]
    head: psutil.Process
    second: psutil.Process
    apart: bool

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        """A sweep on it."""
        return subprocess.Popen(
            [sys.executable, "-m", "tune_study", "sweep", *words, "--address", self.address],
            cwd=ROOT,
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@contextmanager
def two_nodes(hidden: Path) -> Iterator[TwoNodes]:
    """Starts them, with token authentication.

    Args:
        hidden: a folder that the second node does not see, where that can be arranged: as if it
            were another machine.
    """
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as name:
        token = Path(name) / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        environment = os.environ | SOON
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        address = f"127.0.0.1:{port}"
        apart = can_mount()
        hide = 'mount -t tmpfs none "$0" && exec "$@"'
        elsewhere = ["unshare", "-m", "sh", "-c", hide, str(hidden)] if apart else []
        commands = [
            [*START, "--head", f"--port={port}", "--include-dashboard=false"],
            [*elsewhere, *START, f"--address={address}"],
        ]
        started: list[psutil.Popen] = []
        try:
            for number, command in enumerate(commands):
                started.append(_start([*command, f"--temp-dir={name}/{number}"], environment))
            yield TwoNodes(address, environment, *started, apart)
        finally:
            for process in reversed(started):
                lose(process)
                process.wait()


def _start(command: list[str], environment: dict[str, str]) -> psutil.Popen:
    """A node, once it has joined.

    Raises:
        AssertionError: if it does not; says why.
    """
    # Ray's last line would wait in a pipe that nobody reads.
    with tempfile.NamedTemporaryFile("r") as said:
        with open(said.name, "w") as file:
            process = psutil.Popen(command, env=environment, stdout=file, stderr=file)
        wait_for(lambda: STARTED in Path(said.name).read_text() or process.poll() is not None)
        assert process.poll() is None, said.read()
    return process


def lose(node: psutil.Process) -> None:
    """Kills a node and all that runs on it."""
    with suppress(psutil.NoSuchProcess):
        for process in [*node.children(recursive=True), node]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
