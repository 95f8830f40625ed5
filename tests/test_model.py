"""The GPT against a plain restatement of its formulas, and what must not differ between arms."""

from __future__ import annotations

import math

import pytest
import torch

from tune_study.config import TrialConfig
from tune_study.model import GPT

VOCAB = 50


def build(seed: int = 7, **changes) -> GPT:
    config = TrialConfig(width=24, heads=3, context=10, **changes)
    return GPT(config, VOCAB, seed)


def perturbed(**changes) -> GPT:
    """A model whose gains are not 1 and whose weights are large enough to matter."""
    model = build(**changes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator))
    return model


def restated_logits(model: GPT, ids: torch.Tensor, heads: int) -> torch.Tensor:
    """The architecture written out with nothing but sums and products, in float64."""
    w = {name: p.detach().double() for name, p in model.named_parameters()}

    def layer_norm(x, gain):
        centred = x - x.mean(-1, keepdim=True)
        return gain * centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5)

    def gelu(x):
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))

    out = []
    for sequence in ids:
        x = torch.stack([w["tokens.weight"][t] for t in sequence])
        x = x + w["positions.weight"][: len(sequence)]
        n, width = x.shape
        size = width // heads
        for i in range(len(model.blocks)):
            b = f"blocks.{i}."
            h = layer_norm(x, w[b + "attention_norm.gain"]) @ w[b + "attention.qkv.weight"].T
            joined = torch.zeros(n, width, dtype=torch.float64)
            for head in range(heads):
                q, k, v = (
                    h[:, j * width + head * size : j * width + (head + 1) * size] for j in range(3)
                )
                if b + "attention.q_norm.gain" in w:
                    q = q / torch.sqrt((q**2).mean(-1, keepdim=True) + 1e-5)
                    k = k / torch.sqrt((k**2).mean(-1, keepdim=True) + 1e-5)
                    q = q * w[b + "attention.q_norm.gain"]
                    k = k * w[b + "attention.k_norm.gain"]
                for t in range(n):
                    scores = torch.exp(q[t] @ k[: t + 1].T / math.sqrt(size))
                    joined[t, head * size : (head + 1) * size] = scores / scores.sum() @ v[: t + 1]
            x = x + joined @ w[b + "attention.out.weight"].T
            h = layer_norm(x, w[b + "mlp_norm.gain"])
            x = x + gelu(h @ w[b + "mlp.up.weight"].T) @ w[b + "mlp.out.weight"].T
        out.append(layer_norm(x, w["final_norm.gain"]) @ w["tokens.weight"].T)
    return torch.stack(out)


@pytest.mark.parametrize("qk_norm", ["off", "rmsnorm"])
def test_logits_and_loss_equal_the_restated_formulas(qk_norm):
    model = perturbed(depth=2, qk_norm=qk_norm)
    windows = torch.randint(VOCAB, (3, 11), generator=torch.Generator().manual_seed(2))
    expected = restated_logits(model, windows[:, :-1], heads=3)
    torch.testing.assert_close(model(windows[:, :-1]).double(), expected, atol=2e-5, rtol=1e-4)
    picked = torch.log_softmax(expected, -1).gather(-1, windows[:, 1:, None])
    assert model.loss(windows).item() == pytest.approx(-picked.mean().item(), abs=1e-5)


@pytest.mark.parametrize("qk_norm", ["off", "rmsnorm"])
def test_a_changed_future_token_changes_no_earlier_logit(qk_norm):
    model = perturbed(depth=2, qk_norm=qk_norm)
    ids = torch.randint(VOCAB, (1, 10), generator=torch.Generator().manual_seed(3))
    changed = ids.clone()
    changed[0, 6] = (changed[0, 6] + 1) % VOCAB
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.equal(before[:, 6:], after[:, 6:])


def test_arms_share_bit_identical_initial_weights():
    off = dict(build(depth=3).named_parameters())
    on = dict(build(depth=3, qk_norm="rmsnorm").named_parameters())
    assert all(torch.equal(off[name], on[name]) for name in off)
    extra = {name for name in on if name not in off}
    assert extra == {f"blocks.{i}.attention.{n}_norm.gain" for i in range(3) for n in "qk"}
    assert all(torch.equal(on[name], torch.ones(8)) for name in extra)


def test_depths_share_what_they_have_in_common_up_to_the_residual_scale():
    shallow = dict(build(depth=1).named_parameters())
    deep = dict(build(depth=4).named_parameters())
    for name, weight in shallow.items():
        scale = 2.0 if name.endswith("out.weight") else 1.0  # sqrt(2*4) / sqrt(2*1)
        torch.testing.assert_close(weight, deep[name] * scale)


def test_seeds_differ():
    assert not torch.equal(build(seed=1).tokens.weight, build(seed=2).tokens.weight)


def test_initial_weights_do_not_depend_on_the_global_generator():
    torch.manual_seed(5)
    first = build(seed=3).tokens.weight
    torch.manual_seed(6)
    assert torch.equal(build(seed=3).tokens.weight, first)


def test_initial_scale_and_loss():
    model = GPT(TrialConfig(width=64, heads=4, depth=8), 512, seed=0)
    assert model.blocks[0].mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.05)
    # 0.02 / sqrt(2 * 8 blocks) = 0.005
    assert model.blocks[0].mlp.out.weight.std().item() == pytest.approx(0.005, rel=0.05)
    windows = torch.randint(512, (8, 33), generator=torch.Generator().manual_seed(0))
    assert model.loss(windows).item() == pytest.approx(math.log(512), abs=0.05)


def test_parameter_count_of_the_pilot_by_hand():
    # tokens 512*32, positions 32*32, a block 12*32^2 + two gains of 32, final gain 32
    assert GPT(TrialConfig(depth=2), 512, 0).parameter_count() == 42_144
    # and with QK-norm two gains of 16 in each of two blocks
    assert GPT(TrialConfig(depth=2, qk_norm="rmsnorm"), 512, 0).parameter_count() == 42_208


@pytest.mark.parametrize("qk_norm", ["off", "rmsnorm"])
def test_every_parameter_is_contiguous_and_gets_a_gradient(qk_norm):
    model = perturbed(depth=2, qk_norm=qk_norm)
    model.loss(torch.arange(33).view(3, 11) % VOCAB).backward()
    for name, parameter in model.named_parameters():
        assert parameter.is_contiguous(), name
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
