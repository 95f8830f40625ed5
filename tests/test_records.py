"""Trial folders as Tune leaves them, whole and damaged, read back as histories."""

from __future__ import annotations

import json
import shutil

import pytest

from tune_study import checkpoints, records
from tune_study.config import Criterion, TrialConfig

CONFIG = TrialConfig(steps=10, warmup_steps=2, report_every=4)  # reports at 4, 8, 10


def row(step, loss=2.0, resumed=0):
    return {
        "step": step,
        "val/loss": loss,
        "val/loss_init": 6.0,
        "train/loss_ema": loss,
        "attn/max_logit": 1.0,
        "data/unigram_entropy": 5.0,
        "nonfinite_step": None,
        "resumed_step": resumed,
    }


def trial(experiments, experiment, rows, error=None, saved=(), experiment_known=False):
    """Writes the trial of cell `a`."""
    folder = experiments / experiment / "a"
    folder.mkdir(parents=True)
    cell = {"label": "a", "identity": "id"} | (
        {"experiment": experiment} if experiment_known else {}
    )
    (folder / "params.json").write_text(json.dumps({"cell": cell}))
    (folder / "result.json").write_text("".join(json.dumps(r) + "\n" for r in rows))
    for number in saved:
        (folder / f"checkpoint_{number:06d}").mkdir()
        (folder / f"checkpoint_{number:06d}" / checkpoints.FILE).touch()
    if error:
        (folder / "error.txt").write_text(error)
    return folder


def steps(record):
    return [r["step"] for r in record.history(CONFIG)]


def test_report_steps_end_with_the_last_step():
    assert list(records.report_steps(CONFIG)) == [4, 8, 10]
    assert list(records.report_steps(CONFIG.replace(report_every=5))) == [5, 10]


def test_a_whole_history(tmp_path):
    trial(tmp_path, "sweep-001", [row(4), row(8), row(10)])
    found, damage = records.read(tmp_path)
    assert steps(found["id"]) == [4, 8, 10]
    assert damage == []
    assert records.ended(found["id"].history(CONFIG), CONFIG, Criterion()).state == "stable"


def test_a_resumed_cell_is_one_history_without_repeats(tmp_path):
    trial(tmp_path, "sweep-001", [row(4, 3.0), row(8, 9.9)], saved=[0])
    trial(tmp_path, "sweep-002", [row(8, 2.5, resumed=4), row(10, 2.0, resumed=4)])
    found, _ = records.read(tmp_path)
    history = found["id"].history(CONFIG)
    assert [(r["step"], r["val/loss"]) for r in history] == [(4, 3.0), (8, 2.5), (10, 2.0)]


def test_an_attempt_that_resumed_earlier_drops_what_came_after(tmp_path):
    trial(tmp_path, "sweep-001", [row(4), row(8)])
    trial(tmp_path, "sweep-002", [row(4, 3.3)])  # started afresh, and was cut off
    found, _ = records.read(tmp_path)
    assert [(r["step"], r["val/loss"]) for r in found["id"].history(CONFIG)] == [(4, 3.3)]


def test_ten_and_more_experiments_stay_in_order(tmp_path):
    trial(tmp_path, "sweep-002", [row(4, 1.0)])
    trial(tmp_path, "sweep-010", [row(4, 2.0)])
    found, _ = records.read(tmp_path)
    assert found["id"].history(CONFIG)[0]["val/loss"] == 2.0


def test_torn_lines_are_named_and_leave_a_gap_not_a_shorter_run(tmp_path):
    folder = trial(tmp_path, "sweep-001", [row(4), row(8), row(10)])
    lines = (folder / "result.json").read_text().splitlines()
    lines[1] = lines[1][:-10]
    (folder / "result.json").write_text("\n".join(lines) + "\n")
    found, damage = records.read(tmp_path)
    history = found["id"].history(CONFIG, damage)
    assert [r["step"] for r in history] == [4]  # what lies behind the gap is not used
    assert records.ended(history, CONFIG, Criterion()) is None
    assert damage == [
        "sweep-001/a: line 2 of result.json is torn; it is not used",
        f"{CONFIG.label}: no report between steps 4 and 10",
    ]


def test_missing_result_file_is_a_cell_that_never_reported(tmp_path):
    folder = trial(tmp_path, "sweep-001", [])
    (folder / "result.json").unlink()
    found, damage = records.read(tmp_path)
    assert steps(found["id"]) == []
    assert damage == []


@pytest.mark.parametrize("content", [None, "{", "[]", '{"cell": {}}'])
def test_a_folder_that_names_no_cell_is_named(tmp_path, content):
    folder = trial(tmp_path, "sweep-001", [row(4)])
    if content is None:
        (folder / "params.json").unlink()
    else:
        (folder / "params.json").write_text(content)
    found, damage = records.read(tmp_path)
    assert found == {}
    assert len(damage) == 1
    assert "sweep-001/a: params.json" in damage[0]


def test_errors_and_checkpoints_newest_first(tmp_path):
    trial(tmp_path, "sweep-001", [row(4)], error="Traceback\nValueError: no\n\n", saved=[0, 1])
    trial(tmp_path, "sweep-002", [row(8, resumed=4)], saved=[0])
    found, _ = records.read(tmp_path)
    assert found["id"].errors == ["ValueError: no"]
    assert [f"{p.parent.parent.name}/{p.name}" for p in found["id"].checkpoints()] == [
        "sweep-002/checkpoint_000000",
        "sweep-001/checkpoint_000001",
        "sweep-001/checkpoint_000000",
    ]


