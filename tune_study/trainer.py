"""One training run, without Ray: build it, train it piece by piece, save it, load it.

    trainer = Trainer(config, tokens)
    while not trainer.finished:
        row = trainer.train(config.report_every)

Each call returns one flat row of metrics. Inside a call nothing waits for the device:
per-step losses and gradient norms stay there until the row is made.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from tune_study import device as devices
from tune_study import memory
from tune_study.config import TrialConfig
from tune_study.data import Batches, validation_windows
from tune_study.diagnostics import StepWatch, numbers, probe
from tune_study.identity import TRAINER_VERSION
from tune_study.model import GPT
from tune_study.optim import adamw, schedule

EMA_DECAY = 0.9
"""Per-step decay of the smoothed training loss."""

EVAL_TOKENS = 4096
"""Validation tokens a forward pass; bounds the logits' memory, not the result."""

SKIP_BY_THEMSELVES = ("cpu", "cuda")
"""Devices whose fused AdamW heeds `found_inf`; MPS's takes it and ignores it."""


class Tokens(Protocol):
    """What the trainer needs of a prepared corpus."""

    @property
    def train(self) -> np.ndarray: ...

    @property
    def validation(self) -> np.ndarray: ...

    @property
    def vocab_size(self) -> int: ...


Row = dict[str, Any]


