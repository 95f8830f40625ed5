"""Going on: from which checkpoint, with which reports, and when not. Without Ray's processes."""

from __future__ import annotations

import errno
import json
import resource
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.left_study import leave
from trainable import GPTTrainable
from tune_study import checkpoints, disk, sweep
from tune_study.callbacks import Checkpoints, RowLogger
from tune_study.config import ConfigError, Criterion
from tune_study.guard import Guard, StoppedError
from tune_study.identity import identity
from tune_study.model import GPT
from tune_study.store import StudyFolder


@pytest.fixture
def begin(tokens):
    """Makes the trainable of a cell as a worker does, without Ray."""

    def build(config, saved=(), actor=None):
        cell = config.model_dump(mode="json") | {
            "label": config.label,
            "arm": config.arm,
            "identity": "id",
            "checkpoints": [str(folder) for folder in saved],
        }
        data = {"root": str(tokens.folder.parent), "checksum": tokens.manifest.checksum}
        settings = {"cell": cell, "data": data, "checkpoint_every_s": 0.0}
        if actor is not None:
            assert actor.reset_config(settings)
            return actor
        actor = GPTTrainable.__new__(GPTTrainable)  # its __init__ makes folders in the home folder
        actor.setup(settings)
        return actor

    return build


def without_clocks(row):
    return {k: v for k, v in row.items() if not k.startswith("time/") and k != "resumed_step"}


def test_from_a_checkpoint_as_if_never_stopped(begin, small, tmp_path):
    straight = begin(small)
    rows = [straight.step() for _ in range(3)]
    cut = begin(small)
    assert without_clocks(cut.step()) == without_clocks(rows[0])
    cut.save_checkpoint(str(tmp_path))
    again = begin(small, [tmp_path])
    assert [again.step()["resumed_step"], again.resumed_step] == [4, 4]
    again = begin(small, [tmp_path])
    assert [without_clocks(again.step()) for _ in range(2)] == list(map(without_clocks, rows[1:]))


def test_reports_have_a_digest_that_a_changed_value_changes():
    one = checkpoints.digest("", {"step": 4, "val/loss": 2.0, "time/train_s": 1.0})
    assert one == checkpoints.digest("", {"val/loss": 2.0, "step": 4, "time/train_s": 9.0})
    assert one != checkpoints.digest("", {"step": 4, "val/loss": 2.0000000000000004})
    assert one != checkpoints.digest(one, {"step": 4, "val/loss": 2.0})


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda folder: (folder / checkpoints.STAMP).unlink(), "is incomplete"),
        (lambda folder: (folder / checkpoints.STAMP).write_text("{"), "has a damaged stamp"),
        (lambda folder: (folder / checkpoints.FILE).unlink(), "is incomplete"),
        (lambda folder: flip_a_bit(folder / checkpoints.FILE), "trainer.pt is not what was saved"),
        (lambda folder: shutil.rmtree(folder), "is incomplete"),
    ],
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(begin, small, tmp_path, harm, why):
    first, second = tmp_path / "checkpoint_000000", tmp_path / "checkpoint_000001"
    straight = begin(small)
    for folder in (first, second):
        straight.step()
        folder.mkdir()
        straight.save_checkpoint(str(folder))
    harm(second)
    again = begin(small, [second, first])
    row = again.step()
    assert row["resumed_step"] == 4
    assert row["checkpoints_skipped"] == [f"checkpoint_000001: {why}"]
    harm(first)
    row = begin(small, [second, first]).step()
    assert row["resumed_step"] == 0
    assert row["digest"] == begin(small).step()["digest"]


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_checkpoint_of_another_cell_is_passed_over(begin, small, tmp_path):
    other = begin(small.replace(lr=3e-3))
    other.step()
    other.save_checkpoint(str(tmp_path))
    row = begin(small, [tmp_path]).step()
    assert row["checkpoints_skipped"] == [f"{tmp_path.name}: checkpoint of another cell"]
    assert row["digest"] == begin(small).step()["digest"]


def test_one_process_or_one_each_is_the_same(begin, small):
    cells = [small, small.replace(qk_norm="rmsnorm", lr=1.0), small.replace(depth=1, seed=3), small]
    actor = None
    for cell in cells:
        actor = begin(cell, actor=actor)
        alone = begin(cell)
        for _ in range(3):
            assert without_clocks(actor.step()) == without_clocks(alone.step())


