"""Trains cells of a bundle again, and says whether the same comes out.

On a CPU a cell gives the same bits again wherever device, PyTorch, threads, precision and model of
processor are the same. Elsewhere the order of additions differs, and with it the last bits. What
training makes of them depends on the learning rate: up to the best one the final loss stays well
within TOLERANCE, above it the difference grows, and near the edge a run may end on the other side.
So only cells up to the best learning rate are chosen there. docs/bundle.md has measurements.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from tune_study import device as devices
from tune_study.config import ConfigError, Criterion, DataConfig, TrialConfig
from tune_study.data import Tokens, open_tokens, prepare
from tune_study.data.corpora import local_files
from tune_study.data.manifest import file_sha256
from tune_study.data.store import find_by_checksum, open_folder
from tune_study.divergence import Row
from tune_study.identity import identity
from tune_study.records import ended
from tune_study.store import versions
from tune_study.trainer import Trainer

TOLERANCE = 0.01
"""Nats by which a final loss may differ where the bits need not be the same."""

BELOW = 10.0
"""A learning rate counts as below the edge from this factor beneath the lowest that fails."""

ROUNDED = 1.01
"""Learning rates of a grid have three digits."""

TRAINED = ("stable", "failed", "diverged")
"""States of cells that have numbers to compare."""

CLOCKS = ("time/", "resumed_step")
"""What a report holds that is not a result of training."""


class TextMissingError(ConfigError):
    """The text of a bundle is not here; the line says which it is, and how to give it."""


@dataclass(frozen=True)
class Recorded:
    """A cell as the bundle has it.

    Attributes:
        config, identity: its settings and its name then.
        arm: its intervention, as the study calls it.
        state: one of TRAINED.
        device: the device's name, with the CPU's instructions.
        rows: its reports, values that are not finite as None.
        sensitive: whether its learning rate is above the best of its arm and depth, or less than
            BELOW beneath one that fails there.
    """

    config: TrialConfig
    identity: str
    arm: str
    state: str
    device: str
    rows: Sequence[Row]
    sensitive: bool


@dataclass(frozen=True)
class Outcome:
    """What came of a cell here.

    Attributes:
        label: its name.
        bits: whether every number of every report is the same.
        difference: of the final losses, in nats; None where one is not finite or the runs
            ended in different ways.
        agrees: whether that is enough.
        told: for a reader.
    """

    label: str
    bits: bool
    difference: float | None
    agrees: bool
    told: str


# ------------------------------------------------------------------- which cells


def recorded(
    cells: Sequence[Mapping[str, Any]],
    rows: Mapping[str, Sequence[Row]],
    configs: Mapping[str, tuple[TrialConfig, str]],
) -> dict[str, Recorded]:
    """The cells of a bundle that have numbers to compare, by label.

    Args:
        cells: rows of the table of cells.
        rows: reports by cell.
        configs: settings and identity by cell.
    """
    lowest: dict[tuple[Any, ...], float] = {}
    losses: dict[tuple[Any, ...], dict[float, list[float]]] = {}
    for cell in cells:
        line, lr = (cell["arm"], cell["depth"]), cell["lr"]
        if cell["state"] in ("failed", "diverged"):
            lowest[line] = min(lr, lowest.get(line, math.inf))
        elif cell["state"] == "stable":
            losses.setdefault(line, {}).setdefault(lr, []).append(cell["loss"])
    best = {line: min(of, key=lambda lr: fmean(of[lr])) for line, of in losses.items()}
    found = {}
    for cell in cells:
        label, line, lr = cell["cell"], (cell["arm"], cell["depth"]), cell["lr"]
        if cell["state"] in TRAINED and label in rows:
            below = lr * BELOW <= lowest.get(line, math.inf) * ROUNDED
            sensitive = not below or lr > best.get(line, 0)
            found[label] = Recorded(
                *configs[label], cell["arm"], cell["state"], cell["device"], rows[label], sensitive
            )
    return found


def choose(
    cells: Mapping[str, Recorded], why_other: Mapping[str, str], count: int, seed: int
) -> list[str]:
    """Cells to train again, evenly over what there is.

    Of cells whose bits must be the same, evenly over states and arms. Where there are none, stable
    cells that are not sensitive, evenly over depths and arms.

    Args:
        cells: those that have numbers.
        why_other: why the bits of each need not be the same; empty where they must.
        count: how many, all if there are no more.
        seed: of the draw.
    """
    drawn = random.Random(seed)
    groups: dict[tuple[Any, ...], list[str]] = {}
    same = [label for label in cells if not why_other[label]]
    for label in same or cells:
        cell = cells[label]
        if same:
            groups.setdefault((cell.state, cell.arm), []).append(label)
        elif cell.state == "stable" and not cell.sensitive:
            groups.setdefault((cell.config.depth, cell.arm), []).append(label)
    for group in groups.values():
        drawn.shuffle(group)
    chosen: list[str] = []
    used: Counter[Any] = Counter()
    while len(chosen) < count and groups:
        keys = list(groups)
        drawn.shuffle(keys)
        # What was taken least comes first: of the states or depths, then of the arms, then both.
        key = min(keys, key=lambda k: [used[part] for part in enumerate((*k, k))])
        used.update(enumerate((*key, key)))
        chosen.append(groups[key].pop())
        if not groups[key]:
            del groups[key]
    return chosen


def other_machine(cell: Recorded, recorded: Mapping[str, str]) -> str:
    """Why this machine need not give the cell's bits; empty where it must.

    Args:
        recorded: the versions that the sweep recorded.
    """
    if cell.config.device != "cpu":
        return f"{cell.config.device}: repeats need not give the same bits"
    here = versions()
    if (now := devices.describe("cpu")) != cell.device:
        return f"other processor: {now} instead of {cell.device}"
    if here["torch"] != recorded.get("torch"):
        return f"other PyTorch: {here['torch']} instead of {recorded.get('torch', 'unknown')}"
    was = recorded.get("processor", "unknown")
    if here["processor"] != was or was == "unknown":
        return f"other processor: {here['processor']} instead of {was}"
    return ""


# ---------------------------------------------------------------- training again


def train(
    label: str,
    cell: Recorded,
    tokens: Tokens,
    criterion: Criterion,
    why_other: str,
    tolerance: float | None,
) -> Outcome:
    """Trains one cell from its start, and compares.

    Args:
        why_other: why the bits need not be the same, as `other_machine`.
        tolerance: nats by which the final loss may differ; None for TOLERANCE where the bits
            need not be the same, and none where they must.
    """
    config = _here(cell.config)
    trainer = Trainer(config, tokens)
    rows: list[Row] = []
    while ended(rows, config, criterion) is None:
        row = trainer.train(config.report_every)
        rows.append(row | {"data/unigram_entropy": tokens.manifest.unigram_entropy})
    end = f"{cell.state}, {rows[-1]['step']} of {config.steps} steps"
    if _same(cell.rows, rows):
        return Outcome(label, True, 0.0, True, f"{label} ({end}): same bits")
    difference = _difference(cell, rows, config, criterion)
    if difference is None:
        text = "ends otherwise"
    elif difference == 0:
        text = "same final loss, but not the same in all numbers"
    else:
        text = f"final loss {rows[-1]['val/loss']:.6g}, recorded {cell.rows[-1]['val/loss']:.6g}: "
        text += f"differs by {difference:.2g} nats"
    if (name := identity(cell.config, tokens.manifest.checksum)) != cell.identity:
        text += f"; code or versions give it another identity, {name} instead of {cell.identity}"
    allowed = tolerance if tolerance is not None else TOLERANCE if why_other else 0.0
    agrees = difference is not None and difference <= allowed and (allowed > 0)
    if not agrees and not why_other:
        text += "; device, PyTorch, threads, precision and processor are those recorded"
    if not agrees and why_other and cell.sensitive:
        text += "; above the best learning rate processors may disagree so far"
    return Outcome(label, False, difference, agrees, f"{label} ({end}): {text}")


def _here(config: TrialConfig) -> TrialConfig:
    """The cell's settings, on the CPU where its device is not here."""
    try:
        devices.resolve(config.device)
    except ConfigError:
        return config.replace(device="cpu")
    return config


