"""Bundles: what is packed, what `verify` finds wrong, and what it trains again."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import typer

from analysis import bundle, bundled, load
from analysis.summary import json_safe, summarise
from tests.conftest import ROOT
from tune_study import archive, cli
from tune_study import configs as yaml
from tune_study.config import ConfigError, Study
from tune_study.store import StudyFolder

CELL = "d1-off-lr1.000e-02-s0"


@pytest.fixture(scope="module")
def runs(finished: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the swept study `tiny`, whose first cell also left an error with a path in it."""
    copy: Path = tmp_path_factory.mktemp("packed") / "runs"
    shutil.copytree(finished[0], copy)
    error = copy / "tiny/tune/sweep-001" / CELL / "error.txt"
    error.write_text(f'  File "{ROOT}/trainable.py", line 1\n{Path.home()}/x\nOSError: torn\n')
    return copy


@pytest.fixture(scope="module")
def full(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive of `tiny`, and beside it the same unpacked."""
    out: Path = tmp_path_factory.mktemp("full") / "tiny.tar.gz"
    bundle.write(StudyFolder(runs, "tiny"), out)
    with tarfile.open(out) as tar:
        tar.extractall(out.parent, filter="data")
    return out


@pytest.fixture(scope="module")
def _small(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out: Path = tmp_path_factory.mktemp("small") / "tiny"
    bundle.write(StudyFolder(runs, "tiny"), out, small=True)
    return out


@pytest.fixture
def small(_small: Path, tmp_path: Path) -> Path:
    """A small bundle to change."""
    return shutil.copytree(_small, tmp_path / "tiny")


@pytest.fixture
def verify(data: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Exit code and output of the verb."""

    def call(path: Path, **options: Any) -> tuple[int, str]:
        code = 0
        try:
            cli.verify(path, data=data, **options)
        except typer.Exit as stop:
            code = stop.exit_code
        return code, capsys.readouterr().out

    return call


def sealed_anew(folder: Path) -> None:
    """Gives a changed bundle a manifest that agrees with its files."""
    content = archive.read(folder).model_dump()
    del content["files"], content["format"]
    archive.seal(folder, **content)


def table(folder: Path, name: str, change: Callable[[pd.DataFrame], None]) -> None:
    """Changes a table of a bundle."""
    frame = pd.read_parquet(folder / name)
    change(frame)
    frame.to_parquet(folder / name)


# ----------------------------------------------------------------------- packing


def test_an_archive_has_all_that_the_study_came_to_and_nothing_of_the_machine(full, runs, verify):
    folder = full.with_name("tiny")
    there = set(archive.files_in(folder))
    trial = f"tune/sweep-001/{CELL}"
    assert {"README.md", "index.html", "tables/arms.tex", "figures/lr_loss-wide.pdf"} <= there
    logs = {"result.json", "params.json", "config.yaml", "error.txt"}
    assert {f"{trial}/{log}" for log in logs} <= there
    study = yaml.read(folder / "config.yaml", Study)
    assert [config.label for config in study.cells()] == load(folder).cells["cell"].tolist()
    assert not [name for name in there if "checkpoint" in name or name.endswith(".pkl")]
    own = [str(path).encode() for path in (runs, ROOT, Path.home())]
    for name in there - {"index.html"}:
        content = (folder / name).read_bytes()
        assert not [path for path in own if path in content], name
    assert "torn" in (folder / trial / "error.txt").read_text()
    code, out = verify(full, cells=3)
    assert code == 0
    assert "Verdicts and summary: agree" in out
    assert out.splitlines()[-1] == "3 of 3 cells: same bits."


def test_the_same_folder_gives_the_same_archive(full, tmp_path):
    folder = full.with_name("tiny")
    os.utime(folder / "summary.json", (1, 1))
    archive.pack(folder, tmp_path / "again.tar.gz")
    assert (tmp_path / "again.tar.gz").read_bytes() == full.read_bytes()


def test_a_bundle_opens_as_its_study(full, small, runs):
    own = load(runs / "tiny")
    for folder in (full.with_name("tiny"), small):
        again = load(folder)
        pd.testing.assert_frame_equal(again.cells, own.cells)
        kept = [name for name in own.history if name in again.history]
        pd.testing.assert_frame_equal(again.history, own.history[kept])
        assert json_safe(summarise(again)) == json_safe(summarise(own))
    assert "val/loss" in kept
    assert not [name for name in kept if "layer_" in name]
    part = own.study.replace(axes=dict(own.study.axes) | {"seed": (0,)})
    assert set(load(small, study=part).cells["seed"]) == {0}


def test_a_bundle_can_be_judged_by_other_rules(small, runs):
    rules = load(small).study.criterion.replace(name="low", max_logit=0.01, plateau=None)
    own, again = (load(folder, criterion=rules).cells for folder in (runs / "tiny", small))
    assert "diverged" in set(own["state"])
    pd.testing.assert_frame_equal(again, own)


def test_the_manifest_says_how_it_was_made(small):
    manifest = archive.read(small)
    assert manifest.commands[1:] == (
        "python -m tune_study bundle tiny --small --out tiny",
        "python -m tune_study verify tiny",
    )
    assert manifest.status == archive.Status(complete=True, running=False, problems=(), damage=())
    assert {"commit", "python", "torch", "ray", "numpy", "processor"} <= manifest.versions.keys()
    (hardware,) = manifest.hardware
    assert (hardware.precision, hardware.threads, hardware.cells) == ("fp32", 1, 8)
    assert manifest.data["checksum"] == load(small).manifest["checksum"]
    configs = bundled.configs(StudyFolder(small.parent, "tiny"))
    assert {label: name for label, (_, name) in configs.items()} == dict(
        load(small).cells[["cell", "identity"]].itertuples(index=False)
    )
    assert all(config.steps == 20 for config, _ in configs.values())
    readme = (small / "README.md").read_text()
    assert all(command in readme for command in manifest.commands)
    assert f"at commit {manifest.versions['commit']}" in readme


def test_an_unfinished_damaged_running_study_is_packed_and_says_so(
    runs, tmp_path, capsys, verify, monkeypatch
):
    shutil.copytree(runs / "tiny", tmp_path / "runs/tiny")
    trials = tmp_path / "runs/tiny/tune/sweep-001"
    shutil.rmtree(trials / CELL)
    rows = trials / CELL.replace("s0", "s1") / "result.json"
    rows.write_bytes(rows.read_bytes()[:-40])
    monkeypatch.setattr(bundle.report, "figures", lambda *_: [])
    with StudyFolder(tmp_path / "runs", "tiny").lock():
        cli.bundle("tiny", out=tmp_path / "part.tar.gz", runs=str(tmp_path / "runs"))
    packed = capsys.readouterr().out
    code, verified = verify(tmp_path / "part.tar.gz", cells=0)
    assert code == 0
    for out in (packed, verified):
        assert "tiny: running now" in out
        assert "tiny: incomplete: 6 of 8 cells have ended" in out
        assert "is torn" in out


def test_no_folder_of_something_else_is_replaced(runs, small, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is a folder, and no bundle"):
        cli.bundle("tiny", out=tmp_path / "mine", runs=str(runs))
    with pytest.raises(ConfigError, match="is a bundle already"):
        cli.bundle("tiny", runs=str(small.parent))
    with pytest.raises(ConfigError, match="holds a bundle"):
        cli.sweep("smoke", name="tiny", runs=str(small.parent))
    with pytest.raises(ConfigError, match="holds no study"):
        cli.bundle("none", runs=str(runs))


# --------------------------------------------------------------------- verifying


def test_each_file_that_is_missing_changed_or_extra_is_named(small, verify):
    (small / "figures/lr_loss.svg").unlink()
    (small / "figures/link.svg").symlink_to("/etc/passwd")
    (small / "notes.txt").write_text("new")
    cells = (small / "cells.parquet").read_bytes()
    (small / "cells.parquet").write_bytes(cells[:-1] + bytes([cells[-1] ^ 1]))
    (small / "summary.json").write_text("{}")
    code, out = verify(small)
    assert code == 1
    named = {line.partition(":")[0]: line for line in out.splitlines()}
    assert "missing" in named["figures/lr_loss.svg"]
    assert "extra" in named["figures/link.svg"]
    assert "extra" in named["notes.txt"]
    assert "changed, SHA-256" in named["cells.parquet"]
    assert "changed, 2 bytes" in named["summary.json"]
    assert out.splitlines()[-1] == "Differs from its manifest: 5 files."


def test_numbers_that_do_not_follow_from_the_tables_are_named(small, verify):
    path = small / "summary.json"
    summary = json.loads(path.read_text())
    summary["arms"][0]["best_loss"] += 0.01
    path.write_text(json.dumps(summary))
    sealed_anew(small)
    code, out = verify(small)
    assert code == 1
    assert re.search(r"summary.json: arms\[0\].best_loss is .*, computed again", out)


def test_a_verdict_that_does_not_follow_from_the_history_is_named(small, verify):
    def change(cells):
        cells.loc[0, "state"] = "diverged"

    table(small, "cells.parquet", change)
    sealed_anew(small)
    code, out = verify(small, cells=0)
    assert code == 1
    assert f"cells.parquet: {CELL}: diverged with loss" in out


def test_tables_that_are_not_made_of_the_rows_are_named(full, tmp_path, verify):
    folder = shutil.copytree(full.with_name("tiny"), tmp_path / "tiny")

    def change(history):
        history.loc[3, "grad/norm_max"] *= 2

    table(folder, "history.parquet", change)
    sealed_anew(folder)
    code, out = verify(folder, cells=0)
    assert code == 1
    assert "history.parquet: is not what the rows in tune/ give" in out


def test_a_cell_whose_training_gives_other_numbers_differs(small, verify):
    """The table of cells, the history and the summary agree with each other, not with the run."""

    def change(table):
        at = table["cell"] == CELL
        for column in table.columns.intersection(["loss", "val/loss"]):
            table.loc[at, column] += 1e-3

    for name in ("cells.parquet", "history.parquet"):
        table(small, name, change)
    cells = pd.read_parquet(small / "cells.parquet")
    assert cells["loss"].notna().all()
    results = load(small)
    judged = bundled.judged(results.cells, results.history, results.study)
    judged.to_parquet(small / "cells.parquet")
    (small / "summary.json").write_text(json.dumps(json_safe(summarise(load(small)))))
    sealed_anew(small)
    code, out = verify(small, cell=[CELL])
    assert code == 1
    assert "differs by 0.001 nats" in out
    assert "device, PyTorch, threads, precision and processor are those recorded" in out
    assert out.splitlines()[-1] == "1 of 1 cell differs."
    code, out = verify(small, cell=[CELL], tolerance=0.01)
    assert code == 0
    assert re.fullmatch(r"1 of 1 cell: within 0.00[12] nats.", out.splitlines()[-1])


def test_what_cannot_be_verified_is_one_line(small, tmp_path, verify):
    with pytest.raises(ConfigError, match="does not exist"):
        verify(tmp_path / "none.tar.gz")
    with pytest.raises(ConfigError, match=r"manifest.json is missing"):
        verify(tmp_path)
    with pytest.raises(ConfigError, match=rf"--cell d9: .*such as {CELL[:2]}"):
        verify(small, cell=["d9"])
    with pytest.raises(ConfigError, match="only one of the two"):
        verify(small, train="x.txt")
    with pytest.raises(ConfigError, match="synthetic, no file"):
        verify(small, train="x.txt", validation="y.txt")
    manifest = json.loads((small / "manifest.json").read_text())
    for change, why in (
        ({"format": 9}, "format 9"),
        ({"files": {"../x": {"sha256": "0" * 64, "bytes": 1}}}, "outside of the bundle"),
    ):
        (small / "manifest.json").write_text(json.dumps(manifest | change))
        with pytest.raises(ConfigError, match=why):
            verify(small)
    (small / "manifest.json").write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        verify(small)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("cells.parquet", b"torn", "no Parquet file"),
        ("history.parquet", None, "has no column 'cell'"),
        ("summary.json", b"[]", "missing or damaged"),
        ("config.json", b'{"cells": {"a": {}}}', "is damaged"),
        ("study.json", b"{}", "is damaged"),
    ],
)
def test_a_damaged_file_whose_hash_was_made_anew_is_one_line(small, verify, name, content, why):
    if content is None:
        pd.DataFrame({"x": [1]}).to_parquet(small / name)
    else:
        (small / name).write_bytes(content)
    sealed_anew(small)
    with pytest.raises(ConfigError, match=why):
        verify(small)


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([entry("tiny/a"), entry("../escaped")], "Do not use it"),
        ([entry("/escaped")], "cannot be unpacked"),
        ([entry("tiny/a", tarfile.SYMTYPE, "/etc/passwd")], "no plain file"),
        ([entry("tiny/a", tarfile.LNKTYPE, "tiny/b")], "no plain file"),
        ([entry("tiny/a", tarfile.FIFOTYPE)], "no plain file"),
        ([entry("tiny/a"), entry("other/a")], "no single folder"),
        (None, "cannot be unpacked"),
    ],
)
def test_an_unsafe_or_torn_archive_is_refused(tmp_path, entries, why):
    path = tmp_path / "evil.tar.gz"
    if entries is None:
        path.write_bytes(b"torn")
    else:
        with tarfile.open(path, "w:gz") as tar:
            for one in entries:
                tar.addfile(one, io.BytesIO())
    with pytest.raises(ConfigError, match=why), archive.opened(path):
        pass
    assert not (tmp_path.parent / "escaped").exists()


