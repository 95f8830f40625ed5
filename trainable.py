"""Ray on one side, the Trainer on the other: one Tune trial is one cell.

Tune hands over a config `{"cell": {...}, "data": {...}, "checkpoint_every_s": ...}`: the
cell's settings with its label and identity, where its tokens lie (on a cluster also the node that
has them), and how often to save.
"""

from __future__ import annotations

import gc
import platform
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from ray import tune
from ray.tune.result import DONE, SHOULD_CHECKPOINT

from tune_study import checkpoints, device
from tune_study.config import ConfigError, DataConfig, TrialConfig
from tune_study.data import Tokens, open_tokens
from tune_study.home import at_home, fetched, fetched_once
from tune_study.identity import identity
from tune_study.trainer import Trainer


class GPTTrainable(tune.Trainable):
    """Trains one cell; each `step` is `report_every` optimiser steps and one row of metrics."""

    def setup(self, config: dict[str, Any]) -> None:
        """Builds the trainer, and goes on from the newest checkpoint that can be used."""
        cell = config["cell"]
        self.cell = cell["label"]
        trial = TrialConfig.of(cell)
        self.home = config["data"].get("home")
        tokens = _tokens(trial.data, **config["data"])
        if self.home is not None:
            _same_numbers(trial, cell["identity"], tokens.manifest.checksum)
        self.trainer = Trainer(trial, tokens)
        self.constants = {
            "cell": self.cell,
            "arm": cell["arm"],
            "identity": cell["identity"],
            "data/unigram_entropy": tokens.manifest.unigram_entropy,
            "params": self.trainer.model.parameter_count(),
            "device": device.describe(self.trainer.device),
            "precision": trial.precision,
            "threads": torch.get_num_threads(),
        }
        self.digest = ""
        self.skipped: list[str] = []
        self.resumed_step = self._resume(cell["checkpoints"])
        self.checkpoint_every_s = config["checkpoint_every_s"]
        self.saved_at = time.monotonic()

    def step(self) -> dict[str, Any]:
        """Trains up to the next report and returns its row."""
        row = self.trainer.train(self.trainer.config.report_every)
        self.digest = checkpoints.digest(self.digest, row)
        due = time.monotonic() - self.saved_at >= self.checkpoint_every_s
        return {
            **self.constants,
            **row,
            "digest": self.digest,
            "resumed_step": self.resumed_step,
            "checkpoints_skipped": self.skipped,
            DONE: self.trainer.finished,
            SHOULD_CHECKPOINT: due and not self.trainer.finished,
        }

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Writes the trainer's state and its stamp."""
        checkpoints.save(self.trainer.state_dict(), self.digest, Path(checkpoint_dir))
        self.saved_at = time.monotonic()

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Goes on from a checkpoint folder."""
        folder = Path(checkpoint)
        self.trainer.load_state_dict(checkpoints.load(folder))
        self.digest = checkpoints.stamp(folder).digest

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Makes this actor ready for another cell; nothing of the last one stays."""
        self.cleanup()
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        """Lets go of the model and of what the device keeps for it."""
        used = self.trainer.device
        del self.trainer
        gc.collect()
        gc.freeze()  # what is left is no cell's: looking through it again takes a tenth of a second
        device.empty_cache(used)

    def _resume(self, folders: list[str]) -> int:
        """Loads the first of these checkpoints that can be used; 0 for a fresh start."""
        for folder in folders:
            try:
                with fetched(folder, self.home) as here:
                    self.load_checkpoint(here)
                return self.trainer.step
            except Exception as error:
                # Whatever is wrong with the file, the answer is the one before it.
                why = str(error).strip().split("\n")[0]
            self.skipped.append(f"{Path(folder).name}: {why}")
            self.trainer = Trainer(self.trainer.config, self.trainer.tokens)
            self.digest = ""
        return 0


@lru_cache(maxsize=1)
def _tokens(
    config: DataConfig, root: str, checksum: str, home: str | None = None, folder: str = ""
) -> Tokens:
    """The prepared tokens the sweep has verified; refuses any others.

    Opened once a process: what is mapped stays, even if the folder is taken away meanwhile. On a
    cluster they are those of the node's own data folder, if it has them there, else fetched.
    """
    if home is None or at_home(home):
        return open_tokens(config, Path(root), verify=False, checksum=checksum)
    with suppress(ConfigError, OSError):
        return open_tokens(config, Path(root), checksum=checksum)
    return open_tokens(config, fetched_once(folder, home), checksum=checksum)


def _same_numbers(config: TrialConfig, name: str, checksum: str) -> None:
    """Refuses a node on which the cell would be another one.

    Raises:
        ConfigError: naming the node.
    """
    if identity(config, checksum) != name:
        raise ConfigError(
            f"node {platform.node()}: would compute other numbers than asked for, with torch "
            f"{torch.__version__}. Install the versions of requirements.txt there."
        )
