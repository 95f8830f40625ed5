"""What tells the cells of a study apart, as other tools want it: a few names and plain values."""

from __future__ import annotations

from typing import Any

from analysis.load import Results
from tune_study.config import AXES


def settings(results: Results) -> list[dict[str, Any]]:
    """One mapping a cell, in the order of `results.cells`.

    Each has lr, depth, qk_norm and seed, every further setting that differs between cells, and
    the arm where that is not qk_norm alone.
    """
    configs = [config.model_dump(mode="json") for config in results.study.cells()]
    varied = [
        name
        for name in configs[0]
        if name != "data" and any(config[name] != configs[0][name] for config in configs)
    ]
    names = list(dict.fromkeys([*AXES, *varied]))
    rows = []
    arms = results.cells["arm"].tolist()
    named = arms != results.cells["qk_norm"].tolist()
    for config, arm in zip(configs, arms, strict=True):
        rows.append({name: config[name] for name in names} | ({"arm": arm} if named else {}))
    return rows
