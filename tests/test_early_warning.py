"""Warnings and spikes in histories made by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis.early_warning import (
    logit_limit,
    spike_summary,
    spikes,
    warning_summary,
    warnings,
)
from tests.test_calibration import CRITERIA, control, replay

KEY = {"lr": 0.1, "depth": 1, "qk_norm": "off", "seed": 0}


def run(losses):
    """Spikes of one run that reports every 10 steps."""
    rows = [
        {"cell": "c", **KEY, "step": min(i + 10, len(losses)), "train/losses": losses[i : i + 10]}
        for i in range(0, len(losses), 10)
    ]
    return spikes(pd.DataFrame(rows)).to_dict("records")


def test_warnings_and_leads_by_hand():
    results = control(seeds=(0,))
    cells = replay(results, CRITERIA["off"])
    warned = warnings(cells, results.history).set_index("signal")
    # References are 1e-2 and 1e-1; their logits reach 2000, and the failing cell's pass that at
    # step 40. Losses of the references are at most 4.0 4.5 3.0 2.0 1.2: departed from step 20.
    assert warned.loc["max logit", "level"] == 2000
    assert warned.loc["max logit", "step"] == 40
    assert set(warned["departure"]) == {20.0}
    assert warned.loc["max logit", "lead"] == -20  # the loss came first
    assert np.isnan(warned.loc["kurtosis", "step"])
    summary = warning_summary(warned.reset_index()).set_index("signal")
    assert summary.loc["max logit", ["n", "warned", "first"]].tolist() == [1, 1, 0]
    assert summary.loc["kurtosis", "warned"] == 0


def test_a_signal_before_the_loss_has_a_positive_lead():
    results = control(seeds=(0,))
    history = results.history
    stuck = history["lr"] == 1.0
    history.loc[stuck, "val/loss"] = [3.9, 4.4, 2.9, 5.0, 4.8]  # departs at step 80
    history.loc[stuck & (history["step"] >= 40), "attn/entropy_normalised"] = 0.1
    warned = warnings(replay(results, CRITERIA["off"]), history).set_index("signal")
    assert warned.loc["entropy", ["level", "step", "departure", "lead"]].tolist() == [
        0.5,
        40,
        80,
        40,
    ]


def test_no_failures_no_warnings():
    results = control({1e-2: ([3.0, 2.0, 1.5, 1.2, 1.0], [5.0] * 5)})
    warned = warnings(replay(results, CRITERIA["off"]), results.history)
    assert len(warned) == len(warning_summary(warned)) == 0


def test_logit_limit_names_the_exceptions():
    cells = replay(control(seeds=(0,)), CRITERIA["off"])
    row = logit_limit(cells, limit=1500).iloc[0]
    # 2000 in the cell that came back, 9000 in the one that failed
    assert (row["n_above"], row["n_above_unstable"], row["n_unstable"]) == (2, 1, 1)
    assert row["exceptions"] == "d1-off-lr1.000e-01-s0"


def test_a_spike_that_recovers():
    # the average stands at 2.0 while it lasts
    (spike,) = run([2.0] * 15 + [3.0, 4.0, 2.6, 2.05] + [2.0] * 6)
    assert (spike["step"], spike["length"], spike["recovered"]) == (16, 3, True)
    assert spike["size"] == pytest.approx(2.0)


def test_a_spike_that_stays():
    (spike,) = run([2.0] * 5 + [4.9] * 10)
    assert (spike["step"], spike["length"], spike["recovered"]) == (6, 10, False)


def test_noise_and_a_fall_are_no_spikes():
    assert run([2.0, 2.3, 1.9, 2.2, 1.8] * 4) == []
    assert run(list(np.linspace(6, 1, 40))) == []
    assert run([3.0]) == []


def test_a_loss_that_is_not_finite_is_a_spike():
    (spike,) = run([2.0, 2.0, None, 2.0, 2.0])
    assert spike["size"] == np.inf
    assert spike["recovered"]


def test_spikes_per_arm_and_state():
    results = control(seeds=(0,))
    history = results.history
    rows = history.index[(history["lr"] == 1e-2) & (history["step"] == 60)]
    history.at[rows[0], "train/losses"] = [2.0] * 10 + [4.0] + [2.0] * 9
    cells = replay(results, CRITERIA["off"])
    assert cells.loc[cells["lr"] == 1e-2, "state"].tolist() == ["stable"]
    summary = spike_summary(cells, spikes(history)).set_index("state")
    assert summary.loc["stable", ["cells", "spikes", "recovered"]].tolist() == [3, 1, 1]
