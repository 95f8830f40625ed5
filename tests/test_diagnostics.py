"""Diagnostics on inputs whose answer is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from tune_study import diagnostics as d
from tune_study.config import TrialConfig
from tune_study.model import GPT


def test_uniform_causal_attention_has_entropy_ln_i():
    zero = torch.zeros(1, 1, 5, 4)
    entropy = d.attention_entropy(d.attention_logits(zero, zero))
    expected = torch.arange(1, 6).float().log()
    torch.testing.assert_close(entropy[0, 0], expected)
    torch.testing.assert_close(d.normalised(entropy), torch.ones(1, 1, 4))


def test_one_hot_attention_has_entropy_zero_and_masked_rows_no_nan():
    logits = torch.full((1, 1, 3, 3), -math.inf)
    logits[..., 1, 0] = 0.0
    logits[..., 2, 2] = 800.0
    assert torch.equal(d.attention_entropy(logits), torch.zeros(1, 1, 3))


def test_a_logit_that_is_nan_is_not_hidden():
    logits = torch.zeros(1, 1, 2, 2)
    logits[..., 1, 0] = math.nan
    assert torch.isnan(d.attention_entropy(logits)).any()
    assert torch.isnan(d.visible_max(logits))


def test_max_logit_counts_what_is_seen_only():
    q = torch.tensor([[[[1.0, 0.0], [0.0, -2.0]]]])
    k = torch.tensor([[[[3.0, 1.0], [500.0, 4.0]]]])
    # seen: q1.k1 = 3, q2.k1 = -2, q2.k2 = -8; hidden: q1.k2 = 500; over sqrt(2)
    assert d.visible_max(d.attention_logits(q, k)).item() == pytest.approx(8 / math.sqrt(2))


def test_kurtosis_of_known_shapes():
    gaussian = torch.randn(1, 4, 100_000, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(d.kurtosis(gaussian), torch.full((1, 4), 3.0), atol=0.1, rtol=0)
    assert d.kurtosis(torch.full((1, 1, 8), -5.0)).item() == pytest.approx(1.0)
    one_hot = torch.zeros(1, 1, 8)
    one_hot[..., 3] = 1e30  # its fourth power alone would overflow
    assert d.kurtosis(one_hot).item() == pytest.approx(8.0)
    assert d.kurtosis(torch.zeros(1, 1, 8)).item() == 0.0
    large = torch.tensor([[[6e4, 1.0, 2.0, 3.0]]], dtype=torch.float16)
    assert math.isfinite(d.kurtosis(large.float()).item())


def test_sinks_by_hand():
    # One head attends to the first token alone, one uniformly: (1 + 1/2 + 1/3 + 1/4) / 4 = 0.52
    # over 4 tokens is a sink too, over 32 tokens 0.127 is not.
    def share(tokens):
        uniform = d.attention_logits(torch.zeros(1, 1, tokens, 2), torch.zeros(1, 1, tokens, 2))
        first = uniform.clone()
        first[..., 0] = 100.0
        return d.sink_share(torch.cat([uniform, first], dim=1)).item()

    assert share(4) == 1.0
    assert share(32) == 0.5
    logits = torch.full((1, 1, 2, 2), math.nan)
    assert math.isnan(d.sink_share(logits).item())


def test_massive_activations_by_hand():
    x = torch.tensor([[[1.0, -2.0, 3.0], [-4.0, 600.0, 0.0]]])
    # magnitudes 0, 1, 2, 3, 4, 600: the lower of the middle two is 2
    assert d.massive_ratio(x).item() == 300.0
    x[0, 0, 0] = math.nan
    assert math.isnan(d.massive_ratio(x).item())


@pytest.mark.parametrize("qk_norm", ["off", "rmsnorm"])
def test_probed_attention_is_the_attention_that_runs(qk_norm):
    model = GPT(TrialConfig(width=24, heads=3, context=10, qk_norm=qk_norm), 50, seed=0)
    attention = model.blocks[0].attention
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(5.0)
    x = torch.randn(2, 10, 24, generator=torch.Generator().manual_seed(1))
    q, k, v = attention.project(x)
    manual = torch.softmax(d.attention_logits(q, k), -1) @ v
    manual = F.linear(manual.transpose(1, 2).flatten(2), attention.out.weight)
    torch.testing.assert_close(attention(x)[0], manual, atol=1e-5, rtol=1e-5)


def test_probe_names_every_layer_and_changes_nothing():
    model = GPT(TrialConfig(depth=3), 50, seed=0)
    ids = torch.arange(64).view(2, 32) % 50
    before = model(ids)
    metrics = d.probe(model, ids)
    assert torch.equal(model(ids), before)
    averaged = {"attn/entropy", "attn/entropy_normalised", "attn/sink"}
    for name in averaged | {"attn/max_logit", "act/kurtosis", "act/massive"}:
        layers = [metrics[f"{name}/layer_{i}"] for i in range(3)]
        whole = sum(layers) / 3 if name in averaged else max(layers)
        assert metrics[name] == pytest.approx(whole)
    assert 0.9 < metrics["attn/entropy_normalised"] <= 1.0  # small logits at init
