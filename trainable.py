"""Ray on one side, the Trainer on the other: one Tune trial is one cell.

Tune hands over a config `{"cell": {...}, "data": {...}, "checkpoint_every_s": ...}`: the
cell's settings with its label and identity, where its tokens lie, and how often to save.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import torch
from ray import tune
from ray.tune.result import DONE, SHOULD_CHECKPOINT

from tune_study import device
from tune_study.config import TrialConfig
from tune_study.data import Tokens, open_tokens
from tune_study.records import CHECKPOINT_FILE
from tune_study.trainer import Trainer


class GPTTrainable(tune.Trainable):
    """Trains one cell; each `step` is `report_every` optimiser steps and one row of metrics."""

    def setup(self, config: dict[str, Any]) -> None:
        """Builds the trainer, and goes on from the newest checkpoint that can be used."""
        cell = config["cell"]
        self.cell = cell["label"]
        trial = TrialConfig(**{k: v for k, v in cell.items() if k in TrialConfig.model_fields})
        tokens = _tokens(trial, config["data"])
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
        self.skipped: list[str] = []
        self.resumed_step = self._resume(cell.get("checkpoints", []), cell.get("last_step", 0))
        self.checkpoint_every_s = config["checkpoint_every_s"]
        self.saved_at = time.monotonic()

    def step(self) -> dict[str, Any]:
        """Trains up to the next report and returns its row."""
        row = self.trainer.train(self.trainer.config.report_every)
        due = time.monotonic() - self.saved_at >= self.checkpoint_every_s
        return {
            **self.constants,
            **row,
            "resumed_step": self.resumed_step,
            "checkpoints_skipped": self.skipped,
            DONE: self.trainer.finished,
            SHOULD_CHECKPOINT: due and not self.trainer.finished,
        }

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Writes the trainer's state as one file of tensors and plain values."""
        torch.save(self.trainer.state_dict(), Path(checkpoint_dir) / CHECKPOINT_FILE)
        self.saved_at = time.monotonic()

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Goes on from a checkpoint folder."""
        path = Path(checkpoint) / CHECKPOINT_FILE
        self.trainer.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
        self.resumed_step = self.trainer.step

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
        device.empty_cache(used)

    def _resume(self, checkpoints: list[str], last_step: int) -> int:
        """Loads the first usable checkpoint, newest first; 0 for a fresh start.

        A checkpoint beyond the last step whose row is known would leave a hole in the
        history, so it is passed over as an unreadable one is, and said in every row.
        """
        for folder in checkpoints:
            try:
                self.load_checkpoint(folder)
                if self.trainer.step <= last_step:
                    return self.trainer.step
                why = f"is at step {self.trainer.step}, beyond the last report at {last_step}"
            except Exception as error:
                # Whatever is wrong with the file, the answer is the one before it.
                why = str(error).strip().split("\n")[0]
            self.skipped.append(f"{Path(folder).parent.name}/{Path(folder).name}: {why}")
            self.trainer = Trainer(self.trainer.config, self.trainer.tokens)
        return 0


def _tokens(trial: TrialConfig, data: dict[str, Any]) -> Tokens:
    """The prepared tokens the sweep has verified; refuses any others."""
    return open_tokens(trial.data, Path(data["root"]), verify=False, checksum=data["checksum"])
