"""Plain Ray Tune over given cells, as its documentation shows it; prints the seconds it took.

python -m benchmarks.plain_tune LOOP STORAGE DATA CELL...     (cells as JSON)

LOOP: `trainer`, this project's with its rule of divergence; or `plain`, the plain loop to the end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch
from ray import tune

from benchmarks.plain_loop import PlainLoop
from benchmarks.sweep import CORES, rows
from tune_study.config import TrialConfig
from tune_study.data import open_tokens


def plain_rows(cell: TrialConfig, data: Path) -> Iterator[dict[str, Any]]:
    """The reports of the plain loop."""
    torch.set_num_threads(cell.threads)
    return PlainLoop(cell, open_tokens(cell.data, data, verify=False)).reports()


LOOPS: dict[str, Any] = {"trainer": rows, "plain": plain_rows}


class Plain(tune.Trainable):
    """One cell; done where its loop ends."""

    def setup(self, config: dict[str, Any]) -> None:
        cell = TrialConfig.model_validate_json(config["cell"])
        self.rows = LOOPS[config["loop"]](cell, Path(config["data"]))
        self.next = next(self.rows)

    def step(self) -> dict[str, Any]:
        row, self.next = self.next, next(self.rows, None)
        return {**row, "done": self.next is None}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        (Path(checkpoint_dir) / "nothing").touch()


def main() -> None:
    """Runs them and prints how long `fit` took."""
    loop, storage, data, *cells = sys.argv[1:]
    ray.init(num_cpus=CORES, include_dashboard=False)
    tuner = tune.Tuner(
        tune.with_resources(Plain, {"cpu": min(2, CORES)}),
        param_space={"cell": tune.grid_search(cells), "data": data, "loop": loop},
        run_config=tune.RunConfig(storage_path=storage),
    )
    started = time.perf_counter()
    results = tuner.fit()
    took = time.perf_counter() - started
    if results.errors:
        sys.exit(str(results.errors[0]))
    print(took)


if __name__ == "__main__":
    main()
