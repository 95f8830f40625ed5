"""A control study made by hand, and what rules of divergence would have made of it."""

from __future__ import annotations

import json
from dataclasses import replace as with_

import numpy as np
import pandas as pd
import pytest

from analysis.calibration import calibrate, normalised_losses, replay, sensitivity_shift
from analysis.calibration_report import write
from analysis.load import Results
from analysis.tables import as_cells
from tune_study.config import CRITERIA, ConfigError, Criterion, Study, TrialConfig

INIT, H1 = 6.0, 5.0
LOGIT = Criterion(name="logit", loss_above_init=False, max_logit=1000.0, plateau=None)
BASE = TrialConfig(device="cpu", steps=100, warmup_steps=10, report_every=20)

# Validation losses and largest logits at steps 20, 40, 60, 80, 100, by learning rate:
SLOW = [5.8, 5.6, 5.4, 5.3, 5.2], [2.0] * 5  # never failed, merely slow
GOOD = [4.0, 3.0, 2.0, 1.5, 1.0], [5.0] * 5
BACK = [4.0, 4.5, 3.0, 2.0, 1.2], [2000.0, 2000.0, 50.0, 20.0, 10.0]  # comes back
STUCK = [5.2, 5.1, 5.0, 5.0, 4.8], [10.0, 5000.0, 9000.0, 9000.0, 9000.0]
CURVES = {1e-3: SLOW, 1e-2: GOOD, 1e-1: BACK, 1.0: STUCK}


def control(curves=CURVES, seeds=(0, 1)):
    study = Study(
        name="hand",
        base=BASE,
        axes={"lr": tuple(curves), "depth": (1,), "qk_norm": ("off",), "seed": seeds},
        criterion=CRITERIA["off"],
    )
    cells, reports = [], []
    for config in study.cells():
        losses, logits = curves[config.lr]
        # The second seed is 0.1 nat worse at every rate but the best, so that seeds spread.
        losses = [x + 0.1 * config.seed * (config.lr != 1e-2) for x in losses]
        key = {k: getattr(config, k) for k in ("lr", "depth", "qk_norm", "arm", "seed")}
        cells.append(
            {"cell": config.label, **key, "state": "stable", "reason": "", "step": 100}
            | {"steps": 100, "loss": losses[-1], "loss_init": INIT, "loss_best": min(losses)}
            | {"unigram_entropy": H1, "max_logit_peak": max(logits), "params": 1, "threads": 1}
        )
        for i, (loss, logit) in enumerate(zip(losses, logits, strict=True)):
            reports.append(
                {"cell": config.label, **key, "step": 20 * (i + 1), "val/loss": loss}
                | {"val/loss_init": INIT, "train/loss_ema": loss, "attn/max_logit": logit}
                | {"attn/entropy_normalised": 0.5, "grad/norm": 1.0, "act/kurtosis": 3.0}
                | {"nonfinite_step": np.nan, "train/losses": [loss] * 20}
            )
    return Results(study, as_cells(cells), pd.DataFrame(reports), manifest={})


def states(cells):
    first = cells[cells["seed"] == 0].sort_values("lr")
    return list(zip(first["state"], first["steps_run"], strict=True))


def test_the_control_keeps_every_cell_to_its_end():
    # (4.8 - 1) / (5 - 1) = 0.95 fails; (5.2 - 1) / 4 = 1.05 is below the best LR, and only slow
    assert states(replay(control(), CRITERIA["off"])) == [
        ("stable", 100),
        ("stable", 100),
        ("stable", 100),
        ("failed", 100),
    ]


def test_a_rule_stops_where_its_patience_ends():
    cells = replay(control(), LOGIT)
    # two reports in a row above 1000: steps 20 and 40 for BACK, 40 and 60 for STUCK
    assert states(cells) == [
        ("stable", 100),
        ("stable", 100),
        ("diverged", 40),
        ("diverged", 60),
    ]
    stuck = cells[(cells["lr"] == 1.0) & (cells["seed"] == 0)].iloc[0]
    assert (stuck["loss"], stuck["step"]) == (5.0, 60)


def test_a_large_logit_counts_only_at_the_plateau():
    # 0.95 x 5.0 = 4.75: BACK, at 4.0 and 4.5, is below; STUCK is not
    cells = replay(control(), LOGIT.replace(plateau=0.95))
    assert states(cells)[2:] == [("stable", 100), ("diverged", 60)]


