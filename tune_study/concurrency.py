"""How many cells run at a time, and with what of the machine: the one place that decides it.

- MPS: one. Two processes share its memory and its queue, and neither goes faster.
- CUDA: one a GPU.
- CPU: as many as their threads leave cores for. At pilot size a second cell doubles the throughput
  and a second thread adds a sixth, so small studies ask for one thread a cell; at 10M
  parameters two threads are twice as fast as one, and studies of that size ask for all cores
  (docs/performance.md). The number of threads changes the last bits of a loss, so a study
  fixes it; it is never chosen by a measurement, which would give a cell another identity
  with every other load of the machine.

On a Ray cluster the same holds for each of its nodes, and the sweep takes what they have free.

Whatever is decided here changes no number: a cell knows nothing of its neighbours.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from tune_study.config import ConfigError, TrialConfig


@dataclass(frozen=True)
class Policy:
    """Who runs beside whom.

    Attributes:
        at_once: cells at a time.
        cpus, gpus: of each; a share of a GPU where several cells have to make do with one.
        why: for people.
        limit: whether more than that must not run, whatever room there is; not so on a cluster, to
            which nodes may be added.
    """

    at_once: int
    cpus: int
    gpus: float
    why: str
    limit: bool = True


@dataclass(frozen=True)
class Node:
    """A node of a Ray cluster: whole processor cores and GPUs it lends to Ray."""

    cpus: int
    gpus: int = 0

    def cells(self, cpus: int, gpus: float) -> int:
        """How many cells that need so much it has room for."""
        room = self.cpus // cpus
        return room if gpus == 0 else min(room, int(self.gpus / gpus + 1e-6))

    def holds(self, cpus: int, gpus: float) -> bool:
        """Whether one cell fits."""
        return self.cells(cpus, gpus) > 0


def policy(base: TrialConfig, asked: int | None = None) -> Policy:
    """The policy for cells like `base`, whose device and threads are settled.

    Args:
        asked: cells at a time, whatever is found wise.

    Raises:
        ConfigError: if that is no positive number.
    """
    if asked is not None and asked < 1:
        raise ConfigError(f"--max-concurrent {asked}: is not a number of cells. Give 1 or more.")
    threads = _several(base.threads, "thread") + " each"
    if base.device == "cpu":
        wise = max(1, cores() // base.threads)
        cpus, gpus, why = base.threads, 0.0, f"{_several(cores(), 'core')}, {threads}"
    elif base.device == "cuda":
        wise = visible_gpus()
        cpus, gpus, why = 1, wise / (asked or wise), f"{_several(wise, 'GPU')}, one cell on each"
        if asked:
            why = f"{_several(wise, 'GPU')}, {min(1, gpus):.2g} of one for each cell"
    else:
        wise, cpus, gpus, why = 1, 1, 0.0, "one at a time on MPS"
    if asked:
        why += "; as asked by --max-concurrent"
    return Policy(asked or wise, cpus, min(1.0, gpus), why)


def policy_on(nodes: Sequence[Node], base: TrialConfig, asked: int | None = None) -> Policy:
    """The policy on a Ray cluster for cells like `base`, whose device and threads are settled.

    Args:
        asked: cells at a time, over all nodes.

    Raises:
        ConfigError: if that is no positive number, or no node has room for a cell.
    """
    if asked is not None and asked < 1:
        raise ConfigError(f"--max-concurrent {asked}: is not a number of cells. Give 1 or more.")
    if base.device == "mps":
        raise ConfigError("device = 'mps': is not for a Ray cluster. Give cpu or cuda.")
    cpus, gpus = base.threads, 0.0
    if base.device == "cuda":
        present = max(1, sum(node.gpus for node in nodes))
        cpus, gpus = 1, 1 / math.ceil((asked or present) / present)
    room = sum(node.cells(cpus, gpus) for node in nodes)
    if not room:
        need = _several(cpus, "core") + (f" and {gpus:.2g} GPU" if gpus else "")
        found = "; ".join(f"{_several(n.cpus, 'core')}, {_several(n.gpus, 'GPU')}" for n in nodes)
        raise ConfigError(
            f"--address: no node of the cluster has {need} for a cell ({found or 'none'}). "
            "Add a node, or give another --set threads or device."
        )
    why = (
        f"{_several(len(nodes), 'node')}, {_several(cpus, 'core')}{' and a GPU' * bool(gpus)} each"
    )
    if asked:
        why += "; as asked by --max-concurrent"
    return Policy(asked or room, cpus, gpus, why, limit=asked is not None)


def cores() -> int:
    """Processor cores that this process may use: a batch system may lend it a part of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def visible_gpus() -> int:
    """CUDA devices that this process sees, at least 1."""
    import torch

    return max(1, torch.cuda.device_count())


def _several(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
