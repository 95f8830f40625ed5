"""Rows of many cells as columns, in one process or several: nothing is lost, nothing differs."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tune_study import histories, records
from tune_study.config import Criterion, TrialConfig

CONFIG = TrialConfig(steps=10, warmup_steps=2, report_every=4)  # reports at 4, 8, 10
RULES = Criterion()


def row(step: int, loss: float | None = 2.0, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "cell": "a",
        "val/loss": loss,
        "val/loss_init": 6.0,
        "train/loss_ema": loss,
        "train/losses": [3.0, None, 2.5],
        "attn/max_logit": 10.0 * step,
        "data/unigram_entropy": 5.0,
        "nonfinite_step": None,
        "nonfinite": "",
        "params": 7,
        "done": step == 10,
    } | more


def cell(folder: Path, rows: list[dict[str, Any]], text: str | None = None) -> histories.Asked:
    """A cell of one attempt that left these rows, or this text."""
    folder.mkdir(parents=True)
    lines = "".join(json.dumps(each) + "\n" for each in rows) if text is None else text
    (folder / "result.json").write_text(lines)
    return CONFIG, records.Record([records.Attempt(folder, "a", "id", "")])


def awkward(root: Path) -> list[histories.Asked]:
    """A whole cell, one with nulls, one cut off, torn, resumed, empty, and one never started."""
    whole = [row(4), row(8, once=1.0), row(10, extra=2.5)]
    text = "".join(json.dumps(row(step)) + "\n" for step in (4, 8, 10))
    cells = [
        cell(root / "whole", whole),
        cell(root / "null", [row(4), row(8, None, nonfinite="val/loss", nonfinite_step=6)]),
        cell(root / "cut", [row(4), row(8)]),
        cell(root / "torn", [], text[:-20]),
        cell(root / "hole", [], text.replace('"step": 8', '"st', 1)),
        cell(root / "empty", [], ""),
        (CONFIG, records.Record()),
        cell(root / "again", [row(4, 3.0), row(8, 9.0)]),
    ]
    _, later = cell(root / "resumed", [row(8, 2.5, resumed_step=4), row(10, resumed_step=4)])
    cells[-1][1].attempts.extend(later.attempts)
    return cells


def test_columns_by_hand(tmp_path: Path) -> None:
    got = histories.read_batch(awkward(tmp_path), RULES)
    # whole 3, null 2, cut 2, torn 2, hole 1 (what lies behind it is not used), 0, 0, resumed 3.
    assert [one.rows for one in got.cells] == [3, 2, 2, 2, 1, 0, 0, 3]
    assert got.numbers["step"].tolist() == [4, 8, 10, 4, 8, 4, 8, 4, 8, 4, 4, 8, 10]
    np.testing.assert_array_equal(got.numbers["val/loss"][3:5], [2.0, np.nan])
    # In the last row of one cell only; what no end of a run has is no metric.
    np.testing.assert_array_equal(got.numbers["extra"], [*[np.nan] * 2, 2.5, *[np.nan] * 10])
    assert not {"params", "done", "cell", "once"} & got.numbers.keys()
    assert got.notes[4] == "val/loss"
    np.testing.assert_array_equal(got.step_losses()[-1], np.float32([3.0, np.nan, 2.5]))
    assert got.cells[0].verdict is not None
    assert got.cells[0].verdict.state == "stable"
    assert got.cells[1].verdict is not None
    assert got.cells[1].verdict.step == 6
    assert got.cells[2].verdict is None
    assert [one.max_logit for one in got.cells[:2]] == [100.0, 80.0]
    assert got.cells[0].last["params"] == 7
    assert got.cells[5].last == {}
    assert len(got.damage) == 3  # two torn lines, one hole


def test_several_processes_give_the_same_in_the_same_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = awkward(tmp_path)
    alone = list(histories.read(asked, RULES, large=False))
    assert len(alone) == 1
    monkeypatch.setattr(histories, "BATCH_BYTES", 1)
    monkeypatch.setattr(histories, "cores", lambda: 2)
    apart = list(histories.read(asked, RULES, large=True))
    assert len(apart) > 2
    # As text, since a NaN differs from itself.
    assert repr([c for part in apart for c in part.cells]) == repr(alone[0].cells)
    assert [line for part in apart for line in part.damage] == alone[0].damage
    assert [note for part in apart for note in part.notes] == alone[0].notes
    for name, column in alone[0].numbers.items():
        parts = [p.numbers.get(name, np.full(sum(c.rows for c in p.cells), np.nan)) for p in apart]
        np.testing.assert_array_equal(np.concatenate(parts), column)
    losses = [one for part in apart for one in part.step_losses()]
    for one, other in zip(losses, alone[0].step_losses(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_process_that_ends_is_an_error_and_no_missing_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = awkward(tmp_path)
    monkeypatch.setattr(histories, "BATCH_BYTES", 1)
    monkeypatch.setattr(histories, "cores", lambda: 2)
    monkeypatch.setattr(histories.sys, "executable", "/bin/true")
    with pytest.raises(RuntimeError, match="a process that reads results ended"):
        list(histories.read(asked, RULES, large=True))


def test_a_study_is_large_by_the_bytes_of_all_its_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [record for _, record in awkward(tmp_path)]
    size = sum(path.stat().st_size for path in tmp_path.rglob("result.json"))
    monkeypatch.setattr(histories, "LARGE_BYTES", size)
    assert histories.is_large(found)
    monkeypatch.setattr(histories, "LARGE_BYTES", size + 1)
    assert not histories.is_large(found)


def test_a_loss_beyond_single_precision_is_infinite(tmp_path: Path) -> None:
    asked = cell(tmp_path / "a", [row(4, **{"train/losses": [1.5, 1e39]})])
    (losses,) = histories.read_batch([asked], RULES).step_losses()
    np.testing.assert_array_equal(losses, np.float32([1.5, np.inf]))


def test_serving_ends_with_the_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories.signal, "signal", lambda *_: None)
    monkeypatch.setattr(histories.gc, "disable", lambda: None)
    batch = awkward(tmp_path)[:1]
    answers = io.BytesIO()
    histories.serve(io.BytesIO(pickle.dumps((batch, RULES))), answers)
    got = pickle.loads(answers.getvalue())
    assert got.cells == histories.read_batch(batch, RULES).cells
