"""Which cells `verify` trains again, on what text, and what it calls the same."""

from __future__ import annotations

import hashlib
import re
from collections import Counter

import pytest
import torch

from tune_study import verify
from tune_study.config import ConfigError, Criterion, DataConfig, TrialConfig
from tune_study.data import prepare
from tune_study.data.manifest import Manifest
from tune_study.identity import identity
from tune_study.trainer import Trainer


def cell(lr=1e-2, depth=1, arm="off", state="stable", sensitive=False):
    config = TrialConfig(lr=lr, depth=depth, device="cpu")
    return verify.Recorded(config, "", arm, state, "cpu", [], sensitive)


def grid():
    """Two arms and depths, 4 learning rates: 2 stable, one that failed, one that diverged."""
    found = {}
    for arm in ("off", "rmsnorm"):
        for depth in (1, 2):
            for lr, state in ((1e-3, "stable"), (1e-2, "stable"), (0.1, "failed"), (1, "diverged")):
                sensitive = lr > 1e-2
                found[f"d{depth}-{arm}-{lr:g}"] = cell(lr, depth, arm, state, sensitive)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_cells_are_drawn_evenly_over_states_and_arms(seed):
    cells = grid()
    same = dict.fromkeys(cells, "")
    chosen = verify.choose(cells, same, 6, seed)
    assert Counter(cells[label].state for label in chosen) == dict.fromkeys(verify.TRAINED, 2)
    assert Counter(cells[label].arm for label in chosen) == {"off": 3, "rmsnorm": 3}
    assert chosen == verify.choose(cells, same, 6, seed)
    assert len({*verify.choose(cells, same, 99, seed)}) == len(cells)


@pytest.mark.parametrize("seed", range(5))
def test_on_another_machine_only_stable_cells_up_to_the_best_lr_are_drawn(seed):
    cells = grid()
    chosen = verify.choose(cells, dict.fromkeys(cells, "other processor"), 4, seed)
    assert {(cells[k].config.depth, cells[k].arm) for k in chosen} == {
        (depth, arm) for depth in (1, 2) for arm in ("off", "rmsnorm")
    }
    assert {cells[k].state for k in chosen} == {"stable"}
    assert not any(cells[k].sensitive for k in chosen)


def test_sensitive_is_what_lies_above_the_best_learning_rate_or_near_the_edge():
    """off fails at 0.1 in one seed and is best at 0.0178; on never fails and is best at 0.01."""
    losses = {0.00562: 2.0, 0.01: 1.5, 0.0178: 1.4, 0.1: 3.0, 0.178: 4.0}
    rows = [
        {
            "cell": f"{arm} {lr} {seed}",
            "arm": arm,
            "depth": 1,
            "lr": lr,
            "device": "",
            "loss": losses[lr] + (0.5 if arm == "on" and lr > 0.01 else 0),
            "state": "failed" if arm == "off" and lr + seed > 1.09 else "stable",
        }
        for arm in ("off", "on")
        for lr in losses
        for seed in (0, 1)
    ]
    rows.append(rows[0] | {"cell": "gone", "state": "missing"})
    reports = {row["cell"]: [{}] for row in rows}
    found = verify.recorded(rows, reports, {row["cell"]: (TrialConfig(), "x") for row in rows})
    assert "gone" not in found
    assert {label for label, known in found.items() if not known.sensitive} == {
        f"{arm} {lr} {seed}" for arm in ("off", "on") for lr in (0.00562, 0.01) for seed in (0, 1)
    }


def test_another_machine_is_named(monkeypatch):
    versions = {"torch": "2.13.0", "processor": "A"}
    known = cell()
    known = verify.Recorded(**known.__dict__ | {"device": "cpu (x86_64, AVX512)"})
    monkeypatch.setattr(verify, "versions", lambda: versions)
    monkeypatch.setattr(verify.devices, "describe", lambda name: "cpu (x86_64, AVX512)")
    assert verify.other_machine(known, versions) == ""
    for other, why in (
        ({"torch": "2.12.0", "processor": "A"}, "other PyTorch: 2.13.0 instead of 2.12.0"),
        ({"torch": "2.13.0", "processor": "B"}, "other processor: A instead of B"),
        ({"torch": "2.13.0"}, "other processor: A instead of unknown"),
    ):
        assert verify.other_machine(known, other) == why
    monkeypatch.setattr(verify.devices, "describe", lambda name: "cpu (x86_64, AVX2)")
    assert verify.other_machine(known, versions) == (
        "other processor: cpu (x86_64, AVX2) instead of cpu (x86_64, AVX512)"
    )
    gpu = verify.Recorded(**known.__dict__ | {"config": TrialConfig(device="cuda")})
    assert "need not give the same bits" in verify.other_machine(gpu, versions)


@pytest.fixture
def trained(small, tokens):
    """A cell as a bundle would have it."""
    trainer, rows = Trainer(small, tokens), []
    while not trainer.finished:
        row = trainer.train(small.report_every)
        rows.append(row | {"data/unigram_entropy": tokens.manifest.unigram_entropy})
    name = identity(small, tokens.manifest.checksum)
    return verify.Recorded(small, name, "off", "stable", "cpu", rows, False)


def changed(known, **last):
    rows = [*known.rows[:-1], known.rows[-1] | last]
    return verify.Recorded(**known.__dict__ | {"rows": rows})


def again(known, tokens, why="", tolerance=None):
    return verify.train("c", known, tokens, Criterion(), why, tolerance)


