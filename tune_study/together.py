"""How fast a cell trains beside others like it: several processes at once, for a moment.

    with Workers() as workers:
        alone = workers.measure(config, vocab_size, count=1)
        two = workers.measure(config, vocab_size, count=2)

Each worker is this file run as a program, with a model of the cell's shape on random tokens; what
the tokens say does not matter for speed. They begin when the last of them is warm. Nothing here
knows a study, and nothing of it stays.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from tune_study.config import TrialConfig

if TYPE_CHECKING:
    from tune_study.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent

CALL_S = 0.1
"""A worker looks at the clock after about so long."""

WAIT_S = 300.0
"""For a worker's answer: within it the slowest have compiled their model."""


class DiedError(Exception):
    """A worker ended, or gave no answer: that many of them do not fit. Says why."""


@dataclass(frozen=True)
class Together:
    """Processes that trained at the same time.

    Attributes:
        tokens_per_s: of all of them together, validation and reports not counted.
        memory: the share of the device's memory in use then, by whomever; 0 for a CPU.
    """

    tokens_per_s: float
    memory: float


class Workers:
    """The processes; started when they are first needed, ended with the block."""

    def __init__(self) -> None:
        self._all: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *raised: object) -> None:
        for worker in self._all:
            worker.kill()
            worker.communicate()

    def measure(self, config: TrialConfig, vocab_size: int, count: int, seconds: float) -> Together:
        """Trains cells like `config` in `count` processes at once.

        Args:
            config: device and threads are settled.
            seconds: how long, once all are warm; one step at least.

        Raises:
            DiedError: if one of them ended, for want of memory or whatever else.
        """
        self._all += [_started() for _ in range(count - len(self._all))]
        at_work = self._all[:count]
        job = {"config": config.model_dump(mode="json"), "vocab_size": vocab_size}
        for turn in (job, {"seconds": seconds}):
            for worker in at_work:
                _tell(worker, turn)
            answers = [_answer(worker) for worker in at_work]
        return Together(
            sum(answer["tokens_per_s"] for answer in answers),
            max(answer["memory"] for answer in answers),
        )


def _started() -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", __name__],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,  # a line that is read is not held back from `select`
    )


def _tell(worker: subprocess.Popen[bytes], what: dict[str, Any]) -> None:
    assert worker.stdin is not None
    with suppress(BrokenPipeError):  # its answer says that it is gone
        worker.stdin.write(json.dumps(what).encode() + b"\n")


def _answer(worker: subprocess.Popen[bytes]) -> dict[str, Any]:
    """What it says next.

    Raises:
        DiedError: if it says nothing any more, or that it failed.
    """
    assert worker.stdout is not None
    ready, _, _ = select.select([worker.stdout], [], [], WAIT_S)
    if not ready:
        raise DiedError(f"no answer within {WAIT_S:.0f} s")
    line = worker.stdout.readline()
    if not line:
        raise DiedError(f"a process ended with code {worker.wait()}")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise DiedError(answer["error"])
    return answer


# ------------------------------------------------------------------- the worker


def main() -> None:
    """Takes jobs from standard input and answers each by a line, until that is closed."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer
    trainer: Trainer | None = None
    shown: dict[str, Any] = {}
    jobs: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_listen, args=(jobs,), daemon=True).start()
    while True:
        job = json.loads(jobs.get())
        try:
            answer: dict[str, Any] = {}
            if "config" not in job:
                assert trainer is not None
                answer = _trained(trainer, job["seconds"])
            elif job != shown:
                trainer = None  # before the next one is built: they need not both fit
                trainer = _warm(TrialConfig(**job["config"]), job["vocab_size"])
                shown = job
        except Exception as error:
            answer = {"error": str(error).strip().split("\n")[0] or type(error).__name__}
        print(json.dumps(answer), file=answers)


def _listen(jobs: SimpleQueue[str]) -> None:
    """Ends this process when the other one is gone, whatever it is at."""
    for line in sys.stdin:
        jobs.put(line)
    os._exit(0)


def _warm(config: TrialConfig, vocab_size: int) -> Trainer:
    """A trainer that has everything it will ever allocate."""
    from tune_study.cost import RandomTokens
    from tune_study.trainer import Trainer

    trainer = Trainer(config.replace(steps=10**6), RandomTokens(config, vocab_size))
    trainer.train(1)  # compiles, and makes the optimiser's state
    return trainer


def _trained(trainer: Trainer, seconds: float) -> dict[str, float]:
    began, at, trained = time.perf_counter(), trainer.step, trainer.seconds
    steps = 1
    while trainer.step == at or time.perf_counter() - began < seconds:
        before = trainer.seconds
        trainer.train(steps)
        if trainer.seconds - before < CALL_S / 2:
            steps *= 2
    tokens = (trainer.step - at) * trainer.config.tokens_per_step
    return {
        "tokens_per_s": tokens / (trainer.seconds - trained),
        "memory": _in_use(trainer.device),
    }


def _in_use(device: str) -> float:
    """The share of the device's memory that is taken, by this process and all others."""
    if device != "cuda":
        return 0.0
    import torch

    free, total = torch.cuda.mem_get_info()
    return 1 - free / total


if __name__ == "__main__":
    main()
