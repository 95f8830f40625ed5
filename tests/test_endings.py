"""How runs ended: rules without their numbers, steps saved, the calibration that lies there."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from analysis import endings
from tests.hand_tables import table


@pytest.mark.parametrize(
    ("reason", "rule"),
    [
        ("attention logit 1.2e+05 above 10000", "attention logit above 10000"),
        ("attention logit not finite", "attention logit not finite"),
        ("training loss 7.1 above loss at init 6.24", "training loss above loss at init"),
        ("loss or gradient not finite at step 33", "loss or gradient not finite"),
        ("normalised loss 0.88 above 0.5", "normalised loss above 0.5"),
        ("normalised loss 0.88 above 0.5; replayed on cpu: the same", "normalised loss above 0.5"),
        ("cut off at step 120 of 400", "cut off"),
        ("RuntimeError: out of memory", "RuntimeError: out of memory"),
        ("", ""),
    ],
)
def test_a_rule_is_a_reason_without_the_numbers_of_one_cell(reason: str, rule: str) -> None:
    assert endings.rule(reason) == rule


def hand_made() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Four cells of 100 steps: 100, 100, 40 run; one missing after 10."""
    lrs = (0.01, 0.1, 1.0, 10.0)
    cells = table(lrs, {(1, "off", 0): [2.0, ("failed", 4.8), ("diverged", 5.5), "missing"]})
    cells["reason"] = ["", "normalised loss 0.9 above 0.5", "attention logit 2e+04 above 10000",
                       "cut off at step 10 of 100"]  # fmt: skip
    cells["step"] = [100, 100, 40, 10]
    run = dict(zip(cells["cell"], cells["step"], strict=True))
    history = pd.DataFrame(
        [
            {"cell": cell, "step": step}
            for cell, last in run.items()
            for step in range(10, last + 1, 10)
        ]
    )
    return cells, history


def test_endings_by_hand() -> None:
    cells, _ = hand_made()
    rows = endings.endings(cells).to_dict("records")
    assert [(row["state"], row["rule"], row["cells"], row["step"]) for row in rows] == [
        ("stable", "", 1, 100),
        ("failed", "normalised loss above 0.5", 1, 100),
        ("diverged", "attention logit above 10000", 1, 40),
        ("missing", "cut off", 1, 10),
    ]
    assert (rows[2]["lr_low"], rows[2]["lr_high"]) == (1.0, 1.0)


def test_steps_saved_by_hand() -> None:
    """Of 300 steps asked of the cells that ended, 240 were run; the missing cell is no part."""
    assert endings.steps_saved(*hand_made()) == pytest.approx(60 / 300)


def test_steps_saved_of_nothing() -> None:
    cells, history = hand_made()
    assert endings.steps_saved(cells.assign(state="missing"), history[:0]) is None


def test_a_calibration_is_read_where_there_is_one(tmp_path) -> None:
    assert endings.calibration(None) is None
    assert endings.calibration(tmp_path) is None
    row = dict.fromkeys((*endings.CALIBRATION, *endings.SHIFTS), 0) | {"criterion": "safe"}
    folder = tmp_path / "calibration"
    folder.mkdir()
    content = {"study": "control", "criteria": [row | {"verdicts": "", "caught": 3}]}
    (folder / "calibration.json").write_text(json.dumps(content))
    assert endings.calibration(tmp_path) == [row]
