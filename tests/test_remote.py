"""Studies in a store: claims, what goes there and comes back, and refusals. Without a network."""

from __future__ import annotations

import os
import re
import shutil
import tarfile

import pytest
from pyarrow import fs

import search_spaces
from analysis import load
from tests.left_study import leave
from tune_study import archive, cli, doctor, objects, remote, sweep
from tune_study.config import ConfigError, Criterion

URI = "s3://bucket/runs"


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A folder in place of a bucket; returns where the study `left` lies in it."""
    bucket = tmp_path / "store"
    bucket.mkdir()
    inside = fs.SubTreeFileSystem(str(bucket), fs.LocalFileSystem())
    monkeypatch.setattr(objects, "filesystem", lambda uri: (inside, "runs"))
    return bucket / "runs" / "left"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Works on the study as another machine each: machine("a") as a context."""

    def at(name):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        return remote.working(URI, "left")

    return at


def fill(folder, small, tokens, **how):
    """What a sweep that was cut off leaves in its folder."""
    kept = {p.name: p.read_bytes() for p in folder.path.glob(".*") if p.is_file()}
    leave(folder.path.parent, small, tokens, Criterion(), **how)
    for name, content in kept.items():
        (folder.path / name).write_bytes(content)


def test_another_machine_goes_on_where_one_stopped(store, machine, small, tokens):
    with machine("a") as (folder, mirror):
        fill(folder, small, tokens, keep_at=8, history=[{}, {}])
        (folder.experiments / "sweep-001" / "experiment_state.json").write_text("{}")
        (cell,) = sweep.plan(folder.study(), folder, tokens.manifest.checksum).todo
        rows = next(folder.experiments.glob("*/*/result.json"))
        rows.write_bytes(rows.read_bytes() + b'{"step": 12')  # a row that is being written
    assert mirror.behind == ""
    assert not list(store.rglob("experiment_state.json"))
    with machine("b") as (there, _):
        plan = sweep.plan(there.study(), there, tokens.manifest.checksum)
        assert plan.damage == ()
        assert plan.todo[0].rows == cell.rows
        assert [p.name for p in plan.todo[0].checkpoints] == ["checkpoint_000000"]
    results = load(f"{URI}/left")
    assert results.history["step"].tolist() == [4, 8]
    assert not list(results.source.rglob("trainer.pt"))


def test_what_is_gone_here_goes_there(store, machine, small, tokens):
    with machine("a") as (folder, mirror):
        fill(folder, small, tokens, keep_at=8)
        mirror.push()
        assert len(list(store.rglob("trainer.pt"))) == 1
        next(folder.experiments.rglob("trainer.pt")).unlink()
    assert list(store.rglob("trainer.pt")) == []


def test_a_folder_that_is_ahead_of_the_store_is_kept(store, machine, small, tokens):
    with machine("a") as (folder, _):
        fill(folder, small, tokens, history=[{}])
    next(store.rglob("result.json")).write_text("")  # as if the last rows had not come through
    with machine("a") as (folder, _):
        assert next(folder.experiments.rglob("result.json")).stat().st_size > 0
    assert next(store.rglob("result.json")).stat().st_size > 0


def test_two_at_once_are_one(store, machine):
    words = (
        rf"left: a sweep of this study is running \(process {os.getpid()} on .*, since 2.* UTC\)"
    )
    with machine("a"), pytest.raises(ConfigError, match=words):
        machine("b").__enter__()
    assert list((store / ".claims").iterdir()) == []


def test_a_claim_lapses_and_its_holder_stops(store, machine):
    with machine("a") as (_, held):
        (claim,) = (store / ".claims").iterdir()
        long_ago = claim.stat().st_mtime - 2 * remote.STALE_S
        os.utime(claim, (long_ago, long_ago))
        with machine("b") as (_, taken):
            held.push()
            assert "was taken over" in held.fault
            taken.push()
            assert taken.fault == ""


def test_status_tells_a_sweep_that_lives_from_one_that_is_gone(
    store, machine, small, tokens, capsys
):
    with machine("a") as (folder, mirror):
        fill(folder, small, tokens, history=[{}, {}])
        mirror.push()
        cli.status("left", runs=URI)
        printed = capsys.readouterr().out
        assert re.match(rf"Running: process {os.getpid()} on .*, since 2.* UTC\.\n", printed)
        assert "1 running" in printed
        (claim,) = (store / ".claims").iterdir()
        long_ago = claim.stat().st_mtime - 2 * remote.STALE_S
        os.utime(claim, (long_ago, long_ago))
        cli.status("left", runs=URI)
        printed = capsys.readouterr().out
        assert "stopped" in printed
        assert "unning" not in printed
    cli.status("left", runs=URI)
    assert "stopped" in capsys.readouterr().out


