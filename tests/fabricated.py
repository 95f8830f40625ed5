"""Made-up results of a study, shaped like real ones, for the tests of figures and report.

Losses fall with the learning rate, then the arm leaves its stable range for the plateau
at the unigram entropy; nothing here was measured.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from analysis.load import Results
from analysis.tables import as_cells
from tune_study.config import Margins, Study, log_grid

INIT, UNIGRAM, FLOOR, TARGET = 6.24, 4.88, 0.6, 2.9
REPORTS = range(20, 401, 20)


def study(**axes: Any) -> Study:
    """13 learning rates, 3 depths, 2 arms and 3 seeds, unless `axes` says otherwise."""
    default: dict[str, Any] = {
        "lr": log_grid(1e-3, 1.0, 4),
        "depth": (1, 2, 4),
        "qk_norm": ("off", "rmsnorm"),
        "seed": (0, 1, 2),
    }
    return Study(name="fabricated", axes=default | axes, margins=Margins(target_loss=TARGET))


def results(of: Study | None = None) -> Results:
    """Complete, healthy results of a study: every cell found, none errored."""
    of = of or study()
    rows = [_row(trial, np.random.default_rng([i, 7])) for i, trial in enumerate(of.cells())]
    cells = as_cells(rows)
    return Results(
        study=of,
        cells=cells,
        history=history(cells),
        manifest={
            "corpus": "synthetic",
            "vocab_size": 512,
            "unigram_entropy": UNIGRAM,
            "loss_floor": FLOOR,
        },
        versions={"python": "3.11.2", "torch": "2.13.0", "ray": "2.60.0"},
    )


def small() -> Results:
    """Complete results of a study that is quick to draw: 7 learning rates, 2 depths, 2 seeds."""
    return results(study(lr=log_grid(1e-3, 1.0, 2), depth=(1, 2), seed=(0, 1)))


def many_arms(**axes: Any) -> Results:
    """Seven arms at one depth, four of which share qk_norm = off; 7 learning rates, 3 seeds.

    The softcap doubles the edge, QK-norm raises it as ever, z-loss does nothing at all; a step
    of softcap50 takes 1.2 times as long. Cells run two at a time.
    """
    arms: list[dict[str, Any]] = [
        {},
        {"qk_norm": "rmsnorm"},
        {"z_loss": 1e-4},
        {"attn_softcap": 50.0},
        {"sigma_reparam": True},
        {"qk_norm": "rmsnorm", "z_loss": 1e-4},
        {"qk_norm": "rmsnorm", "attn_softcap": 50.0},
    ]
    grid = {"lr": log_grid(1e-3, 1.0, 2), "depth": (2,), "seed": (0, 1, 2)}
    of = Study(name="many-arms", axes=grid | axes, arms=arms)
    whole = results(of)
    cells = whole.cells
    place = np.arange(len(cells)) // 2
    slower = np.where(cells["arm"].str.contains("softcap"), 1.2, 1.0)
    noise = np.exp(0.01 * np.random.default_rng(3).normal(size=len(cells)))
    cells = cells.assign(
        started=1.7e9 + 10.0 * place, ended=1.7e9 + 10.0 * place + 9, seconds=6 * slower * noise
    )
    return replace(whole, cells=cells)


def many(seeds: int) -> Results:
    """A large study: the cells of three seeds over and over, each time as other seeds, and with
    other numbers, since equal ones would be stored once."""
    whole = results()
    shared = {"lr", "unigram_entropy", "loss_floor", "bytes_per_token"}
    cells, reports = [], []
    for first in range(0, seeds, 3):
        for table, copies in ((whole.cells, cells), (whole.history, reports)):
            seed = table["seed"] + first
            name = table["cell"].str.rsplit("-s", n=1).str[0] + "-s" + seed.astype(str)
            own = [c for c in table.select_dtypes("float64") if c not in shared]
            copies.append(table.assign(seed=seed, cell=name, **(table[own] * (1 + first * 1e-5))))
    return replace(
        whole,
        study=study(seed=tuple(range(seeds))),
        cells=pd.concat(cells, ignore_index=True),
        history=pd.concat(reports, ignore_index=True),
    )


def awkward() -> Results:
    """A study in which whatever can be odd is odd; one seed, 42 cells.

    - depth 1: off is stable, failed, stable (not monotone); rmsnorm is best at the highest LR;
    - depth 2: every off cell diverged, its loss not a number, infinite or above the loss at
      init in turn; one rmsnorm cell errored, one is missing;
    - depth 4: the whole rmsnorm arm is missing;
    - attention entropy is 0 and the attention logit 0, NaN and infinite for some cells;
    - a metric's name has a dot and brackets.
    """
    whole = results(study(lr=log_grid(1e-3, 1.0, 2), seed=(0,)))
    cells = whole.cells.copy()
    by = {
        (cell.depth, cell.qk_norm, round(math.log10(cell.lr) * 2)): cell.Index
        for cell in cells.itertuples()
    }
    off = [by[2, "off", k] for k in range(-6, 1)]
    cells.loc[off, "state"] = "diverged"
    cells.loc[off, "reason"] = "loss not finite"
    cells.loc[off, "loss"] = [math.nan, math.inf, 9.0, math.nan, math.inf, 9.0, math.nan]
    cells.loc[by[1, "off", -5], ["state", "loss"]] = ["failed", 4.5]
    rms = [by[1, "rmsnorm", k] for k in range(-6, 1)]
    cells.loc[rms, "state"] = "stable"
    cells.loc[rms, "loss"] = [3.0, 2.0, 1.5, 1.2, 1.1, 1.0, 0.95]
    _lose(cells, [by[2, "rmsnorm", -6]], "errored", "RuntimeError: out of memory")
    _lose(cells, [by[2, "rmsnorm", -5]], "missing", "cut off at step 40")
    _lose(cells, [by[4, "rmsnorm", k] for k in range(-6, 1)], "missing", "never started")
    reports = history(cells)
    reports["attn/entropy"] = 0.0
    reports.loc[reports["depth"] == 1, "attn/max_logit"] = 0.0
    reports.loc[reports["cell"] == cells.loc[by[4, "off", -6], "cell"], "attn/max_logit"] = math.nan
    reports.loc[reports["cell"] == cells.loc[by[4, "off", -5], "cell"], "attn/max_logit"] = math.inf
    reports["odd.metric[0]"] = math.nan
    damage = ("d2-rmsnorm-lr1.000e-03-s0/result.json: line 3 is torn",)
    return replace(whole, cells=cells, history=reports, damage=damage)


def _lose(cells: pd.DataFrame, rows: list[int], state: str, reason: str) -> None:
    cells.loc[rows, ["state", "reason"]] = [state, reason]
    cells.loc[rows, ["loss", "loss_best", "normalised_loss"]] = math.nan


def _row(trial: Any, rng: np.random.Generator) -> dict[str, Any]:
    edge = {"off": 0.1, "rmsnorm": 0.8}[trial.qk_norm] / trial.depth**0.3
    edge *= 2 if trial.attn_softcap else 1
    best = 0.88 + 0.02 * trial.depth
    slow = 2.4 * max(0.0, math.log10(1.2e-2 / trial.lr)) ** 1.3
    broken = 1 / (1 + (edge * math.exp(0.15 * rng.normal()) / trial.lr) ** 5)
    loss = best + slow + broken * (UNIGRAM - best) + 0.02 * abs(rng.normal())
    normalised = (loss - best) / (UNIGRAM - best)
    state = "failed" if normalised > 0.5 and trial.lr > 1.2e-2 else "stable"
    if state == "failed" and trial.lr > 5 * edge:
        state = "diverged"
    logit = (8 if trial.qk_norm == "off" else 5) * (1 + (trial.lr / edge) ** 2 * 40)
    return {
        "cell": trial.label,
        "lr": trial.lr,
        "depth": trial.depth,
        "qk_norm": trial.qk_norm,
        "arm": trial.arm,
        "seed": trial.seed,
        "state": state,
        "reason": {
            "stable": "",
            "failed": f"normalised loss {normalised:.2f} above 0.5",
            "diverged": f"attention logit {logit:.3g} above 1000",
        }[state],
        "step": 120 if state == "diverged" else 400,
        "steps": 400,
        "loss": loss,
        "loss_init": INIT + 0.01 * rng.normal(),
        "loss_best": min(loss, best + slow),
        "normalised_loss": normalised,
        "unigram_entropy": UNIGRAM,
        "loss_floor": FLOOR,
        "bytes_per_token": 3.6,
        "attn_entropy": 1.9 - 1.2 * broken,
        "max_logit": logit,
        "max_logit_peak": 1.3 * logit,
        "kurtosis": 3 + 4 * broken,
        "grad_norm": 0.4 + broken,
        "clipped_share": 0.02 + 0.5 * broken,
        "params": 30_000 * trial.depth,
        "seconds": 3.0 * trial.depth,
        "tokens_per_s": 68_000 / trial.depth,
        "device": "cpu",
        "precision": "fp32",
        "threads": 1,
        "identity": hashlib.sha256(trial.label.encode()).hexdigest()[:16],
    }


def history(cells: pd.DataFrame) -> pd.DataFrame:
    """The reports that lead to `cells`: losses fall exponentially to where they end."""
    parts = []
    for cell in cells.itertuples():
        if cell.state in ("errored", "missing"):
            continue
        steps = np.array([s for s in REPORTS if s <= cell.step], dtype="int64")
        share = np.exp(-steps / 60)
        with np.errstate(invalid="ignore"):  # some tests end cells at infinity
            loss = cell.loss + (cell.loss_init - cell.loss) * share
        layers: dict[str, Any] = {}
        for layer in range(cell.depth):
            layers[f"attn/entropy/layer_{layer}"] = cell.attn_entropy + 0.1 * layer + share
            layers[f"attn/max_logit/layer_{layer}"] = cell.max_logit * (1 - share) / (layer + 1)
            layers[f"act/kurtosis/layer_{layer}"] = cell.kurtosis + share * layer
            layers[f"attn/sink/layer_{layer}"] = np.clip(cell.kurtosis / 10 - share, 0, 1)
        parts.append(
            pd.DataFrame(
                {
                    "cell": cell.cell,
                    "lr": cell.lr,
                    "depth": cell.depth,
                    "qk_norm": cell.qk_norm,
                    "arm": cell.arm,
                    "seed": cell.seed,
                    "step": steps,
                    "val/loss": loss,
                    "train/loss": loss * 0.98,
                    "grad/norm": cell.grad_norm * (1 + share),
                    "attn/entropy": cell.attn_entropy + share,
                    "attn/entropy_normalised": (cell.attn_entropy + share) / math.log(32),
                    "attn/sink": np.clip(cell.kurtosis / 10 - share, 0, 1),
                    "attn/max_logit": cell.max_logit * (1 - share),
                    "act/kurtosis": cell.kurtosis + share,
                    "train/losses": [_between(a, b) for a, b in pairwise([cell.loss_init, *loss])],
                    **layers,
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


def _between(before: float, after: float) -> np.ndarray:
    """The training losses of the 20 steps between two reports."""
    with np.errstate(invalid="ignore"):
        return np.linspace(before, after, 20, dtype=np.float32)
