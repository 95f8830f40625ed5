"""Estimators over the tidy tables: what a study says, seed by seed and arm by arm.

Every function takes the `cells` table (`history` where it says so) of analysis/tables.py
and returns a new table; nothing is modified, row order and repeated rows do not matter. The
state of a cell is taken from the table, never judged again. A cell that is missing or
errored is no evidence: it makes a value NaN, with the reason beside it, or widens a bin; it
never drops out of a mean. Losses are in nats per token. docs/estimators.md has the formulas
and their sources.
"""

from analysis.estimators.comparable import require_comparable, require_uniform
from analysis.estimators.grid import (
    ARM_KEYS,
    AXIS_KEYS,
    LR_KEYS,
    SEED_KEYS,
    Curves,
    counts,
    curves,
    stable_bins,
    uneven_spacing,
)
from analysis.estimators.metrics import bits_per_byte, by_lr, perplexity, with_last_report
from analysis.estimators.paired import (
    Pairs,
    arms,
    necessity_bins,
    necessity_by_seed,
    necessity_threshold,
    pair,
    paired_by_lr,
    pairs,
)
from analysis.estimators.per_arm import arm_summary
from analysis.estimators.sensitivity import STOPPED_SHARE, lr_sensitivity, sensitivities
from analysis.estimators.stability import (
    best_lr,
    best_of,
    max_stable_lr,
    usable_window,
)
from analysis.estimators.steps import kaplan_meier, median_steps, steps_to_threshold
from tune_study.components import OFF

__all__ = [
    "ARM_KEYS",
    "AXIS_KEYS",
    "LR_KEYS",
    "OFF",
    "SEED_KEYS",
    "STOPPED_SHARE",
    "Curves",
    "Pairs",
    "arm_summary",
    "arms",
    "best_lr",
    "best_of",
    "bits_per_byte",
    "by_lr",
    "counts",
    "curves",
    "kaplan_meier",
    "lr_sensitivity",
    "max_stable_lr",
    "median_steps",
    "necessity_bins",
    "necessity_by_seed",
    "necessity_threshold",
    "pair",
    "paired_by_lr",
    "pairs",
    "perplexity",
    "require_comparable",
    "require_uniform",
    "sensitivities",
    "stable_bins",
    "steps_to_threshold",
    "uneven_spacing",
    "usable_window",
    "with_last_report",
]
