"""What a sweep takes, by hand; and the command that says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from typer.testing import CliRunner

import search_spaces
from tune_study import cost, threads
from tune_study.cli import app
from tune_study.concurrency import cores, policy
from tune_study.config import ConfigError, TrialConfig
from tune_study.cost import Speed
from tune_study.model import GPT


def test_shapes_count_cells_steps_and_parameters():
    study = search_spaces.get("smoke")
    todo = [(cell, 0) for cell in study.cells()]
    todo[0] = (todo[0][0], 25)  # depth 1, off: it has reported twice
    shapes = cost.shapes(todo, vocab_size=300)
    assert [(s.config.depth, s.config.qk_norm, s.cells, s.steps, s.reports) for s in shapes] == [
        (1, "off", 6, 335, 34),
        (1, "rmsnorm", 6, 360, 36),
        (2, "off", 6, 360, 36),
        (2, "rmsnorm", 6, 360, 36),
    ]
    for shape in shapes:
        model = GPT(shape.config, 300, 0)
        assert shape.embedding == (300 + 32) * 32
        assert shape.embedding + shape.other == model.parameter_count()
        depth = shape.config.depth
        assert shape.flops == 6 * (depth * 12 * 32**2 + 300 * 32) + 12 * depth * 32 * 32


def test_an_untied_head_is_an_embedding_and_counts_once_in_flops():
    tied = cost.shapes([(TrialConfig(), 0)], 300)[0]
    untied = cost.shapes([(TrialConfig(tied_head=False), 0)], 300)[0]
    assert untied.embedding == tied.embedding + 300 * 32
    assert (untied.other, untied.flops) == (tied.other, tied.flops)


def test_seconds_by_hand():
    config = TrialConfig(device="cpu", threads=1, steps=100, report_every=50, warmup_steps=10)
    shapes = cost.shapes([(config, 0)] * 4, 300)
    who = policy(config, asked=2)
    speeds = {shapes[0].config: Speed(start=0.5, step=0.01, report=0.1)}
    alone = 4 * (0.5 + cost.CELL_S + 100 * 0.01 + 2 * 0.1)
    assert cost.seconds(shapes, speeds, who) == pytest.approx(alone / 2 + cost.START_S)
    sharing = replace(who, speed=0.7)  # each has that much of its speed alone
    assert cost.seconds(shapes, speeds, sharing) == pytest.approx(alone / 2 / 0.7 + cost.START_S)
    crowded = policy(config, asked=9)  # no cell is faster than alone
    assert cost.seconds(shapes, speeds, crowded) == pytest.approx(alone / 4 + cost.START_S)
    assert cost.seconds([], {}, who) == 0


def test_plan_prints_and_writes_nothing(tmp_path, monkeypatch):
    asked, measure = [], threads.measure
    monkeypatch.setattr(threads, "cores", lambda: 2)
    monkeypatch.setattr(
        threads, "measure", lambda *words: asked.append(words) or measure(*words, seconds=0.05)
    )
    words = ["plan", "smoke", "--runs", str(tmp_path / "runs"), "--data", str(tmp_path / "data")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == ("smoke: 24 cells = 3 lr x 2 depth x 2 qk_norm x 2 seed; 0 done, 24 to run.")
    assert lines[1].startswith("depth 1, width 32, off: 6 cells of 23,008 parameters (10,624 in")
    assert lines[5].startswith("1,440 steps, 737,280 tokens, ")
    assert "at a time" in lines[5]
    assert "tokens are not prepared yet: 300 ids" in lines[6]
    assert lines[7].startswith("Tokens/s of the largest cell: 2 cells x 1 thread: ")
    assert "; 1 cell x 2 threads: " in lines[7]
    ((config, vocab_size, pairs),) = asked
    assert (config.depth, vocab_size, pairs) == (2, 300, [(2, 1), (1, 2)])
    overridden = CliRunner().invoke(app, [*words, "--max-concurrent", "1"])
    assert "1 at a time" in overridden.stdout.splitlines()[5]
    assert len(asked) == 1  # as it is not for this to decide
    assert list(tmp_path.iterdir()) == []


def test_how_many_at_a_time(monkeypatch):
    cell = TrialConfig(device="cpu", threads=1)
    assert policy(cell).at_once == cores()
    assert policy(cell.replace(threads=1000)).at_once == 1
    assert policy(cell.replace(device="mps")).at_once == 1
    asked = policy(cell.replace(threads=2), asked=5)
    assert (asked.at_once, asked.cpus, asked.gpus) == (5, 2, 0)
    monkeypatch.setattr("tune_study.concurrency.visible_gpus", lambda: 4)
    gpus = policy(cell.replace(device="cuda"))
    assert (gpus.at_once, gpus.cpus, gpus.gpus) == (4, 1, 1)
    shared = policy(cell.replace(device="cuda"), asked=8)
    assert (shared.at_once, shared.gpus) == (8, 0.5)
    uneven = policy(cell.replace(device="cuda"), asked=5)  # two of them on one GPU
    assert (uneven.at_once, uneven.gpus, uneven.devices) == (5, 0.5, 3)
    assert (gpus.devices, shared.devices, asked.devices) == (4, 4, 0)
    assert policy(cell.replace(device="cuda"), asked=12).devices == 4  # thirds
    with pytest.raises(ConfigError, match="--max-concurrent 0"):
        policy(cell, asked=0)
