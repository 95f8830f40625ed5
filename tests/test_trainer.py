"""The trainer: golden losses, exact resume, and what cells must have in common."""

from __future__ import annotations

import io
import json
import math
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tune_study import trainer as module
from tune_study.config import ConfigError
from tune_study.trainer import Trainer, stream_seed, strict

GOLDEN = [
    4.58294,
    4.57777,
    4.57147,
    4.56534,
    4.54387,
    4.56958,
    4.58723,
    4.52347,
    4.61027,
    4.56166,
    4.57968,
    4.58719,
    4.59305,
    4.54804,
    4.56402,
    4.52445,
    4.59747,
    4.61928,
    4.57172,
    4.54965,
]
"""First 20 training losses of `golden_cell` on CPU. They change when the arithmetic, the
initialisation or the data order changes: then raise TRAINER_VERSION and renew them. Kinds of
processor differ in the last bits, which at a learning rate of 0.1 grow to 0.05 within these steps;
at 0.01 AVX2 and AVX-512 agree in all digits given."""


@pytest.fixture
def golden_tokens():
    """Tokens written out here, so that only the trainer can change what follows."""
    i = np.arange(4000)
    ids = ((i * i // 7 + 3 * (i // 5)) % 97).astype(np.uint16)
    return SimpleNamespace(train=ids[:3000], validation=ids[3000:], vocab_size=97)


@pytest.fixture
def golden_cell(small):
    return small.replace(steps=20, report_every=20, warmup_steps=5, lr=0.01, qk_norm="rmsnorm")


def rows(config, tokens):
    trainer = Trainer(config, tokens)
    out = []
    while not trainer.finished:
        out.append(trainer.train(config.report_every))
    return out


def comparable(row):
    """A row without what clocks say."""
    return {key: value for key, value in row.items() if not key.startswith("time/")}


def test_golden_losses(golden_cell, golden_tokens):
    (row,) = rows(golden_cell, golden_tokens)
    assert row["train/losses"] == pytest.approx(GOLDEN, abs=1e-4)


def test_the_same_cell_gives_the_same_bits(small, tokens):
    first, second = rows(small, tokens), rows(small, tokens)
    assert [comparable(r) for r in first] == [comparable(r) for r in second]


def test_training_is_the_plain_loop(small, tokens):
    """The step written out: same batches, same losses, same weights."""
    config = small.replace(grad_accum=2, lr=0.01)
    trainer = Trainer(config, tokens)
    row = trainer.train(4)

    from tune_study.data import Batches
    from tune_study.model import GPT
    from tune_study.optim import adamw, schedule

    model = GPT(config, tokens.vocab_size, stream_seed(config.seed, "model"))
    optimizer = adamw(model, config)
    batches = Batches(tokens.train, stream_seed(config.seed, "data"), 8, config.context)
    losses = []
    for step in range(4):
        windows = torch.from_numpy(batches.at(step))
        loss = (model.loss(windows[:4]) + model.loss(windows[4:])) / 2
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = config.lr * schedule(config, step)
        optimizer.step()
        losses.append(loss.item())
    assert row["train/losses"] == pytest.approx(losses, rel=1e-5)
    for mine, plain in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("accum", [1, 4])
def test_stop_save_load_go_on_is_never_having_stopped(small, tokens, accum):
    config = small.replace(grad_accum=accum, lr=0.05, qk_norm="rmsnorm")
    straight = Trainer(config, tokens)
    expected = [straight.train(4) for _ in range(3)]

    first = Trainer(config, tokens)
    first.train(4)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    torch.rand(3)  # a generator disturbed in between must not matter
    second = Trainer(config, tokens)
    second.load_state_dict(torch.load(file, weights_only=True))
    resumed = [second.train(4) for _ in range(2)]

    assert [comparable(r) for r in resumed] == [comparable(r) for r in expected[1:]]
    for a, b in zip(straight.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    step = next(iter(second.optimizer.state.values()))["step"]
    assert step.item() == 12
    assert torch.equal(second.state_dict()["torch_rng"], straight.state_dict()["torch_rng"])


def test_a_checkpoint_of_another_cell_or_version_is_refused(small, tokens):
    state = Trainer(small, tokens).state_dict()
    with pytest.raises(ValueError, match="another cell"):
        Trainer(small.replace(lr=0.5), tokens).load_state_dict(state)
    with pytest.raises(ValueError, match="version"):
        Trainer(small, tokens).load_state_dict(state | {"version": -1})


def test_arms_rates_and_depths_share_batches_and_seeds_do_not(small, tokens):
    def first_batches(**changes):
        return Trainer(small.replace(**changes), tokens).batches.range(0, 50)

    base = first_batches()
    for changes in ({"qk_norm": "rmsnorm"}, {"lr": 0.5}, {"depth": 5}):
        assert np.array_equal(base, first_batches(**changes))
    assert not np.array_equal(base, first_batches(seed=1))


def test_arms_and_rates_share_initial_weights(small, tokens):
    base = dict(Trainer(small, tokens).model.named_parameters())
    for changes in ({"qk_norm": "rmsnorm"}, {"lr": 0.5}):
        other = dict(Trainer(small.replace(**changes), tokens).model.named_parameters())
        assert all(torch.equal(base[name], other[name]) for name in base)


def test_validation_windows_are_the_same_for_every_cell(small, tokens):
    base = Trainer(small, tokens).val_windows
    for changes in ({"seed": 5}, {"depth": 3}, {"lr": 1.0}, {"qk_norm": "rmsnorm"}):
        assert torch.equal(base, Trainer(small.replace(**changes), tokens).val_windows)


def test_three_seeds_are_three_runs(small, tokens):
    finals = {rows(small.replace(seed=s), tokens)[-1]["val/loss"] for s in range(3)}
    assert len(finals) == 3


def test_loss_at_init_is_measured_before_the_first_update(small, tokens):
    trainer = Trainer(small, tokens)
    expected = trainer.evaluate()
    row = trainer.train(4)
    assert row["val/loss_init"] == expected
    assert row["val/loss_init"] == pytest.approx(math.log(tokens.vocab_size), abs=0.1)
    assert row["val/loss"] != expected
    assert trainer.train(4)["val/loss_init"] == expected


def test_a_row_is_flat_strict_json_and_adds_up(small, tokens):
    row = rows(small.replace(grad_clip=0.5), tokens)[1]
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert not any(isinstance(value, dict) for value in row.values())
    losses = row["train/losses"]
    assert row["step"] == 8
    assert len(losses) == 4
    assert row["train/loss"] == pytest.approx(sum(losses) / 4, rel=1e-4)
    assert row["train/loss_last"] == pytest.approx(losses[-1], rel=1e-4)
    assert row["train/loss_max"] == pytest.approx(max(losses), rel=1e-4)
    assert 0 <= row["grad/clipped_share"] <= 1
    assert row["grad/norm_max"] >= row["grad/norm"] > 0
    assert "attn/max_logit/layer_1" in row


def test_gradient_norm_is_that_before_clipping(small, tokens):
    row = Trainer(small.replace(grad_clip=1e-3), tokens).train(4)
    assert row["grad/norm"] > 1e-2
    assert row["grad/clipped_share"] == 1.0
    assert row["grad/clipped_steps"] == 4


def test_a_non_finite_loss_is_caught_on_its_step_and_changes_no_weight(small, tokens):
    trainer = Trainer(small, tokens)
    trainer.train(4)
    honest = trainer.objective

    calls = []

    def poisoned(windows):
        calls.append(1)
        factor = math.nan if len(calls) == 3 else 1.0
        return tuple(factor * loss for loss in honest(windows))

    trainer.objective = poisoned
    trainer._advance(2)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    losses, *_ = trainer._advance(2)
    assert int(trainer.nonfinite_step) == 7  # 4 before, then the third of these
    assert math.isnan(losses[0])
    for p, kept in zip(trainer.model.parameters(), before, strict=True):
        assert torch.equal(p, kept)


def test_weights_stay_where_the_optimiser_cannot_skip(small, tokens, monkeypatch):
    """As on MPS: the same weights, and losses, as where it can."""

    def weights(diverging):
        trainer = Trainer(small.replace(sigma_reparam=True), tokens)
        trainer.train(4)
        if diverging:
            trainer.model.tokens.weight.data[0, 0] = torch.nan
        trainer.train(4)
        return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])

    skipping = weights(False), weights(True)
    monkeypatch.setattr(module, "SKIP_BY_THEMSELVES", ())
    restoring = weights(False), weights(True)
    assert torch.equal(skipping[0], restoring[0])
    assert torch.equal(skipping[1].nan_to_num(9), restoring[1].nan_to_num(9))
    assert skipping[1].isnan().sum() == 1


def test_a_row_with_non_finite_values_says_so():
    row = strict({"a": math.inf, "b": [1.0, math.nan], "c": 2.0, "step": 3})
    assert row == {"a": None, "b": [1.0, None], "c": 2.0, "step": 3, "nonfinite": "a,b"}
    json.dumps(row, allow_nan=False)


def test_every_weight_changes_in_one_step(small, tokens):
    trainer = Trainer(small.replace(qk_norm="rmsnorm"), tokens)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train(1)
    for (name, p), old in zip(trainer.model.named_parameters(), before, strict=True):
        assert p.is_contiguous(), name
        assert not torch.equal(p, old), name


def test_bf16_is_used_where_asked_for(small, tokens):
    full = rows(small, tokens)[-1]["val/loss"]
    half = rows(small.replace(precision="bf16"), tokens)[-1]["val/loss"]
    assert half != full
    assert half == pytest.approx(full, abs=0.05)


def test_a_device_that_is_not_here_is_refused(small, tokens):
    missing = "mps" if not torch.backends.mps.is_available() else "cuda"
    with pytest.raises(ConfigError, match=f"device = '{missing}'"):
        Trainer(small.replace(device=missing), tokens)


def test_threads_0_means_all_cores_and_is_recorded_as_such(small, tokens):
    assert Trainer(small.replace(threads=0), tokens).config.threads == os.cpu_count()


def test_too_little_validation_text_is_refused(small, tokens):
    with pytest.raises(ConfigError, match="val_windows = 100000"):
        Trainer(small.replace(val_windows=100_000), tokens)


def test_full_diagnostics_measure_more_and_change_nothing(small, tokens):
    cheap, full = rows(small, tokens), rows(small.replace(diagnostics="full"), tokens)
    for few, many in zip(cheap, full, strict=True):
        clocks = {name for name in few if name.startswith("time/")}
        assert {name: many[name] for name in few.keys() - clocks} == comparable(few)
    extra = full[-1].keys() - cheap[-1].keys()
    assert {"grad/rms/layer_1", "update/rms/embedding", "act/kurtosis_pooled"} <= extra
    # The gradient's norm over the whole model, put together from its parts' root mean squares.
    model = Trainer(small, tokens).model
    sizes = {"embedding": model.tokens.weight.numel() + model.positions.weight.numel()}
    sizes |= {
        f"layer_{i}": sum(p.numel() for p in b.parameters()) for i, b in enumerate(model.blocks)
    }
    sizes["head"] = small.width
    one = Trainer(small.replace(diagnostics="full"), tokens).train(1)
    squares = sum(one[f"grad/rms/{part}"] ** 2 * n for part, n in sizes.items())
    assert math.sqrt(squares) == pytest.approx(one["grad/norm"], rel=1e-4)
    assert small.replace(diagnostics="full").telling() == small.telling()
