"""What counts as diverged, failed and stable: one definition, for the sweep and the analysis.

Measured on hundreds of small runs (docs/method.md): a run above its edge does not reach
NaN and does not pass its loss at init. Just after warm-up it climbs to the unigram
entropy, the loss of a model that ignores context, and stays there. So `diverged` is
decided while running on signals that were never seen to come back, and `failed` afterwards on
where the run ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tune_study.config import Criterion

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """The state of one cell, why, and the step at which it was decided (None: not yet)."""

    state: str
    reason: str = ""
    step: int | None = None


def ordered(history: Iterable[Row]) -> list[Row]:
    """The rows by step, each step once, the later report kept.

    A resumed trial reports again what it had reported since its checkpoint; with this, such
    a replay changes nothing.
    """
    by_step = {row["step"]: row for row in history}
    return [by_step[step] for step in sorted(by_step)]


def diverged(history: Iterable[Row], criterion: Criterion, warmup_steps: int) -> Verdict | None:
    """The first step at which a run counts as diverged, or None.

    A non-finite loss or gradient is divergence at once, on the step it occurred. The other signals
    count only after warm-up, where a spike may still recover, and only when `patience`
    reports in a row agree: training loss (moving average) above the loss at init; or largest
    attention logit above `max_logit` while the validation loss is not below `plateau` times the
    unigram entropy, since a large logit alone comes back (docs/divergence.md).

    Args:
        history: reported rows, in any order, repeats allowed.
        criterion: the rules.
        warmup_steps: steps of warm-up of the run.
    """
    in_a_row = 0
    for row in ordered(history):
        if row.get("nonfinite_step") is not None:
            step = row["nonfinite_step"]
            return Verdict("diverged", f"loss or gradient not finite at step {step}", step)
        if row["val/loss"] is None:
            return Verdict(
                "diverged", f"validation loss not finite at step {row['step']}", row["step"]
            )
        signal = _bad_report(row, criterion) if row["step"] > warmup_steps else ""
        in_a_row = in_a_row + 1 if signal else 0
        if in_a_row >= criterion.patience:
            return Verdict("diverged", signal, row["step"])
    return None


def _bad_report(row: Row, criterion: Criterion) -> str:
    """Why one report counts as bad; empty if it does not."""
    smoothed, init = row["train/loss_ema"], row["val/loss_init"]
    if criterion.loss_above_init and smoothed is not None and smoothed > init:
        return f"training loss {smoothed:.3g} above loss at init {init:.3g}"
    logit, limit = row["attn/max_logit"], criterion.max_logit
    if limit is None or (logit is not None and logit <= limit) or _below_plateau(row, criterion):
        return ""
    if logit is None:
        return "attention logit not finite"
    return f"attention logit {logit:.3g} above {limit:g}"


def _below_plateau(row: Row, criterion: Criterion) -> bool:
    if criterion.plateau is None:
        return False
    return bool(row["val/loss"] < criterion.plateau * row["data/unigram_entropy"])


@dataclass(frozen=True)
class Finish:
    """What `failed` needs of one finished cell that did not diverge."""

    lr: float
    arm: Any
    loss: float


LEARNED = 0.1
"""The best loss of a group must lie this share below H1, or nothing there has learned context
and where its runs end says nothing about stability."""


def failed(
    finishes: Sequence[Finish],
    unigram_entropy: float,
    criterion: Criterion,
    reached: float = math.inf,
) -> list[Verdict]:
    """Judges the finished cells of one depth and seed, over all arms and learning rates.

    With l* the lowest loss among them, a cell's normalised loss is (l - l*) / (H1 - l*). A
    cell above `failed_margin`, at a learning rate at or above its own arm's best, failed; below
    the arm's best the same loss is only slow. l* is taken over the arms together, so that an
    arm in which every learning rate fails is not measured against itself.

    Args:
        reached: a loss that cells like these reached elsewhere, if that is lower than l*.

    Returns:
        one verdict a finish, `stable` or `failed`, in the order given.
    """
    best = min([reached, *(f.loss for f in finishes)])
    best_lr = {
        arm: min((f for f in finishes if f.arm == arm), key=lambda f: (f.loss, f.lr)).lr
        for arm in {f.arm for f in finishes}
    }
    learned = best < (1 - LEARNED) * unigram_entropy
    verdicts = []
    for f in finishes:
        share = normalised_loss(f.loss, best, unigram_entropy)
        if learned and f.lr >= best_lr[f.arm] and share > criterion.failed_margin:
            verdicts.append(
                Verdict("failed", f"normalised loss {share:.2f} above {criterion.failed_margin:g}")
            )
        else:
            verdicts.append(Verdict("stable"))
    return verdicts


def normalised_loss(loss: float, best: float, unigram_entropy: float) -> float:
    """(loss - best) / (H1 - best): 0 at the best loss, 1 at the unigram plateau."""
    return (loss - best) / (unigram_entropy - best) if unigram_entropy > best else math.nan
