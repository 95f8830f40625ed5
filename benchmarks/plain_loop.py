"""A training loop written the ordinary way, to measure others against.

Batches stacked from slices, PyTorch's default AdamW, cross-entropy over all the logits,
`loss.item()` after every step. Same model, same learning rates, same validation windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tune_study.config import TrialConfig
from tune_study.data import validation_windows
from tune_study.model import GPT
from tune_study.optim import schedule
from tune_study.trainer import Tokens


class PlainLoop:
    """One model and its loop."""

    def __init__(self, config: TrialConfig, tokens: Tokens, compiled: bool = False) -> None:
        self.config = config
        self.model = GPT(config, tokens.vocab_size, seed=config.seed)
        self.forward = torch.compile(self.model) if compiled else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr, betas=(0.9, 0.95))
        self.data = torch.from_numpy(tokens.train.astype(np.int64))
        held_out = validation_windows(tokens.validation, config.val_windows, config.context)
        self.val_windows = torch.from_numpy(held_out)
        self.steps = 0

    def step(self) -> float:
        """One optimiser step; returns its loss."""
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = config.lr * schedule(config, self.steps)
        starts = torch.randint(len(self.data) - config.context, (config.batch_size,))
        x = torch.stack([self.data[s : s + config.context] for s in starts])
        y = torch.stack([self.data[s + 1 : s + 1 + config.context] for s in starts])
        loss = self._loss(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return loss.item()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the validation windows."""
        return self._loss(self.val_windows[:, :-1], self.val_windows[:, 1:]).item()

    def reports(self) -> Iterator[dict[str, Any]]:
        """A row every `report_every` steps, to the last step whatever the loss."""
        while self.steps < self.config.steps:
            loss = 0.0
            for _ in range(self.config.report_every):
                loss = self.step()
            yield {"step": self.steps, "train/loss": loss, "val/loss": self.evaluate()}

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.forward(x)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), y.reshape(-1))
