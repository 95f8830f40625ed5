"""Is this machine fit for a sweep, and can what it computes be believed?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tune_study import machine
from tune_study.config import ConfigError, Study, TrialConfig

STEPS, LR = 200, 1e-3
"""Of the comparison: at a low learning rate, rounding does not grow."""

TOLERANCE = {"fp32": 2e-4, "bf16": 3e-3}
"""Largest difference of a training loss from CPU float32, in nats. Measured in these steps between
AVX2 and AVX-512, and between 1 and 2 threads: 1e-5; between bf16 and float32 on a CPU: 3e-4."""

CPU = {"device": "cpu", "precision": "fp32", "compile": False, "threads": 1}


@dataclass(frozen=True)
class Finding:
    """One line of the examination.

    Attributes:
        kind: `ok`, `note` for what a sweep can do without, or `fault`.
        text: what was found, and the remedy of a fault.
    """

    kind: str
    text: str


def examine(study: Study, runs: str, data: Path) -> Iterator[Finding]:
    """Looks at everything a sweep of the study needs, one thing after the other.

    Goes on after a fault, as far as that can be.

    Args:
        runs: folder or URI of all studies.
    """
    from tune_study import objects, remote
    from tune_study.concurrency import policy

    yield _found(machine.supported)
    yield _found(machine.packages)
    device = _found(lambda: _device(study.base))
    yield device
    yield _found(machine.sockets)
    place = remote.place(runs)
    if objects.is_uri(runs):
        yield _found(lambda: objects.check(runs))
        yield _found(lambda: machine.writable(place, "another place by XDG_CACHE_HOME"))
    else:
        yield _found(lambda: machine.writable(place, "another folder with --runs"))
    yield _found(machine.home, without="note")
    yield _found(machine.proxies, without="note")
    yield _found(lambda: _data(study.base, data))
    if device.kind != "ok":
        return
    base = _settled(study.base)
    yield _found(lambda: machine.memory(policy(base).at_once))
    yield _found(lambda: _disk(study.replace(base=base), place))
    yield _found(lambda: believe(base))


def _found(check: Callable[[], str], without: str = "fault") -> Finding:
    try:
        return Finding("ok", check())
    except ConfigError as error:
        return Finding(without, str(error))


def _settled(base: TrialConfig) -> TrialConfig:
    from tune_study import device

    return device.settle(base)


def _device(base: TrialConfig) -> str:
    from tune_study import device
    from tune_study.concurrency import policy

    settled = _settled(base)
    who = policy(settled)
    best = device.resolve("auto")
    other = "" if best == settled.device else f"; this machine also has {best}: --set device={best}"
    return (
        f"device {device.describe(settled.device)}, {settled.precision}, "
        f"{who.at_once} at a time ({who.why}){other}"
    )


def _data(base: TrialConfig, data: Path) -> str:
    from tune_study.data import open_tokens

    try:
        return f"tokens of {open_tokens(base.data, data).folder.name} are prepared and whole"
    except ConfigError as error:
        if base.data.corpus == "synthetic" and "does not exist" in str(error):
            return "tokens are not prepared yet; a sweep makes them of the built-in corpus"
        raise


def _disk(study: Study, place: Path) -> str:
    from tune_study import cost, disk, sweep
    from tune_study.concurrency import policy
    from tune_study.store import StudyFolder

    folder = StudyFolder(place, study.name)
    checksum = folder.read()["data"]["checksum"] if folder.exists() else ""
    plan = sweep.plan(study, folder, checksum)
    ids, at_once = cost.vocab_size(study.base.data), policy(study.base).at_once
    needs = disk.needs(plan, folder, ids, at_once, sweep.CHECKPOINTS_KEPT)
    disk.check({machine.existing(path): parts for path, parts in needs.items()})
    total = sum(n for parts in needs.values() for n in parts.values())
    return f"room for {len(plan.todo)} cells of {study.name}: {disk.size(total)} at most"


# ------------------------------------------------------------------ arithmetic


class _Chain:
    """Tokens of which each is followed by one of four: something that can be learned."""

    vocab_size = 512

    def __init__(self) -> None:
        numbers = np.random.default_rng(0)
        follows = numbers.integers(0, self.vocab_size, (self.vocab_size, 4))
        ids = [0]
        for choice in numbers.integers(0, 4, 40_000):
            ids.append(int(follows[ids[-1], choice]))
        self.train = np.array(ids[:32_000], dtype=np.uint16)
        self.validation = np.array(ids[32_000:], dtype=np.uint16)


def believe(base: TrialConfig) -> str:
    """Trains 200 steps on the device and on CPU in float32, and compares every loss.

    Where the device is the CPU in float32, the two must be equal bit for bit.

    Args:
        base: device, precision, threads and compile are taken of it.

    Raises:
        ConfigError: if the losses differ by more than rounding does.
    """
    ways = {name: getattr(base, name) for name in CPU}
    repeats = {**ways, "threads": 1} == CPU
    there = f"on {base.device} in {base.precision}" + (", compiled" if base.compile else "")
    apart = 0.0
    for qk_norm in ("off", "rmsnorm"):
        here = _losses(qk_norm, **(ways if repeats else CPU))
        apart = max(apart, float(np.abs(_losses(qk_norm, **ways) - here).max()))
    if not np.isfinite(apart) or apart > (0 if repeats else TOLERANCE[base.precision]):
        raise ConfigError(
            f"{STEPS} steps at learning rate {LR:g} {there} differ from CPU float32 by {apart:.2g} "
            "nats: a sweep here cannot be believed. Use --set device=cpu, or another PyTorch."
        )
    if repeats:
        return f"{STEPS} steps {there} repeat bit for bit: a sweep here can be believed"
    return (
        f"{STEPS} steps {there} agree with CPU float32 within {apart:.1g} nats (limit "
        f"{TOLERANCE[base.precision]:g}): a sweep here can be believed"
    )


def _losses(qk_norm: Any, **ways: Any) -> np.ndarray:
    from tune_study.trainer import Trainer

    config = TrialConfig(
        lr=LR, qk_norm=qk_norm, steps=STEPS, report_every=STEPS, val_windows=64, **ways
    )
    row = Trainer(config, _Chain()).train(STEPS)
    losses = [np.nan if loss is None else loss for loss in row["train/losses"]]
    return np.array([*losses, np.nan if row["val/loss"] is None else row["val/loss"]])
