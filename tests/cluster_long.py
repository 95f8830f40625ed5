"""The long form of test_cluster.py: `make test-cluster`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.study import ROOT, Tables, wait_for
from tests.two_nodes import lose, two_nodes

SMOKE = ["smoke", "--no-report", "--checkpoint-every", "0"]
NOTHING = {"lost rows": 0, "doubled rows": 0, "differing values": 0}


def sweep(runs: Path, data: Path) -> None:
    """The study on this machine alone, or what is missing of it."""
    command = [sys.executable, "-m", "tune_study", "sweep", *SMOKE, "--runs", str(runs)]
    subprocess.run([*command, "--data", str(data)], cwd=ROOT, check=True, timeout=600)


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """The study's tables as one machine makes them."""
    runs = tmp_path_factory.mktemp("alone")
    sweep(runs, data)
    return Tables.of(runs / "smoke")


@pytest.mark.parametrize("which", ["second", "head"])
def test_a_node_is_killed_in_the_middle(which, alone, data, tmp_path):
    study = tmp_path / "runs" / "smoke"
    with two_nodes(hidden=tmp_path.parent.parent) as nodes:
        running = nodes.start(*SMOKE, "--runs", str(study.parent), "--data", str(data))
        wait_for(lambda: ended(study) >= 10 or running.poll() is not None)
        lose(getattr(nodes, which))
        output, errors = running.communicate(timeout=600)
    if which == "head":
        assert running.returncode == 1, output + errors
        assert "does not answer any more" in errors
        sweep(study.parent, data)  # without a cluster
    else:
        assert running.returncode == 0, output + errors
    assert Tables.of(study).against(alone) == NOTHING


def ended(study: Path) -> int:
    """Cells with all their reports."""
    return sum(path.read_bytes().count(b"\n") >= 6 for path in study.glob("tune/*/*/result.json"))
