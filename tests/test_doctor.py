"""What is broken about a machine is one line each; broken machines are real where they can be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import search_spaces
from tests.faults.suite import can_mount, mounted
from tune_study import doctor, machine
from tune_study.cli import app
from tune_study.config import ConfigError, TrialConfig

ROOT = Path(__file__).resolve().parent.parent


def kinds(result):
    """The lines of a run of `doctor`, those that are no fault left out."""
    return [line for line in result.output.splitlines() if not line.startswith("ok:")]


def test_a_sound_machine_has_no_faults(tmp_path):
    result = CliRunner().invoke(app, ["doctor", "smoke", "--runs", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert kinds(result) == ["0 faults."]
    assert "repeat bit for bit: a sweep here can be believed" in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variable", "value", "check", "says"),
    [
        ("TMPDIR", "/tmp/" + "deep/" * 20, machine.sockets, "deep: too long by"),
        ("TMPDIR", "/proc/1", machine.sockets, "/proc/1: cannot be written"),
        ("HOME", "/proc/1", machine.home, "a sweep does without"),
        ("https_proxy", "http://me:secret@127.0.0.1:9", machine.proxies, "127.0.0.1:9: does not"),
    ],
)
def test_a_broken_environment_is_one_line(monkeypatch, variable, value, check, says):
    for name in ("RAY_TMPDIR", "TMPDIR", *machine.PROXIES, *map(str.upper, machine.PROXIES)):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    if says.startswith("deep"):
        os.makedirs(value, exist_ok=True)
    with pytest.raises(ConfigError, match=says) as error:
        check()
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)


def test_a_folder_that_cannot_be_written():
    with pytest.raises(ConfigError, match="/proc/1: cannot be written"):
        machine.writable(Path("/proc/1/runs"), "another")


@pytest.mark.skipif(not can_mount(), reason="no small disk can be mounted here")
def test_a_small_disk(tmp_path):
    study = search_spaces.get("smoke")
    with (
        mounted(tmp_path, size=2**20),
        pytest.raises(ConfigError, match=f"{tmp_path}: 1 MB free, .* needed"),
    ):
        doctor._disk(study, tmp_path / "runs")


def test_too_little_memory_and_other_versions(monkeypatch):
    with pytest.raises(ConfigError, match="needed for 100000 cells at a time"):
        machine.memory(100_000)
    monkeypatch.setattr(machine, "version", lambda name: "0.1")
    with pytest.raises(ConfigError, match=r"ray is 0.1, not .*; torch is 0.1"):
        machine.packages()


def refused(*python):
    """What a Python answers, in its one line."""
    done = subprocess.run(python, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    return line


def test_a_python_without_the_packages_says_so():
    code = "import runpy; runpy.run_module('tune_study', run_name='__main__')"
    assert refused(sys.executable, "-S", "-c", code).startswith("typer: not installed in ")


def test_another_python_is_refused():
    found = [shutil.which(f"python3.{minor}") for minor in (9, 10, 14)]
    others = [path for path in found if path and _runs(path)]
    code = "import runpy; runpy.run_module('tune_study', run_name='__main__')"
    if not others:  # this one, under another's number
        others, code = [sys.executable], f"import sys; sys.version_info = (3, 10, 1)\n{code}"
    assert "not supported. Use 3.11, 3.12 or 3.13" in refused(others[0], "-c", code)


def _runs(python):
    return subprocess.run([python, "-c", ""], capture_output=True).returncode == 0


def test_a_device_that_computes_something_else_is_not_believed(monkeypatch):
    base = TrialConfig(device="cpu", precision="bf16")
    assert "agree with CPU float32 within" in doctor.believe(base)

    def wrong(qk_norm, **ways):
        off = 0.01 * (ways["precision"] == "bf16")
        return np.array([4.0, 3.0 + off])

    monkeypatch.setattr(doctor, "_losses", wrong)
    with pytest.raises(ConfigError, match=r"differ from CPU float32 by 0.01 nats"):
        doctor.believe(base)
