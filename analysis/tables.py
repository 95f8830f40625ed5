"""The two tidy tables every analysis starts from: their columns, types and units.

`cells` has one row for each cell that the study asks for, found or not; `history` has
one row for each (cell, step) reported. Losses are in nats per token.
"""

from __future__ import annotations

import pandas as pd

STATES = ("stable", "failed", "diverged", "errored", "missing")
"""Every cell is in exactly one. `missing` covers cells never started and cells cut off."""

CELL_COLUMNS: dict[str, tuple[str, str]] = {
    "cell": ("str", "readable name, unique in the study"),
    "lr": ("float64", "peak learning rate"),
    "depth": ("int64", "number of blocks"),
    "qk_norm": ("str", "the norm on queries and keys: 'off', 'rmsnorm', ..."),
    "arm": ("str", "name of the intervention; qk_norm where nothing else is varied"),
    "seed": ("int64", "seed of initial weights and batches"),
    "state": ("str", "one of " + ", ".join(STATES)),
    "reason": ("str", "why it is in that state; empty for stable cells"),
    "step": ("Int64", "step at which the verdict fell; for missing cells the last step seen"),
    "steps": ("int64", "steps the cell was asked to run"),
    "loss": ("float64", "validation loss at the last report, NaN if none or not finite"),
    "loss_init": ("float64", "validation loss before the first update, measured"),
    "loss_best": ("float64", "lowest validation loss at any report"),
    "normalised_loss": ("float64", "(loss - best of the depth and seed) / (H1 - that best)"),
    "unigram_entropy": ("float64", "H1: entropy of the training tokens' frequencies"),
    "loss_floor": ("float64", "entropy of the corpus where it is known exactly, else NaN"),
    "bytes_per_token": ("float64", "bytes of validation text a token stands for"),
    "attn_entropy": ("float64", "attention entropy at the last report, mean over layers, nats"),
    "max_logit": ("float64", "largest attention logit at the last report, over layers"),
    "max_logit_peak": ("float64", "largest attention logit at any report, over layers"),
    "kurtosis": ("float64", "activation kurtosis at the last report, max over layers"),
    "grad_norm": ("float64", "mean gradient norm before clipping in the last report window"),
    "clipped_share": ("float64", "share of all steps whose gradient was clipped"),
    "params": ("int64", "number of parameters"),
    "seconds": ("float64", "training time, all attempts that count"),
    "tokens_per_s": ("float64", "training tokens a second, over `seconds`"),
    "started": ("float64", "Unix time at which it began, NaN where it was cut off and gone on"),
    "ended": ("float64", "Unix time of its last report, NaN likewise"),
    "device": ("str", "device name"),
    "precision": ("str", "fp32 or bf16"),
    "threads": ("Int64", "CPU threads"),
    "identity": ("str", "hash of everything that determines the cell's numbers"),
}

HISTORY_KEYS = ("cell", "lr", "depth", "qk_norm", "arm", "seed", "step")
"""First columns of `history`; the others are the metrics a trial reports, under the names
it reports them by: val/loss, train/loss, grad/norm, attn/entropy, attn/max_logit,
act/kurtosis, and per layer attn/entropy/layer_0, ..."""


def as_cells(rows: list[dict]) -> pd.DataFrame:
    """Rows to a `cells` table with every column, in order, typed."""
    frame = pd.DataFrame(rows, columns=list(CELL_COLUMNS))
    return frame.astype({name: dtype for name, (dtype, _) in CELL_COLUMNS.items()})
