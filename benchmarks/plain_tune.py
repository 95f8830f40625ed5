"""Plain Ray Tune over given cells, as its documentation shows it; prints the seconds it took.

python -m benchmarks.plain_tune STORAGE DATA CELL...     (cells as JSON)
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray import tune

from benchmarks.sweep import CORES, rows
from tune_study.config import TrialConfig


class Plain(tune.Trainable):
    """One cell; done where its loop ends."""

    def setup(self, config: dict[str, Any]) -> None:
        cell = TrialConfig.model_validate_json(config["cell"])
        self.rows = rows(cell, Path(config["data"]))
        self.next = next(self.rows)

    def step(self) -> dict[str, Any]:
        row, self.next = self.next, next(self.rows, None)
        return {**row, "done": self.next is None}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        (Path(checkpoint_dir) / "nothing").touch()


def main() -> None:
    """Runs them and prints how long `fit` took."""
    storage, data, *cells = sys.argv[1:]
    ray.init(num_cpus=CORES, include_dashboard=False)
    tuner = tune.Tuner(
        tune.with_resources(Plain, {"cpu": min(2, CORES)}),
        param_space={"cell": tune.grid_search(cells), "data": data},
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
