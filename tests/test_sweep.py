"""The whole path in real processes: sweep, go on, extend, refuse. What kills it: test_faults."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pandas as pd
import pytest
import torch

from analysis import load
from tests.conftest import GRID, ROOT, SHORT
from tune_study.data import open_tokens
from tune_study.store import StudyFolder
from tune_study.trainer import Trainer


def table(runs, name="tiny"):
    """Both tables without what clocks and attempts say."""
    results = load(runs / name)
    history = results.history
    clocks = [c for c in history if c.startswith("time/") or c == "resumed_step"]
    cells = results.cells.drop(columns=["seconds", "tokens_per_s", "started", "ended"])
    return cells, history.drop(columns=clocks)


def test_a_sweep_runs_every_cell_and_reports(finished):
    runs, result = finished
    cells, history = table(runs)
    assert len(cells) == 8 == 2 * 1 * 2 * 2
    assert set(cells["state"]) <= {"stable", "failed", "diverged"}
    assert history.groupby("cell")["step"].agg(list).tolist() == [[10, 20]] * 8
    assert "8 cells = 2 lr x 1 depth x 2 qk_norm x 2 seed; 0 done, 8 to run" in result.stdout
    assert "160 steps, 81,920 tokens, " in result.stdout
    report = runs / "tiny" / "report"
    for name in ("index.html", "cells.parquet", "history.parquet", "summary.json"):
        assert (report / name).stat().st_size > 0
    summary = json.loads((report / "summary.json").read_text(), parse_constant=pytest.fail)
    assert summary["study"] == "tiny"
    assert summary["cells"]["expected"] == summary["cells"]["found"] == 8
    assert {(arm["depth"], arm["qk_norm"]) for arm in summary["arms"]} == {
        (1, "off"),
        (1, "rmsnorm"),
    }


def test_every_json_line_is_strict(finished):
    runs, _ = finished
    lines = [
        line
        for path in (runs / "tiny" / "tune").rglob("result.json")
        for line in path.read_text().splitlines()
    ]
    assert len(lines) == 16
    for line in lines:
        row = json.loads(line, parse_constant=pytest.fail)
        assert "config" not in row
        assert row["device"].startswith("cpu")


def test_no_cell_ends_below_the_entropy_of_the_corpus(finished):
    """A loss below the floor would mean that validation text leaks into training."""
    runs, _ = finished
    cells, _ = table(runs)
    assert cells["loss_floor"].gt(0).all()
    assert cells["loss"].gt(cells["loss_floor"]).all()
    summary = json.loads((runs / "tiny" / "report" / "summary.json").read_text())
    assert summary["leak_alarm"] is False


def test_prepare_makes_tokens_once(run, tmp_path):
    words = ["prepare", "smoke", "--data", str(tmp_path / "tokens")]
    command = [sys.executable, "-m", "tune_study", *words]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert first.returncode == 0, first.stderr
    assert "loss floor" in first.stdout
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert "unchanged" in again.stdout


def test_finished_cells_keep_no_checkpoint(finished):
    runs, _ = finished
    assert list((runs / "tiny" / "tune").rglob("trainer.pt")) == []


def test_a_cell_alone_is_the_cell_in_the_sweep(finished, data):
    runs, _ = finished
    study = StudyFolder(runs, "tiny").study()
    tokens = open_tokens(study.base.data, data)
    _, history = table(runs)
    for config in list(study.cells())[::3]:
        trainer = Trainer(config, tokens)
        alone = [trainer.train(config.report_every) for _ in range(2)]
        swept = history[history["cell"] == config.label]
        for metric in ("val/loss", "train/loss", "grad/norm", "attn/max_logit"):
            assert swept[metric].tolist() == [row[metric] for row in alone]


def test_run_again_does_nothing_and_says_so(finished, run):
    runs, _ = finished
    before = sorted((runs / "tiny" / "tune").iterdir())
    result = run(runs, "sweep", "smoke", *GRID, *SHORT, "--name", "tiny")
    assert result.returncode == 0
    assert "all 8 cells are done" in result.stdout
    assert sorted((runs / "tiny" / "tune").iterdir()) == before


def test_a_changed_study_under_the_same_name_is_refused(finished, run):
    runs, _ = finished
    changed = ["--set", "steps=20", "--set", "warmup_steps=4"]
    result = run(runs, "sweep", "smoke", *GRID, *changed, "--name", "tiny")
    assert result.returncode == 2
    (line,) = result.stderr.strip().splitlines()
    assert "base.warmup_steps was 5, is 4" in line
    assert "--name" in line


def test_more_seeds_run_exactly_the_missing_cells(finished, run, tmp_path):
    runs, _ = finished
    more = ["--lr", "1e-2,1e-1", "--depth", "1", "--seed", "0,1,2"]
    moved = tmp_path / "moved"  # and at another place: nothing may point back
    subprocess.run(["cp", "-r", str(runs), str(moved)], check=True)
    result = run(moved, "sweep", "smoke", *more, *SHORT, "--name", "tiny", "--no-report")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "8 done, 4 to run" in result.stdout
    assert not (moved / "tiny" / "report").exists()  # that of eight cells
    cells, _ = table(moved)
    kept, _ = table(runs)
    assert len(cells) == 12
    pd.testing.assert_frame_equal(
        cells[cells["seed"] < 2].reset_index(drop=True).drop(columns=["normalised_loss"]),
        kept.drop(columns=["normalised_loss"]),
    )
    fewer = run(moved, "sweep", "smoke", *GRID, *SHORT, "--name", "tiny")
    assert "all 8 cells are done" in fewer.stdout


def test_narrowing_without_a_name_gets_one_of_its_own_and_keeps_weights(run, tmp_path):
    one = ["--lr", "1e-2", "--depth", "1", "--seed", "0", "--qk-norm", "off", *SHORT]
    stopped = run(tmp_path, "sweep", "smoke", *one, "--hours", "1e-6")
    assert stopped.returncode == 3, stopped.stdout + stopped.stderr
    assert "The 1e-06 hours are over; everything reported is kept. Go on with:" in stopped.stdout
    result = run(tmp_path, "sweep", "smoke", *one, "--keep-weights", "d1-*")
    assert result.returncode == 0, result.stdout + result.stderr
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("smoke-")
    status = run(tmp_path, "status", folder.name)
    assert "1 of 1 cells" in status.stdout
    weights = torch.load(folder / "weights" / "d1-off-lr1.000e-02-s0.pt", weights_only=True)
    assert sum(value.numel() for value in weights.values()) == load(folder).cells["params"][0]
    assert list(folder.rglob("trainer.pt")) == []


def test_damage_is_named_and_the_report_says_what_is_missing(finished, run, tmp_path):
    runs = tmp_path / "copy"
    shutil.copytree(finished[0], runs)
    torn, deleted, *_ = sorted((runs / "tiny" / "tune").rglob("result.json"))
    torn.write_bytes(torn.read_bytes()[:-40])
    deleted.unlink()
    report = run(runs, "report", "tiny")
    assert report.returncode == 0, report.stderr
    assert "6 of 8 cells" in report.stdout
    assert "line 2 of result.json is torn" in report.stdout
    assert (load(runs / "tiny").cells["state"] == "missing").sum() == 2


UNSHARED = """
import sys
from pathlib import Path
from tune_study import sweep
from tune_study.concurrency import Policy
from tune_study.data import open_tokens
from tune_study.board import Board
from tune_study.progress import Progress
from tune_study.store import StudyFolder

