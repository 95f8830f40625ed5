"""Criteria, calibration and replay from the command line, on a study left by hand."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tests.conftest import SMALL_DATA
from tests.left_study import leave
from tune_study.cli import app
from tune_study.cli.asked import changed
from tune_study.config import CRITERIA, ConfigError, Criterion
from tune_study.data import prepare


@pytest.fixture
def call(tmp_path, small, tokens):
    """Runs one verb on the study `left`."""
    leave(tmp_path, small.replace(depth=1), tokens, Criterion())

    def run(*words, **more):
        options = [f"--{name}={value}" for name, value in more.items()]
        words = [*words, f"--runs={tmp_path}", *options]
        return CliRunner().invoke(app, words, catch_exceptions=False, standalone_mode=False)

    run.runs = tmp_path
    return run


def test_a_report_under_another_criterion_leaves_the_study_s_own_alone(call):
    result = call("report", "left", criterion="off")
    assert "1 of 1 cells: 1 stable" in result.output
    report = call.runs / "left" / "report"
    assert (report / "off" / "index.html").is_file()
    assert not (report / "index.html").exists()


def test_an_unknown_criterion_is_one_line(call):
    with pytest.raises(ConfigError, match=r"criterion = 'strict': unknown. Give one of: off, safe"):
        call("report", "left", criterion="strict")


def test_calibrate_prints_and_writes(call):
    result = call("calibrate", "left")
    assert "left: 1 cells, all run to their end." in result.output
    content = json.loads((call.runs / "left" / "calibration" / "calibration.json").read_text())
    assert [row["criterion"] for row in content["criteria"]] == list(CRITERIA)


def test_replay_says_whether_it_diverges_there_too(call, small, tmp_path):
    data = tmp_path / "tokens"
    prepare(SMALL_DATA, data, say=lambda line: None)
    label = small.replace(depth=1).label
    result = call("replay", "left", label, data=data)
    assert f"{label}: stable on mps (arm64); replayed on CPU in float32" in result.output
    assert "also stable" in result.output


def test_sweeps_under_another_criterion_have_another_name():
    off = changed("pilot", {}, None, None, "off")
    assert off.criterion == CRITERIA["off"]
    assert off.name.startswith("pilot-")
    assert off.name != changed("pilot", {}, None, None, "eager").name
    assert changed("pilot", {}, None, None, "safe").name == "pilot"
