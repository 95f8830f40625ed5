"""Schedule and AdamW against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tune_study.config import TrialConfig
from tune_study.model import GPT
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


def test_mup_divides_the_rate_of_hidden_matrices_by_the_width_ratio():
    shape = {"width": 128, "heads": 2, "tied_head": False, "qk_norm": "rmsnorm", "lr": 0.5}
    config = CONFIG.replace(parametrisation="mup", **shape)
    model = GPT(config, 50, seed=0)
    names = {id(p): name for name, p in model.named_parameters()}
    vectors, hidden, gains = (
        {names[id(p)] for p in group["params"]} for group in adamw(model, config).param_groups
    )
    assert vectors == {"tokens.weight", "positions.weight", "head.weight"}
    assert {name.split(".", 2)[2] for name in hidden} == {
        *("attention.qkv.weight", "attention.out.weight", "mlp.up.weight", "mlp.out.weight")
    }
    assert all(name.endswith("gain") for name in gains)
    assert len(names) == len(vectors) + len(hidden) + len(gains)
    for mode in ("independent", "coupled"):
        groups = adamw(model, config.replace(decay_mode=mode)).param_groups
        # width 128 is four times the base's 32
        assert [group["lr"] for group in groups] == [0.5, 0.125, 0.5]
        decays = [group["lr"] * group["weight_decay"] for group in groups]
        # independent: lr x decay is the same whatever the learning rate
        of_hidden = 1e-4 if mode == "independent" else 0.125e-4
        of_vectors = 1e-4 if mode == "independent" else 0.5e-4
        assert decays == pytest.approx([of_vectors, of_hidden, 0])


def test_mup_initialises_and_scales_by_the_base_shape():
    wide = TrialConfig(parametrisation="mup", width=128, heads=2)
    standard = wide.replace(parametrisation="standard")
    mup, plain = GPT(wide, 50, seed=0), GPT(standard, 50, seed=0)
    # hidden matrices: 0.02 / sqrt(4); embeddings as they were
    up = "blocks.0.mlp.up.weight"
    assert torch.allclose(mup.state_dict()[up], plain.state_dict()[up] / 2)
    assert torch.equal(mup.tokens.weight, plain.tokens.weight)
    # heads of 64 in place of 16: sqrt(16) / 64 in place of 1 / sqrt(64)
    assert mup.blocks[0].attention.scale == 4 / 64
    plain.load_state_dict(mup.state_dict())
    with torch.no_grad():
        for block in plain.blocks:
            block.attention.scale = 4 / 64
    ids = torch.arange(20).view(2, 10)
    assert torch.allclose(mup(ids), plain(ids) / 4)  # the output multiplier