old, new, data = (Path(word) for word in sys.argv[1:])
study = StudyFolder(old, "tiny").study()
study = study.replace(axes=dict(study.axes) | {"lr": (0.01,)})
tokens = open_tokens(study.base.data, data)
folder = StudyFolder(new, "tiny")
plan = sweep.plan(study, folder, tokens.manifest.checksum)
folder.write(study, tokens.manifest.model_dump(mode="json"))
who = Policy(at_once=2, cpus=1, gpus=0.5, why="a GPU for two, as Ray counts")
sweep.run(plan, folder, tokens, Progress(Board(study), 1), reuse_actors=False, who=who)
"""


def test_a_process_and_half_a_gpu_for_each_cell_give_the_same_numbers(finished, data, tmp_path):
    command = [sys.executable, "-c", UNSHARED, str(finished[0]), str(tmp_path), str(data)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    shared, unshared = table(finished[0])[1], table(tmp_path)[1]
    assert len(unshared) == 8
    shared = shared[shared["lr"] == 0.01].reset_index(drop=True)
    pd.testing.assert_frame_equal(unshared, shared, check_exact=True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sweep", "nosuch"], "study = 'nosuch'"),
        (["sweep", "smoke", "--lr", "-1"], "axes.lr = '-1'"),
        (["sweep", "smoke", "--lr", "1e-2,,1"], "--lr '1e-2,,1'"),
        (["sweep", "smoke", "--set", "steps"], "--set steps"),
        (["sweep", "smoke", "--set", "stepz=3"], "stepz is not a setting"),
        (["sweep", "smoke", "--set", "lr=3"], "Give --lr 3"),
        (["sweep", "smoke", "--set", "device=tpu"], "device = 'tpu'"),
        (["sweep", "smoke", "--hours", "0"], "--hours 0"),
        (["report", "nosuch"], "holds no study"),
        (["status", "nosuch"], "holds no study"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, tmp_path, words, expected):
    result = run(tmp_path, *words)
    assert result.returncode == 2
    (line,) = result.stderr.strip().splitlines()
    assert expected in line
    assert list(tmp_path.iterdir()) == []


def test_a_search_runs_in_rounds(run, tmp_path):
    smoke_data = ["vocab_size=300", "train_documents=2000", "validation_documents=300"]
    changes = [word for setting in smoke_data for word in ("--set", f"data.{setting}")]
    changes += [*SHORT, "--set", "report_every=10", "--set", "val_windows=32"]
    narrow = ["--depth", "1", "--seed", "0", "--cells", "3", "--name", "found", "--no-report"]
    result = run(tmp_path, "sweep", "edge", *narrow, *changes)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "a search among at most 3 of 50 cells" in result.stdout
    assert "round 1: 2 cells run" in result.stdout
    assert "round 2: 3 cells run" in result.stdout
    cells = load(tmp_path / "found").cells
    assert cells["state"].value_counts()["untried"] == 47
    refused = run(tmp_path, "sweep", "smoke", "--cells", "3")
    assert refused.returncode == 2
    assert "runs all of its cells" in refused.stderr


def test_an_error_of_our_own_is_not_hidden_by_ray(data, tmp_path):
    broken = """
import sys
from tune_study import cli, sweep
def raises(*args):
    raise RuntimeError("a mistake of ours")
sweep._experiment = raises
sys.argv = ["tune_study", *sys.argv[1:]]
cli.main()
"""
    command = [sys.executable, "-c", broken, "sweep", "smoke", *GRID, *SHORT, "--name", "broken"]
    command += ["--runs", str(tmp_path), "--data", str(data)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "RuntimeError: a mistake of ours" in done.stderr
    assert "Go on with: python -m tune_study sweep smoke" in done.stderr
    assert "GCS" not in done.stderr
