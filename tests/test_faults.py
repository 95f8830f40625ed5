"""The short form of `make test-faults`: one fault of each important kind, on one study."""

from __future__ import annotations

import random
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.faults.beside import another_ray
from tests.faults.study import ROOT, Place
from tests.faults.suite import Scenario, can_mount, mounted, place_for, play, undisturbed


def test_interrupted_filled_killed_damaged_and_moved_is_never_disturbed():
    scenario = Scenario(
        number=0,
        rng=random.Random(0),
        endings=["driver SIGKILL", "Ctrl-C", "disk full" if can_mount() else "all SIGKILL"],
        disturbances=["SIGSTOP, SIGCONT", "worker SIGKILL", "second sweep"],
        damages=[["checkpoint altered"], ["rows cut"], ["runs folder moved"]],
    )
    with tempfile.TemporaryDirectory() as name, another_ray() as untouched:
        place = Place(Path(name) / "runs", Path(name) / "data")
        tables = undisturbed(place)
        with place_for(scenario, place.data) as here:
            outcome = play(scenario, here, tables)
        assert outcome.passed, f"{outcome.trouble}{outcome.differences}"
        assert len(outcome.faults) == 9
        assert untouched()


@pytest.mark.skipif(not can_mount(), reason="a small disk cannot be mounted here")
def test_too_small_a_disk_is_refused_before_the_start(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    with mounted(disk, size=2**24):
        command = Place(disk / "runs", tmp_path / "data").command()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{disk}/runs/tiny: 16 MB free, ")
    assert "needed (" in line
