"""A Study as Tune experiments: start it, go on with it, extend it.

Going on is starting: every start reads what earlier ones left (`records`), and makes a new
Tune experiment of exactly the cells that have no result yet, each from its last usable
checkpoint. Tune's own restore is not used: it ignores a changed grid, and repeats rows.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tune_study.config import Study, TrialConfig
from tune_study.data import Tokens
from tune_study.divergence import Row
from tune_study.identity import identity
from tune_study.records import Record, ended, read
from tune_study.store import StudyFolder

# Before Ray is imported, which reads them then.
os.environ.update(
    {
        "RAY_USAGE_STATS_ENABLED": "0",  # no telemetry
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # only the logs that somebody reads
        "TUNE_DISABLE_SIGINT_HANDLER": "1",  # ours ends the sweep in order
        "RAY_AIR_NEW_OUTPUT": "0",  # with verbose=0, no output but ours
        "RAY_CHDIR_TO_TRIAL_DIR": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray 2.60 asks for a choice, or warns
    }
)


@dataclass(frozen=True)
class Cell:
    """One cell to run: its settings, name, and how far earlier starts came with it."""

    config: TrialConfig
    identity: str
    record: Record
    rows: list[Row]

    @property
    def label(self) -> str:
        """The cell's readable name."""
        return self.config.label

    @property
    def last_step(self) -> int:
        """The last step it has reported, 0 if none."""
        return self.rows[-1]["step"] if self.rows else 0


@dataclass(frozen=True)
class Plan:
    """What a start of the study will do."""

    study: Study
    done: int
    todo: tuple[Cell, ...]
    damage: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """How a sweep ended."""

    interrupted: bool
    errors: dict[str, str]


def plan(study: Study, folder: StudyFolder, checksum: str) -> Plan:
    """Compares what the study asks for with what its folder holds."""
    records, damage = read(folder.experiments)
    todo, done = [], 0
    for config in study.cells():
        name = identity(config, checksum)
        record = records.get(name, Record())
        rows = record.history(config, damage)
        if ended(rows, config, study.criterion) is None:
            todo.append(Cell(config, name, record, rows))
        else:
            done += 1
    return Plan(study, done, tuple(todo), tuple(damage))


def concurrency(study: Study) -> int:
    """Trials at a time: one on an accelerator; on CPU as many as their threads leave room for.

    At pilot size a second trial doubles the throughput and a second thread adds a sixth, so
    small studies ask for one thread a trial.
    """
    if study.base.device != "cpu":
        return 1
    return max(1, (os.cpu_count() or 1) // study.base.threads)


def run(plan: Plan, folder: StudyFolder, tokens: Tokens, progress: Any) -> Outcome:
    """Runs the cells of a plan to their ends, or until interrupted.

    Args:
        plan: which cells.
        folder: where the study lies; a new Tune experiment is made in it.
        tokens: the prepared corpus, verified.
        progress: a tune.Callback that shows what happens.
    """
    # Ray takes seconds to import; nothing above needs it.
    from ray import tune

    from trainable import GPTTrainable
    from tune_study.callbacks import FinishedCheckpoints, RowLogger
    from tune_study.stopper import DivergenceStopper

    study, at_once = plan.study, concurrency(plan.study)
    cpus = study.base.threads if study.base.device == "cpu" else 1
    gpus = 1 if study.base.device == "cuda" else 0
    # The slot holds trials apart where Ray does not see the accelerator, or sees it wrongly.
    resources: dict[str, float] = {"cpu": cpus, "gpu": gpus, "trial_slot": 1}
    stopper = DivergenceStopper(
        study.criterion,
        {cell.label: cell.config.warmup_steps for cell in plan.todo},
        {cell.label: cell.rows for cell in plan.todo},
    )
    with _ray(cpus * at_once, gpus, at_once), _interruptible(stopper.halt) as interrupted:
        tune.Tuner(
            tune.with_resources(GPTTrainable, resources),
            param_space={
                "cell": tune.grid_search([_trial_config(cell) for cell in plan.todo]),
                "data": {"root": str(tokens.folder.parent), "checksum": tokens.manifest.checksum},
                "checkpoint_every_s": study.checkpoint_every_s,
            },
            tune_config=tune.TuneConfig(
                max_concurrent_trials=at_once,
                reuse_actors=True,
                trial_name_creator=_trial_name,
                trial_dirname_creator=_trial_name,
            ),
            run_config=tune.RunConfig(
                name=folder.next_experiment(),
                storage_path=str(folder.experiments),
                stop=stopper,
                verbose=0,
                callbacks=[RowLogger(), FinishedCheckpoints(), progress],
                checkpoint_config=tune.CheckpointConfig(num_to_keep=2, checkpoint_at_end=False),
            ),
        ).fit()
        stopped = interrupted()
    records, _ = read(folder.experiments)
    errors = {
        cell.label: records[cell.identity].errors[-1]
        for cell in plan.todo
        if cell.identity in records and records[cell.identity].attempts[-1].error
    }
    return Outcome(stopped, errors)


def _trial_config(cell: Cell) -> dict[str, Any]:
    return {
        **cell.config.model_dump(mode="json"),
        "label": cell.label,
        "arm": cell.config.arm,
        "identity": cell.identity,
        "checkpoints": [str(path) for path in cell.record.checkpoints()],
        "last_step": cell.last_step,
    }


def _trial_name(trial: Any) -> str:
    return str(trial.config["cell"]["label"])


@contextmanager
def _ray(cpus: int, gpus: int, slots: int) -> Iterator[None]:
    """A Ray of our own on this machine, gone when we are done."""
    import ray

    # Workers inherit the environment: they find `trainable` whatever folder we started in.
    root = str(Path(__file__).resolve().parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    ray.init(
        address="local",
        num_cpus=cpus,
        num_gpus=gpus,
        resources={"trial_slot": slots},
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=128 * 2**20,  # trials exchange rows, not tensors
    )
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _interruptible(halt: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM end the sweep in order; the second time, at once."""
    seen: list[int] = []

    def handler(number: int, frame: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)
        halt()

    previous = {n: signal.signal(n, handler) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(seen)
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
