"""An intervention is one file; the tutorial's is tried as a reader would try it."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import interventions
from analysis import load
from tune_study.config import ConfigError, TrialConfig
from tune_study.identity import identity
from tune_study.model import GPT
from tune_study.trainer import Trainer

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("analysis", "interventions", "search_spaces", "tune_study", "trainable.py")


def test_embed_norm_is_its_formula_and_shifts_no_other_weight():
    plain = GPT(TrialConfig(), 50, seed=0)
    model = GPT(TrialConfig(intervention="embed_norm"), 50, seed=0)
    assert model.parameter_count() == plain.parameter_count() + 32
    weights = dict(model.named_parameters())
    assert all(torch.equal(weights[name], p) for name, p in plain.named_parameters())
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        model.embed_norm.gain.fill_(2.0)
        x_BTC = plain.tokens(ids) + plain.positions.weight[:3]
        torch.testing.assert_close(model.embed(ids), 2 * F.layer_norm(x_BTC, (32,), eps=1e-5))
    model.loss(torch.tensor([[1, 2, 3, 4]])).backward()
    assert model.embed_norm.gain.grad.abs().max() > 0


def test_what_it_adds_is_trained_and_saved(small, tokens):
    trainer = Trainer(small.replace(intervention="embed_norm"), tokens)
    assert trainer.config.arm == "embed_norm"
    trainer.train(4)
    assert not torch.equal(trainer.model.embed_norm.gain, torch.ones(16))
    again, saved = Trainer(trainer.config, tokens), io.BytesIO()
    torch.save(trainer.state_dict(), saved)
    saved.seek(0)
    again.load_state_dict(torch.load(saved, weights_only=True))
    assert again.train(4)["val/loss"] == trainer.train(4)["val/loss"]


def test_a_name_without_a_file_is_refused():
    with pytest.raises(ConfigError, match=r"intervention = 'nomr': .*Give one of: .*embed_norm"):
        TrialConfig(intervention="nomr")


def test_the_text_of_the_file_is_part_of_the_identity(monkeypatch):
    config = TrialConfig(intervention="embed_norm", device="cpu")
    before = identity(config, "abc")
    assert identity(config, "abc") == before != identity(TrialConfig(device="cpu"), "abc")
    monkeypatch.setattr(interventions, "source", lambda name: "of a changed file")
    assert identity(config, "abc") != before


def test_the_tutorial_s_two_files_are_all_it_takes(tmp_path, data):
    text = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    files = dict(
        re.findall(
            r"`((?:interventions|search_spaces)/\w+\.py)`[^`]*```python\n(.*?)```", text, re.S
        )
    )
    assert list(files) == ["interventions/centred_qk.py", "search_spaces/centred.py"]
    assert all(len(content.splitlines()) <= 40 for content in files.values())
    for name in PACKAGES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    command = [sys.executable, "-m", "tune_study", "sweep", "centred", "--name", "centred-small"]
    command += ["--lr", "1e-2", "--seed", "0", "--set", "steps=20", "--set", "warmup_steps=5"]
    command += ["--set", "data.vocab_size=300", "--set", "data.train_documents=2000"]
    command += ["--set", "data.validation_documents=300", "--no-report", "--data", str(data)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    monkey = pytest.MonkeyPatch()
    monkey.setattr(interventions, "__path__", [str(tmp_path / "interventions")])
    cells = load(tmp_path / "runs" / "centred-small").cells
    monkey.undo()
    assert sorted(cells["arm"]) == ["centred_qk", "off", "rmsnorm"]
    assert cells["state"].eq("stable").all()
    assert cells["loss"].nunique() == 3
