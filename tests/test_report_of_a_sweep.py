"""The report of a study that was really swept: its page in a browser, its verbs, its examples."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from analysis import charts, load
from tests.browser import Tab
from tests.conftest import ROOT
from tune_study import cli
from tune_study.store import StudyFolder


@pytest.fixture(scope="module")
def runs(finished: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the swept study under the name that the documents use, `pilot`, and `mine`, of
    which only the cells of seed 0 are asked for."""
    copy: Path = tmp_path_factory.mktemp("copied") / "runs"
    shutil.copytree(finished[0], copy)
    (copy / "tiny").rename(copy / "pilot")
    shutil.copytree(copy / "pilot", copy / "mine")
    for name, change in (("pilot", {}), ("mine", {"seed": [0]})):
        file = copy / name / "study.json"
        content = json.loads(file.read_text())
        axes = dict(content["study"]["axes"]) | change
        content["study"] |= {"name": name, "axes": list(axes.items())}
        file.write_text(json.dumps(content))
    return copy


@pytest.fixture
def tab(browser: Any, runs: Path) -> Iterator[Tab]:
    tab = Tab(browser, runs / "pilot" / "report" / "index.html")
    yield tab
    tab.context.close()


def test_the_page_is_drawn_in_full(tab: Tab, runs: Path) -> None:
    """No error, every figure drawn, one mark a cell by state, a click brings out the curve."""
    results = load(runs / "pilot")
    assert tab.wrong == []
    assert [url for url in tab.requests if not url.startswith("file:")] == []
    figures = tab.page.query_selector_all("[data-figure]")
    assert [f.get_attribute("data-figure") for f in figures] == charts.names(results)
    assert all(figure.query_selector("svg.marks path") for figure in figures)
    drawn = Counter(datum["state"] for datum in tab.marks("lr_loss", "cells_"))
    assert drawn == Counter(results.cells["state"])
    tab.page.locator("[data-figure=lr_loss] g.cells_0_marks path").nth(5).click(force=True)
    tab.page.wait_for_function("picked.length === 1")
    (cell,) = tab.page.evaluate("picked")
    assert tab.page.evaluate("views.curves.signal('chosen')") == [cell]
    tab.page.fill("#filter", "rmsnorm s1")
    assert tab.page.locator("#cell-table tbody tr").count() == 2


def test_a_report_of_a_running_study_says_so_and_touches_nothing_of_the_sweep(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One cell has not begun."""
    study = runs / "mine"
    folder = next((study / "tune").glob("sweep-001/*-s0"))
    shutil.rmtree(folder)
    before = _digests(study)
    with StudyFolder(runs, "mine").lock():
        cli.report(["mine"], runs=str(runs))
    assert "mine: incomplete, running now, 3 of 4 cells" in capsys.readouterr().out
    html = (study / "report" / "index.html").read_text()
    assert "still running" in html
    assert "3 of 4 cells" in html
    assert _digests(study) == before


def _digests(study: Path) -> dict[Path, str]:
    """Of every file that is not of the report, nor of the lock."""
    files = [study / "study.json", *(study / "tune").rglob("*")]
    return {f: hashlib.sha256(f.read_bytes()).hexdigest() for f in files if f.is_file()}


def test_two_studies_are_set_side_by_side(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.report(["pilot", "mine"], runs=str(runs))
    path = Path(capsys.readouterr().out.removeprefix("Comparison: ").strip())
    html = path.read_text()
    assert path == runs / "pilot-vs-mine" / "index.html"
    assert "axes.seed" in html
    assert html.count("data-figure=") >= 4


def test_the_examples_of_the_report_s_document_run(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every piece of Python in docs/report.md, where runs/pilot is."""
    (tmp_path / "runs").symlink_to(runs)
    monkeypatch.chdir(tmp_path)
    pieces = re.findall(r"```python\n(.*?)```", (ROOT / "docs/report.md").read_text(), re.S)
    assert pieces
    for code in pieces:
        exec(compile(code, "docs", "exec"), {})
