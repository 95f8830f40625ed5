"""The long form of test_cluster.py and test_remote.py: `make test-cluster`."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from pyarrow import fs

from analysis import load
from tests.faults.study import ROOT, Tables, wait_for
from tests.two_nodes import SOON, lose, two_nodes
from tune_study import cli, objects, remote

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
    port = free_port()
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


def test_a_study_lies_in_s3(bucket, alone, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a"))
    command = [sys.executable, "-m", "tune_study", "sweep", *SMOKE, "--data", str(data)]
    killed = subprocess.Popen([*command, "--runs", bucket], cwd=ROOT)
    here = remote.cache(bucket) / "smoke"
    wait_for(lambda: ended(here) >= 10 or killed.poll() is not None)
    killed.kill()
    killed.wait()
    there = remote.Mirror(bucket, "smoke", here)
    assert there.holder().startswith(f"process {killed.pid} on ")
    elsewhere = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "b")}
    again = [*command, "--runs", bucket]
    held = subprocess.run(again, cwd=ROOT, env=elsewhere, capture_output=True, text=True)
    assert held.returncode == 2
    assert "a sweep of this study is running" in held.stderr
    time.sleep(remote.STALE_S)
    assert there.holder() == ""
    subprocess.run(again, cwd=ROOT, env=elsewhere, check=True, timeout=600)
    assert Tables.of(f"{bucket}/smoke").against(alone) == NOTHING
    cli.plan("smoke", runs=bucket, data=data)
    assert "; 24 done, 0 to run." in capsys.readouterr().out
    cli.bundle("smoke", out=tmp_path / "smoke", small=True, runs=bucket)
    assert load(tmp_path / "smoke").cells["loss"].tolist() == alone.cells["loss"].tolist()
    assert "can be written, listed" in objects.check(bucket)


SHIMS = {
    "ssh": """
        [ "$1" = -t ] && shift
        mkdir -p "$RAY_TMPDIR/$1"
        export RAY_TMPDIR="$RAY_TMPDIR/$1"
        cd && exec sh -c "$2" """,
    "srun": """
        while [ "${1#--}" != "$1" ]; do echo "srun $1" >> "$CALLS"; shift; done
        mkdir -p "$RAY_TMPDIR/srun"
        export RAY_TMPDIR="$RAY_TMPDIR/srun"
        exec "$@" """,
    "sbatch": 'printf "sbatch%s\\n" "$(printf " %s" "$@")" >> "$CALLS"',
    "hostname": "echo 127.0.0.1",
}
"""What the recipes call, for a machine alone: each runs on it what would run on another."""


@dataclass
class Recipe:
    """Runs a recipe of docs/."""

    environment: dict[str, str]

    def __call__(self, script: str, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        process = self.start(script, *words, **more)
        out, errors = process.communicate(timeout=600)
        return subprocess.CompletedProcess(process.args, process.returncode, out, errors)

    def start(self, script: str, *words: str, **more: str) -> subprocess.Popen[str]:
        """The same, without waiting for it."""
        return subprocess.Popen(
            ["bash", str(ROOT / "docs" / script), *words],
            env=self.environment | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def left(self) -> list[psutil.Process]:
        """Processes of Ray and of the sweep that live."""
        name = self.environment["RAY_TMPDIR"]
        every = psutil.process_iter(["cmdline"])
        return [p for p in every if name in " ".join(p.info["cmdline"] or ())]


@pytest.fixture
def recipe(tmp_path: Path) -> Iterator[Recipe]:
    """With SHIMS in place of ssh and SLURM, and one of Ray's folders; nothing of it may be left."""
    (tmp_path / "bin").mkdir()
    for name, body in SHIMS.items():
        shim = tmp_path / "bin" / name
        shim.write_text(f"#!/bin/sh\n{body}\n")
        shim.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    (home / "tune_study").symlink_to(ROOT)
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as name:
        environment = os.environ | SOON
        environment |= {"HOME": str(home), "RAY_TMPDIR": name, "CALLS": str(tmp_path / "calls")}
        environment["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        started = Recipe(environment)
        yield started
        assert started.left() == []


def test_the_ssh_recipe(recipe, alone, data, tmp_path):
    place = ["--runs", str(tmp_path / "runs"), "--data", str(data)]
    more = {"HOSTS": "127.0.0.1 localhost", "NODE": "--num-cpus=1", "PORT": str(free_port())}
    done = recipe("ssh.sh", *SMOKE, *place, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 nodes, 1 core each" in done.stdout
    assert Tables.of(tmp_path / "runs" / "smoke").against(alone) == NOTHING
    assert not list((tmp_path / "home").glob(".ray-token*"))
    refused = recipe("ssh.sh", "smoke", "--lr", "x y", **more)
    assert refused.returncode == 2
    assert "axes.lr = 'x y'" in refused.stderr


def test_the_ssh_recipe_leaves_nothing_when_it_is_killed(recipe, data, tmp_path):
    words = [*SMOKE, "--runs", str(tmp_path / "runs"), "--data", str(data)]
    more = {"HOSTS": "127.0.0.1 localhost", "NODE": "--num-cpus=1", "PORT": str(free_port())}
    script = recipe.start("ssh.sh", *words, **more)
    wait_for(lambda: ended(tmp_path / "runs" / "smoke") >= 2 or script.poll() is not None)
    assert recipe.left() != []
    script.kill()
    script.communicate(timeout=120)  # once nobody holds its output
    wait_for(lambda: recipe.left() == [])


SSHD = os.environ.get("SSHD") or "/usr/sbin/sshd"


@pytest.mark.skipif(not Path(SSHD).exists(), reason="no sshd is installed: openssh-server")
def test_the_ssh_recipe_with_a_real_sshd(recipe, alone, data, tmp_path):
    at, port = tmp_path / "sshd", free_port()
    at.mkdir()
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-N", "", "-f", str(at / key)], check=True)
    fresh = " ".join(f"{name}={value}" for name, value in SOON.items())
    (at / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {at}/host\nPidFile none\n"
        f"AuthorizedKeysFile {at}/user.pub\nPasswordAuthentication no\nStrictModes no\n"
        f"SetEnv RAY_TMPDIR={recipe.environment['RAY_TMPDIR']} {fresh}\n"
    )
    (at / "config").write_text(
        f"Port {port}\nIdentityFile {at}/user\nIdentitiesOnly yes\nStrictHostKeyChecking no\n"
        f"UserKnownHostsFile {at}/known\nBatchMode yes\nLogLevel ERROR\n"
    )
    ssh = f'#!/bin/sh\nexec {shutil.which("ssh")} -F {at}/config "$@"\n'
    (tmp_path / "bin" / "ssh").write_text(ssh)
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", str(at / "sshd_config")])
    try:
        wait_for(lambda: answers(port) or server.poll() is not None)
        words = [*SMOKE, "--runs", str(tmp_path / "runs"), "--data", str(data)]
        more = {"HOSTS": "127.0.0.1 localhost", "NODE": "--num-cpus=1", "FOLDER": str(ROOT)}
        done = recipe("ssh.sh", *words, **more, PORT=str(free_port()))
    finally:
        server.kill()
        server.wait()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 nodes, 1 core each" in done.stdout
    assert Tables.of(tmp_path / "runs" / "smoke").against(alone) == NOTHING


def test_the_slurm_recipe(recipe, alone, data, tmp_path):
    words = [*SMOKE, "--runs", str(tmp_path / "runs"), "--data", str(data)]
    job = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": str(free_port()),
        "SLURM_NNODES": "2",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURMD_NODENAME": "node1",
    }
    script = str(ROOT / "docs" / "slurm.sh")
    cut_off = recipe("slurm.sh", *words, "--hours", "0.002", **job)
    assert cut_off.returncode == 0, cut_off.stdout + cut_off.stderr
    assert "The 0.002 hours are over" in cut_off.stdout
    *srun, again = (tmp_path / "calls").read_text().splitlines()
    assert set(srun) == {
        *("srun --nodes=1", "srun --ntasks=1", "srun --cpus-per-task=1", "srun --exclude=node1")
    }
    assert again == " ".join(["sbatch", script, *words, "--hours", "0.002"])
    done = recipe("slurm.sh", *words, **job)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 nodes, 1 core each" in done.stdout
    assert Tables.of(tmp_path / "runs" / "smoke").against(alone) == NOTHING
    alone_again = recipe("slurm.sh", *words, **(job | {"SLURM_NNODES": "1"}))
    assert alone_again.returncode == 0
    assert "all 24 cells are done" in alone_again.stdout
    assert not list(ROOT.glob(".ray-token*"))


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def ended(study: Path) -> int:
    """How many cells have all their reports."""
    found = study.glob("tune/*/*/result.json")
    return sum(path.read_bytes().count(b"\n") >= 6 for path in found)