def _same(recorded: Sequence[Row], rows: Sequence[Row]) -> bool:
    """Whether all numbers that both have are the same, and the same reports are there."""
    if [row["step"] for row in recorded] != [row["step"] for row in rows]:
        return False
    return all(
        _equal(value, again[name])
        for row, again in zip(recorded, rows, strict=True)
        for name, value in row.items()
        if name in again and not name.startswith(CLOCKS)
    )


def _equal(value: Any, again: Any) -> bool:
    if isinstance(value, str) or isinstance(again, str):
        return bool(value == again)
    one, other = (np.asarray(v, dtype=np.float64) for v in (value, again))
    if one.ndim:  # the losses of single steps are stored in float32
        with np.errstate(over="ignore"):
            one, other = one.astype(np.float32), other.astype(np.float32)
    return one.shape == other.shape and bool(np.array_equal(one, other, equal_nan=True))


def _difference(
    cell: Recorded, rows: Sequence[Row], config: TrialConfig, criterion: Criterion
) -> float | None:
    """Of the final losses; None where only one of the runs diverged, or one is not finite."""
    verdicts = [ended(list(of), config, criterion) for of in (cell.rows, rows)]
    states = {verdict.state for verdict in verdicts if verdict is not None}
    losses = [of[-1]["val/loss"] for of in (cell.rows, rows)]
    if len(states) != 1 or None in losses:
        return None
    return float(abs(losses[0] - losses[1]))


