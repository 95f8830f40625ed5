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
    entropy = d.attention_entropy(d.attention_logits(zero, zero).softmax(-1))
    expected = torch.arange(1, 6).float().log()
    torch.testing.assert_close(entropy[0, 0], expected)
    torch.testing.assert_close(d.normalised(entropy, expected), torch.ones(1, 1, 4))


def test_one_hot_attention_has_entropy_zero():
    logits = torch.full((1, 1, 3, 3), -math.inf)
    logits[..., 0, 0] = logits[..., 1, 0] = 0.0
    logits[..., 2, 2] = 800.0
    assert torch.equal(d.attention_entropy(logits.softmax(-1)), torch.zeros(1, 1, 3))
    assert torch.equal(d.most_entropy(3, logits.device), torch.tensor([1.0, 2.0, 3.0]).log())


def test_a_logit_that_is_nan_is_not_hidden():
    logits = torch.zeros(1, 1, 2, 2)
    logits[..., 1, 0] = math.nan
    assert torch.isnan(d.attention_entropy(logits.softmax(-1))).any()
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
        return d.sink_share(torch.cat([uniform, first], dim=1).softmax(-1)).item()

    assert share(4) == 1.0
    assert share(32) == 0.5
    logits = torch.full((1, 1, 2, 2), math.nan)
    assert math.isnan(d.sink_share(logits.softmax(-1)).item())


@pytest.mark.parametrize("detail", ["cheap", "full"])
def test_inference_mode_changes_no_bit(detail, monkeypatch):
    config = TrialConfig(lr=1e-2, depth=2, qk_norm="rmsnorm", device="cpu", threads=1)
    model = GPT(config, 512, 0)
    ids = torch.arange(64).view(2, 32)
    found = d.probe(model, ids, detail)
    monkeypatch.setattr(d, "WITHOUT_GRADIENT", torch.no_grad)
    assert found == d.probe(model, ids, detail)
    model.loss(torch.arange(66).view(2, 33)).backward()  # nothing it left behind is in the way


@pytest.mark.parametrize("shape", [(1,), (2, 3), (8, 32, 32), (3, 5, 7)])
def test_median_is_the_element_pytorch_finds(shape, monkeypatch):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).abs()
    found = d.median(x)
    monkeypatch.setattr(d, "SELECTS_BY_NUMPY", ())
    assert found.item() == d.median(x).item() == x.median().item()


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


def test_the_four_kurtoses_by_hand():
    # two tokens, two channels: m4/m2^2
    x = torch.tensor([[[1.0, 3.0], [1.0, 1.0]]])
    full = {name: value.item() for name, value in d._activations_in_full(x).items()}
    # token 1: (1 + 81)/2 / ((1 + 9)/2)^2 = 41/25; token 2: 1
    assert d._activations(x)["act/kurtosis"].item() == pytest.approx((41 / 25 + 1) / 2)
    # less the token's mean: (-1, 1) gives 1; (0, 0) gives 0
    assert full["act/kurtosis_centred"] == pytest.approx(0.5)
    # all four less their mean 1.5: -.5 1.5 -.5 -.5: (3/16 + 81/16)/4 / (3/4)^2 = 7/3
    assert full["act/kurtosis_pooled"] == pytest.approx(7 / 3)
    # squares of the channels' root mean squares: 1 and 5: (1 + 25)/2 / 3^2 = 13/9
    assert full["act/kurtosis_neuron"] == pytest.approx(13 / 9)
    assert full["act/rms"] == pytest.approx(math.sqrt(12 / 4))
    assert full["act/max"] == 3.0


def test_logit_rms_and_norms_by_hand():
    q = torch.tensor([[[[3.0, 4.0], [0.0, 2.0]]]])
    k = torch.tensor([[[[1.0, 0.0], [0.0, 6.0]]]])
    found = d._attention_in_full(q, k, d.attention_logits(q, k, scale=1.0))
    # seen: q1.k1 = 3, q2.k1 = 0, q2.k2 = 12; q1.k2 = 24 is hidden
    assert found["attn/logit_rms"].item() == pytest.approx(math.sqrt((9 + 144) / 3))
    assert found["attn/max_logit_uncapped"].item() == 12.0
    assert found["attn/q_norm"].item() == pytest.approx((5 + 2) / 2)
    assert found["attn/k_norm"].item() == pytest.approx((1 + 6) / 2)


def test_log_z_by_hand():
    # 50 equal logits of 2: ln(50 e^2) = ln 50 + 2
    assert d.log_z(torch.full((1, 1, 50), 2.0)).item() == pytest.approx(math.log(50) + 2)
    model = GPT(TrialConfig(), 50, seed=0)
    ids = torch.zeros(1, 4, dtype=torch.int64)
    assert d.probe(model, ids, "full")["out/log_z"] == pytest.approx(math.log(50), abs=0.1)
    assert "out/log_z" not in d.probe(model, ids)


def test_full_adds_to_cheap_and_sees_through_a_cap():
    config = TrialConfig(depth=2, attn_softcap=0.01)
    model, ids = GPT(config, 50, seed=0), torch.arange(64).view(2, 32) % 50
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3.0)
    cheap, full = d.probe(model, ids), d.probe(model, ids, "full")
    assert {name: full[name] for name in cheap} == cheap
    # per layer 6 measures and their summary
    assert len(cheap) == 6 * 3
    assert len(full) == 15 * 3 + 1
    assert full["attn/max_logit"] <= 0.01 < full["attn/max_logit_uncapped"]


def test_a_step_watched_by_hand():
    model = GPT(TrialConfig(depth=2, tied_head=False), 50, seed=0)
    for i, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, float(i))
    watch = d.StepWatch(model)
    with torch.no_grad():
        for p in model.parameters():
            p.grad *= 100  # clipping comes after the look at the gradients
        model.blocks[1].mlp.up.weight += 0.5
        model.tokens.weight.fill_(0.0)
    found = {name: value.item() for name, value in watch.metrics().items()}
    parts = ("embedding", "layer_0", "layer_1", "head")
    assert found.keys() == {
        f"{what}/rms/{of}" for what in ("grad", "param", "update") for of in parts
    }
    # tokens (50 rows of 32) have gradient 0, positions (32 rows) 1
    assert found["grad/rms/embedding"] == pytest.approx(math.sqrt(32 / 82))
    assert found["update/rms/layer_0"] == found["update/rms/head"] == 0.0
    # of the block's 12 x 32^2 + 2 x 32 parameters, 4 x 32^2 moved by 0.5
    assert found["update/rms/layer_1"] == pytest.approx(0.5 * math.sqrt(4096 / 12352))
    assert found["param/rms/embedding"] == pytest.approx(0.02, rel=0.1)  # before the step


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_logits_are_measured_in_float32(precision):
    model, ids = GPT(TrialConfig(), 50, seed=0), torch.arange(64).view(2, 32) % 50
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        logit = d.probe(model, ids)["attn/max_logit"]
    # A number with bfloat16's 8 bits would survive the round trip.
    assert torch.tensor(logit).bfloat16().item() != logit