def test_a_non_finite_step_ends_the_cell_at_the_report_that_shows_it():
    results = control()
    history = results.history
    bad = (history["lr"] == 1.0) & (history["step"] >= 40)
    history.loc[bad, "nonfinite_step"] = 23
    cells = replay(results, LOGIT)
    assert states(cells)[3] == ("diverged", 40)
    assert cells.loc[cells["lr"] == 1.0, "step"].tolist() == [23, 23]
    # without stopping it runs on, and is known all the same
    assert states(replay(results, CRITERIA["off"]))[3] == ("diverged", 100)


def test_false_stops_missed_failures_and_what_is_saved():
    found = calibrate(
        control(), [CRITERIA["off"], LOGIT, LOGIT.replace(name="deaf", max_logit=1e9)]
    )
    off, logit, deaf = found.criteria.to_dict("records")
    assert (logit["n_stopped"], logit["false_stops"], logit["caught"], logit["missed"]) == (
        4,
        2,
        2,
        0,
    )
    assert logit["saved"] == pytest.approx((60 + 40) / 400)  # of 400 steps a seed
    assert logit["edge_shift"] == 1  # 1e-1 is stable in the control
    for quiet in (off, deaf):
        assert (quiet["n_stopped"], quiet["missed"], quiet["saved"]) == (0, 2, 0.0)
        assert quiet["sensitivity_shift"] == 0.0
    assert set(found.stops["control_state"]) == {"stable", "failed"}


def test_shift_of_lr_sensitivity_by_hand():
    results = control()
    cells = replay(results, LOGIT.replace(plateau=0.95))
    shift = sensitivity_shift(results, cells, replay(results, CRITERIA["off"])).iloc[0]
    # control, seed 0: ((5.2 - 1) + 0 + (1.2 - 1) + (4.8 - 1)) / 4 = 2.05; seed 1: + 0.3 / 4
    assert shift["control"] == pytest.approx(2.05 + 0.0375)
    assert shift["sd"] == pytest.approx(0.075 / np.sqrt(2))
    # The one stopped cell counts min(5.0, 1 + 0.97 (5 - 1) = 4.88) in place of 4.8; with the
    # second seed 4.88 in place of 4.9: a quarter of 0.08 and of -0.02.
    assert shift["shift"] == pytest.approx((0.02 - 0.005) / 2)
    assert shift["edge_shift"] == 0


def test_rules_for_the_loss_of_a_stopped_cell_by_hand():
    found = calibrate(control(seeds=(0,)), [LOGIT.replace(plateau=0.95)])
    error = found.rules.set_index("rule")["loss_error"]
    assert error["loss at stop"] == pytest.approx(5.0 - 4.8)
    assert error["loss at init"] == pytest.approx(6.0 - 4.8)
    assert error["unigram entropy"] == pytest.approx(5.0 - 4.8)
    assert error["smaller of stop and near unigram"] == pytest.approx(4.88 - 4.8)
    shift = found.rules.set_index("rule")["shift_worst"]
    assert shift["smaller of stop and near unigram"] == pytest.approx(
        found.shifts["shift"].iloc[0]  # what the estimator does
    )
    assert shift["loss at init"] == pytest.approx(1.2 / 4)


def test_histogram_of_losses_above_the_best_learning_rate():
    table = normalised_losses(replay(control(seeds=(0,)), CRITERIA["off"]))
    # 1e-1: (1.2 - 1) / 4 = 0.05; 1.0: 0.95. The slow cell lies below the best.
    assert table["count"].tolist() == [1, 0, 0, 0, 0, 0, 0, 0, 0, 1]


def test_a_study_with_stopped_cells_is_no_control():
    results = control()
    last = (results.history["lr"] == 1.0) & (results.history["step"] > 60)
    cut = with_(results, history=results.history[~last])
    with pytest.raises(ConfigError, match=r"hand: is no control study, 2 of 8 .*--criterion off"):
        calibrate(cut)


def test_everything_is_written_as_strict_json_and_csv(tmp_path):
    text = write(control(), tmp_path)
    assert text[0] == "hand: 8 cells, all run to their end."
    content = json.loads((tmp_path / "calibration.json").read_text(), parse_constant=pytest.fail)
    assert content["criteria"][0]["criterion"] == "off"
    assert len(content["losses"]) == 10
    for path in tmp_path.glob("*.csv"):
        assert path.read_text().count(",") > 0
    again = tmp_path / "again"
    write(control(), again)
    assert (again / "calibration.json").read_bytes() == (tmp_path / "calibration.json").read_bytes()