def verdict(outcomes: Sequence[Outcome], reasons: Collection[str]) -> str:
    """All outcomes in one line.

    Args:
        reasons: why the bits need not be the same; empty where they must.
    """
    n = len(outcomes)
    what = f"of {n} cell{'s' if n != 1 else ''}"
    if differing := sum(not outcome.agrees for outcome in outcomes):
        return f"{differing} {what} differ{'s' if differing == 1 else ''}."
    same = sum(outcome.bits for outcome in outcomes)
    if same == n:
        return f"{n} {what}: same bits."
    most = max(outcome.difference or 0.0 for outcome in outcomes)
    some = f", {same} of them with the same bits" if same else ""
    why = f" ({'; '.join(sorted(reasons))})" if reasons else ""
    return f"{n} {what}: within {_up(most)} nats{some}{why}."


def _up(value: float) -> str:
    """Rounded up to one digit, so that it is a bound."""
    if value == 0:
        return "0"
    unit = 10.0 ** math.floor(math.log10(value))
    return f"{math.ceil(value / unit * (1 - 1e-12)) * unit:.1g}"


# ------------------------------------------------------------------------ tokens


def find_tokens(
    settings: DataConfig,
    recorded: Mapping[str, Any],
    data: Path,
    texts: Mapping[str, str],
    say: Callable[[str], None],
) -> Tokens:
    """The tokens that a bundle's cells were trained on.

    Those that are prepared under `data` are taken; text that the code makes itself is prepared;
    other text must be given. Nothing is fetched.

    Args:
        recorded: the manifest of the tokens.
        texts: paths for `train` and `validation`, where given.

    Raises:
        TextMissingError: if they are not here and no text is given.
        ConfigError: if the text that is given, or made, has other tokens.
    """
    checksum = recorded["checksum"]
    if texts:
        if settings.corpus != "text":
            raise ConfigError(
                f"--train, --validation: the text is {settings.corpus}, no file. Leave them out."
            )
        _refuse_other_files(recorded, texts)
        settings = settings.replace(**texts)
    elif found := find_by_checksum(data, checksum):
        return open_folder(found)
    elif settings.corpus != "synthetic" or settings.tokenizer.startswith("gpt2"):
        raise TextMissingError(_how_to_get(recorded))
    prepare(settings, data, say)
    tokens = open_tokens(settings, data)
    if (now := tokens.manifest.checksum) != checksum:
        raise ConfigError(
            f"data: these tokens have the checksum {now[:12]}, those of the bundle "
            f"{checksum[:12]}. {_how_to_get(recorded)}"
        )
    return tokens


def _refuse_other_files(recorded: Mapping[str, Any], texts: Mapping[str, str]) -> None:
    """Names the first file whose content is not that of the bundle's."""
    for split, path in texts.items():
        expected = [s["sha256"] for s in recorded["sources"] if s["split"] == split]
        found = [file_sha256(file) for file in local_files(split, path)]
        if found != expected:
            was, now = (", ".join(digest[:12] for digest in of) for of in (expected, found))
            raise ConfigError(
                f"--{split} {path}: has SHA-256 {now}, not {was}. {_how_to_get(recorded)}"
            )


def _how_to_get(recorded: Mapping[str, Any]) -> str:
    """Which text it is, and how to give it."""
    corpus, sources = recorded["corpus"], recorded["sources"]
    if recorded["settings"]["corpus"] == "synthetic":
        return "They are made by the code: use the commit that the bundle names."
    if not sources:
        return (
            f"The text is {corpus}. Where there is a network, prepare it by `prepare STUDY` with "
            "the settings of the bundle's study.json, and name its folder by --data."
        )
    files = ", ".join(f"{s['name']} (SHA-256 {s['sha256'][:12]})" for s in sources)
    return (
        f"The text is {files}. Give it by --train FILE --validation FILE, or tokens prepared of "
        "it by --data FOLDER."
    )
