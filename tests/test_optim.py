"""Schedule and AdamW against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tune_study.config import TrialConfig
from tune_study.optim import adamw, schedule

CONFIG = TrialConfig(steps=100, warmup_steps=10, report_every=10)


def test_schedule_by_hand():
    assert schedule(CONFIG, 0) == pytest.approx(0.1)  # first of ten warm-up steps
    assert schedule(CONFIG, 9) == 1.0  # last of warm-up
    assert schedule(CONFIG, 10) == 1.0  # cosine starts at the peak
    assert schedule(CONFIG, 55) == pytest.approx(0.5)  # half of the cosine
    # one step before the end: (1 + cos(pi * 89/90)) / 2
    assert schedule(CONFIG, 99) == pytest.approx((1 + math.cos(math.pi * 89 / 90)) / 2)
    kept = CONFIG.replace(min_lr_fraction=0.1)
    assert schedule(kept, 55) == pytest.approx(0.55)
    assert schedule(CONFIG.replace(warmup_steps=0), 0) == 1.0


def restated(p0, grads, decays, lrs, beta1=0.9, beta2=0.95, eps=1e-8):
    """Loshchilov and Hutter 2019, algorithm 2, in plain floats; decay given as a factor."""
    p, m, v = p0, 0.0, 0.0
    for t, (g, decay, lr) in enumerate(zip(grads, decays, lrs, strict=True), start=1):
        p *= 1 - decay
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        p -= lr * (m / (1 - beta1**t)) / (math.sqrt(v / (1 - beta2**t)) + eps)
    return p


@pytest.mark.parametrize("mode", ["independent", "coupled"])
@pytest.mark.parametrize("lr", [1e-3, 0.5])
def test_both_kinds_of_weight_decay(mode, lr):
    config = CONFIG.replace(lr=lr, weight_decay=0.1, decay_mode=mode)
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    optimizer = adamw(model, config)
    grads = [0.5, -1.0, 2.0]
    shape = [schedule(config, step) for step in range(3)]
    for grad, scale in zip(grads, shape, strict=True):
        model.weight.grad = torch.full_like(model.weight, grad)
        for group in optimizer.param_groups:
            group["lr"] = lr * scale
        optimizer.step()
    # independent: the schedule scales the decay, the peak learning rate does not
    decays = [0.1 * s * (1 if mode == "independent" else lr) for s in shape]
    expected = restated(2.0, grads, decays, [lr * s for s in shape])
    assert model.weight.item() == pytest.approx(expected, rel=1e-5)


def test_gains_are_not_decayed():
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.LayerNorm(2, bias=False)})
    matrices, gains = adamw(model, CONFIG).param_groups
    assert [p.shape for p in matrices["params"]] == [(2, 2)]
    assert [p.shape for p in gains["params"]] == [(2,)]
    assert gains["weight_decay"] == 0
    assert matrices["weight_decay"] == pytest.approx(CONFIG.weight_decay / CONFIG.lr)
