"""The baseline is GPT-2 without its biases: checked against the transformers library's."""

from __future__ import annotations

import pytest
import torch

from tune_study.config import TrialConfig
from tune_study.model import GPT
from tune_study.optim import adamw, schedule

VOCAB = 60
CONFIG = TrialConfig(
    width=32, heads=4, depth=3, context=16, steps=20, warmup_steps=4, report_every=20, lr=1e-2,
    weight_decay=0.1, decay_mode="coupled",
)  # fmt: skip


@pytest.fixture(scope="module")
def reference_class():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")  # read once, at import
        import transformers

    torch.set_num_threads(1)  # as Trainer does; more cost time at this size
    settings = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=16, n_embd=32, n_layer=3, n_head=4,
        activation_function="gelu", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        layer_norm_epsilon=1e-5, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return lambda: transformers.GPT2LMHeadModel(settings)


def copied(model: GPT, reference: torch.nn.Module) -> torch.nn.Module:
    """The reference with our weights; its biases at 0 and not trained."""
    names = {"wte.weight": "tokens.weight", "wpe.weight": "positions.weight"}
    names |= {"ln_f.weight": "final_norm.gain"}
    for i in range(CONFIG.depth):
        names |= {
            f"h.{i}.ln_1.weight": f"blocks.{i}.attention_norm.gain",
            f"h.{i}.attn.c_attn.weight": f"blocks.{i}.attention.qkv.weight",
            f"h.{i}.attn.c_proj.weight": f"blocks.{i}.attention.out.weight",
            f"h.{i}.ln_2.weight": f"blocks.{i}.mlp_norm.gain",
            f"h.{i}.mlp.c_fc.weight": f"blocks.{i}.mlp.up.weight",
            f"h.{i}.mlp.c_proj.weight": f"blocks.{i}.mlp.out.weight",
        }
    ours = dict(model.named_parameters())
    assert set(names.values()) == set(ours)
    with torch.no_grad():
        for name, parameter in reference.transformer.named_parameters():
            if name.endswith("bias"):
                parameter.zero_().requires_grad_(False)
                continue
            weight = ours[names[name]]
            # GPT-2 keeps its linear layers transposed, as inputs x outputs.
            parameter.copy_(weight.T if ".c_" in name else weight)
    return reference


def test_logits_loss_and_twenty_steps_of_adamw_are_gpt2s(reference_class):
    model = GPT(CONFIG, VOCAB, seed=0)
    reference = copied(model, reference_class())
    generator = torch.Generator().manual_seed(0)
    # Every batch a count upwards from somewhere, so that there is something to learn.
    starts = torch.randint(VOCAB, (20, 8, 1), generator=generator)
    windows = list((starts + torch.arange(17)) % VOCAB)

    with torch.no_grad():
        expected = reference(windows[0][:, :-1]).logits
        torch.testing.assert_close(model(windows[0][:, :-1]), expected, atol=1e-5, rtol=0)

    weights = [p for p in reference.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in weights if p.ndim == 2], "weight_decay": CONFIG.weight_decay},
        {"params": [p for p in weights if p.ndim == 1], "weight_decay": 0.0},
    ]
    plain = torch.optim.AdamW(groups, lr=CONFIG.lr, betas=(0.9, 0.95), eps=1e-8)
    ours = adamw(model, CONFIG)
    for step, batch in enumerate(windows):
        logits = reference(batch[:, :-1]).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss = model.loss(batch)
        assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
        for network, optimizer, objective in ((model, ours, loss), (reference, plain, expected)):
            optimizer.zero_grad()
            objective.backward()
            trained = [p for p in network.parameters() if p.requires_grad]
            torch.nn.utils.clip_grad_norm_(trained, CONFIG.grad_clip)
            for group in optimizer.param_groups:
                group["lr"] = CONFIG.lr * schedule(CONFIG, step)
            optimizer.step()
    assert loss.item() < 3.5  # it did learn: ln 60 = 4.09
    after = dict(copied(model, reference_class()).named_parameters())
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(parameter, after[name], atol=1e-5, rtol=0, msg=name)