def stream_seed(seed: int, purpose: str) -> int:
    """A 63-bit seed for one purpose, so that weights and batches never share a stream."""
    digest = hashlib.sha256(f"tune_study/{purpose}/{seed}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class Trainer:
    """Holds one run: model, optimiser, step and the running values that outlive a report.

    Args:
        config: the cell; device and threads are settled here.
        tokens: the prepared corpus. Batches depend on (seed, step) alone and the
            validation windows on nothing, so all arms, learning rates and depths share them.

    Raises:
        ConfigError: for a device or precision this machine cannot do, or a validation
            split too small for `val_windows`.
    """

    def __init__(self, config: TrialConfig, tokens: Tokens) -> None:
        self.config = config = devices.settle(config)
        self.tokens = tokens
        self.device = config.device
        if self.device == "cpu":
            memory.keep_freed()
        torch.set_num_threads(config.threads)
        torch.manual_seed(stream_seed(config.seed, "torch"))

        model_seed = stream_seed(config.seed, "model")
        self.model = GPT(config, tokens.vocab_size, model_seed).to(self.device)
        self.optimizer = adamw(self.model, config)
        self.peaks = [group["lr"] for group in self.optimizer.param_groups]
        self.loss: Callable[[Tensor], Tensor] = self.model.loss
        self.objective: Callable[[Tensor], tuple[Tensor, Tensor]] = self.model.objective
        if config.compile:
            self.loss = torch.compile(self.model.loss, dynamic=False)
            self.objective = torch.compile(self.model.objective, dynamic=False)

        windows = config.batch_size * config.grad_accum
        data_seed = stream_seed(config.seed, "data")
        self.batches = Batches(tokens.train, data_seed, windows, config.context)
        held_out = validation_windows(tokens.validation, config.val_windows, config.context)
        self.val_windows = torch.from_numpy(held_out).to(self.device)
        self.probe_ids = self.val_windows[: config.probe_windows, :-1]

        self.step = 0
        self.seconds = 0.0
        self.loss_init: float | None = None
        self.loss_ema: float | None = None
        self.loss_ema_min: float | None = None
        self.val_loss_min: float | None = None
        self.clipped_steps = 0
        # First step whose loss or gradient was not finite; -1 for none. It lives on the
        # device, where it also tells the optimiser to leave the weights as they are.
        self.nonfinite_step = torch.tensor(-1.0, device=self.device)

    @property
    def finished(self) -> bool:
        """Whether all steps of the run are done."""
        return self.step >= self.config.steps

    def train(self, n_steps: int) -> Row:
        """Trains up to `n_steps` updates, then measures, and returns the row of metrics.

        The first call measures the loss at initialisation before it trains. Values that
        are not finite appear as None and are named in the row's `nonfinite`.
        """
        if self.loss_init is None:
            self.loss_init = self.evaluate()
        started = time.perf_counter()
        n_steps = min(n_steps, self.config.steps - self.step)
        losses, norms, last_step = self._advance(n_steps)
        trained = time.perf_counter() - started
        self.seconds += trained

        # Validation is the larger: before it, the probe finds the cache as training left it.
        measured = self._probe() | numbers(last_step)
        val_loss = self.evaluate()
        smoothed = self._smooth(losses)
        self.val_loss_min = _lower(self.val_loss_min, val_loss)
        clipped = int((norms > self.config.grad_clip).sum())
        self.clipped_steps += clipped
        first_bad = int(self.nonfinite_step)
        row: Row = {
            "step": self.step,
            "val/loss": val_loss,
            "val/loss_init": self.loss_init,
            "val/loss_min": self.val_loss_min,
            "train/loss": float(losses.mean()),
            "train/loss_last": float(losses[-1]),
            "train/loss_max": float(losses.max()),
            "train/loss_ema": smoothed,
            "train/loss_ema_min": self.loss_ema_min,
            "train/losses": [float(f"{x:.6g}") for x in losses.tolist()],
            "grad/norm": float(norms.mean()),
            "grad/norm_max": float(norms.max()),
            "grad/clipped_share": clipped / n_steps,
            "grad/clipped_steps": self.clipped_steps,
            **measured,
            "nonfinite_step": None if first_bad < 0 else first_bad,
            "lr_now": self.config.lr * schedule(self.config, self.step - 1),
            "time/train_s": self.seconds,
            "time/tokens_per_s": n_steps * self.config.tokens_per_step / trained,
        }
        return strict(row)

    def _advance(self, n_steps: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Runs the updates; returns losses and pre-clip gradient norms, each [n_steps], on
        the CPU, and what full diagnostics say of the last step. The only wait for the device is
        at the end."""
        watch: StepWatch | None = None
        losses = torch.zeros(n_steps, device=self.device)
        norms = torch.zeros(n_steps, device=self.device)
        parameters = list(self.model.parameters())
        accum, batch = self.config.grad_accum, self.config.batch_size
        windows = torch.from_numpy(self.batches.range(self.step, self.step + n_steps))
        windows = windows.to(self.device)
        for i in range(n_steps):
            for part in windows[i].split(batch):
                with self._autocast():
                    objective, loss = self.objective(part)
                (objective / accum).backward()
                losses[i] += loss.detach() / accum
            if self.config.diagnostics == "full" and i == n_steps - 1:
                watch = StepWatch(self.model)
            norms[i] = torch.nn.utils.clip_grad_norm_(parameters, self.config.grad_clip)
            finite = torch.isfinite(losses[i]) & torch.isfinite(norms[i])
            first = ~finite & (self.nonfinite_step < 0)
            self.nonfinite_step = torch.where(first, float(self.step + 1), self.nonfinite_step)
            frozen = self.nonfinite_step >= 0
            for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
                group["lr"] = peak * schedule(self.config, self.step)
            self._update(parameters, frozen)
            self.model.after_step(frozen)
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1
        return losses.cpu(), norms.cpu(), {} if watch is None else watch.metrics()

    def _update(self, parameters: list[nn.Parameter], frozen: Tensor) -> None:
        """The optimiser's step; where `frozen` is true, weights stay as they are."""
        if self.device in SKIP_BY_THEMSELVES:
            self.optimizer.found_inf = frozen.float()  # type: ignore[attr-defined]
            self.optimizer.step()
            return
        before = [p.detach().clone() for p in parameters]
        self.optimizer.step()
        with torch.no_grad():
            for p, old in zip(parameters, before, strict=True):
                p.copy_(torch.where(frozen, old, p))

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the fixed validation windows, nats per token."""
        total = torch.zeros((), device=self.device)
        for part in self.val_windows.split(max(1, EVAL_TOKENS // self.config.context)):
            with self._autocast():
                total += self.loss(part) * len(part)
        return float(total / len(self.val_windows))

    def _probe(self) -> dict[str, float]:
        with self._autocast():
            return probe(self.model, self.probe_ids, self.config.diagnostics)

    def _smooth(self, losses: Tensor) -> float:
        """Carries the exponential moving average of the loss over these steps."""
        for loss in losses.tolist():
            previous = loss if self.loss_ema is None else self.loss_ema
            self.loss_ema = EMA_DECAY * previous + (1 - EMA_DECAY) * loss
            self.loss_ema_min = _lower(self.loss_ema_min, self.loss_ema)
        assert self.loss_ema is not None
        return self.loss_ema

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device, dtype=torch.bfloat16)

    def state_dict(self) -> dict[str, Any]:
        """Everything that going on needs; tensors and plain values only, so that it loads
        with `weights_only=True`."""
        return {
            "version": TRAINER_VERSION,
            "config": self.config.telling(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "torch_rng": torch.get_rng_state(),
            "nonfinite_step": self.nonfinite_step,
            **{name: getattr(self, name) for name in _CARRIED},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state`: on CPU, bit for bit as if never stopped.

        Raises:
            ValueError: if the state is another trainer version's or another cell's.
        """
        if state.get("version") != TRAINER_VERSION:
            raise ValueError(
                f"checkpoint of trainer version {state.get('version')}, not {TRAINER_VERSION}"
            )
        if state["config"] != self.config.telling():
            raise ValueError("checkpoint of another cell")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["torch_rng"])
        self.nonfinite_step = state["nonfinite_step"].to(self.device)
        for name in _CARRIED:
            setattr(self, name, state[name])


_CARRIED = (
    "step",
    "seconds",
    "loss_init",
    "loss_ema",
    "loss_ema_min",
    "val_loss_min",
    "clipped_steps",
)
"""Plain attributes of a Trainer that a checkpoint carries."""


def strict(row: Row) -> Row:
    """The row with every non-finite number as None, and their names in `nonfinite`.

    JSON has no NaN; a value that is missing for that reason must still be seen.
    """
    bad = sorted(name for name, value in row.items() if not _finite(value))
    clean = {name: _none_if_not_finite(row[name]) for name in bad}
    return row | clean | {"nonfinite": ",".join(bad)}


def _finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, list) or all(map(_finite, value))


def _none_if_not_finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_none_if_not_finite(v) for v in value]
    return value if _finite(value) else None


def _lower(best: float | None, value: float) -> float | None:
    """The lower of the two; a value that is not finite never becomes the best."""
    if not np.isfinite(value):
        return best
    return value if best is None else min(best, value)