def test_the_same_bits_are_found_and_one_other_is_not_taken_for_them(trained, tokens):
    found = again(trained, tokens)
    assert (found.bits, found.agrees, found.told) == (
        True,
        True,
        "c (stable, 12 of 12 steps): same bits",
    )
    norm = trained.rows[-1]["grad/norm"]
    found = again(changed(trained, **{"grad/norm": norm * (1 + 1e-12)}), tokens)
    assert (found.bits, found.agrees, found.difference) == (False, False, 0.0)
    assert "same final loss, but not the same in all numbers" in found.told
    losses = [*trained.rows[-1]["train/losses"][:-1], 1.0]
    assert not again(changed(trained, **{"train/losses": losses}), tokens).bits
    assert not again(changed(trained, nonfinite="val/loss"), tokens).bits
    assert again(changed(trained, **{"time/train_s": 1e9}), tokens).bits


def test_elsewhere_the_final_loss_may_differ_by_the_tolerance(trained, tokens):
    loss = trained.rows[-1]["val/loss"]
    near, far = (changed(trained, **{"val/loss": loss + by}) for by in (0.005, 0.03))
    why = "other processor: A instead of B"
    close, apart = again(near, tokens, why), again(far, tokens, why)
    assert (close.agrees, apart.agrees) == (True, False)
    assert "differs by 0.005 nats" in close.told
    assert again(far, tokens, why, tolerance=0.05).agrees
    assert not again(near, tokens).agrees
    edge = verify.Recorded(**far.__dict__ | {"sensitive": True})
    assert "above the best learning rate" in again(edge, tokens, why).told
    text = verify.verdict([close, again(trained, tokens, why)], {why})
    expected = r"2 of 2 cells: within 0\.00[56] nats, 1 of them with the same bits "
    assert re.fullmatch(expected + rf"\({why}\)\.", text)
    assert verify.verdict([close, apart], {why}) == "1 of 2 cells differs."


def test_a_run_that_ends_otherwise_never_agrees(trained, tokens):
    diverged = changed(trained, nonfinite_step=11, **{"val/loss": None})
    found = again(diverged, tokens, "other processor", tolerance=9)
    assert not found.agrees
    assert "ends otherwise" in found.told


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is here")
def test_a_cell_of_a_device_that_is_not_here_is_trained_on_the_cpu(trained, tokens):
    gpu = verify.Recorded(
        **trained.__dict__ | {"config": trained.config.replace(device="cuda"), "device": "cuda (H)"}
    )
    why = verify.other_machine(gpu, {})
    assert "cuda" in why
    assert again(changed(gpu, **{"grad/norm": 0.0}), tokens, why).agrees


def test_code_that_gives_another_identity_is_named(trained, tokens):
    other = verify.Recorded(**changed(trained, lr_now=0.0).__dict__ | {"identity": "0" * 16})
    assert "another identity" in again(other, tokens, "other processor").told


# -------------------------------------------------------------------------- text


@pytest.fixture
def told(tmp_path):
    """Two small texts, the settings that name them, and the manifest of their tokens."""
    paths = {}
    for split in ("train", "validation"):
        paths[split] = str(tmp_path / f"{split}.txt")
        with open(paths[split], "w") as file:
            for number in range(40):
                file.write(f"{split} {number} of a cat that sat\n<|endoftext|>\n")
    named = DataConfig(corpus="text", tokenizer="bytes", **paths)
    folder = prepare(named, tmp_path / "elsewhere", say=lambda line: None)
    settings = named.replace(train="train.txt", validation="validation.txt")
    return paths, settings, Manifest.read(folder).model_dump(mode="json")


def find(settings, recorded, data, texts):
    return verify.find_tokens(settings, recorded, data, texts, lambda line: None)


def test_text_is_taken_where_it_is_prepared_or_given(told, tmp_path):
    paths, settings, recorded = told
    with pytest.raises(verify.TextMissingError, match=r"train.txt \(SHA-256 .*--train FILE"):
        find(settings, recorded, tmp_path / "data", {})
    given = find(settings, recorded, tmp_path / "data", paths)
    assert given.manifest.checksum == recorded["checksum"]
    assert find(settings, recorded, tmp_path / "data", {}).folder == given.folder


def test_another_text_is_named(told, tmp_path):
    paths, settings, recorded = told
    wrong = paths | {"train": paths["validation"]}
    with pytest.raises(ConfigError, match=r"--train .*has SHA-256 .*, not ") as error:
        find(settings, recorded, tmp_path / "data", wrong)
    with open(paths["train"], "rb") as file:
        assert hashlib.sha256(file.read()).hexdigest()[:12] in str(error.value)


def test_text_of_the_network_is_not_fetched(told, tmp_path):
    _, _, recorded = told
    settings = DataConfig(corpus="tinystories", tokenizer="bytes")
    recorded |= {"sources": [], "settings": {"corpus": "tinystories"}, "corpus": "TinyStories"}
    with pytest.raises(verify.TextMissingError, match=r"TinyStories\. Where there is a network"):
        find(settings, recorded, tmp_path / "data", {})


def test_built_in_text_that_comes_out_otherwise_is_named(told, tmp_path):
    _, _, recorded = told
    settings = DataConfig(tokenizer="bytes", train_documents=20, validation_documents=10)
    recorded |= {"settings": {"corpus": "synthetic"}}
    with pytest.raises(ConfigError, match="use the commit that the bundle names"):
        find(settings, recorded, tmp_path / "data", {})
