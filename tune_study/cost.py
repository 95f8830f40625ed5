"""What a start of a study will take, before it runs: parameters, tokens, FLOPs, disk and time.

Time comes from a calibration: a model of each shape, on random tokens, trains for a moment on the
device. Speed does not depend on what the tokens say, so none have to be prepared.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tune_study.concurrency import Policy
from tune_study.config import DataConfig, Study, TrialConfig
from tune_study.disk import size
from tune_study.size import flops_per_token

if TYPE_CHECKING:
    from tune_study.sweep import Plan

TIMED_S, TIMED_STEPS = 0.1, 20
"""A shape's steps are timed for about so long, or so many."""

CALIBRATION_S, CALIBRATION_SHARE, CALIBRATION_MOST_S = 0.5, 0.005, 60.0
"""Once calibration has taken so long, and this share of what the study takes or a minute, the
shapes that are left are not measured: their time follows from the others' by their FLOPs."""

START_S = 8.0
"""From the first line to the first cell's first step: Ray, and workers that import PyTorch."""

CELL_S = 0.07
"""What Ray takes between two cells of an actor (docs/performance.md)."""

MOST_SAVED = 0.21
"""The largest share of a study's steps that stopping was measured to save (docs/divergence.md)."""


@dataclass(frozen=True)
class Shape:
    """Cells that take equally long: they differ in learning rate and seed alone.

    Attributes:
        config: one of them.
        cells, steps, reports: how many there are, and what they have still to do together.
        embedding, other: parameters of the embeddings (and an untied head), and all others.
        flops: of training on one token.
    """

    config: TrialConfig
    cells: int
    steps: int
    reports: int
    embedding: int
    other: int
    flops: float


@dataclass(frozen=True)
class Speed:
    """Seconds that a cell of some shape takes to begin, for a step and for a report."""

    start: float
    step: float
    report: float

    def times(self, ratio: float) -> Speed:
        """That of a shape with so many times the FLOPs."""
        return Speed(self.start, self.step * ratio, self.report * ratio)


@dataclass(frozen=True)
class Cost:
    """What a start takes.

    Attributes:
        shapes: smallest first.
        seconds: with the most that stopping was seen to save, and with nothing stopped.
        disk: bytes, at most.
    """

    shapes: tuple[Shape, ...]
    seconds: tuple[float, float]
    disk: int

    @property
    def steps(self) -> int:
        """Optimiser steps to do."""
        return sum(shape.steps for shape in self.shapes)

    @property
    def tokens(self) -> int:
        """Tokens to train on."""
        return sum(shape.steps * shape.config.tokens_per_step for shape in self.shapes)

    @property
    def flops(self) -> float:
        """Floating-point operations of training; measuring comes on top."""
        return sum(s.flops * s.steps * s.config.tokens_per_step for s in self.shapes)


def shapes(todo: Iterable[tuple[TrialConfig, int]], vocab_size: int) -> list[Shape]:
    """The shapes of cells to run, each with the step it stands at; smallest first."""
    import torch

    from tune_study.model import EMBEDDINGS, GPT

    groups: dict[TrialConfig, list[tuple[TrialConfig, int]]] = {}
    for config, at in todo:
        groups.setdefault(config.replace(lr=1e-3, seed=0), []).append((config, at))
    found = []
    for config, cells in groups.items():
        with torch.device("meta"):  # sizes without memory
            model = GPT(config, vocab_size, 0)
        sizes = {name: p.numel() for name, p in model.named_parameters()}
        embedding = sum(n for name, n in sizes.items() if name in EMBEDDINGS)
        matrices = vocab_size * config.width + sum(
            p.numel()
            for name, p in model.named_parameters()
            if p.ndim > 1 and name not in EMBEDDINGS
        )
        found.append(
            Shape(
                config=config,
                cells=len(cells),
                steps=sum(config.steps - at for _, at in cells),
                reports=sum(
                    math.ceil((config.steps - at) / config.report_every) for _, at in cells
                ),
                embedding=embedding,
                other=sum(sizes.values()) - embedding,
                flops=flops_per_token(matrices, config.depth, config.width, config.context),
            )
        )
    return sorted(found, key=lambda shape: (shape.flops, shape.config.arm))


def largest(study: Study, vocab_size: int) -> TrialConfig:
    """A cell of the shape that takes most to train on a batch, and so most memory."""
    all_cells = ((cell, 0) for cell in study.cells())
    return max(
        shapes(all_cells, vocab_size),
        key=lambda s: (s.flops * s.config.tokens_per_step, s.embedding),
    ).config


def estimate(plan: Plan, vocab_size: int, policy: Policy, disk: int) -> Cost:
    """What running `plan` takes on this machine, by a calibration of seconds.

    Args:
        disk: bytes that it writes at most.
    """
    to_run = shapes(((cell.config, cell.last_step) for cell in plan.todo), vocab_size)
    slowest = seconds(to_run, calibrate(to_run, vocab_size, policy), policy)
    saved = MOST_SAVED if plan.study.criterion.stop else 0.0
    return Cost(tuple(to_run), (slowest * (1 - saved), slowest), disk)


def seconds(shapes: Sequence[Shape], speeds: Mapping[TrialConfig, Speed], policy: Policy) -> float:
    """Time of a start in which every cell runs to its end."""
    alone, longest = 0.0, 0.0
    for shape in shapes:
        speed = speeds[shape.config]
        together = shape.cells * (speed.start + CELL_S)
        together += shape.steps * speed.step + shape.reports * speed.report
        alone += together
        longest = max(longest, together / shape.cells)
    together = max(alone / policy.at_once, longest) / policy.speed
    return together + (START_S if shapes else 0.0)


