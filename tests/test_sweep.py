"""The whole path in real processes: sweep, go on, extend, refuse, survive being killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from analysis import load
from tune_study.data import open_tokens
from tune_study.store import StudyFolder
from tune_study.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent
GRID = ["--lr", "1e-2,1e-1", "--depth", "1", "--seed", "0,1"]
SHORT = ["--set", "steps=20", "--set", "warmup_steps=5"]


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture(scope="session")
def command(data):
    """Builds the command line of one verb."""

    def build(runs, *words):
        base = [sys.executable, "-m", "tune_study", *words]
        return [*base, "--runs", str(runs), *(["--data", str(data)] if words[0] == "sweep" else [])]

    return build


@pytest.fixture(scope="session")
def run(command):
    def call(runs, *words):
        return subprocess.run(
            command(runs, *words), cwd=ROOT, capture_output=True, text=True, timeout=300
        )

    return call


@pytest.fixture(scope="session")
def finished(run, tmp_path_factory):
    """A small study, swept undisturbed."""
    runs = tmp_path_factory.mktemp("runs")
    result = run(runs, "sweep", "smoke", *GRID, *SHORT, "--name", "tiny")
    assert result.returncode == 0, result.stdout + result.stderr
    return runs, result


def table(runs, name="tiny"):
    """Both tables without what clocks and attempts say."""
    results = load(runs / name)
    history = results.history
    clocks = [c for c in history if c.startswith("time/") or c == "resumed_step"]
    cells = results.cells.drop(columns=["seconds", "tokens_per_s", "started", "ended"])
    return cells, history.drop(columns=clocks)


def assert_same(left, right):
    for one, other in zip(left, right, strict=True):
        pd.testing.assert_frame_equal(one, other, check_exact=True)


def test_a_sweep_runs_every_cell_and_reports(finished):
    runs, result = finished
    cells, history = table(runs)
    assert len(cells) == 8 == 2 * 1 * 2 * 2
    assert set(cells["state"]) <= {"stable", "failed", "diverged"}
    assert history.groupby("cell")["step"].agg(list).tolist() == [[10, 20]] * 8
    assert "8 cells = 2 lr x 1 depth x 2 qk_norm x 2 seed; 0 done, 8 to run" in result.stdout
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
    result = run(moved, "sweep", "smoke", *more, *SHORT, "--name", "tiny")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "8 done, 4 to run" in result.stdout
    cells, _ = table(moved)
    kept, _ = table(runs)
    assert len(cells) == 12
    pd.testing.assert_frame_equal(
        cells[cells["seed"] < 2].reset_index(drop=True).drop(columns=["normalised_loss"]),
        kept.drop(columns=["normalised_loss"]),
    )
    fewer = run(moved, "sweep", "smoke", *GRID, *SHORT, "--name", "tiny")
    assert "all 8 cells are done" in fewer.stdout


def test_narrowing_without_a_name_gets_one_of_its_own(run, command, tmp_path):
    one = ["--lr", "1e-2", "--depth", "1", "--seed", "0", "--qk-norm", "off", *SHORT]
    result = run(tmp_path, "sweep", "smoke", *one)
    assert result.returncode == 0, result.stdout + result.stderr
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("smoke-")
    status = run(tmp_path, "status", folder.name)
    assert "1 of 1 cells" in status.stdout


def slow():
    """Words of a study with a checkpoint at every report, so that kills find something."""
    return [
        "sweep", "smoke", "--name", "tiny", "--lr", "1e-2,1e-1", "--depth", "2", "--seed", "0",
        "--set", "steps=240", "--set", "warmup_steps=20", "--checkpoint-every", "0", "--no-report",
    ]  # fmt: skip


@pytest.fixture(scope="session")
def undisturbed(run, tmp_path_factory):
    runs = tmp_path_factory.mktemp("undisturbed")
    result = run(runs, *slow())
    assert result.returncode == 0, result.stdout + result.stderr
    return table(runs)


def reports(runs):
    return sum(len(p.read_text().splitlines()) for p in runs.rglob("result.json"))


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_and_run_again_is_never_having_stopped(number, undisturbed, run, command, tmp_path):
    stale = tmp_path / "tiny" / "report" / "index.html"
    stale.parent.mkdir(parents=True)
    stale.write_text("complete")
    process = subprocess.Popen(
        command(tmp_path, *slow()),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for(lambda: reports(tmp_path) >= 12)
    os.kill(process.pid, number)
    output, _ = process.communicate(timeout=120)
    if number == signal.SIGKILL:
        assert process.returncode == -9
    else:
        assert process.returncode == 130, output
        assert "Go on with" in output
    assert not stale.exists()
    partial = load(tmp_path / "tiny")
    assert "missing" in set(partial.cells["state"])
    half_done = partial.cells[partial.cells["state"] == "missing"]
    assert half_done["reason"].str.contains("cut off|not started").all()

    again = run(tmp_path, *slow())
    assert again.returncode == 0, again.stdout + again.stderr
    assert_same(table(tmp_path), undisturbed)
    assert load(tmp_path / "tiny").history["resumed_step"].max() > 0


def test_damage_is_named_then_mended_by_running_again(undisturbed, run, tmp_path):
    assert run(tmp_path, *slow()).returncode == 0
    torn, deleted, *_ = sorted((tmp_path / "tiny" / "tune").rglob("result.json"))
    torn.write_bytes(torn.read_bytes()[:-40])
    deleted.unlink()
    results = load(tmp_path / "tiny")
    assert (results.cells["state"] == "missing").sum() == 2
    assert any("torn" in line for line in results.damage)
    report = run(tmp_path, "report", "tiny")
    assert report.returncode == 0
    assert "2 of 4 cells" in report.stdout
    assert run(tmp_path, *slow()).returncode == 0
    assert_same(table(tmp_path), undisturbed)


def test_a_second_sweep_of_the_same_study_says_who_holds_it(run, tmp_path):
    folder = StudyFolder(tmp_path, "tiny")
    with folder.lock():
        result = run(tmp_path, *slow())
        assert folder.running()
    assert result.returncode == 2
    assert f"process {os.getpid()}" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not folder.running()


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
