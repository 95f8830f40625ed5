"""How many cells run at a time, and with what of the machine: the one place that decides it.

- MPS: one. Two processes share its memory and its queue, and neither goes faster.
- CUDA: as many on each GPU as a measurement at the start finds to pay: 1, 2, 4 or 8 of the study's
  largest cell at once, twice as many as long as that has 1.15 times the tokens/s (`sharing.py`). It
  is kept in the study's folder. One a GPU where there are fewer cells to run than two on each, or
  GPUs of several kinds. A GPU was not at hand: this has been run on CPUs alone.
- CPU: as many as their threads leave cores for. At pilot size a second cell doubles the throughput
  and a second thread adds a sixth, so small studies ask for one thread a cell; at 10M
  parameters two threads are twice as fast as one, and studies of that size ask for all cores
  (docs/performance.md). The number of threads changes the last bits of a loss, so a study
  fixes it; it is never chosen by a measurement, which would give a cell another identity
  with every other load of the machine. `plan` measures the other choices for the study's size
  and says whether one is faster here (`threads.py`); taking it is up to the user.

On a Ray cluster the same holds for each of its nodes, and the sweep takes what they have free; a
GPU is measured on one of them. `--max-concurrent` overrides all of it, and nothing is measured.

Whatever is decided here changes no number: a cell knows nothing of its neighbours. On a GPU, too,
it does the same operations in the same order with them as without; batch, seed and identity are
its own.
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
        speed: of each, as a share of what it has with a device to itself.
    """

    at_once: int
    cpus: int
    gpus: float
    why: str
    limit: bool = True
    speed: float = 1.0

    @property
    def devices(self) -> int:
        """GPUs that have room for all of them."""
        return math.ceil(self.at_once * self.gpus - 1e-6)


@dataclass(frozen=True)
class Share:
    """What was found out about cells that share a GPU.

    Attributes:
        cells: on each.
        gain: their tokens/s together, over those of one alone.
        told: for people; empty if nothing was measured.
    """

    cells: int = 1
    gain: float = 1.0
    told: str = ""

    def on(self, gpus: str) -> str:
        """For people: so many cells on each of these."""
        cells = "one cell" if self.cells == 1 else f"{self.cells} cells"
        return f"{gpus}, {cells} on each" + (self.told and f": {self.told}")


ALONE = Share()
"""One cell a GPU, where nothing is known."""


@dataclass(frozen=True)
class Node:
    """A node of a Ray cluster.

    Attributes:
        cpus, gpus: whole processor cores and GPUs it lends to Ray.
        gpu: what its GPUs are called; empty if that is not known.
    """

    cpus: int
    gpus: int = 0
    gpu: str = ""

    def cells(self, cpus: int, gpus: float) -> int:
        """How many cells that need so much it has room for."""
        room = self.cpus // cpus
        return room if gpus == 0 else min(room, int(self.gpus / gpus + 1e-6))

    def holds(self, cpus: int, gpus: float) -> bool:
        """Whether one cell fits."""
        return self.cells(cpus, gpus) > 0


def policy(base: TrialConfig, asked: int | None = None, share: Share = ALONE) -> Policy:
    """The policy for cells like `base`, whose device and threads are settled.

    Args:
        asked: cells at a time, whatever is found wise.
        share: how many cells a GPU takes.

    Raises:
        ConfigError: if that is no positive number.
    """
    if asked is not None and asked < 1:
        raise ConfigError(f"--max-concurrent {asked}: is not a number of cells. Give 1 or more.")
    threads, speed = several(base.threads, "thread") + " each", 1.0
    if base.device == "cpu":
        wise = max(1, cores() // base.threads)
        cpus, gpus, why = base.threads, 0.0, f"{several(cores(), 'core')}, {threads}"
    elif base.device == "cuda":
        present = visible_gpus()
        wise, cpus, gpus, speed = present * share.cells, 1, 1 / share.cells, _speed(share)
        why = share.on(several(present, "GPU"))
        if asked:
            gpus, speed = 1 / math.ceil(asked / present), 1.0
            why = f"{several(present, 'GPU')}, {gpus:.2g} of one for each cell"
    else:
        wise, cpus, gpus, why = 1, 1, 0.0, "one at a time on MPS"
    if asked:
        why += "; as asked by --max-concurrent"
    return Policy(asked or wise, cpus, gpus, why, speed=speed)


def policy_on(
    nodes: Sequence[Node], base: TrialConfig, asked: int | None = None, share: Share = ALONE
) -> Policy:
    """The policy on a Ray cluster for cells like `base`, whose device and threads are settled.

    Args:
        asked: cells at a time, over all nodes.
        share: how many cells a GPU takes.

    Raises:
        ConfigError: if that is no positive number, or no node has room for a cell.
    """
    if asked is not None and asked < 1:
        raise ConfigError(f"--max-concurrent {asked}: is not a number of cells. Give 1 or more.")
    if base.device == "mps":
        raise ConfigError("device = 'mps': is not for a Ray cluster. Give cpu or cuda.")
    cpus, gpus = base.threads, 0.0
    present = sum(node.gpus for node in nodes)
    if base.device == "cuda":
        cpus = 1
        gpus = 1 / (math.ceil(asked / max(1, present)) if asked else share.cells)
    room = sum(node.cells(cpus, gpus) for node in nodes)
    if not room:
        need = several(cpus, "core") + (f" and {gpus:.2g} GPU" if gpus else "")
        found = "; ".join(f"{several(n.cpus, 'core')}, {several(n.gpus, 'GPU')}" for n in nodes)
        raise ConfigError(
            f"--address: no node of the cluster has {need} for a cell ({found or 'none'}). "
            "Add a node, or give another --set threads or device."
        )
    why = f"{several(len(nodes), 'node')}, "
    if not gpus:
        why += f"{several(cpus, 'core')} each"
    elif asked:
        why += f"{several(present, 'GPU')}, {gpus:.2g} of one for each cell"
    else:
        why += share.on(several(present, "GPU"))
    if asked:
        why += "; as asked by --max-concurrent"
    speed = 1.0 if asked or not gpus else _speed(share)
    return Policy(asked or room, cpus, gpus, why, asked is not None, speed)


def cores() -> int:
    """Processor cores that this process may use: a batch system may lend it a part of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def visible_gpus() -> int:
    """CUDA devices that this process sees, at least 1."""
    import torch

    return max(1, torch.cuda.device_count())


def gpu_names() -> list[str]:
    """What they are called."""
    import torch

    return [torch.cuda.get_device_name(i) for i in range(visible_gpus())]


def _speed(share: Share) -> float:
    return share.gain / share.cells


def several(n: int, what: str) -> str:
    """1 core, 2 cores."""
    return f"{n} {what}{'' if n == 1 else 's'}"
