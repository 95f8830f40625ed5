"""Each component against an independent statement of its formula (tests/restated.py)."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path

import pytest
import torch
from restated import Restated

from tune_study.attention import Attention, attention_logits
from tune_study.components import NEUTRAL
from tune_study.config import ConfigError, TrialConfig
from tune_study.layers import SigmaLinear
from tune_study.model import GPT
from tune_study.trainer import Trainer

VOCAB = 50
WINDOWS = torch.randint(VOCAB, (3, 11), generator=torch.Generator().manual_seed(2))
IDS = WINDOWS[:, :-1]

ARMS = {
    # what is on: parameters that it adds at width 32, 2 heads, depth 2, context 32, vocabulary 512
    "off": ({}, 0),
    "rmsnorm": ({"qk_norm": "rmsnorm"}, 2 * 2 * 16),
    "layernorm": ({"qk_norm": "layernorm"}, 2 * 2 * 16),
    "l2": ({"qk_norm": "l2"}, 2),
    "rmsnorm+frozengain": ({"qk_norm": "rmsnorm", "qk_gain": "frozen"}, 0),
    "layernorm+absentgain": ({"qk_norm": "layernorm", "qk_gain": "absent"}, 0),
    "l2+frozengain": ({"qk_norm": "l2", "qk_gain": "frozen"}, 0),
    "l2+absentgain": ({"qk_norm": "l2", "qk_gain": "absent"}, 0),
    "rmsnorm+overwidth": ({"qk_norm": "rmsnorm", "qk_over": "width"}, 2 * 2 * 32),
    "layernorm+overwidth": ({"qk_norm": "layernorm", "qk_over": "width"}, 2 * 2 * 32),
    "softcap2": ({"attn_softcap": 2.0}, 0),
    "finalcap2": ({"final_softcap": 2.0}, 0),
    "zloss1e-4": ({"z_loss": 1e-4}, 0),
    "sigmareparam": ({"sigma_reparam": True}, 2 * 4),
    "normformer": ({"normformer": "all"}, 2 * (2 + 32 + 128)),
    "normformer-head_scale": ({"normformer": "head_scale"}, 2 * 2),
    "normformer-post_norm": ({"normformer": "post_norm"}, 2 * 32),
    "normformer-mlp_norm": ({"normformer": "mlp_norm"}, 2 * 128),
    "qkclip100": ({"qk_clip": 100.0}, 0),
    "mup": ({"parametrisation": "mup"}, 0),
    "rotary": ({"positions": "rotary"}, -32 * 32),
    "blockrmsnorm": ({"block_norm": "rmsnorm"}, 0),
    # 3 x 32 x 85 in place of 2 x 32 x 128
    "swiglu": ({"mlp": "swiglu"}, -2 * 32),
    "kvheads1": ({"kv_heads": 1}, -2 * 2 * 16 * 32),
    "valueresidual": ({"value_residual": True}, 0),
    "untied": ({"tied_head": False}, 512 * 32),
    "rmsnorm+rotary+blockrmsnorm+swiglu+kvheads1+valueresidual+untied": (
        {"qk_norm": "rmsnorm", "positions": "rotary", "block_norm": "rmsnorm", "mlp": "swiglu"}
        | {"kv_heads": 1, "value_residual": True, "tied_head": False},
        64 - 1024 - 64 - 2048 + 16384,
    ),
}
MODERN = max(ARMS, key=len)
EXACT_AT_START = {"off", "zloss1e-4", "sigmareparam", "normformer-head_scale", "qkclip100", "mup"}
"""Arms whose formula leaves the initial model as it is, bit for bit."""
STATEFUL = ("sigmareparam", "qkclip100")


def config(**changes) -> TrialConfig:
    shape = {"width": 24, "heads": 3, "context": 10, "depth": 3, "device": "cpu"}
    return TrialConfig(**shape | changes)


def build(**changes) -> GPT:
    """A small model whose weights are large enough, and gains different enough, to matter."""
    model = GPT(config(**changes), VOCAB, seed=7)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator))
    for module in model.modules():
        if isinstance(module, SigmaLinear):
            gamma = module.gamma.detach().clone()
            module.reset()
            module.gamma.data = gamma
    return model


@pytest.mark.parametrize("arm", ARMS)
def test_logits_are_those_of_the_formulas(arm):
    changes, _ = ARMS[arm]
    model = build(**changes)
    expected = Restated(model, config(**changes)).logits(IDS)
    torch.testing.assert_close(model(IDS).double(), expected, atol=5e-5, rtol=2e-4)
    if arm not in EXACT_AT_START:
        assert not torch.allclose(model(IDS), build()(IDS), atol=1e-3)


@pytest.mark.parametrize("arm", ARMS)
def test_parameters_names_and_initial_weights(arm):
    changes, added = ARMS[arm]
    assert TrialConfig(**changes).arm == arm
    baseline, model = GPT(TrialConfig(), 512, 0), GPT(TrialConfig(**changes), 512, 0)
    assert model.parameter_count() == baseline.parameter_count() + added
    # Weights that both have are the same: what a component draws shifts nothing else.
    weights = dict(model.named_parameters())
    for name, weight in baseline.named_parameters():
        if name in weights and weights[name].shape == weight.shape:
            assert torch.equal(weights[name], weight), name
    ids = WINDOWS[:, :-1]
    assert torch.equal(model(ids), baseline(ids)) == (arm in EXACT_AT_START)


@pytest.mark.parametrize("arm", ARMS)
def test_every_parameter_gets_a_gradient_and_no_future_token_is_seen(arm):
    changes, _ = ARMS[arm]
    model = build(**changes)
    model.objective(WINDOWS)[0].backward()
    for name, parameter in model.named_parameters():
        assert parameter.is_contiguous(), name
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
    changed = IDS.clone()
    changed[:, 6] = (changed[:, 6] + 1) % VOCAB
    before, after = model(IDS), model(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(before[:, 6:], after[:, 6:], atol=1e-3)


def test_every_component_is_in_the_table():
    covered = {field for changes, _ in ARMS.values() for field in changes}
    assert covered >= NEUTRAL.keys() - {"mup_base_width", "mup_base_head_width", "intervention"}


def test_every_component_is_in_the_method():
    table = (Path(__file__).parents[1] / "docs/method.md").read_text(encoding="utf-8")
    missing = [name for name in NEUTRAL if not re.search(rf"`{name}\b", table)]
    assert missing == []


@pytest.mark.parametrize("arm", [*STATEFUL, "l2", "softcap2", "zloss1e-4", MODERN])
def test_stop_save_load_go_on_is_never_having_stopped(arm, small, tokens):
    cell = small.replace(lr=0.3, **ARMS[arm][0])
    straight, first, second = (Trainer(cell, tokens) for _ in range(3))
    expected = [straight.train(4) for _ in range(3)]
    first.train(4)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    resumed = [second.train(4) for _ in range(2)]
    for mine, theirs in zip(resumed, expected[1:], strict=True):
        assert {k: v for k, v in mine.items() if not k.startswith("time/")} == {
            k: v for k, v in theirs.items() if not k.startswith("time/")
        }
    for a, b in zip(straight.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("arm", [*STATEFUL, "l2", "softcap2", "normformer", MODERN])
def test_bf16_stays_near_fp32(arm, small, tokens):
    cell = small.replace(lr=0.01, **ARMS[arm][0])
    full, half = (
        Trainer(cell.replace(precision=p), tokens).train(12)["val/loss"] for p in ("fp32", "bf16")
    )
    assert half != full
    assert half == pytest.approx(full, abs=0.05)


# ------------------------------------------------------------------ one by one


def test_l2_starts_at_log2_of_the_pairs_of_positions():
    attention = Attention(TrialConfig(qk_norm="l2", context=32))
    assert attention.q_norm.gain.item() == pytest.approx(math.log2(32 * 31))  # 9.95
    q, k, _ = attention.project(torch.randn(1, 4, 32))
    assert q.norm(dim=-1).tolist() == [[pytest.approx([9.954] * 4, abs=1e-3)] * 2]
    assert k.norm(dim=-1).tolist() == [[pytest.approx([1.0] * 4)] * 2]
    # So no logit can pass g: unit vectors' products lie in [-1, 1].
    assert attention.logits(q, k).max() <= 9.955


def test_a_frozen_gain_is_in_the_checkpoint_and_never_trained(small, tokens):
    trainer = Trainer(small.replace(qk_norm="l2", qk_gain="frozen", lr=0.1), tokens)
    trainer.train(12)
    name = "blocks.0.attention.q_norm.gain"
    assert name not in dict(trainer.model.named_parameters())
    assert trainer.state_dict()["model"][name].item() == pytest.approx(math.log2(16 * 15))


def test_softcaps_by_hand():
    one = torch.tensor([[[[3.0]]]])
    # 3 * 3 = 9; 10 tanh(0.9) = 7.163
    assert attention_logits(one, one, cap=10.0).item() == pytest.approx(7.163, abs=1e-3)
    plain, capped = build()(IDS), build(final_softcap=2.0)(IDS)
    assert plain.abs().max() > 4
    expected = [2 * math.tanh(x / 2) for x in plain.flatten().tolist()]
    assert capped.flatten().tolist() == pytest.approx(expected, abs=1e-5)


def test_z_loss_is_added_to_what_is_descended_and_not_to_what_is_reported():
    model = build(z_loss=0.5)
    objective, loss = model.objective(WINDOWS)
    rows = model(IDS).double().flatten(0, 1).tolist()
    log_z = [math.log(sum(math.exp(x) for x in row)) for row in rows]
    penalty = 0.5 * sum(z * z for z in log_z) / len(log_z)
    assert objective.item() == pytest.approx(loss.item() + penalty, rel=1e-5)
    assert torch.equal(loss, build().loss(WINDOWS))
    objective, loss = build().objective(WINDOWS)
    assert objective is loss


def test_sigma_reparam_follows_the_spectral_norm(small, tokens):
    trainer = Trainer(small.replace(sigma_reparam=True, lr=0.02, steps=60), tokens)
    layer = trainer.model.blocks[0].mlp.up
    start = torch.linalg.svdvals(layer.weight)[0].item()
    assert layer.sigma().item() == layer.gamma.item() == pytest.approx(start, rel=1e-5)
    trainer.train(60)
    norms = torch.linalg.svdvals(layer.weight.detach())
    assert norms[0].item() != pytest.approx(start, rel=0.05)
    assert layer.sigma().item() == pytest.approx(norms[0].item(), rel=0.02)
    # The weight in effect has spectral norm gamma.
    effective = layer.weight * (layer.gamma / layer.sigma())
    assert torch.linalg.matrix_norm(effective, 2).item() == pytest.approx(
        abs(layer.gamma.item()), rel=0.02
    )


def test_sigma_flows_gradients_through_the_weights_and_not_the_vectors():
    layer = SigmaLinear(3, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[3.0, 0.0, 0.0], [0.0, 1.0, 0.0]]))
    layer.reset()
    layer(torch.tensor([[1.0, 1.0, 0.0]])).sum().backward()
    # f = gamma (w11 + w12 + w21 + w22) / sigma, sigma = w11 = gamma = 3, sum of the four 4:
    # df/dw11 = 3/3 - 3 * 4 / 9 = -1/3, the others 3/3 = 1; df/dgamma = 4/3
    expected = torch.tensor([[-1 / 3, 1.0, 0.0], [1.0, 1.0, 0.0]])
    torch.testing.assert_close(layer.weight.grad, expected)
    assert layer.gamma.grad.item() == pytest.approx(4 / 3)


def test_qk_clip_scales_the_heads_above_tau_and_no_others():
    tau = 2.0
    model = build(qk_clip=tau)
    attention = model.blocks[0].attention
    before = attention.qkv.weight.detach().clone()
    model.objective(WINDOWS)
    with torch.no_grad():
        q, k, _ = attention.project(model.blocks[0].attention_norm(model.embed(IDS)))
        largest = [attention_logits(q, k)[:, h].max().item() for h in range(3)]
    assert attention.largest_logit.tolist() == pytest.approx(largest)
    model.after_step(torch.tensor(False))
    for h, size in enumerate(largest):
        factor = math.sqrt(tau / size) if size > tau else 1.0
        for part, scale in ((0, factor), (1, factor), (2, 1.0)):
            rows = slice(24 * part + 8 * h, 24 * part + 8 * (h + 1))
            torch.testing.assert_close(attention.qkv.weight[rows], before[rows] * scale)
    assert max(largest) > tau
    with torch.no_grad():
        q, k, _ = attention.project(model.blocks[0].attention_norm(model.embed(IDS)))
    assert attention_logits(q, k).max().item() == pytest.approx(tau, rel=1e-4)
    # The count starts anew, looking without training counts nothing, and frozen weights stay.
    assert attention.largest_logit.tolist() == [0.0] * 3
    with torch.no_grad():
        model.loss(WINDOWS)
    assert attention.largest_logit.tolist() == [0.0] * 3
    kept = attention.qkv.weight.detach().clone()
    attention.largest_logit.fill_(100.0)
    model.after_step(torch.tensor(True))
    attention.largest_logit.fill_(math.nan)
    model.after_step(torch.tensor(False))
    attention.largest_logit.fill_(math.inf)
    model.after_step(torch.tensor(False))
    assert torch.equal(attention.qkv.weight, kept)


def test_qk_clip_holds_the_logits_of_a_run_and_the_baseline_does_not(small, tokens):
    runs = {}
    for tau in (None, 1.0):
        trainer = Trainer(small.replace(qk_clip=tau, lr=0.3, warmup_steps=0), tokens)
        runs[tau] = trainer.train(8)["attn/max_logit"]
    assert runs[None] > 10
    assert runs[1.0] < 3  # one step may pass tau; it is scaled back before the next


def test_rotary_logits_depend_on_the_distance_alone():
    attention = Attention(TrialConfig(positions="rotary", qk_norm="rmsnorm"))
    x = torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(0)).repeat(1, 8, 1)
    q, k, _ = attention.project(x)
    logits = attention_logits(q, k)[0, 0]
    for distance in range(8):
        diagonal = logits.diagonal(-distance)
        torch.testing.assert_close(
            diagonal, diagonal[:1].expand(8 - distance), rtol=1e-4, atol=1e-5
        )
    # The norm comes first, and turning keeps it: every query has length sqrt(16).
    assert q.norm(dim=-1).flatten().tolist() == pytest.approx([4.0] * 16, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_gain": "frozen"}, "qk_gain = 'frozen': does not work with qk_norm 'off'"),
        ({"qk_over": "width"}, "qk_over = 'width': does not work with qk_norm 'off'"),
        ({"qk_norm": "l2", "qk_over": "width"}, "qk_over = 'width': not with qk_norm 'l2'"),
        ({"qk_norm": "rmsnorm", "qk_clip": 100}, r"qk_clip = 100\.0: does not work with qk_norm"),
        ({"sigma_reparam": True, "qk_clip": 100}, "which undoes it"),
        ({"kv_heads": 1, "qk_clip": 100}, "keys belong to several heads"),
        ({"kv_heads": 3}, "kv_heads = 3: does not divide heads = 2"),
        ({"positions": "rotary", "width": 6}, "turns pairs"),
        ({"mup_base_width": 64}, "mup_base_width = 64: does not work with parametrisation"),
        ({"mlp": "relu"}, "mlp = 'relu'.*'swiglu'"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        TrialConfig(**changes)
    assert "\n" not in str(error.value)
