"""An existing Ray cluster as the engine: how a sweep connects to it, and what its cells get there.

Nothing of the cluster is ours: it is neither started nor ended here. The driver runs on one of its
machines, and the study's folder is that machine's; workers get the code as a package of Ray's,
the tokens and checkpoints through `home`.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pyarrow.fs import FileSystem

from tune_study import signals
from tune_study.concurrency import Node
from tune_study.config import ConfigError
from tune_study.sweep import ENVIRONMENT

ROOT = Path(__file__).resolve().parent.parent

SHIPPED = {"trainable.py", "tune_study", "interventions", "search_spaces"}
"""Of the repository: what a worker imports. Nothing else leaves this machine."""

ANSWER_S = 3.0
"""Within which the cluster's servers must take a connection."""

PATIENCE = 3
"""Looks one after the other that find no answer, until the cluster counts as gone."""

GRACE_S = 4.0
"""For the sweep to end in order when they are gone."""

ROOM_EVERY_S = 10.0
"""Between two looks at whether a node is left that a cell fits on."""

GPU_WAIT_S = 300.0
"""For a measurement on a GPU, others' work on it included."""

GPU_NAMED = "accelerator_type:"
"""How Ray begins the name of a resource that says what a node's GPUs are."""

T = TypeVar("T")


@dataclass
class Cluster:
    """A cluster this process is connected to.

    Attributes:
        address: of its head, host:port.
        raylet: the socket of Ray's server on this machine.
        connected: whether it is still needed.
        gone: why it cannot be used any more; empty if it can.
    """

    address: str
    raylet: str
    connected: bool = True
    gone: str = ""
    _looked: float = field(default_factory=time.monotonic)

    def nodes(self) -> list[Node]:
        """The nodes that are alive, with what they have."""
        import ray

        return [
            Node(int(found.get("CPU", 0)), int(found.get("GPU", 0)), _gpu(found))
            for found in (node["Resources"] for node in ray.nodes() if node["Alive"])
        ]

    def on_gpu(self, function: Callable[[], T], cpus: int) -> T:
        """What a function returns on some node, with a GPU and so many cores to itself.

        Raises:
            RuntimeError: if it fails there, or none is free for GPU_WAIT_S seconds.
        """
        import ray

        task = ray.remote(num_cpus=cpus, num_gpus=1, max_retries=0)(lambda: function())
        result = task.remote()
        try:
            found: T = ray.get(result, timeout=GPU_WAIT_S)
        except ray.exceptions.GetTimeoutError:
            ray.cancel(result, force=True)
            raise RuntimeError(f"no GPU was free for {GPU_WAIT_S:.0f} s") from None
        except ray.exceptions.RayError as error:
            raise RuntimeError(str(error).strip().split("\n")[-1]) from None
        return found

    def storage(self, folder: Path) -> FileSystem:
        """This machine's disk for all nodes.

        Raises:
            ConfigError: if Ray's processes on this machine have another one.
        """
        from tune_study import home

        try:
            return home.filesystem(folder)
        except RuntimeError as error:
            raise ConfigError(
                f"--runs: {error}. Start the sweep where Ray was started, or give a folder that "
                "both have."
            ) from None

    def fault(self, cpus: int, gpus: float) -> str:
        """Why nothing goes on there for cells of this need; empty if it does."""
        if not self.gone and time.monotonic() - self._looked > ROOM_EVERY_S:
            self._looked = time.monotonic()
            if not any(node.holds(cpus, gpus) for node in self.nodes()):
                return f"no node of the Ray cluster at {self.address} is left for a cell."
        return self.gone

    def watch(self) -> None:
        """Looks, in a thread of its own, whether the servers this process depends on are there.

        Without them Ray's calls do not return, and after ten seconds Ray ends the process with
        words of its own. So what is blocked a moment after they are gone is ended here.
        """
        host, _, port = self.address.rpartition(":")
        silent = 0
        while silent < PATIENCE:
            time.sleep(1.0)
            answers = _connects(socket.AF_INET, (host, int(port))) and _connects(
                socket.AF_UNIX, self.raylet
            )
            silent = 0 if answers or not self.connected else silent + 1
        self.gone = f"the Ray cluster at {self.address} does not answer any more."
        time.sleep(GRACE_S)
        os.write(2, f"Stopped: {self.gone} Everything reported is kept.\n".encode())
        os._exit(1)


def _gpu(resources: dict[str, float]) -> str:
    """What a node's GPUs are called."""
    names = (name.partition(GPU_NAMED)[2] for name in resources if name.startswith(GPU_NAMED))
    return next(names, "")


@contextmanager
def connected(address: str) -> Iterator[Cluster]:
    """A connection to a cluster, ended with the block unless an error ends that.

    Args:
        address: host:port of the head, or `auto` for the cluster of this machine.

    Raises:
        ConfigError: if there is none, it refuses, or this machine is no node of it.
    """
    if "://" in address:
        raise ConfigError(
            f"--address {address}: is not the address of a head. Give host:port, or auto, on a "
            "machine that has joined the cluster with `ray start`."
        )
    # Before Ray is imported: it would try a wrong token for half a minute.
    os.environ.setdefault("RAY_py_gcs_connect_timeout_s", "10")
    import ray

    with signals.kept():  # Ray sets its own
        try:
            _answers(address)
            with _quiet():
                context: Any = ray.init(
                    address=address,
                    runtime_env={
                        "working_dir": str(ROOT),
                        "excludes": _excludes(),
                        "env_vars": ENVIRONMENT,
                    },
                    log_to_driver=False,
                    logging_level=logging.CRITICAL,
                )
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise ConfigError(_refused(address, error)) from None
    found = context.address_info
    cluster = Cluster(found["gcs_address"], found["raylet_socket_name"])
    threading.Thread(target=cluster.watch, daemon=True).start()
    yield cluster
    cluster.connected = False
    ray.shutdown()


def _answers(address: str) -> None:
    """Whether there is anybody; Ray itself tries for half a minute.

    Raises:
        OSError: if not.
    """
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), ANSWER_S).close()


@contextmanager
def _quiet() -> Iterator[None]:
    """Nothing on standard error: what Ray's C++ part writes there would drown our one line."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _excludes() -> list[str]:
    """Everything but SHIPPED, as lines of a .gitignore."""
    others = sorted(path.name for path in ROOT.iterdir() if path.name not in SHIPPED)
    return [*(f"/{name}" for name in others), "__pycache__"]


def _refused(address: str, error: Exception) -> str:
    """One line for what Ray says in many."""
    import ray

    if isinstance(error, ray.exceptions.AuthenticationError):
        return (
            f"--address {address}: refused: the token is not the cluster's. Set RAY_AUTH_MODE="
            "token and RAY_AUTH_TOKEN_PATH to the file that `ray start` had on every node."
        )
    why = " ".join(str(error).split())
    why = why if len(why) <= 200 else why[:200] + "..."
    return (
        f"--address {address}: no Ray cluster to run on ({why}). Give host:port of its head, on a "
        "machine that has joined it with `ray start`; if that had a token, this needs "
        "RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN_PATH."
    )


def _connects(family: int, place: Any) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as attempt, suppress(OSError):
        attempt.settimeout(ANSWER_S)
        attempt.connect(place)
        return True
    return False