@pytest.mark.parametrize("first", [True, False], ids=["manifest first", "manifest last"])
@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("tiny/more", b"x", "it holds more, which its manifest does not list"),
        ("tiny/summary.json", b"x" * 10**6, r"summary.json has 1,000,000 bytes, \d\S* by its"),
    ],
)
def test_an_archive_that_holds_more_than_it_declares_is_refused(
    small, tmp_path, name, content, why, first
):
    path = tmp_path / "more.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        added = tarfile.TarInfo(name)
        added.size = len(content)
        if first:
            tar.add(small / "manifest.json", "tiny/manifest.json")
        tar.addfile(added, io.BytesIO(content))
        if not first:
            tar.add(small / "manifest.json", "tiny/manifest.json")
    with pytest.raises(ConfigError, match=f"{why}.*Do not use it"), archive.opened(path):
        pass


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.XHDTYPE])
def test_an_archive_that_is_mostly_air_is_refused(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(archive, "SMALL_BYTES", 2**20)
    path = tmp_path / "bomb.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        air = tarfile.TarInfo("tiny/history.parquet")
        air.type, air.size = kind, 2**24
        tar.addfile(air, io.BytesIO(bytes(air.size)))
    words = r"more than \d\S* bytes, which is too much for its size. Do not use it"
    with pytest.raises(ConfigError, match=words), archive.opened(path):
        pass


def test_a_bundle_that_does_not_fit_on_the_disk_is_one_line(full, monkeypatch):
    monkeypatch.setattr(archive, "disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(ConfigError, match=r"0 bytes free, .* needed"), archive.opened(full):
        pass
