"""Small `cells` tables written by hand, for the tests of the statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis.tables import as_cells

Entry = float | str | tuple[str, float]


def table(
    lrs: Sequence[float],
    curves: Mapping[tuple[int, str, int], Sequence[Entry]],
    loss_init: float = 6.0,
    **shared: Any,
) -> pd.DataFrame:
    """One row a cell.

    Args:
        curves: by (depth, qk_norm, seed) one entry for each of `lrs`: a loss (stable), a state
            without a loss, or (state, loss).
        shared: columns that all cells have in common.
    """
    rows = []
    for (depth, arm, seed), entries in curves.items():
        for lr, entry in zip(lrs, entries, strict=True):
            state, loss = entry if isinstance(entry, tuple) else ("stable", entry)
            if isinstance(entry, str):
                state, loss = entry, np.nan
            rows.append(
                {
                    "cell": f"d{depth}-{arm}-lr{lr:g}-s{seed}",
                    "lr": lr,
                    "depth": depth,
                    "qk_norm": arm,
                    "arm": arm,
                    "seed": seed,
                    "state": state,
                    "reason": "",
                    "step": 100,
                    "steps": 100,
                    "loss": loss,
                    "loss_init": np.nan if state == "missing" else loss_init,
                    "unigram_entropy": 5.0,
                    "bytes_per_token": 4.0,
                    "device": "cpu",
                    "precision": "fp32",
                    "params": 1,
                    "threads": 1,
                    "identity": "",
                }
                | shared
            )
    return as_cells(rows)


def states(text: str) -> list[Entry]:
    """A row of cells by letters: s(table), f(ailed), d(iverged), e(rrored), m(issing)."""
    entries: dict[str, Entry] = {
        "s": 2.0,
        "f": ("failed", 4.8),
        "d": ("diverged", 5.5),
        "e": "errored",
        "m": "missing",
    }
    return [entries[letter] for letter in text]
