"""What two tables must share before their numbers may be compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from tune_study.config import ConfigError

_SHARED = {
    "steps": ["steps"],
    "data": ["unigram_entropy", "loss_floor", "bytes_per_token"],
    "precision": ["precision"],
}
"""What every cell of a comparison has to share, and the columns that tell."""


def require_uniform(cells: pd.DataFrame) -> None:
    """Refuses a table whose cells were not run alike.

    Raises:
        ConfigError: naming what differs: steps, data or precision.
    """
    for what, columns in _SHARED.items():
        for column in columns:
            values = _distinct(cells, column)
            if len(values) > 1:
                raise ConfigError(
                    f"cells: {what} differ, {column} is {values[0]} and {values[1]}. "
                    "Give cells of one study, run alike."
                )


def require_comparable(
    studies: Mapping[str, pd.DataFrame],
    lr_ranges: Mapping[str, tuple[float, float] | None] | None = None,
) -> None:
    """Refuses to compare studies whose numbers do not mean the same.

    Args:
        studies: `cells` by the study's name.
        lr_ranges: the declared range of each, if LR sensitivities are to be compared.

    Raises:
        ConfigError: naming the two studies and what differs: LR grid, LR range, steps, data
            or precision.
    """
    for cells in studies.values():
        require_uniform(cells)
    (first, reference), *others = studies.items()
    for name, cells in others:
        for what, mine, theirs in _differences(reference, cells):
            raise _incomparable(what, first, mine, name, theirs)
        if lr_ranges is not None and lr_ranges[first] != lr_ranges[name]:
            raise _incomparable("LR range", first, lr_ranges[first], name, lr_ranges[name])


def _differences(a: pd.DataFrame, b: pd.DataFrame) -> Iterable[tuple[str, Any, Any]]:
    grids = [np.unique(x["lr"].to_numpy(float)) for x in (a, b)]
    if len(grids[0]) != len(grids[1]) or not np.allclose(grids[0], grids[1], rtol=1e-6, atol=0):
        spans = [f"{len(g)} LRs from {g[0]:g} to {g[-1]:g}" for g in grids]
        yield "LR grid", spans[0], spans[1]
    for what, columns in _SHARED.items():
        for column in columns:
            mine, theirs = _distinct(a, column), _distinct(b, column)
            if mine != theirs:
                yield what, f"{column} {mine[0] if mine else None}", theirs[0] if theirs else None


def _distinct(cells: pd.DataFrame, column: str) -> list[Any]:
    """The different values of a column over the cells that have one."""
    values = cells[column].dropna()
    values = values[values.astype(str) != ""]
    if pd.api.types.is_float_dtype(values):
        values = values.round(9)
    return sorted(values.unique().tolist())


def _incomparable(what: str, a: str, mine: Any, b: str, theirs: Any) -> ConfigError:
    return ConfigError(
        f"{a} and {b}: {what} differs, {mine} against {theirs}. "
        "Compare studies that share LR grid, LR range, steps, data and precision."
    )
