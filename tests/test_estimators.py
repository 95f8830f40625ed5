"""Every estimator against tables that can be worked by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis import estimators as est
from tests.hand_tables import states, table
from tune_study.config import ConfigError, Margins

WORTSMAN = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
FIVE = (1e-3, 1e-2, 1e-1, 1e0, 1e1)
MARGINS = Margins()


def one(frame: pd.DataFrame, **where: object) -> pd.Series:
    for column, value in where.items():
        frame = frame[frame[column] == value]
    assert len(frame) == 1
    return frame.iloc[0]


# -------------------------------------------------------------- LR sensitivity


def test_lr_sensitivity_on_the_grid_of_wortsman() -> None:
    # l* = 2.0, H1 = 5.0. Excesses 1.5, 0.8, 0.3, 0, 0.1, min(7, 6) - 2 = 4, and for the stopped
    # cell 0.97 (5 - 2) = 2.91, as that is less than 5.9 - 2; sum 9.61, / 7.
    losses = [3.5, 2.8, 2.3, 2.0, 2.1, ("failed", 7.0), ("diverged", 5.9)]
    row = one(est.lr_sensitivity(table(WORTSMAN, {(2, "off", 0): losses})))
    assert row["value"] == pytest.approx(9.61 / 7)
    # The stopped cell is at least 0 above l* (6.7 / 7), at most 6 - 2 = 4 (10.7 / 7).
    assert row["lower"] == pytest.approx(6.7 / 7)
    assert row["upper"] == pytest.approx(10.7 / 7)
    assert (row["lr_low"], row["lr_high"], row["n_lrs"]) == (3e-4, 3e-1, 7)
    assert (row["n_asked"], row["n_stable"], row["n_failed"], row["n_diverged"]) == (7, 5, 1, 1)


def test_lr_sensitivity_in_a_range_uses_only_the_range() -> None:
    # [1e-3, 3e-2]: l* = 2.0; 0.8 + 0.3 + 0 + 0.1 = 1.2, / 4.
    losses = [1.0, 2.8, 2.3, 2.0, 2.1, ("failed", 7.0), "missing"]
    row = one(est.lr_sensitivity(table(WORTSMAN, {(2, "off", 0): losses}), (1e-3, 3e-2)))
    assert row["value"] == pytest.approx(0.3)
    assert row["n_asked"] == row["n_lrs"] == 4


def test_diverged_cell_without_a_finite_loss_counts_at_init() -> None:
    # Excesses 0, 0, 6 - 2 = 4; / 3.
    cells = table(FIVE[:3], {(2, "off", 0): [2.0, 2.0, ("diverged", np.nan)]})
    assert one(est.lr_sensitivity(cells))["value"] == pytest.approx(4 / 3)


def test_best_loss_is_never_that_of_a_stopped_cell() -> None:
    # The stopped cell's last loss, 1.0, is below the best finished one: it adds nothing.
    cells = table(FIVE[:3], {(2, "off", 0): [3.0, 2.0, ("diverged", 1.0)]})
    assert one(est.lr_sensitivity(cells))["value"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(("lost", "reason"), [("m", "1 missing of 5"), ("e", "1 errored of 5")])
def test_lost_cell_makes_sensitivity_unknown(lost: str, reason: str) -> None:
    row = one(est.lr_sensitivity(table(FIVE, {(2, "off", 0): states("ssf" + lost + "f")})))
    assert math.isnan(row["value"])
    assert reason in row["reason"]


def test_cell_without_a_row_is_missing() -> None:
    cells = table(FIVE, {(2, "off", 0): states("sssff"), (2, "off", 1): states("sssff")})
    cells = cells[~((cells["seed"] == 1) & (cells["lr"] == 1.0))]
    result = est.lr_sensitivity(cells)
    assert result["value"].isna().tolist() == [False, True]
    assert "1 missing" in result["reason"][1]


def test_without_a_stable_cell_there_is_no_best_loss() -> None:
    row = one(est.lr_sensitivity(table(FIVE, {(2, "off", 0): states("fffff")})))
    assert math.isnan(row["value"])
    assert "no stable cell" in row["reason"]


def test_grid_with_a_gap_has_no_sensitivity_and_names_the_gap() -> None:
    cells = table((1e-3, 1e-2, 1e-1, 1e1), {(2, "off", 0): states("ssff")})
    row = one(est.lr_sensitivity(cells))
    assert math.isnan(row["value"])
    assert math.isnan(row["upper"])
    assert "0.1 to 10 is 2.000 decades" in row["reason"]
    # The edge of stability needs no even grid.
    (arm,) = est.arm_summary(cells, Margins())
    assert arm["lr_sensitivity"]["value"] is None
    assert "not log-spaced" in arm["lr_sensitivity"]["reason"]
    assert arm["max_stable_lr"]["value"] == pytest.approx(1e-2)


def test_range_off_the_grid_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lr_range = \[100, 1000\]"):
        est.lr_sensitivity(table(FIVE, {(2, "off", 0): states("sssff")}), (100, 1000))


# ---------------------------------------------------------- maximum stable LR


@pytest.mark.parametrize(
    ("row", "low", "high", "censored", "monotone", "widened"),
    [
        ("sssff", 1e-1, 1e0, "", True, False),
        ("sssdf", 1e-1, 1e0, "", True, False),
        ("ssfsf", 1e-2, 1e-1, "", False, False),  # the contiguous rule, and a flag
        ("sssss", 1e1, math.inf, "above", True, False),
        ("fffff", 0, 1e-3, "below", True, False),
        ("fssff", 0, 1e-3, "below", False, False),
        ("ssmff", 1e-2, 1e0, "", True, True),  # the edge is below or above the lost cell
        ("ssmsf", 1e-2, 1e1, "", True, True),
        ("sssem", 1e-1, math.inf, "above", True, True),
        ("msfff", 0, 1e-1, "below", True, True),
        ("sssfm", 1e-1, 1e0, "", True, False),  # a lost cell beyond the edge says nothing
    ],
)
def test_max_stable_lr(
    row: str, low: float, high: float, censored: str, monotone: bool, widened: bool
) -> None:
    got = one(est.max_stable_lr(table(FIVE, {(2, "off", 0): states(row)})))
    assert (got["low"], got["high"], got["censored"]) == (low, high, censored)
    assert (got["monotone"], got["widened"]) == (monotone, widened)
    assert got["value"] == (low or high)


def test_max_stable_lr_without_evidence_is_unknown() -> None:
    got = one(est.max_stable_lr(table(FIVE, {(2, "off", 0): states("memem")})))
    assert math.isnan(got["value"])
    assert got["censored"] == ""
    assert got["reason"] == "3 missing, 2 errored of 5 cells"


# -------------------------------------------------------------------- best LR


@pytest.mark.parametrize(
    ("losses", "value", "censored"),
    [
        ([3.0, 2.0, 2.5, ("failed", 4.8), "missing"], 1e-2, ""),
        ([2.0, 2.1, 2.5, ("failed", 4.8), ("failed", 4.9)], 1e-3, "below"),
        ([3.0, 2.9, 2.5, 2.4, 2.3], 1e1, "above"),
        ([3.0, 2.9, 2.5, "missing", "errored"], 1e-1, "above"),  # nothing known beyond
        ([3.0, 2.9, 2.5, ("diverged", 1.0), ("failed", 5.0)], 1e-1, ""),
    ],
)
def test_best_lr(losses: list, value: float, censored: str) -> None:
    got = one(est.best_lr(table(FIVE, {(2, "off", 0): losses})))
    assert (got["value"], got["censored"]) == (value, censored)


def test_best_lr_without_a_stable_cell_is_unknown() -> None:
    got = one(est.best_lr(table(FIVE, {(2, "off", 0): states("ffdff")})))
    assert math.isnan(got["value"])
    assert math.isnan(got["loss"])


# -------------------------------------------------------------- usable window


@pytest.mark.parametrize(
    ("losses", "low", "high", "decades", "most", "censored"),
    [
        # Usable up to 2.1: 1e-2 and 1e-1; first unusable 1e-3 and 1.
        ([2.5, 2.05, 2.0, 2.3, ("failed", 5.0)], 1e-2, 1e-1, 1, 3, ""),
        # A usable point beyond an unusable one is not part of the window.
        ([2.0, 2.5, 2.05, 2.0, ("failed", 5.0)], 1e-3, 1e-3, 0, math.inf, "below"),
        ([2.5, 2.0, 2.0, 2.0, 2.0], 1e-2, 1e1, 3, math.inf, "above"),
        ([2.0, 2.0, 2.0, 2.0, 2.0], 1e-3, 1e1, 4, math.inf, "both"),
        # The lost cell may be usable: the window may reach up to the failed one at 10.
        ([2.5, 2.0, 2.0, "missing", ("failed", 5.0)], 1e-2, 1e-1, 1, 4, "above"),
    ],
)
def test_usable_window(
    losses: list, low: float, high: float, decades: float, most: float, censored: str
) -> None:
    got = one(est.usable_window(table(FIVE, {(2, "off", 0): losses}), margin=0.1))
    assert (got["low"], got["high"]) == (low, high)
    assert got["decades"] == pytest.approx(decades)
    assert got["decades_most"] == pytest.approx(most)
    assert got["censored"] == censored


def test_no_usable_window_without_a_stable_cell() -> None:
    got = one(est.usable_window(table(FIVE, {(2, "off", 0): states("fffff")}), margin=0.1))
    assert math.isnan(got["decades"])
    assert got["reason"] == "no stable cell"


# --------------------------------------------------------- necessity threshold


def necessity(off: list, on: list) -> pd.Series:
    cells = table(FIVE, {(2, "off", 0): off, (2, "rmsnorm", 0): on})
    return one(est.necessity_by_seed(cells, margin=0.1))


F = ("failed", 4.8)


@pytest.mark.parametrize(
    ("off", "on", "low", "high", "censored", "monotone"),
    [
        # Gains 0, 0.05, 0.2, then off unstable where on is stable; on's edge is 1.
        ([2, 2, 2.2, F, F], [2, 1.95, 2.0, 2.1, F], 1e-2, 1e-1, "", True),
        # Needed everywhere.
        ([3, 3, 3, F, F], [2, 2, 2, 2, F], 0, 1e-3, "below", True),
        # Needed nowhere up to on's edge; both fail beyond.
        ([2, 2, 2, F, F], [2, 2, 2, F, F], 1e-1, math.inf, "above", True),
        # Needed at 1e-3, not at 1e-2, needed from 1e-1 on.
        ([3, 2, 3, F, F], [2, 2, 2, 2, F], 1e-2, 1e-1, "", False),
        # Off lost at 1e-1: the threshold may be there or at 1.
        ([2, 2, "missing", F, F], [2, 2, 2, 2, F], 1e-2, 1e0, "", True),
        # On lost at 1e-1, where off fails: on may be stable there or not.
        ([2, 2, F, F, F], [2, 2, "errored", 2, F], 1e-2, 1e0, "", True),
        # On nowhere stable: nothing can be said.
        ([2, 2, F, F, F], [F, F, F, F, F], 0, math.inf, "", True),
    ],
)
def test_necessity_by_seed(
    off: list, on: list, low: float, high: float, censored: str, monotone: bool
) -> None:
    got = necessity(off, on)
    assert (got["low"], got["high"]) == (low, high)
    assert (got["censored"], got["monotone"]) == (censored, monotone)


def test_necessity_threshold_tests_from_the_top_down() -> None:
    # Gains at 1e-3: 1, 1, 1; at 1e-2: 0, 0.3, 0.6 (mean 0.3, t interval +-0.745: no);
    # at 1e-1: 0.5, 0.6, 0.55 (+-0.124: above 0.1); at 1 off fails in every seed.
    off = {0: [3, 2.0, 2.5, F, F], 1: [3, 2.3, 2.6, F, F], 2: [3, 2.6, 2.55, F, F]}
    curves = {(2, "off", seed): losses for seed, losses in off.items()}
    curves |= {(2, "rmsnorm", seed): [2, 2, 2, 2, F] for seed in off}
    got = one(est.necessity_threshold(table(FIVE, curves), margin=0.1))
    assert (got["value"], got["censored"], got["tested_to"]) == (1e-1, "", 1e0)
    assert (got["n"], got["n_asked"]) == (3, 3)


def test_pairs_need_both_arms_and_a_shared_seed() -> None:
    with pytest.raises(ConfigError, match="only 'off'"):
        est.necessity_by_seed(table(FIVE, {(2, "off", 0): states("sssff")}), 0.1)
    cells = table(FIVE, {(2, "off", 0): states("sssff"), (2, "rmsnorm", 1): states("sssff")})
    with pytest.raises(ConfigError, match="share no depth and seed"):
        est.pairs(cells, "rmsnorm")


def test_paired_by_lr_pairs_the_seeds() -> None:
    # At 1e-3 the gains are 0.1 and 0.3 though the losses differ by 1 between seeds:
    # mean 0.2, sd 0.1414, t = 0.2 / 0.1 = 2, p with 1 degree of freedom = 0.2952.
    curves = {
        (2, "off", 0): [2.1, 2.0],
        (2, "rmsnorm", 0): [2.0, "missing"],
        (2, "off", 1): [3.3, 3.0],
        (2, "rmsnorm", 1): [3.0, 2.5],
    }
    got = est.paired_by_lr(table((1e-3, 1e-2), curves))
    first, second = one(got, lr=1e-3), one(got, lr=1e-2)
    assert first["gain"] == pytest.approx(0.2)
    assert first["p"] == pytest.approx(0.2952, abs=1e-4)
    assert first["p_holm"] == pytest.approx(first["p"])  # the only one that could be tested
    assert (second["n"], second["n_asked"]) == (1, 2)
    assert math.isnan(second["p"])
    assert not second["significant"]


# ---------------------------------------------------------- steps to threshold


def history_of(cells: pd.DataFrame, losses: dict[int, list[float]]) -> pd.DataFrame:
    rows = [
        {
            "lr": 1e-3,
            "depth": 2,
            "qk_norm": "off",
            "seed": seed,
            "step": 20 * (k + 1),
            "val/loss": loss,
        }
        for seed, curve in losses.items()
        for k, loss in enumerate(curve)
    ]
    return pd.DataFrame(rows)


def test_steps_to_threshold_interpolates_and_keeps_the_censored() -> None:
    curves = {
        (2, "off", 0): [2.0],
        (2, "off", 1): [2.9],
        (2, "off", 2): [("diverged", 5.0)],
        (2, "off", 3): ["missing"],
        (2, "off", 4): [2.0],
    }
    cells = table([1e-3], curves)
    losses = {0: [4.0, 2.0], 1: [4.0, 2.9], 2: [4.0, 5.0], 3: [5.0], 4: [2.5, 2.0]}
    got = est.steps_to_threshold(cells, history_of(cells, losses), target=2.5).set_index("seed")
    # Seed 0: from 4.0 at 20 to 2.0 at 40; 2.5 is three quarters of the way: 35.
    # Seed 4: exactly 2.5 at step 20, from 6.0 at step 0.
    assert got["step"].to_dict() == {0: 35.0, 1: 100.0, 2: 100.0, 3: 20.0, 4: 20.0}
    assert got["reached"].to_dict() == {0: True, 1: False, 2: False, 3: False, 4: True}


def test_kaplan_meier_by_hand() -> None:
    # Events at 10 (5 at risk), 20 (3 at risk after one is lost at 15): 4/5, then 4/5 x 2/3.
    curve = est.kaplan_meier([10, 15, 20, 30, 30], [True, False, True, False, False])
    assert curve["survival"].tolist() == pytest.approx([0.8, 0.8 * 2 / 3])
    assert curve["at_risk"].tolist() == [5, 3]


def test_median_steps_is_open_when_most_never_arrive() -> None:
    times = pd.DataFrame(
        {
            "lr": 1e-3,
            "depth": 2,
            "qk_norm": "off",
            "step": [10.0, 100.0, 100.0],
            "reached": [True, False, False],
        }
    )
    got = one(est.median_steps(times))
    assert math.isinf(got["step"])
    assert (got["n_asked"], got["n_reached"]) == (3, 1)
    times["reached"] = [True, True, False]
    assert one(est.median_steps(times))["step"] == 100


# --------------------------------------------------------------- other scales


def test_perplexity_and_bits_per_byte() -> None:
    assert est.perplexity(math.log(8)) == pytest.approx(8)
    # 2 ln 2 nats a token of 4 bytes: 2 bits / 4 bytes.
    assert est.bits_per_byte(2 * math.log(2), 4) == pytest.approx(0.5)


def test_by_lr_never_hides_a_lost_seed() -> None:
    curves = {(2, "off", 0): [2.1, 2.0], (2, "off", 1): [2.2, 2.0], (2, "off", 2): [F, 2.3]}
    got = est.by_lr(table((1e-3, 1e-2), curves))
    first, second = one(got, lr=1e-3), one(got, lr=1e-2)
    assert first["label"] == "2/3 stable"
    assert math.isnan(first["mean"])
    assert first["median"] == pytest.approx(2.2)
    # Mean 2.1, sd 0.1732, t(2) = 4.3027: half width 0.4303.
    assert second["mean"] == pytest.approx(2.1)
    assert second["high"] - second["mean"] == pytest.approx(0.4303, abs=1e-4)


def test_reports_in_any_order_and_twice_change_nothing() -> None:
    cells = table([1e-3], {(2, "off", 0): [2.0], (2, "off", 1): [2.0], (2, "off", 2): ["missing"]})
    history = history_of(cells, {0: [4.0, 2.0], 1: [2.5, 2.0, 2.4]})
    history["attn/sink"] = np.linspace(0, 0.4, len(history))
    stray = history.iloc[:1].assign(seed=9)
    mixed = pd.concat([stray, history.iloc[::-1], history.iloc[1:3]]).set_axis(range(8))
    steps = est.steps_to_threshold(cells, history, 2.2)
    # Seed 0: from 4.0 at 20 to 2.0 at 40, 2.2 is at 38. Seed 1: from 2.5 to 2.0, at 32.
    assert steps["step"].tolist() == pytest.approx([38.0, 32.0, 0.0])
    pd.testing.assert_frame_equal(est.steps_to_threshold(cells, mixed, 2.2), steps)
    last = est.with_last_report(cells, history, ["attn/sink"])
    assert last["attn/sink"].tolist() == pytest.approx([0.1, 0.4, math.nan], nan_ok=True)
    pd.testing.assert_frame_equal(est.with_last_report(cells, mixed, ["attn/sink"]), last)
    nothing = est.steps_to_threshold(cells, history.iloc[:0], 2.2)
    assert nothing["reached"].tolist() == [False] * 3
    assert est.with_last_report(cells, history.iloc[:0], ["attn/sink"])["attn/sink"].isna().all()


def test_a_loss_at_init_below_the_target_is_reached_at_once() -> None:
    cells = table([1e-3], {(2, "off", 0): [2.0]})
    got = one(est.steps_to_threshold(cells, history_of(cells, {0: [4.0]}), target=6.0))
    assert (got["step"], got["reached"]) == (0, True)


def test_last_report_joins_metrics() -> None:
    cells = table([1e-3], {(2, "off", 0): [2.0]})
    history = history_of(cells, {0: [4.0, 2.0]}).assign(**{"attn/sink": [0.1, 0.4]})
    joined = est.with_last_report(cells, history, ["attn/sink"])
    assert one(est.by_lr(joined, ["attn/sink"]))["median"] == pytest.approx(0.4)


# ------------------------------------------------------------------ one per arm


def test_arm_summary_is_strict_json_and_keeps_censoring() -> None:
    curves = {(2, "off", s): states("sssff") for s in range(3)}
    curves |= {(2, "rmsnorm", s): states("sssss" if s else "ssssf") for s in range(3)}
    off, on = est.arm_summary(table(FIVE, curves), MARGINS)
    json.dumps([off, on], allow_nan=False)
    edge = off["max_stable_lr"]
    assert (edge["value"], edge["censored"], edge["monotone"]) == (pytest.approx(0.1), "", True)
    # All three in one bin: never a zero width.
    assert edge["low"] < 0.1
    assert edge["high"] > 1.0
    top = on["max_stable_lr"]
    assert (top["censored"], top["high"]) == ("above", None)
    assert top["value"] == pytest.approx(10 ** ((0 + 1 + 1) / 3))


def test_arm_summary_of_one_seed_has_the_grids_bin_and_no_interval() -> None:
    (arm,) = est.arm_summary(table(FIVE, {(2, "off", 0): [2.5, 2.0, 2.2, F, F]}), MARGINS)
    assert arm["max_stable_lr"]["method"] == "grid"
    assert (arm["max_stable_lr"]["low"], arm["max_stable_lr"]["high"]) == pytest.approx((0.1, 1.0))
    sensitivity = arm["lr_sensitivity"]
    # (0.5 + 0 + 0.2 + 2.8 + 2.8) / 5
    assert (sensitivity["value"], sensitivity["low"]) == (pytest.approx(1.26), None)
    assert "one seed" in sensitivity["reason"]


def test_arm_summary_never_takes_a_best_lr_at_which_a_seed_was_lost() -> None:
    curves = {(2, "off", 0): [2.5, 1.9, F], (2, "off", 1): [2.4, "errored", F]}
    (arm,) = est.arm_summary(table(FIVE[:3], curves), MARGINS)
    assert arm["best_lr"] == 1e-3
    assert arm["best_loss"] == pytest.approx(2.45)
    assert arm["lr_sensitivity"]["value"] is None
    assert "seed 1: 1 errored of 3 cells" in arm["lr_sensitivity"]["reason"]
    assert (arm["n_asked"], arm["n_found"], arm["n_errored"]) == (6, 6, 1)


# ------------------------------------------------------------- what is refused


def test_one_cell_with_two_different_rows_is_refused() -> None:
    cells = table(FIVE, {(2, "off", 0): states("sssff")})
    other = cells.iloc[[2]].assign(loss=3.0)
    with pytest.raises(ConfigError, match=r"lr 0\.1, depth 2, qk_norm off, seed 0 has two rows"):
        est.curves(pd.concat([cells, other]))


def test_unknown_state_and_empty_table_are_refused() -> None:
    cells = table(FIVE, {(2, "off", 0): states("sssff")})
    with pytest.raises(ConfigError, match="state 'lost' is not known"):
        est.curves(cells.assign(state="lost"))
    with pytest.raises(ConfigError, match="empty"):
        est.curves(cells.iloc[:0])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"steps": 200}, "steps differs"),
        ({"unigram_entropy": 4.5}, "data differs"),
        ({"precision": "bf16"}, "precision differs"),
    ],
)
def test_unlike_studies_are_not_compared(change: dict, named: str) -> None:
    cells = table(FIVE, {(2, "off", 0): states("sssff")})
    with pytest.raises(ConfigError, match=f"one and two: {named}"):
        est.require_comparable({"one": cells, "two": cells.assign(**change)})
    mixed = pd.concat([cells, cells.assign(seed=1, **change)])
    with pytest.raises(ConfigError, match="run alike"):
        est.require_uniform(mixed)


def test_other_grids_and_ranges_are_not_compared() -> None:
    cells = table(FIVE, {(2, "off", 0): states("sssff")})
    fewer = table(FIVE[:4], {(2, "off", 0): states("sssf")})
    with pytest.raises(ConfigError, match="LR grid differs, 5 LRs"):
        est.require_comparable({"one": cells, "two": fewer})
    ranges = {"one": (1e-3, 1.0), "two": None}
    with pytest.raises(ConfigError, match="LR range differs"):
        est.require_comparable({"one": cells, "two": cells}, ranges)
    est.require_comparable({"one": cells, "two": cells.copy()}, {"one": None, "two": None})


# ----------------------------------------------------------------- properties

letters = st.text("sfdem", min_size=5, max_size=5)
bounded = settings(max_examples=12, deadline=None, derandomize=True)


def everything(cells: pd.DataFrame) -> list[pd.DataFrame]:
    return [
        est.lr_sensitivity(cells),
        est.max_stable_lr(cells),
        est.best_lr(cells),
        est.usable_window(cells, 0.1),
        est.necessity_by_seed(cells, 0.1),
        est.necessity_threshold(cells, 0.1),
        est.paired_by_lr(cells),
        est.by_lr(cells),
    ]


@settings(bounded, max_examples=4)
@given(rows=st.lists(letters, min_size=4, max_size=4), order=st.randoms(use_true_random=False))
def test_row_order_and_repeated_rows_change_nothing(rows: list[str], order) -> None:
    keys = [(2, "off", 0), (2, "off", 1), (2, "rmsnorm", 0), (2, "rmsnorm", 1)]
    cells = table(FIVE, {key: states(row) for key, row in zip(keys, rows, strict=True)})
    index = [*range(len(cells)), *range(0, len(cells), 3)]
    order.shuffle(index)
    shuffled = cells.iloc[index].set_axis(range(100, 100 + len(index)))
    for expected, got in zip(everything(cells), everything(shuffled), strict=True):
        pd.testing.assert_frame_equal(expected, got)


@bounded
@given(row=letters, factor=st.sampled_from([1e-2, 10.0, 1e3]))
def test_scaling_the_learning_rates_scales_the_edge_and_nothing_else(
    row: str, factor: float
) -> None:
    cells = table(FIVE, {(2, "off", 0): states(row)})
    scaled = cells.assign(lr=cells["lr"] * factor)
    before, after = one(est.max_stable_lr(cells)), one(est.max_stable_lr(scaled))
    assert after["low"] == pytest.approx(before["low"] * factor)
    assert after["high"] == pytest.approx(before["high"] * factor)
    a, b = one(est.lr_sensitivity(cells))["value"], one(est.lr_sensitivity(scaled))["value"]
    assert a == pytest.approx(b, nan_ok=True)


@bounded
@given(
    losses=st.lists(st.floats(2.0, 7.0), min_size=5, max_size=5),
    worse=st.integers(0, 4),
    by=st.floats(0.01, 3.0),
)
def test_a_worse_loss_beside_the_best_never_lowers_sensitivity(
    losses: list[float], worse: int, by: float
) -> None:
    def value(entries: list[float]) -> float:
        return float(one(est.lr_sensitivity(table(FIVE, {(2, "off", 0): entries})))["value"])

    if worse == int(np.argmin(losses)):
        return
    risen = [x + by * (k == worse) for k, x in enumerate(losses)]
    assert value(risen) >= value(losses) - 1e-12


@bounded
@given(row=st.text("sfd", min_size=5, max_size=5), lost=st.sets(st.integers(0, 4)))
def test_lost_cells_only_ever_widen_the_edges_bin(row: str, lost: set[int]) -> None:
    holes = "".join("m" if k in lost else letter for k, letter in enumerate(row))
    whole = one(est.max_stable_lr(table(FIVE, {(2, "off", 0): states(row)})))
    holed = one(est.max_stable_lr(table(FIVE, {(2, "off", 0): states(holes)})))
    assert holed["low"] <= whole["low"]
    assert holed["high"] >= whole["high"]