def calibrate(shapes: Sequence[Shape], vocab_size: int, policy: Policy) -> dict[TrialConfig, Speed]:
    """The speed of every shape, largest first; of the last ones by their FLOPs, if time is up."""
    from tune_study.trainer import Trainer

    speeds: dict[TrialConfig, Speed] = {}
    if shapes:  # what PyTorch does once in a process is no cell's
        Trainer(shapes[0].config, RandomTokens(shapes[0].config, vocab_size)).train(1)
    began = time.perf_counter()
    measured: list[Shape] = []
    for shape in sorted(shapes, key=lambda shape: -shape.flops):
        spent = time.perf_counter() - began
        if measured:
            expected = seconds(measured, speeds, policy)
            enough = min(CALIBRATION_SHARE * expected, CALIBRATION_MOST_S)
            if spent > max(CALIBRATION_S, enough):
                nearest = min(measured, key=lambda other: abs(other.flops - shape.flops))
                ratio = shape.flops / nearest.flops
                speeds[shape.config] = speeds[nearest.config].times(ratio)
                continue
        speeds[shape.config] = measure(shape.config, vocab_size)
        measured.append(shape)
    return speeds


class RandomTokens:
    """Uniform ids, as many as the measurement needs."""

    def __init__(self, config: TrialConfig, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        ids = np.random.default_rng(0).integers(0, vocab_size, 2**17 + 2 * config.context)
        self.train = ids.astype(np.uint16 if vocab_size <= 2**16 else np.uint32)
        windows = config.val_windows * (config.context + 1)
        self.validation = np.resize(self.train, windows + config.context)


def measure(config: TrialConfig, vocab_size: int) -> Speed:
    """Trains a model of this shape for a moment."""
    from tune_study.device import empty_cache
    from tune_study.trainer import EVAL_TOKENS, Trainer

    # One forward pass of the validation set; the others take as long.
    a_pass = max(1, EVAL_TOKENS // config.context)
    few = config.replace(val_windows=min(config.val_windows, a_pass), steps=10**6)
    passes = config.val_windows / few.val_windows
    began = time.perf_counter()
    trainer = Trainer(few, RandomTokens(few, vocab_size))
    built = time.perf_counter() - began
    first = trainer.train(1)  # compiles, and makes the optimiser's state
    began = time.perf_counter()
    evaluated = trainer.evaluate() and time.perf_counter() - began
    began, before = time.perf_counter(), trainer.seconds
    trainer.train(1)
    steps = max(1, min(TIMED_STEPS, round(TIMED_S / (trainer.seconds - before))))
    began, before = time.perf_counter(), trainer.seconds
    trainer.train(steps)
    total, trained = time.perf_counter() - began, trainer.seconds - before
    empty_cache(trainer.device)
    step = trained / steps
    start = built + max(0.0, first["time/train_s"] - step) + evaluated * passes
    return Speed(start, step, total - trained - evaluated + evaluated * passes)


def vocab_size(config: DataConfig) -> int:
    """Ids of tokens that are not prepared yet, at most."""
    from tune_study.data.tokenizers import DEFAULT_BPE

    sizes = {"bpe": DEFAULT_BPE, "bytes": 257, "gpt2": 50_257, "gpt2-compact": 50_257}
    return config.vocab_size or sizes[config.tokenizer]


# ------------------------------------------------------------------- for people


def line(cost: Cost, policy: Policy, base: TrialConfig) -> str:
    """What a start takes, in one line."""
    fast, slow = (duration(s) for s in cost.seconds)
    return (
        f"{cost.steps:,} steps, {_number(cost.tokens)} tokens, {cost.flops:.1e} FLOPs, "
        f"at most {size(cost.disk)} of disk; "
        + (f"about {slow}" if fast == slow else f"{fast} to {slow}")
        + f" on {base.device}, {policy.at_once} at a time ({policy.why}), {base.precision}."
    )


def table(cost: Cost) -> list[str]:
    """A line for each shape: its cells and parameters."""
    return [
        f"depth {shape.config.depth}, width {shape.config.width}, {shape.config.arm}: "
        f"{shape.cells} cells of {_number(shape.embedding + shape.other)} parameters "
        f"({_number(shape.embedding)} in embeddings, {_number(shape.other)} others), "
        f"{shape.steps:,} steps"
        for shape in sorted(cost.shapes, key=lambda s: (s.config.depth, s.config.arm))
    ]


def product(study: Study) -> str:
    """The study as a product: `234 cells = 13 lr x 3 depth x 2 qk_norm x 3 seed`."""
    axes = [*study.axes, *([] if study.arms is None else [("arms", study.arms)])]
    searched = ""
    if study.search is not None:
        most = "" if study.search.cells is None else f"at most {study.search.cells} of "
        searched = f"a search among {most}"
    return f"{searched}{len(study)} cells = " + " x ".join(f"{len(v)} {name}" for name, v in axes)


def duration(seconds: float) -> str:
    """40 s, 12 min, 3.4 h or 5.1 days."""
    for unit, length in (("days", 86_400), ("h", 3_600)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def _number(n: float) -> str:
    for unit, name in ((1e9, " billion"), (1e6, " million")):
        if n >= unit:
            return f"{n / unit:.3g}{name}"
    return f"{n:,.0f}"