def peak_rss():
    """Bytes; macOS counts bytes, Linux KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def test_memory_is_flat_over_100_cells_in_one_process(begin, small):
    # 0.6 M parameters: with gradients and AdamW's moments 10 MB a cell, 0.9 GB over 90 cells.
    shape = {"width": 160, "steps": 1, "warmup_steps": 0, "report_every": 1}
    windows = {"batch_size": 1, "val_windows": 1, "probe_windows": 1}
    large = small.replace(**shape, **windows)
    actor = None
    for number in range(100):
        actor = begin(large.replace(seed=number), actor=actor)
        actor.step()
        if number == 9:
            before = peak_rss()
    assert sum(p.numel() for p in actor.trainer.model.parameters()) > 6e5
    assert peak_rss() - before < 60 * 2**20


# ---------------------------------------------------------------------- plan


@pytest.fixture
def left(small, tokens, tmp_path):
    """A study of one cell, cut off after some reports; and what a start would do with it."""

    def build(history=None, keep_at=None, **changes):
        folder, _label = leave(tmp_path, small, tokens, Criterion(), keep_at, history)
        study = folder.study().replace(**changes)
        return folder, lambda **how: sweep.plan(study, folder, tokens.manifest.checksum, **how)

    return build


def test_a_cut_cell_goes_on_from_its_checkpoint(left):
    _folder, plan = left(history=[{}, {}], keep_at=8)
    (cell,) = plan().todo
    assert cell.last_step == 8
    assert [path.name for path in cell.checkpoints] == ["checkpoint_000000"]
    assert plan().damage == ()


def test_a_checkpoint_without_its_report_is_not_used(left):
    _folder, plan = left(history=[{}], keep_at=8)
    (cell,) = plan().todo
    assert (cell.last_step, cell.checkpoints, len(cell.others)) == (4, (), 1)
    (line,) = plan().damage
    assert line.endswith("its report of step 8 is not there; it is not used")


def test_a_checkpoint_of_another_run_of_the_cell_is_not_used(left):
    """On an accelerator a cell that was run again went another way; its rows say so."""
    _folder, plan = left(history=[{"digest": "other"}, {"digest": "other"}], keep_at=4)
    assert plan().todo[0].checkpoints == ()


def test_of_a_cell_that_ended_nothing_but_its_rows_is_needed(left):
    _folder, plan = left(keep_at=8)
    found = plan()
    assert (found.done, found.todo) == (1, ())
    assert [path.name for path in found.surplus] == ["checkpoint_000000"]


def test_after_three_errors_a_cell_is_left_alone(left):
    folder, plan = left(history=[{}])
    trial = next(folder.experiments.glob("*/*"))
    (trial / "error.txt").write_text("ValueError: no")
    for number in (2, 3):
        assert len(plan().todo) == 1
        shutil.copytree(trial, folder.experiments / f"sweep-00{number}" / trial.name)
    assert plan().todo == ()
    assert plan().given_up == {trial.name: "ValueError: no (3 times)"}
    assert len(plan(retry_errored=True).todo) == 1


def test_kept_weights_are_a_part_of_being_done(left):
    folder, plan = left(keep_at=8, keep_weights=("d2-*",))
    found = plan()
    (cell,) = found.todo  # it ended, but its weights are not there
    assert found.keep == {cell.label}
    assert len(cell.checkpoints) == 1
    folder.weights.mkdir()
    folder.kept_weights(cell.label).touch()
    assert plan().done == 1


def test_a_cell_runs_again_for_its_weights_from_before_its_end(left):
    _, plan = left(keep_at=12, keep_weights=("d2-*",))
    assert plan().todo[0].checkpoints == ()  # at the end there is nothing left to report


def test_a_pattern_that_fits_no_cell_is_refused(left):
    with pytest.raises(ConfigError, match=r"keep_weights = 'd9\*': fits no cell of left"):
        left(keep_weights=("d9*",))[1]()


# ------------------------------------------------------------------- callbacks


@pytest.fixture
def trial(small, tmp_path):
    """What Tune hands to callbacks."""
    path = tmp_path / "left" / "tune" / "sweep-001" / small.label
    path.parent.mkdir(parents=True)
    cell = small.model_dump(mode="json") | {"label": small.label, "identity": "id"}
    return SimpleNamespace(trial_id="t", config={"cell": cell}, path=str(path))


def test_final_weights_are_kept_and_load_into_the_model(begin, small, tokens, trial, tmp_path):
    folder = StudyFolder(tmp_path, "left")
    callback = Checkpoints(folder, SimpleNamespace(keep={small.label}, may_run=[todo(small)]), 2)
    actor = begin(small)
    rows = [actor.step() for _ in range(3)]
    callback.on_trial_result(0, [], trial, rows[-1])
    assert rows[-1]["should_checkpoint"]
    saved = tmp_path / "left" / "tune" / "sweep-001" / small.label / "checkpoint_000000"
    saved.mkdir(parents=True)
    actor.save_checkpoint(str(saved))
    callback.on_trial_complete(0, [], trial)
    assert not saved.exists()
    weights = torch.load(folder.kept_weights(small.label), weights_only=True)
    model = GPT(small, tokens.vocab_size, seed=9)
    model.load_state_dict(weights)
    trained = actor.trainer.model.state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())


def todo(config, usable=(), others=()):
    return SimpleNamespace(label=config.label, checkpoints=usable, others=others)


def test_earlier_checkpoints_go_when_there_are_two_of_ones_own(small, trial, tmp_path):
    usable = [tmp_path / "earlier" / f"checkpoint_00000{i}" for i in (1, 0)]
    other = tmp_path / "other" / "checkpoint_000000"
    for folder in (*usable, other):
        folder.mkdir(parents=True)
    plan = SimpleNamespace(keep=set(), may_run=[todo(small, usable, (other,))])
    callback = Checkpoints(StudyFolder(tmp_path, "left"), plan, 2)
    own = [tmp_path / trial.path / f"checkpoint_00000{number}" for number in range(3)]
    left = []
    for newest in own:
        newest.mkdir(parents=True)
        callback.on_checkpoint(0, [], trial, checkpoint=None)
        left.append([folder.exists() for folder in (*own, *usable, other)])
    assert left == [
        [True, False, False, True, False, False],
        [True, True, False, False, False, False],
        [False, True, True, False, False, False],
    ]


def test_rows_are_strict_and_params_whole(trial):
    logger = RowLogger(SimpleNamespace(labels=()))
    logger.on_trial_start(0, [], trial)
    for step in (4, 8):
        logger.on_trial_result(0, [], trial, {"step": step, "date": "today", "val/loss": None})
    with open(f"{trial.path}/result.json") as file:
        assert [json.loads(line) for line in file] == [
            {"step": 4, "val/loss": None},
            {"step": 8, "val/loss": None},
        ]
    with open(f"{trial.path}/params.json") as file:
        assert json.load(file) == trial.config
    with pytest.raises(ValueError, match="not JSON compliant"):
        logger.on_trial_result(0, [], trial, {"step": 12, "val/loss": float("nan")})


# ----------------------------------------------------------------------- guard


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tune_study.settings.ConfigError: /d: holds no tokens.", r"/d: holds no tokens\."),
        ("OSError: [Errno 28] Error writing bytes to file.", "the disk is full"),
        ("OSError: [Errno 122] Disk quota exceeded", "the disk is full"),
    ],
)
def test_what_is_not_the_cell_s_fault_stops_the_sweep(tmp_path, text, why):
    folder = StudyFolder(tmp_path, "left")
    folder.experiments.mkdir(parents=True)
    (tmp_path / "error.txt").write_text(f"Traceback ...\n{text}\n")
    trial = SimpleNamespace(error_file=str(tmp_path / "error.txt"))
    with pytest.raises(StoppedError, match=why):
        Guard(folder, 0).on_trial_error(0, [], trial)
    (tmp_path / "error.txt").write_text("RuntimeError: shapes differ\n")
    Guard(folder, 0).on_trial_error(0, [], trial)


def test_a_disk_that_fills_or_a_folder_that_moves_stops_the_sweep(tmp_path):
    folder = StudyFolder(tmp_path, "left")
    folder.experiments.mkdir(parents=True)
    Guard(folder, 0).on_step_end(0, [])
    with pytest.raises(StoppedError, match="the disk is full"):
        Guard(folder, 2**62).on_step_end(0, [])
    guard = Guard(folder, 0)
    folder.path.rename(tmp_path / "moved")
    with pytest.raises(StoppedError, match="was moved or deleted"):
        guard.on_step_end(0, [])


def test_a_folder_that_tune_makes_anew_is_still_one_that_moved(tmp_path):
    folder = StudyFolder(tmp_path / "runs", "left")
    guard = Guard(folder, 0)
    (folder.path / "study.json").touch()
    folder.path.rename(tmp_path / "moved")
    (folder.experiments / "sweep-001").mkdir(parents=True)
    (folder.experiments / "sweep-001" / "experiment_state.json").touch()
    (tmp_path / "error.txt").write_text("RuntimeError: no access to the storage path\n")
    with pytest.raises(StoppedError, match="was moved or deleted"):
        guard.on_trial_error(0, [], SimpleNamespace(error_file=str(tmp_path / "error.txt")))
    assert "was moved" in guard.explain(RuntimeError("no access to the storage path"))
    guard.tidy("sweep-001")
    assert not folder.path.parent.exists()
    assert (tmp_path / "moved" / "study.json").exists()


def test_what_others_put_at_the_old_place_stays(tmp_path):
    folder = StudyFolder(tmp_path / "runs", "left")
    guard = Guard(folder, 0)
    guard.tidy("sweep-001")  # nothing moved
    assert folder.experiments.is_dir()
    folder.path.rename(tmp_path / "moved")
    (folder.experiments / "sweep-001").mkdir(parents=True)
    (folder.path / "study.json").touch()
    guard.tidy("sweep-001")
    assert [path.name for path in folder.path.rglob("*")] == ["study.json"]


def test_a_full_disk_is_recognised_behind_what_tune_makes_of_it(tmp_path):
    folder = StudyFolder(tmp_path, "left")
    folder.experiments.mkdir(parents=True)
    error = RuntimeError("Tune's own")
    error.__context__ = OSError(errno.ENOSPC, "No space left on device")
    assert "the disk is full" in Guard(folder, 0).explain(error)
    assert Guard(folder, 0).explain(RuntimeError("a fault of ours")) == ""


# ------------------------------------------------------------------------ disk


def test_what_a_start_needs_is_checked_before_it(left, tokens, monkeypatch):
    folder, plan = left(history=[{}])
    disk.check(disk.needs(plan(), folder, tokens.vocab_size, at_once=2, kept=2))
    free = SimpleNamespace(free=40 * 2**20)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: free)
    with pytest.raises(ConfigError) as refusal:
        disk.check(disk.needs(plan(), folder, tokens.vocab_size, at_once=2, kept=2))
    line = str(refusal.value)
    assert str(folder.path) in line
    assert "40 MB free" in line
    assert "Ray" in line
    assert "--runs" in line
    assert "\n" not in line


def test_a_checkpoint_takes_no_more_than_is_reckoned_with(begin, small, tokens, tmp_path, left):
    folder, _ = left()
    study = folder.study()
    for config in (small, small.replace(width=64, depth=4, qk_norm="rmsnorm")):
        actor = begin(config)
        actor.step()
        actor.save_checkpoint(str(tmp_path))
        size = sum(path.stat().st_size for path in tmp_path.glob("*.*"))
        axes = dict(study.axes) | {"depth": (config.depth,), "qk_norm": (config.qk_norm,)}
        reckoned = disk.checkpoint_bytes(study.replace(base=config, axes=axes), tokens.vocab_size)
        assert 0.5 * reckoned < size <= reckoned


# ----------------------------------------------------------------------- store


def test_the_next_experiment_comes_after_all_and_minds_no_foreign_names(tmp_path):
    folder = StudyFolder(tmp_path, "s")
    assert folder.next_experiment() == "sweep-001"
    for name in ("sweep-009", "sweep-010", "sweep-011 copy", "sweep-x", "notes"):
        (folder.experiments / name).mkdir(parents=True)
    assert folder.next_experiment() == "sweep-011"


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"study": {}, "data": 3}', "\0\0"])
def test_a_damaged_study_file_is_said_and_written_anew(left, content, tokens):
    folder, _ = left()
    study = folder.study()
    path = folder.path / "study.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"study\.json: is damaged"):
        folder.study()
    assert folder.refuse_if_different(study, "any") == ["study.json; it is written anew"]
    folder.write(study, tokens.manifest.model_dump(mode="json"))
    assert folder.refuse_if_different(study, tokens.manifest.checksum) == []
    kept = study.replace(keep_weights=("d2-*",), checkpoint_every_s=1.0)
    assert folder.refuse_if_different(kept, tokens.manifest.checksum) == []


def test_keeping_weights_is_no_part_of_a_cell(small, tokens):
    assert "keep_weights" not in type(small).model_fields
    assert identity(small, tokens.manifest.checksum) == identity(small, tokens.manifest.checksum)