def test_without_stopping_a_run_ends_with_its_last_step(tmp_path):
    high = [row(4, 9.0), row(8, 9.0), row(10, 9.0)]  # above the loss at init from step 4 on
    rules = Criterion(patience=2)
    assert records.ended(high[:2], CONFIG, rules).step == 8
    assert records.ended(high[:2], CONFIG, rules.replace(stop=False)) is None  # still running
    assert records.ended(high, CONFIG, rules.replace(stop=False)).step == 8
    frozen = [row(4, None) | {"nonfinite_step": 3}]
    assert records.ended(frozen, CONFIG, rules.replace(stop=False)).step == 3


def test_nothing_there_is_nothing_found(tmp_path):
    assert records.read(tmp_path / "tune") == ({}, [])


def test_a_cut_at_any_byte_leaves_the_reports_before_it(tmp_path):
    folder = trial(tmp_path, "sweep-001", [row(4), row(8), row(10)])
    path = folder / "result.json"
    content = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    for cut in range(len(content)):
        path.write_bytes(content[:cut])
        (record,) = records.read(tmp_path)[0].values()
        # A line without its newline is whole, too.
        whole = sum(end - 1 <= cut for end in ends)
        assert steps(record) == [4, 8, 10][:whole]


def test_a_line_twice_and_a_line_of_another_cell_are_named(tmp_path):
    rows = [row(4), row(8, 9.9), row(8, 2.5), row(8, 7.7) | {"identity": "other"}]
    trial(tmp_path, "sweep-001", rows)
    found, _ = records.read(tmp_path)
    damage: list[str] = []
    assert [r["val/loss"] for r in found["id"].history(CONFIG, damage)] == [2.0, 2.5]
    assert damage == [
        "sweep-001/a: line 4 of result.json is another cell's",
        "sweep-001/a: result.json has a step twice; the later line is used",
    ]


@pytest.mark.parametrize("content", [None, "{"])
def test_a_folder_whose_reports_name_the_cell_is_used(tmp_path, content):
    folder = trial(tmp_path, "sweep-001", [row(4) | {"cell": "a", "identity": "id"}])
    if content is None:
        (folder / "params.json").unlink()
    else:
        (folder / "params.json").write_text(content)
    found, damage = records.read(tmp_path)
    assert steps(found["id"]) == [4]
    assert damage == ["sweep-001/a: params.json is missing or damaged; its reports are used"]


def test_copies_and_foreign_folders_are_named_and_not_used(tmp_path):
    first = trial(tmp_path, "sweep-001", [row(4)], experiment_known=True)
    trial(tmp_path, "sweep-002", [row(8, resumed=4), row(10, resumed=4)], experiment_known=True)
    shutil.copytree(first, first.with_name("a copy"))
    shutil.copytree(first.parent, tmp_path / "sweep-003")  # would end the cell at step 4
    (tmp_path / "sweep-1 copy").mkdir()
    (tmp_path / "sweep-002" / "begun").mkdir()  # a trial that was not started: no damage
    (tmp_path / ".DS_Store").touch()
    found, damage = records.read(tmp_path)
    assert steps(found["id"]) == [4, 8, 10]
    assert damage == [
        "sweep-1 copy: no start of this study; the folder is not used",
        "sweep-001/a copy: a copy of sweep-001/a; the folder is not used",
        "sweep-003/a: a copy of sweep-001/a; the folder is not used",
        "sweep-003/a copy: a copy of sweep-001/a; the folder is not used",
    ]


def test_a_thousand_starts_stay_in_order(tmp_path):
    trial(tmp_path, "sweep-999", [row(4, 1.0)])
    trial(tmp_path, "sweep-1000", [row(4, 2.0)])
    found, _ = records.read(tmp_path)
    assert found["id"].history(CONFIG)[0]["val/loss"] == 2.0


def test_failures_count_since_a_step_was_gained(tmp_path):
    attempts = [
        ([row(4)], "E: a"),  # gained 4, then errored: 1
        ([], None),  # interrupted: does not count
        ([row(4)], "E: b"),  # 2
        ([row(8, resumed=4)], None),  # gained 8
        ([], "E: b"),  # 1
        ([row(8, resumed=4)], "E: c"),  # 2
    ]
    counts = []
    for number, (rows, error) in enumerate(attempts, start=1):
        trial(tmp_path, f"sweep-{number:03d}", rows, error=error)
        counts.append(records.read(tmp_path)[0]["id"].failures())
    assert counts == [1, 1, 2, 0, 1, 2]
    record = records.read(tmp_path)[0]["id"]
    assert record.errors == ["E: a", "E: b", "E: b", "E: c"]
    assert record.reasons == "E: a; E: b (2 times); E: c"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Traceback\n  ...\nValueError: no\n\n", "ValueError: no"),
        ("", "unknown error"),
        ("x: The worker died. " + "Some common causes. " * 20, "x: The worker died."),
    ],
)
def test_an_error_is_one_short_line(tmp_path, text, reason):
    folder = trial(tmp_path, "sweep-001", [])
    (folder / "error.txt").write_text(text)
    assert records.read(tmp_path)[0]["id"].errors == [reason]
