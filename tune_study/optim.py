"""AdamW and the learning-rate schedule."""

from __future__ import annotations

import math

import torch
from torch import nn

from tune_study.config import TrialConfig
from tune_study.model import EMBEDDINGS


def schedule(config: TrialConfig, step: int) -> float:
    """The learning rate's multiplier, in (0, 1], for the update that follows `step` updates.

    Linear warm-up to 1 over `warmup_steps`, then half a cosine down to
    `min_lr_fraction` at the end of the run (Loshchilov and Hutter 2017, eq. 5). The first
    update already moves: warm-up goes from 1/warmup_steps.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / (config.steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr_fraction + (1 - config.min_lr_fraction) * cosine


def adamw(model: nn.Module, config: TrialConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019) that decays matrices and leaves gains alone.

    PyTorch multiplies weights by 1 - lr_t * decay, which ties the decay to the learning
    rate that the study sweeps ("coupled"). "Independent" decay is 1 - schedule_t * decay
    (Wortsman et al. 2023, section 3.2.2): the same update with decay divided by the peak.
    """
    decay = config.weight_decay
    if config.decay_mode == "independent":
        decay /= config.lr
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    gains = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": gains, "weight_decay": 0.0}]
    if config.parametrisation == "mup":
        groups = _mup(model, config, groups)
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def _mup(model: nn.Module, config: TrialConfig, groups: list[dict]) -> list[dict]:
    """Gives hidden matrices a group of their own, whose learning rate falls with the width.

    Yang et al. 2022 (2203.03466), table 8, Adam: embeddings, output and gains keep the learning
    rate, hidden matrices have it divided by width / base width. Independent decay stays what it
    is: here too it is divided by the rate that it will be multiplied by.
    """
    hidden = {p for name, p in model.named_parameters() if p.ndim >= 2 and name not in EMBEDDINGS}
    matrices, gains = groups
    decay = matrices["weight_decay"]
    if config.decay_mode == "independent":
        decay *= config.width_ratio
    return [
        matrices | {"params": [p for p in matrices["params"] if p not in hidden]},
        {
            "params": [p for p in matrices["params"] if p in hidden],
            "weight_decay": decay,
            "lr": config.lr / config.width_ratio,
        },
        gains,
    ]
