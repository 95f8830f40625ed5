"""A study's folder, made by hand, as tidy tables: every state, every kind of damage."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pandas as pd
import pytest

from analysis import load
from analysis.report import write
from analysis.summary import summarise
from analysis.tables import CELL_COLUMNS
from tune_study.config import ConfigError, Criterion, Study, TrialConfig
from tune_study.identity import identity
from tune_study.store import StudyFolder

BASE = TrialConfig(device="cpu", steps=100, warmup_steps=10, report_every=50)
STUDY = Study(
    name="made",
    base=BASE,
    axes={"lr": (0.001, 0.01, 0.1, 1.0), "depth": (2,), "qk_norm": ("off",), "seed": (0,)},
)
MANIFEST = {
    "checksum": "abc",
    "unigram_entropy": 5.0,
    "loss_floor": 0.5,
    "bytes_per_token": 2.0,
}


def row(step, loss, logit=10.0, **more):
    return {
        "step": step,
        "cell": "renamed later",
        "val/loss": loss,
        "val/loss_init": 6.0,
        "val/loss_min": loss,
        "train/loss_ema": loss,
        "attn/entropy": 1.0,
        "attn/max_logit": logit,
        "data/unigram_entropy": 5.0,
        "act/kurtosis": 3.0,
        "grad/norm": 0.5,
        "train/losses": [loss, loss],
        "grad/clipped_steps": step // 10,
        "nonfinite_step": None,
        "nonfinite": "",
        "resumed_step": 0,
        "params": 7,
        "device": "cpu (test)",
        "time/train_s": step / 100,
    } | more


@pytest.fixture
def made(tmp_path):
    """Writes trial folders for (lr -> rows), beside a stored study."""

    def build(rows_by_lr, error=None):
        folder = StudyFolder(tmp_path, "made")
        folder.write(STUDY, MANIFEST)
        for config in STUDY.cells():
            if config.lr not in rows_by_lr:
                continue
            trial = folder.experiments / "sweep-001" / config.label
            trial.mkdir(parents=True)
            cell = {"label": config.label, "identity": identity(config, "abc")}
            (trial / "params.json").write_text(json.dumps({"cell": cell}))
            (trial / "result.json").write_text(
                "".join(json.dumps(r) + "\n" for r in rows_by_lr[config.lr])
            )
            if error == config.lr:
                (trial / "error.txt").write_text("Traceback ...\nRuntimeError: out of memory\n")
        return folder.path

    return build


WHOLE = {
    0.001: [row(50, 5.8), row(100, 5.6)],
    0.01: [row(50, 2.0), row(100, 1.0)],
    0.1: [row(50, 4.0), row(100, 4.9)],
    1.0: [row(50, 5.0, 1e5), row(100, 5.1, 1e6)],
}


def states(results):
    return dict(zip(results.cells["lr"], results.cells["state"], strict=True))


def test_every_state_by_hand(made):
    results = load(made(WHOLE))
    # 0.1: (4.9 - 1.0) / (5.0 - 1.0) = 0.975 above the margin; 0.001 is worse but only slow
    assert states(results) == {0.001: "stable", 0.01: "stable", 0.1: "failed", 1.0: "diverged"}
    cells = results.cells.set_index("lr")
    assert cells.loc[0.1, "normalised_loss"] == pytest.approx(0.975)
    assert cells.loc[1.0, "step"] == 100
    assert "logit" in cells.loc[1.0, "reason"]
    assert cells.loc[0.01, "clipped_share"] == pytest.approx(0.1)
    assert cells.loc[0.01, "tokens_per_s"] == pytest.approx(100 * 16 * 32 / 1.0)
    assert cells.loc[1.0, "max_logit_peak"] == 1e6
    assert results.damage == ()
    assert not results.running


def test_tables_have_the_documented_columns_and_types(made):
    results = load(made(WHOLE))
    assert list(results.cells) == list(CELL_COLUMNS)
    assert len(results.history) == 8
    assert set(results.history["cell"]) == {c.label for c in STUDY.cells()}


def test_a_study_not_started_is_all_missing(made):
    nothing = load(made({}))
    assert list(nothing.cells) == list(CELL_COLUMNS)
    assert (nothing.cells["state"] == "missing").all()
    assert len(nothing.history) == 0


def test_a_study_without_a_report_has_a_summary_and_no_page(made, tmp_path):
    results = load(made({}))
    assert len(results.history) == 0
    assert summarise(results)["cells"]["missing"] == 4
    with pytest.raises(ConfigError, match="made: no cell has reported yet"):
        write(results, tmp_path / "report")
    assert not (tmp_path / "report").exists()


def test_a_run_that_improves_and_then_blows_up_is_diverged_with_its_last_loss(made):
    best = {"val/loss_min": 1.0}  # between two reports
    late = [row(50, 6.5, **best), row(100, 7.0, **best)]
    cells = load(made(WHOLE | {0.1: late})).cells.set_index("lr")
    assert cells.loc[0.1, "state"] == "diverged"
    assert cells.loc[0.1, "loss"] == 7.0  # the best-ever loss never stands in
    assert cells.loc[0.1, "loss_best"] == 1.0


def test_cut_off_and_never_started_cells_are_missing(made):
    results = load(made({0.001: WHOLE[0.001], 0.01: WHOLE[0.01][:1]}))
    cells = results.cells.set_index("lr")
    assert cells.loc[0.01, "state"] == "missing"
    assert cells.loc[0.01, "reason"] == "cut off at step 50 of 100"
    assert cells.loc[0.1, "reason"] == "not started"


def test_an_error_is_not_divergence(made):
    results = load(made(WHOLE | {0.1: WHOLE[0.1][:1]}, error=0.1))
    cells = results.cells.set_index("lr")
    assert cells.loc[0.1, "state"] == "errored"
    assert cells.loc[0.1, "reason"] == "RuntimeError: out of memory"


def test_a_gap_in_a_history_is_damage_and_not_a_shorter_run(made):
    results = load(made(WHOLE | {0.01: WHOLE[0.01][1:]}))
    assert states(results)[0.01] == "missing"
    assert any("no report between steps 0 and 100" in line for line in results.damage)


def test_non_finite_values_are_nan_and_flagged(made):
    bad = row(50, None, None, nonfinite_step=31, nonfinite="attn/max_logit,val/loss")
    results = load(made(WHOLE | {1.0: [bad]}))
    cells = results.cells.set_index("lr")
    assert cells.loc[1.0, "state"] == "diverged"
    assert cells.loc[1.0, "step"] == 31
    assert pd.isna(cells.loc[1.0, "loss"])
    assert results.history["nonfinite"].str.contains("val/loss").sum() == 1


def test_another_criterion_judges_anew_without_running(made):
    path = made(WHOLE)
    quiet = Criterion(name="quiet", max_logit=None)
    assert states(load(path, criterion=quiet))[1.0] == "failed"
    lenient = Criterion(name="lenient", failed_margin=0.99)
    assert states(load(path, criterion=lenient))[0.1] == "stable"


def test_part_of_a_study_can_be_asked_for(made):
    part = STUDY.replace(axes=dict(STUDY.axes) | {"lr": (0.01, 0.1)})
    assert states(load(made(WHOLE), study=part)) == {0.01: "stable", 0.1: "failed"}


def test_an_experiment_leads_to_its_study(made):
    path = made(WHOLE)
    analysis = SimpleNamespace(experiment_path=str(path / "tune" / "sweep-001"))
    assert states(load(analysis)) == states(load(path))


def test_no_study_and_a_damaged_one_are_one_line(made, tmp_path):
    with pytest.raises(ConfigError, match="holds no study"):
        load(tmp_path / "nothing")
    path = made(WHOLE)
    (path / "study.json").write_text("{")
    with pytest.raises(ConfigError, match=r"study\.json: is damaged"):
        load(path)