def test_plan_knows_what_is_done_in_a_store(
    store, machine, small, tokens, data_root, monkeypatch, tmp_path, capsys
):
    with machine("a") as (folder, _):
        fill(folder, small, tokens)
        study = folder.study().replace(keep_weights=("*",))
        (label,) = (config.label for config in study.cells())
        folder.write(study, tokens.manifest.model_dump(mode="json"))
        folder.weights.mkdir()
        folder.kept_weights(label).write_bytes(b"weights")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    cli.plan(str(folder.path / "config.yaml"), runs=URI, data=data_root)
    assert "; 1 done, 0 to run." in capsys.readouterr().out
    there = remote.outline(URI, "left")
    assert there.kept_weights(label).read_bytes() == b""  # known, and not fetched
    assert not (tmp_path / "b").exists()
    cli.plan(f"{folder.path}/config.yaml", "other", max_concurrent=1, runs=URI, data=data_root)
    assert "; 0 done, 1 to run." in capsys.readouterr().out
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a"))
    assert remote.outline(URI, "left").path == folder.path  # it is ahead


def test_bundle_and_exports_of_a_store_lie_here(
    store, machine, small, tokens, monkeypatch, tmp_path, capsys
):
    with machine("a") as (folder, _):
        fill(folder, small, tokens)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("analysis.bundle.report.figures", lambda *_: [])
    cli.bundle("left", runs=URI)
    assert "Bundle: left.tar.gz" in capsys.readouterr().out
    with tarfile.open("left.tar.gz") as tar:
        assert f"left/{archive.CELLS}" in tar.getnames()
    cli.export("left", "tensorboard", runs=URI)
    assert "1 cells written. View them: tensorboard --logdir left-tensorboard" in (
        capsys.readouterr().out
    )
    shutil.copytree(store, store.with_name("right"))
    study = store.with_name("right") / "study.json"
    study.write_text(study.read_text().replace('"name": "left"', '"name": "right"'))
    before = sorted(path for path in store.parent.rglob("*"))
    cli.report(["left", "right"], runs=URI)
    assert "Comparison: left-vs-right/" in capsys.readouterr().out
    cli.export("left", "optuna", out=tmp_path / "deep" / "x.db", runs=URI)
    assert (tmp_path / "deep" / "x.db").is_file()
    names = sorted(path.name for path in (tmp_path / "here").iterdir())
    assert names == ["left-tensorboard", "left-vs-right", "left.tar.gz"]
    assert sorted(path for path in store.parent.rglob("*")) == before


def test_a_store_is_no_place_for_a_bundle(run, tmp_path):
    refused = run(tmp_path, "bundle", "tiny", "--out", "s3://bucket/tiny.tar.gz")
    assert refused.returncode == 2
    assert "--out s3://bucket/tiny.tar.gz: is a URI." in refused.stderr


def refuse():
    raise OSError("denied")


def test_doctor_tries_the_store(store, monkeypatch, tmp_path, data_root):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    study = search_spaces.get("smoke")

    def looked_at():
        """What is found of the store, and of all before it."""
        return next(found for found in doctor.examine(study, URI, data_root) if URI in found.text)

    assert looked_at() == doctor.Finding("ok", f"{URI} can be written, listed, read, deleted from")
    assert not (tmp_path / "cache").exists()
    with monkeypatch.context() as denied:
        denied.setattr(objects.Prefix, "list", lambda prefix: refuse())
        with pytest.raises(ConfigError, match=r"\(listing: denied\)"):
            objects.check(URI)
    assert list(store.parent.iterdir()) == []
    store.parent.rmdir()
    store.parent.write_text("no folder")
    fault = looked_at()
    assert fault.kind == "fault"
    assert fault.text.startswith(f"--runs {URI}: cannot be used (writing: ")


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ("nosuch://bucket/runs", "Protocol not known"),
        ("s3:///runs", "it names no bucket"),
        ("dropbox://bucket/runs", "dropboxdrivefs"),
    ],
)
def test_a_uri_that_nobody_knows_is_refused(run, tmp_path, runs, said):
    refused = run(runs, "status", "tiny")
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"--runs {runs}: cannot be used (")
    assert said in line


def test_a_verb_that_needs_a_folder_says_so(run):
    refused = run("s3://bucket/runs", "calibrate", "tiny")
    assert refused.returncode == 2
    assert "--runs s3://bucket/runs: is a URI. Give a path" in refused.stderr


def test_a_file_uri_is_a_folder(tmp_path):
    assert not remote.is_uri(f"file://{tmp_path}")
    with remote.working(f"file://{tmp_path}", "left") as (folder, mirror):
        assert folder.path == tmp_path / "left"
    assert mirror is None
