"""The long form of test_cluster.py and test_remote.py: `make test-cluster`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow import fs

from tests.faults.study import ROOT, Tables, wait_for
from tests.two_nodes import lose, two_nodes
from tune_study import remote

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


MOTO = Path(os.environ.get("MOTO_SERVER") or ROOT / ".venv" / "moto" / "bin" / "moto_server")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An S3-compatible store on loopback: moto's server."""
    if not MOTO.exists():
        pytest.skip("moto is not installed: requirements-store.txt")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([str(MOTO), "-H", "127.0.0.1", "-p", str(port)])
    try:
        wait_for(lambda: answers(port))
        at = {"endpoint_override": f"127.0.0.1:{port}", "scheme": "http", "region": "us-east-1"}
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        fs.S3FileSystem(**at, allow_bucket_creation=True).create_dir("bucket")
        yield "s3://bucket/runs"
    finally:
        server.kill()
        server.wait()


def answers(port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as attempt:
        return attempt.connect_ex(("127.0.0.1", port)) == 0


def test_a_study_lies_in_s3(bucket, alone, data, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a"))
    command = [sys.executable, "-m", "tune_study", "sweep", *SMOKE, "--data", str(data)]
    killed = subprocess.Popen([*command, "--runs", bucket], cwd=ROOT)
    here = remote.cache(bucket) / "smoke"
    wait_for(lambda: ended(here) >= 10 or killed.poll() is not None)
    killed.kill()
    killed.wait()
    elsewhere = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "b")}
    again = [*command, "--runs", bucket]
    held = subprocess.run(again, cwd=ROOT, env=elsewhere, capture_output=True, text=True)
    assert held.returncode == 2
    assert "a sweep of this study is running" in held.stderr
    time.sleep(remote.STALE_S)
    subprocess.run(again, cwd=ROOT, env=elsewhere, check=True, timeout=600)
    assert Tables.of(f"{bucket}/smoke").against(alone) == NOTHING


def ended(study: Path) -> int:
    """How many cells have all their reports."""
    found = study.glob("tune/*/*/result.json")
    return sum(path.read_bytes().count(b"\n") >= 6 for path in found)
