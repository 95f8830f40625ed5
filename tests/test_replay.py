"""A cell run again on CPU: from the start, from a checkpoint, with another outcome."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest

from analysis import load
from tests.left_study import leave
from tune_study import checkpoints
from tune_study.callbacks import Checkpoints
from tune_study.config import ConfigError, Criterion
from tune_study.replay import replay
from tune_study.store import StudyFolder
from tune_study.trainer import Trainer

RULES = Criterion(name="low", loss_above_init=False, max_logit=0.01, plateau=None, patience=1)
"""Every run passes a logit of 0.01, so that a replay diverges at its first report."""


@pytest.fixture
def swept(small, tokens, tmp_path):
    """Leaves a study of one cell, trained in bf16 on what it takes for an accelerator."""
    config = small.replace(precision="bf16", lr=1e-2, depth=1)

    def build(criterion, keep_at=None, history=None):
        return leave(tmp_path, config, tokens, criterion, keep_at, history)

    return build


def quiet(line):
    pass


def test_a_cell_that_diverges_there_too(swept, tokens):
    folder, label = swept(RULES)
    outcome = replay(folder, label, tokens, say=quiet)
    assert (outcome.state, outcome.cpu_state, outcome.cpu_step) == ("diverged", "diverged", 4)
    assert outcome.from_step == 0
    assert outcome.agrees
    assert "also diverged" in outcome.sentence
    assert load(folder.path).cells["reason"][0].endswith(outcome.sentence)
    assert load(folder.path).damage == ()


def test_a_fault_of_the_backend_is_named(swept, tokens):
    # not finite at step 6 on the accelerator, stopped there; nothing of the kind on CPU
    broken = [{}, {"nonfinite_step": 6, "val/loss": None}]
    folder, label = swept(Criterion(), keep_at=4, history=broken)
    outcome = replay(folder, label, tokens, say=quiet)
    assert (outcome.state, outcome.cpu_state, outcome.from_step) == ("diverged", "stable", 4)
    assert outcome.precision == "bf16"
    assert not outcome.agrees
    results = load(folder.path)
    assert results.cells["state"][0] == "diverged"
    assert "suspect the backend" in results.cells["reason"][0]
    assert "suspect the backend" in results.damage[0]


def test_from_a_checkpoint_as_from_the_start_where_the_arithmetic_is_the_same(swept, small, tokens):
    folder, label = swept(Criterion(), keep_at=8)
    from_checkpoint = replay(folder, label, tokens, say=quiet)
    shutil.rmtree(next(folder.experiments.rglob("checkpoint_*")))
    from_start = replay(folder, label, tokens, say=quiet)
    assert (from_checkpoint.from_step, from_start.from_step) == (8, 0)
    # bf16 steps up to the checkpoint leave a difference, a small one
    assert from_checkpoint.cpu_loss == pytest.approx(from_start.cpu_loss, abs=0.05)
    straight = Trainer(small.replace(lr=1e-2, depth=1), tokens)
    straight.train(12)
    assert from_start.cpu_loss == straight.evaluate()


def test_a_damaged_checkpoint_is_passed_over(swept, tokens):
    folder, label = swept(Criterion(), keep_at=8)
    next(folder.experiments.rglob(checkpoints.FILE)).write_bytes(b"torn")
    assert replay(folder, label, tokens, say=quiet).from_step == 0


def test_what_cannot_be_replayed_is_one_line(swept, tokens):
    folder, label = swept(Criterion(), history=[{}])
    with pytest.raises(ConfigError, match="has not ended yet"):
        replay(folder, label, tokens, say=quiet)
    with pytest.raises(ConfigError, match=r"'d9': not in study left.*d1-off-lr1.000e-02-s0"):
        replay(folder, "d9", tokens, say=quiet)


@pytest.mark.parametrize(
    ("device", "row", "left"),
    [
        ("mps", {"step": 8, "verdict/state": "diverged"}, ["own/checkpoint_000001"]),
        ("cpu", {"step": 8, "verdict/state": "diverged"}, []),
        ("mps", {"step": 12}, []),
        # cut off: it goes on from what it has
        ("mps", {"step": 8}, ["earlier/checkpoint_000000", "own/checkpoint_000000"]),
    ],
)
def test_of_a_cell_that_diverged_on_an_accelerator_one_checkpoint_stays(
    tmp_path, device, row, left
):
    numbers = (0, 1) if len(left) < 2 else (0,)
    earlier = tmp_path / "earlier" / "checkpoint_000000"
    own = [tmp_path / "own" / f"checkpoint_00000{i}" for i in numbers]
    for folder in (earlier, *own):
        folder.mkdir(parents=True)
    cell = {"label": "c", "steps": 12, "device": device}
    plan = SimpleNamespace(
        keep=frozenset(), may_run=[SimpleNamespace(label="c", checkpoints=(earlier,), others=())]
    )
    trial = SimpleNamespace(trial_id="t", config={"cell": cell}, path=str(tmp_path / "own"))
    callback = Checkpoints(StudyFolder(tmp_path, "left"), plan, 2)
    callback.on_trial_result(0, [], trial, row)
    callback.on_trial_complete(0, [], trial)
    there = sorted(f"{p.parent.name}/{p.name}" for p in tmp_path.rglob("checkpoint_*"))
    assert there == left
