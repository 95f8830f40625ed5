"""The board of a running study, what is shown of it, and the verbs that look at a study."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from analysis import load, terminal
from tests import fabricated
from tests.conftest import ROOT
from tune_study import cli, view
from tune_study.board import RUNNING, TO_GO, UNTRIED, Board
from tune_study.config import ConfigError, Search, Study


def study() -> Study:
    """Off and rmsnorm, depths 1 and 2, 3 learning rates, 2 seeds: 24 cells of 400 steps."""
    return fabricated.study(lr=(0.01, 0.1, 1.0), depth=(1, 2), seed=(0, 1))


def row(step: int, loss: float | None) -> dict[str, Any]:
    return {
        "step": step,
        "val/loss": loss,
        "data/unigram_entropy": 4.88,
        "time/tokens_per_s": 12_345.6,
    }


def run(board: Board, label: str, loss: float, seconds: float, steps: int = 400) -> None:
    """One cell from its begin to its end."""
    board.begin(label, 0, at=10.0)
    board.report(label, row(steps, loss), at=10.0 + seconds)
    board.end(label, "stable" if steps == 400 else "diverged")


def printed(what: Any, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(what)
    return out.getvalue()


def test_failed_is_told_from_stable_as_cells_end() -> None:
    """0.1 ends at 4.5 nats, above the best LR: H1 is 4.88 and the best 1.0, so it failed."""
    board = Board(study())
    run(board, "d1-off-lr1.000e-01-s0", 4.5, 4)
    assert board.counts() == {"stable": 1, TO_GO: 23}  # nothing to compare with yet
    run(board, "d1-off-lr1.000e-02-s0", 1.0, 4)
    assert board.counts() == {"stable": 1, "failed": 1, TO_GO: 22}
    run(board, "d1-off-lr1.000e+00-s0", 5.0, 1, steps=100)
    assert board.counts()["diverged"] == 1
    assert board.done == 3
    assert board.tiles()["off"][1] == ["stable", "failed", "diverged"]
    run(board, "d1-off-lr1.000e-01-s1", 1.2, 4)
    assert board.tiles()["off"][1][1] == "mixed"
    board.begin("d2-off-lr1.000e-02-s0", 0, at=0.0)
    assert board.tiles()["off"][2] == [RUNNING, TO_GO, TO_GO]


def test_time_left_by_hand() -> None:
    """0.01 s a step at depth 1, 0.02 at depth 2. To go after these: depth 1, 11 cells of 400 steps,
    but one of lr 1 stopped at 100, so its other seed is expected to: 10 * 4 + 1 = 41 s less the
    cell of lr 1 itself; depth 2, 11 cells of 8 s and half of one: 92 s. Two at a time."""
    board = Board(study())
    assert board.seconds_left(2) is None
    run(board, "d1-off-lr1.000e+00-s0", 5.0, 1, steps=100)
    board.begin("d2-off-lr1.000e-02-s0", 0, at=0.0)
    board.report("d2-off-lr1.000e-02-s0", row(200, 2.0), at=4.0)
    assert board.seconds_left(2) == pytest.approx((10 * 4 + 1 + 11 * 8 + 4) / 2)


def test_a_cell_that_goes_on_is_timed_from_where_it_went_on() -> None:
    board = Board(study())
    board.begin("d1-off-lr1.000e-02-s0", 300, at=50.0)
    board.report("d1-off-lr1.000e-02-s0", row(350, 2.0), at=51.0)
    assert board.cells["d1-off-lr1.000e-02-s0"].seconds_per_step == pytest.approx(1 / 50)


@pytest.mark.parametrize("width", [80, 140])
def test_the_view_fits_and_is_ascii(width: int) -> None:
    board = Board(fabricated.study())
    board.begin("d1-off-lr1.000e-02-s0", 0, at=0.0)
    board.report("d1-off-lr1.000e-02-s0", row(20, None), at=1.0)
    board.end("d1-off-lr1.000e-03-s0", "errored")
    shown = printed(view.screen(board, view.time_left(board, 2), width), width)
    assert max(map(len, shown.splitlines())) <= width
    assert shown.isascii()
    assert "0 of 234 cells" in shown
    assert "1 errored, 1 running, 232 to go" in shown
    assert "20/400" in shown
    assert "not finite" in shown
    assert "12,346" in shown
    assert "depth 1   ! . . . * . . . . . . . ." in shown


def test_a_search_counts_what_it_has_asked_for() -> None:
    """Two cells of 24, then a third; the map is empty where nothing was asked for."""
    first, second, third = list(Board(study()).cells)[:3]
    board = Board(study().replace(search=Search()), [first, second])
    run(board, first, 1.0, 4)
    assert (board.done, board.total) == (1, 2)
    board.ask([first, third])
    assert board.counts() == {"stable": 1, TO_GO: 2}
    assert view.time_left(board, 1) == "8s left in this round"
    assert sum(tile == UNTRIED for row in board.tiles()["off"].values() for tile in row) > 0


def test_a_plain_line() -> None:
    board = Board(study())
    run(board, "d1-off-lr1.000e-02-s0", 1.0, 4)
    board.begin("d2-off-lr1.000e-02-s0", 0, at=0.0)
    board.report("d2-off-lr1.000e-02-s0", row(20, 3.1), at=1.0)
    assert view.line(board, "9s left") == (
        "1/24 cells, 1 stable; 9s left. d2-off-lr1.000e-02-s0 step 20 loss 3.100"
    )


def test_a_study_on_disk_has_the_board_of_one_that_runs() -> None:
    """What the awkward study holds: counts as in its cells, nothing at work."""
    results = fabricated.awkward()
    counts = terminal.board(results).counts()
    expected = results.cells["state"].value_counts().to_dict()
    assert counts == {TO_GO: expected.pop("missing"), **expected}
    assert "stopped" in printed(terminal.status(results, 80))


def test_a_list_of_cells_filters_and_sorts() -> None:
    results = fabricated.small()
    lines = printed(terminal.listing(results, ["d1", "off", "s0"], by="loss"), 200).splitlines()[1:]
    own = results.cells.query("depth == 1 and qk_norm == 'off' and seed == 0").sort_values("loss")
    assert [line.split()[0] for line in lines] == own["cell"].tolist()
    failed = printed(terminal.listing(results, state="failed"), 200).splitlines()[1:]
    assert len(failed) == int(results.cells["state"].eq("failed").sum())
    with pytest.raises(ConfigError, match=r"--state sick: unknown. Give one of: stable"):
        terminal.listing(results, state="sick")
    with pytest.raises(ConfigError, match=r"--by size: no column. Give one of: cell, lr"):
        terminal.listing(results, by="size")


def test_one_cell_and_its_training() -> None:
    results = fabricated.small()
    row = results.cells.iloc[0]
    shown = printed(terminal.cell(results, row["cell"], unicode=False))
    assert shown.isascii()
    assert shown.startswith(f"{row['cell']}: {row['state']}")
    assert "validation loss" in shown
    assert "9" in shown.split("validation loss")[1].split()[1]  # it falls from its highest
    with pytest.raises(ConfigError, match=r"not in fabricated. Give one such as d1-off-lr3"):
        terminal.cell(results, "d1-off-lr1", unicode=False)
    silent = fabricated.awkward()
    missing = silent.cells.loc[silent.cells["state"] == "missing", "cell"].iloc[0]
    assert "reported nothing yet" in printed(terminal.cell(silent, missing, unicode=False))


def test_sparklines_by_hand() -> None:
    """A gap where a value is not finite; equal steps of a log scale are equal heights."""
    assert terminal.sparkline(np.array([0.0, 4.5, np.nan, 9.0]), "0123456789") == "04 9"
    assert terminal.sparkline(np.array([1.0, 10.0, 100.0]), "0123456789", log=True) == "049"
    assert terminal.sparkline(np.array([np.nan]), "01") == " "
    assert len(terminal.sparkline(np.arange(1000.0), "01")) == terminal.SPARK_WIDTH


def test_the_verbs_that_look(finished: Any, capsys: pytest.CaptureFixture[str]) -> None:
    runs, _ = finished
    cell = load(runs / "tiny").cells["cell"][0]
    cli.status("tiny", runs=runs)
    assert "tiny  8 of 8 cells [##########" in capsys.readouterr().out
    cli.cells("tiny", runs=runs)
    assert capsys.readouterr().out.count("\n") == 9
    cli.show("tiny", cell, runs=runs)
    assert "training loss" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="at least two"):
        cli.compare(["tiny", "tiny"], runs=runs)


def test_help_is_there_at_once_and_the_shell_completes(tmp_path: Path) -> None:
    """Nothing is loaded but what parses a command line."""
    heavy = {"ray", "torch", "pandas", "numpy", "altair", "rich.live", "scipy", "pyarrow"}
    code = f"import sys, tune_study.cli; print(*({heavy} & set(sys.modules)))"
    assert _python(["-c", code]).strip() == ""
    (tmp_path / "pilot-mine").mkdir()
    (tmp_path / "pilot-mine" / "study.json").touch()
    asked = {
        "TUNE_STUDY_PROGRAM": "./tune-study",
        "_TUNE_STUDY_COMPLETE": "complete_bash",
        "COMP_WORDS": "tune-study status pi",
        "COMP_CWORD": "2",
        "RUNS": str(tmp_path),
    }
    assert _python(["-m", "tune_study"], **asked).split() == ["pilot", "pilot-mine"]


def _python(words: list[str], **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_what_tune_calls_back_is_kept_and_shown() -> None:
    """One cell diverges, one is cut off, one errors; a search then asks for two more."""
    from tune_study.progress import Progress

    labels = list(Board(study()).cells)
    out = io.StringIO()
    board = Board(study().replace(search=Search()), labels[:3])
    progress = Progress(board, 2, Console(file=out, width=200, highlight=False))
    about = {"checkpoints_skipped": ["its checkpoint is torn"], "resumed_step": 0}
    for i, label in enumerate(labels[:3]):
        cell = {"label": label, "last_step": 0}
        trial: Any = SimpleNamespace(trial_id=label, config={"cell": cell})
        progress.on_trial_start(0, [], trial)
        progress.on_trial_result(0, [], trial, about | row(20, 5.0) | {"cell": label})
        if i == 0:
            progress._last[label]["verdict/state"] = "diverged"
        (progress.on_trial_error if i == 2 else progress.on_trial_complete)(0, [], trial)
    assert board.counts() == {"diverged": 1, "errored": 1, TO_GO: 1}
    progress.go_on(labels[3:5], ["round 1: 3 cells run"])
    assert board.total == 5
    pickle.dumps(progress)
    progress.close()
    shown = out.getvalue()
    assert f"{labels[0]}: its checkpoint is torn; went on from step 0" in shown
    assert f"{labels[2]}: errored" in shown
    assert "round 1: 3 cells run" in shown
    assert "1/5 cells, 1 diverged, 1 errored; " in shown
