"""Each component against an independent statement of its formula."""

from __future__ import annotations

import math

import pytest
import torch

from tune_study.config import TrialConfig
from tune_study.model import GPT

VOCAB = 50
IDS = torch.randint(VOCAB, (3, 11), generator=torch.Generator().manual_seed(2))


def build(**changes) -> GPT:
    """A small model whose weights are large enough for every component to matter."""
    model = GPT(TrialConfig(**{"width": 24, "heads": 3, "context": 10} | changes), VOCAB, seed=7)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator))
    return model


def test_final_softcap_by_hand():
    plain, capped = build()(IDS[:, :-1]), build(final_softcap=2.0)(IDS[:, :-1])
    assert plain.abs().max() > 4
    expected = [2 * math.tanh(x / 2) for x in plain.flatten().tolist()]
    assert capped.flatten().tolist() == pytest.approx(expected, abs=1e-5)


def test_z_loss_is_added_to_what_is_descended_and_not_to_what_is_reported():
    model = build(z_loss=0.5)
    objective, loss = model.objective(IDS)
    logits = model(IDS[:, :-1]).double().flatten(0, 1)
    log_z = [math.log(sum(math.exp(x) for x in row)) for row in logits.tolist()]
    penalty = 0.5 * sum(z * z for z in log_z) / len(log_z)
    assert objective.item() == pytest.approx(loss.item() + penalty, rel=1e-5)
    assert torch.equal(loss, build().loss(IDS))
    objective, loss = build().objective(IDS)
    assert objective is loss
