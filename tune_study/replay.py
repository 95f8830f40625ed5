"""A cell run again on CPU in float32: is it the learning rate, or the backend?

A run that diverges on an accelerator and not here, from the same weights and on the same
batches, is no evidence about its learning rate.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from tune_study import checkpoints
from tune_study.config import ConfigError, Criterion, Study, TrialConfig
from tune_study.data import Tokens
from tune_study.divergence import Finish, Row, Verdict, failed
from tune_study.files import write_whole
from tune_study.identity import identity
from tune_study.records import Record, ended, read
from tune_study.store import StudyFolder
from tune_study.trainer import Trainer

CPU = {"device": "cpu", "precision": "fp32", "compile": False}
"""The settings under which arithmetic is trusted."""


@dataclass(frozen=True)
class Replay:
    """What came of a cell here, beside what came of it in the sweep.

    Attributes:
        cell: its name.
        device, precision: where and in what the sweep ran it.
        state, reason: the sweep's verdict.
        from_step: the step of the checkpoint that the replay went on from; 0 for the start.
        cpu_state, cpu_reason, cpu_step: the verdict here, and when it fell.
        cpu_loss: last validation loss here, nats per token; None if not finite.
    """

    cell: str
    device: str
    precision: str
    state: str
    reason: str
    from_step: int
    cpu_state: str
    cpu_reason: str
    cpu_step: int | None
    cpu_loss: float | None

    @property
    def agrees(self) -> bool:
        """Whether the cell is stable on both sides, or on neither."""
        return (self.state == "stable") == (self.cpu_state == "stable")

    @property
    def sentence(self) -> str:
        """The outcome for a reader."""
        start = f"from step {self.from_step}" if self.from_step else "from the start"
        why = f" ({self.cpu_reason})" if self.cpu_reason else ""
        also = "also " if self.agrees else ""
        hint = "" if self.agrees else "; suspect the backend, not the learning rate"
        return f"replayed on CPU in float32 {start}: {also}{self.cpu_state}{why}{hint}"


def replay(
    folder: StudyFolder, label: str, tokens: Tokens, say: Callable[[str], None] = print
) -> Replay:
    """Runs one cell of a study on CPU in float32, from its newest checkpoint if one is left.

    The outcome is written into the study's folder, where the analysis finds it.

    Raises:
        ConfigError: if the study has no such cell, or the sweep has not ended it.
    """
    study = folder.study()
    config = _config(study, label)
    records, _ = read(folder.experiments)
    of_group = [c for c in study.cells() if (c.depth, c.seed) == (config.depth, config.seed)]
    names = {c.label: identity(c, tokens.manifest.checksum) for c in of_group}
    histories = {c.label: (c, records.get(names[c.label], Record()).history(c)) for c in of_group}
    entropy = tokens.manifest.unigram_entropy
    was = _verdicts(histories, study.criterion, entropy).get(label)
    if was is None:
        raise ConfigError(f"{label}: has not ended yet. Run it first: sweep {study.name}")
    swept = histories[label][1]

    trainer = _trainer(config, tokens, records[names[label]], swept[-1]["step"])
    from_step = trainer.step
    # Only what is seen here is judged; rows before the checkpoint are the sweep's.
    rows: list[Row] = []
    while ended(rows, config, study.criterion) is None:
        row = trainer.train(config.report_every) | {"data/unigram_entropy": entropy}
        say(f"{label}: step {row['step']} of {config.steps}, validation loss {row['val/loss']}")
        rows.append(row)
    here = _verdicts(histories | {label: (config, rows)}, study.criterion, entropy)[label]
    outcome = Replay(
        cell=label,
        device=str(swept[-1]["device"]),
        precision=config.precision,
        state=was.state,
        reason=was.reason,
        from_step=from_step,
        cpu_state=here.state,
        cpu_reason=here.reason,
        cpu_step=here.step,
        cpu_loss=rows[-1]["val/loss"],
    )
    _write(folder, outcome)
    return outcome


def _config(study: Study, label: str) -> TrialConfig:
    for config in study.cells():
        if config.label == label:
            return config
    example = next(study.cells()).label
    raise ConfigError(
        f"cell = {label!r}: not in study {study.name}. Give one of its cells, such as {example}."
    )


def _verdicts(
    histories: Mapping[str, tuple[TrialConfig, Sequence[Row]]],
    criterion: Criterion,
    unigram_entropy: float,
) -> dict[str, Verdict]:
    """Verdicts on the ended cells of one depth and seed, by label."""
    verdicts = {
        label: verdict
        for label, (config, rows) in histories.items()
        if (verdict := ended(list(rows), config, criterion))
    }
    done = [label for label, verdict in verdicts.items() if verdict.state == "stable"]
    finishes = [
        Finish(histories[k][0].lr, histories[k][0].arm, histories[k][1][-1]["val/loss"])
        for k in done
    ]
    return verdicts | dict(zip(done, failed(finishes, unigram_entropy, criterion), strict=True))


def _trainer(config: TrialConfig, tokens: Tokens, record: Record, last_step: int) -> Trainer:
    """A trainer on CPU, at the newest checkpoint that can be used, else at the start."""
    trainer = Trainer(config.replace(**CPU), tokens)
    for folder in record.checkpoints():
        try:
            state = checkpoints.load(folder)
            # The checkpoint is this cell's, but for where and in what precision it ran.
            state["config"] |= CPU
            trainer.load_state_dict(state)
        except Exception:
            # Whatever is wrong with the file, the answer is the one before it.
            trainer = Trainer(config.replace(**CPU), tokens)
            continue
        if trainer.step < last_step and int(trainer.nonfinite_step) < 0:
            return trainer
        trainer = Trainer(config.replace(**CPU), tokens)
    return trainer


def _write(folder: StudyFolder, outcome: Replay) -> None:
    folder.replays.mkdir(exist_ok=True)
    content = asdict(outcome) | {"agrees": outcome.agrees, "sentence": outcome.sentence}
    path = folder.replays / f"{outcome.cell}.json"
    write_whole(path, json.dumps(content, indent=1, allow_nan=False) + "\n")
