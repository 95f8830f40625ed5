"""How many cells share a GPU, by a short measurement with the study's largest.

One, two, four and eight of it train at once on one GPU, each in a process of its own as in a
sweep, as long as twice as many have at least GAIN times the tokens/s. It is not tried where there
is no room: memory of the GPU, cores and memory of the machine, cells to run. A number whose
processes end, as for want of memory, is one that does not fit, and no error.

It settles how many cells run side by side and nothing else: batches, seeds and identities are the
study's, and a cell's operations are the same whoever shares its GPU.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from tune_study import cost, machine
from tune_study.concurrency import Node, Policy, Share, cores, gpu_names, policy, policy_on
from tune_study.config import Study, TrialConfig
from tune_study.files import write_whole
from tune_study.together import DiedError, Together, Workers

if TYPE_CHECKING:
    from tune_study.cluster import Cluster
    from tune_study.sweep import Plan

GAIN = 1.15
"""Times the tokens/s that twice as many cells must have to be worth their memory."""

MOST = 8
"""Cells on a GPU: each holds the libraries' memory once more, there and on the machine."""

FULL = 0.9
"""The share of a GPU's memory that may be in use with all cells on it."""

TRY_S = 2.0
"""For each number of cells, once all are warm."""


@dataclass(frozen=True)
class Tried:
    """A measurement.

    Attributes:
        most: cells there was room for, the GPU's memory aside.
        rates: tokens/s of one, two, four, ... cells, all together; those that fit.
        seconds: it took.
        why: the next number did not fit; empty if it was not tried.
    """

    most: int
    rates: tuple[float, ...]
    seconds: float
    why: str = ""


def policy_for(
    plan: Plan,
    vocab_size: int,
    asked: int | None,
    file: Path,
    keep: bool = False,
    cluster: Cluster | None = None,
    say: Callable[[str], None] = print,
) -> Policy:
    """The policy for a start, whose study's device and threads are settled.

    On a GPU it measures, unless it is told the number of cells, has room for one alone, or knows.

    Args:
        asked: cells at a time; then nothing is measured.
        file: holds what was measured before, and with `keep` gets what is now.
        cluster: to run on; this machine by default.
        say: gets a line before seconds go by.
    """
    base, share = plan.study.base, Share()
    if asked is None and base.device == "cuda":
        share = _share(plan.study, len(plan.todo), vocab_size, file, keep, cluster, say)
    if cluster is None:
        return policy(base, asked, share)
    return policy_on(cluster.nodes(), base, asked, share)


def _share(
    study: Study,
    cells: int,
    vocab_size: int,
    file: Path,
    keep: bool,
    cluster: Cluster | None,
    say: Callable[[str], None],
) -> Share:
    if cluster is None:
        names = gpu_names()
        gpus = [Node(cores() // len(names), 1, name) for name in names]
        most = min(room(gpus, cells), machine.workers() // len(names))
    else:
        gpus = [node for node in cluster.nodes() if node.gpus]
        most = room(gpus, cells)
    if most < 2:
        return Share()
    config = cost.largest(study, vocab_size)
    known = _read(file)
    key = _key(gpus[0].gpu, config, vocab_size)
    tried = known.get(key)
    if tried is not None and tried.most >= most:
        return decide(tried, most, "earlier")
    say("Measuring how many cells a GPU trains best at once ...")
    measure = partial(on_this_machine, config, vocab_size, most)
    if cluster is None:
        tried = measure()
    else:
        began = time.monotonic()
        try:
            tried = cluster.on_gpu(measure, most)
        except RuntimeError as error:
            tried = Tried(most, (), time.monotonic() - began, str(error))
    if keep and tried.rates and gpus[0].gpu:
        known |= {key: tried}
        write_whole(file, json.dumps({k: asdict(v) for k, v in known.items()}, indent=1) + "\n")
    return decide(tried, most, f"in {tried.seconds:.0f} s")


def room(gpus: Sequence[Node], cells: int) -> int:
    """How many cells a GPU it is worth trying; 1 where the GPUs are not known to be alike.

    Args:
        gpus: nodes that have some.
        cells: to run.
    """
    count = sum(node.gpus for node in gpus)
    names = {node.gpu for node in gpus}
    if not count or len(names) > 1 or (len(gpus) > 1 and "" in names):
        return 1
    return max(1, min(MOST, cells // count, *(node.cpus // node.gpus for node in gpus)))


def on_this_machine(
    config: TrialConfig, vocab_size: int, most: int, seconds: float = TRY_S
) -> Tried:
    """Tries cells like `config`, on its device, up to so many at once."""
    began = time.monotonic()
    with Workers() as workers:
        rates, why = climb(most, lambda n: workers.measure(config, vocab_size, n, seconds))
    return Tried(most, tuple(rates), time.monotonic() - began, why)


def climb(most: int, measure: Callable[[int], Together]) -> tuple[list[float], str]:
    """Doubles the number of cells as long as it pays and there is room.

    Returns:
        the rate of each number that fits, and why the next does not, if it was tried.
    """
    rates: list[float] = []
    while True:
        count = 2 ** len(rates)
        try:
            found = measure(count)
        except DiedError as error:
            return rates, str(error)
        if rates and found.memory > FULL:
            return rates, "no memory to spare"
        rates.append(found.tokens_per_s)
        if 2 * found.memory > FULL:
            return rates, "no memory for twice as many"
        if 2 * count > most or not _pays(rates, len(rates) - 1):
            return rates, ""


def _pays(rates: Sequence[float], at: int) -> bool:
    return at == 0 or rates[at] >= GAIN * rates[at - 1]


def decide(tried: Tried, most: int, when: str) -> Share:
    """How many cells share a GPU by a measurement that went up to `most` of them or more."""
    rates = tried.rates
    if not rates:
        return Share(told=f"could not be measured ({tried.why})")
    best = 0
    while best + 1 < len(rates) and 2 ** (best + 1) <= most and _pays(rates, best + 1):
        best += 1
    measured = f"(measured {when} on the largest cell)"
    gain = rates[best] / rates[0]
    if best:
        return Share(2**best, gain, f"{gain:.2g} x the tokens/s of one {measured}")
    if len(rates) > 1:
        return Share(told=f"two have {rates[1] / rates[0]:.2g} x its tokens/s {measured}")
    return Share(told=f"two do not fit: {tried.why} {measured}")


def _key(gpu: str, config: TrialConfig, vocab_size: int) -> str:
    """What a measurement holds for."""
    shape = json.dumps([config.model_dump(mode="json"), vocab_size], sort_keys=True)
    return f"{gpu}, torch {version('torch')}, {hashlib.sha256(shape.encode()).hexdigest()[:16]}"


def _read(file: Path) -> dict[str, Tried]:
    """What was measured before; nothing if it cannot be read, for it can be measured again."""
    try:
        found = json.loads(file.read_bytes())
        return {
            key: Tried(int(t["most"]), tuple(map(float, t["rates"])), float(t["seconds"]), t["why"])
            for key, t in found.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
