"""The two tidy tables every analysis starts from: their columns, types and units.

`cells` has one row for each cell of the study's grid, found or not; `history` has
one row for each (cell, step) reported. Losses are in nats per token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import pandas as pd

STATES = ("stable", "failed", "diverged", "errored", "missing", "untried")
"""Every cell is in exactly one. `missing` covers cells never started and cells cut off; `untried`
are those that a search did not ask for."""

ASKED = STATES[:-1]
"""States of the cells that a study asks for."""

NO_EVIDENCE = ("errored", "missing", "untried")
"""States that say nothing about the learning rate."""

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
"""First columns of `history`, typed as in `cells`; the others are the metrics of HISTORY_METRICS
that the study recorded, under the names trials report them by."""

HISTORY_METRICS: dict[str, tuple[str, str]] = {
    "val/loss": ("float64", "validation loss, nats a token"),
    "val/loss_init": ("float64", "validation loss before the first update, nats a token"),
    "val/loss_min": ("float64", "lowest validation loss so far, nats a token"),
    "train/loss": ("float64", "mean training loss of the steps since the report before"),
    "train/loss_last": ("float64", "training loss of the last step"),
    "train/loss_max": ("float64", "highest training loss of a step since the report before"),
    "train/loss_ema": ("float64", "moving average of the training loss, decay 0.9 a step"),
    "train/loss_ema_min": ("float64", "lowest such average so far"),
    "train/losses": ("list of float32", "training loss of each step since the report before"),
    "grad/norm": ("float64", "mean norm of the gradient before clipping since the report before"),
    "grad/norm_max": ("float64", "largest such norm since the report before"),
    "grad/clipped_share": ("float64", "share of the steps since then that were clipped, 0 to 1"),
    "grad/clipped_steps": ("float64", "steps clipped so far"),
    "attn/entropy": ("float64", "attention entropy, nats; mean over layers"),
    "attn/entropy_normalised": ("float64", "the same over its maximum, 0 to 1; mean over layers"),
    "attn/max_logit": ("float64", "largest attention logit, over layers"),
    "attn/max_logit_uncapped": ("float64", "the same before any capping"),
    "attn/logit_rms": ("float64", "root mean square of the attention logits; mean over layers"),
    "attn/q_norm": ("float64", "mean norm of a query; mean over layers"),
    "attn/k_norm": ("float64", "mean norm of a key; mean over layers"),
    "attn/sink": ("float64", "share of heads that are attention sinks, 0 to 1; mean over layers"),
    "act/kurtosis": ("float64", "activation kurtosis m4 / m2^2, a token; max over layers"),
    "act/kurtosis_centred": ("float64", "the same about each token's mean"),
    "act/kurtosis_pooled": ("float64", "kurtosis of all activations together"),
    "act/kurtosis_neuron": ("float64", "kurtosis of the neurons' root mean squares"),
    "act/massive": ("float64", "largest over median magnitude of activations; max over layers"),
    "act/rms": ("float64", "root mean square of the activations; max over layers"),
    "act/max": ("float64", "largest magnitude of an activation, over layers"),
    "grad/rms": ("float64", "root mean square of the gradient, by part of the model"),
    "param/rms": ("float64", "root mean square of the weights before the step, by part"),
    "update/rms": ("float64", "root mean square of the step's update, by part"),
    "out/log_z": ("float64", "mean log normaliser of the output logits, nats"),
    "lr_now": ("float64", "learning rate of the last step"),
    "nonfinite_step": ("float64", "step at which loss or gradient was first not finite, else NaN"),
    "nonfinite": ("str", "the metrics of the report that were not finite; they are NaN here"),
    "resumed_step": ("float64", "step from which the attempt went on, 0 from the start"),
    "data/unigram_entropy": ("float64", "H1: entropy of the training tokens' frequencies, nats"),
    "time/train_s": ("float64", "seconds of training so far"),
    "time/tokens_per_s": ("float64", "training tokens a second since the report before"),
}
"""Where the model has parts, a metric also comes part by part: attn/entropy/layer_0, ...,
grad/rms/embedding, grad/rms/head."""


HISTORY_COLUMNS: dict[str, tuple[str, str]] = {
    **{name: CELL_COLUMNS[name] for name in HISTORY_KEYS},
    "step": ("int64", "optimiser steps done at the report"),
    **HISTORY_METRICS,
}


def meaning(column: str, described: Mapping[str, tuple[str, str]]) -> str | None:
    """What a column holds, in words; None if it is not described.

    Args:
        described: CELL_COLUMNS or HISTORY_COLUMNS.
    """
    if column in described:
        return described[column][1]
    name, _, part = column.rpartition("/")
    if name in described and re.fullmatch(r"layer_\d+|embedding|head", part):
        words = described[name][1].split("; ")[0].removesuffix(", over layers")
        return f"{words}; {part} alone"
    return None


def as_cells(rows: list[dict]) -> pd.DataFrame:
    """Rows to a `cells` table with every column, in order, typed."""
    frame = pd.DataFrame(rows, columns=list(CELL_COLUMNS))
    return frame.astype({name: dtype for name, (dtype, _) in CELL_COLUMNS.items()})
