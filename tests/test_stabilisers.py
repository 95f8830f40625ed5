"""The ranking of arms and the interaction of two, worked by hand; ties, censoring, cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis import arms, intervals, stabilisers
from tests import hand_tables
from tests.hand_tables import Entry
from tune_study.config import Margins

LRS = (1e-3, 1e-2, 1e-1, 1.0)
MARGINS = Margins()

quick = settings(max_examples=25, deadline=None, derandomize=True)


def cells(curves: Mapping[tuple[str, int], Sequence[Entry]], **shared: Any) -> pd.DataFrame:
    """A table of arms at depth 2, by (arm, seed); softcap50 and zloss1e-4 share qk_norm = off."""
    table = hand_tables.table(
        LRS, {(2, arm, seed): entries for (arm, seed), entries in curves.items()}
    )
    norms = [arms.components(arm) for arm in table["qk_norm"]]
    return table.assign(
        arm=table["qk_norm"], qk_norm=["rmsnorm" if "rmsnorm" in n else "off" for n in norms]
    ).assign(**shared)


def fails(loss: float) -> Entry:
    return ("failed", loss)


def hand() -> pd.DataFrame:
    """Three arms, four learning rates, three seeds.

    LR sensitivity, the mean of loss - lowest loss:
        off        (1 + 0 + 2.8 + 3.0)/4 = 1.70, (1 + 0 + 2.9 + 3.1)/4 = 1.75, 1.65
        rmsnorm    (1 + 0 + 0 + 2.8)/4   = 0.95, (1 + 0 + 0.1 + 3.0)/4 = 1.025, 0.95
        zloss1e-4  1.70, 1.80, 1.60
    """
    return cells(
        {
            ("off", 0): [3.0, 2.0, fails(4.8), fails(5.0)],
            ("off", 1): [3.0, 2.0, fails(4.9), fails(5.1)],
            ("off", 2): [3.1, 2.1, fails(4.8), fails(5.0)],
            ("rmsnorm", 0): [3.0, 2.0, 2.0, fails(4.8)],
            ("rmsnorm", 1): [3.0, 2.0, 2.1, fails(5.0)],
            ("rmsnorm", 2): [3.1, 2.1, 2.1, fails(4.9)],
            ("zloss1e-4", 0): [3.0, 2.0, fails(4.8), fails(5.0)],
            ("zloss1e-4", 1): [3.0, 2.0, fails(5.0), fails(5.2)],
            ("zloss1e-4", 2): [3.1, 2.1, fails(4.7), fails(4.9)],
        }
    )


def ranked(table: pd.DataFrame, quantity: str) -> pd.DataFrame:
    values = stabilisers.by_seed(table, MARGINS)
    rows = stabilisers.ranking(values, arms.names(table)[0], step=1.0)
    return rows[rows["quantity"] == quantity].set_index("arm")


# ------------------------------------------------------------------ the ranking


def test_ranking_of_three_arms_by_hand() -> None:
    rows = ranked(hand(), "lr_sensitivity")
    assert rows["value"].to_dict() == {
        "off": pytest.approx(1.70),
        "rmsnorm": pytest.approx(2.925 / 3),
        "zloss1e-4": pytest.approx(1.70),
    }
    # Paired differences of rmsnorm: -0.75, -0.725, -0.70; sd 0.025, t = 0.725 / (0.025 / sqrt 3).
    # With two degrees p = 1 - t / sqrt(t^2 + 2) = 0.000396, twice that over the two arms.
    rms = rows.loc["rmsnorm"]
    assert rms["change"] == pytest.approx(-0.725)
    half = 4.302653 * 0.025 / math.sqrt(3)
    assert (rms["change_low"], rms["change_high"]) == pytest.approx((-0.725 - half, -0.725 + half))
    assert rms["p"] == pytest.approx(0.000396, abs=2e-6)
    assert rms["p_holm"] == pytest.approx(2 * rms["p"])
    assert rms["outcome"] == "better"
    # Those of zloss1e-4: 0, 0.05, -0.05.
    assert rows.loc["zloss1e-4", "change"] == pytest.approx(0)
    assert rows.loc["zloss1e-4", "p"] == pytest.approx(1)
    assert rows.loc["zloss1e-4", "outcome"] == ""
    assert math.isnan(rows.loc["off", "p"])


def test_arms_that_cannot_be_told_apart_stay_tied() -> None:
    rows = ranked(hand(), "lr_sensitivity")
    ranks = {arm: (row["rank_first"], row["rank_last"]) for arm, row in rows.iterrows()}
    # rmsnorm against zloss1e-4: -0.75, -0.775, -0.65; t = 18.98, p = 0.0028; Holm 0.0055.
    assert ranks == {"rmsnorm": (1, 1), "off": (2, 3), "zloss1e-4": (2, 3)}
    # One grid step higher in all three seeds: the bin of the ratio is [1, 100], which holds 1.
    edges = ranked(hand(), "max_stable_lr")
    assert edges["value"].to_dict() == pytest.approx(
        {"off": 0.01, "rmsnorm": 0.1, "zloss1e-4": 0.01}
    )
    assert (edges["rank_first"] == 1).all()
    assert (edges["rank_last"] == 3).all()
    assert edges.loc["rmsnorm", "change_low"] < 1


def test_an_arm_that_outlasts_the_grid_is_at_least_so_much_better() -> None:
    """All of rmsnorm's cells stable: its edge is >= 1, the ratio's bin [10, inf) in every seed."""
    table = hand()
    table.loc[table["arm"] == "rmsnorm", "state"] = "stable"
    row = ranked(table, "max_stable_lr").loc["rmsnorm"]
    assert (row["value"], row["censored"]) == (pytest.approx(1.0), "above")
    assert math.isnan(row["change"])
    assert row["change_high"] == math.inf
    # Taken as [1, 3] in log10, the likelihood at 0 is (Phi(3/s) - Phi(1/s))^3, highest where
    # ln 3 = 4 / s^2, at 0.2420^3; t^2 = 2 (0.2420^-2 - 1), p = 1 - t / sqrt(t^2 + 2) = 0.0297.
    assert row["p"] == pytest.approx(0.0297, abs=5e-4)
    assert 1 < row["change_low"] < 10


def test_a_seed_without_evidence_lowers_n_and_is_named() -> None:
    table = hand()
    lost = (table["arm"] == "rmsnorm") & (table["seed"] == 1) & (table["lr"] == 1e-3)
    table.loc[lost, ["state", "loss"]] = ["missing", math.nan]
    row = ranked(table, "lr_sensitivity").loc["rmsnorm"]
    assert (row["n"], row["n_asked"]) == (2, 3)
    assert math.isnan(row["value"])  # a mean of two seeds beside means of three
    assert row["reason"] == "seed 1: 1 missing of 4 cells"
    assert not math.isnan(row["change"])


def test_an_arm_without_any_value_has_no_rank() -> None:
    table = hand()
    table.loc[table["arm"] == "zloss1e-4", "state"] = "diverged"
    rows = ranked(table, "lr_sensitivity")
    assert rows.loc["zloss1e-4", ["rank_first", "rank_last", "n_ranked"]].tolist() == [0, 0, 0]
    assert "no stable cell" in rows.loc["zloss1e-4", "reason"]
    assert rows.loc["off", "rank_last"] == 2
    assert ranked(table, "max_stable_lr").loc["zloss1e-4", "censored"] == "below"


def test_one_seed_ranks_nothing() -> None:
    table = hand()
    rows = ranked(table[table["seed"] == 0], "lr_sensitivity")
    assert rows["p"].isna().all()
    assert (rows["outcome"] == "").all()
    assert (rows["rank_last"] - rows["rank_first"] == 2).all()


def test_usable_window_and_best_loss() -> None:
    """off is usable at 0.01 only, rmsnorm at 0.01 and 0.1: 0 and 1 decade, up to 2 and 3."""
    windows = ranked(hand(), "usable_window")
    assert windows["value"].to_dict() == {"off": 0, "rmsnorm": 1, "zloss1e-4": 0}
    best = ranked(hand(), "best_loss")
    assert best.loc["off", "value"] == pytest.approx((2.0 + 2.0 + 2.1) / 3)
    # rmsnorm's lowest mean is at 0.01 too; the same losses to the last bit are no difference.
    assert best.loc["rmsnorm", "change"] == 0
    assert (best.loc["rmsnorm", "p"], best.loc["rmsnorm", "outcome"]) == (1.0, "")


seeds_of = st.lists(
    st.floats(-2, 2, allow_nan=False, width=32), min_size=3, max_size=3, unique=True
)


@quick
@given(st.lists(seeds_of, min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_rankings_hold_together(values: list[list[float]], random: Any) -> None:
    table = _values("lr_sensitivity", {f"a{i}": v for i, v in enumerate(values)})
    rows = stabilisers.ranking(table, "a0", step=1.0).set_index("arm")
    assert (rows["rank_first"] >= 1).all()
    assert (rows["rank_first"] <= rows["rank_last"]).all()
    assert (rows["rank_last"] <= len(values)).all()
    assert (rows["p_holm"].dropna() >= rows["p"].dropna() - 1e-12).all()
    # A lower mean never ranks wholly behind a higher one.
    means = {f"a{i}": np.mean(v) for i, v in enumerate(values)}
    for one in means:
        for other in means:
            if rows.loc[one, "rank_last"] < rows.loc[other, "rank_first"]:
                assert means[one] < means[other]
    # Neither the order of the rows nor what the seeds are called says anything.
    order = list(range(len(table)))
    random.shuffle(order)
    again = table.iloc[order].assign(seed=lambda t: 7 - t["seed"])
    shuffled = stabilisers.ranking(again, "a0", step=1.0).set_index("arm").loc[rows.index]
    for name in ("change", "p_holm", "rank_first", "rank_last"):
        np.testing.assert_allclose(shuffled[name].to_numpy(float), rows[name].to_numpy(float))


@quick
@given(st.lists(st.integers(0, 8), min_size=3, max_size=3), st.integers(1, 6))
def test_a_better_edge_never_counts_as_worse(at: list[int], up: int) -> None:
    """One arm's bins `up` steps above the baseline's in every seed, and an arm equal to it."""
    low = np.array(at, dtype=float)
    table = pd.concat(
        _values("max_stable_lr", {arm: low + shift}, high={arm: low + shift + 1})
        for arm, shift in (("off", 0), ("same", 0), ("up", up))
    )
    rows = stabilisers.ranking(table, "off", step=1.0).set_index("arm")
    assert rows.loc["same", "outcome"] == ""
    assert rows.loc["up", "outcome"] in ("", "better")
    assert rows.loc["up", "change"] == pytest.approx(10.0**up)


def _values(
    quantity: str,
    low: Mapping[str, Sequence[float]],
    high: Mapping[str, Sequence[float]] | None = None,
) -> pd.DataFrame:
    """A table as `by_seed` gives it, for one quantity at depth 2."""
    ends = high or low
    return pd.DataFrame(
        [
            {
                "quantity": quantity,
                "depth": 2,
                "arm": arm,
                "seed": seed,
                "value": 10.0**x if stabilisers.BY_NAME[quantity].log else x,
                "low": x,
                "high": ends[arm][seed],
                "censored": "",
                "reason": "",
            }
            for arm, values in low.items()
            for seed, x in enumerate(values)
        ]
    )


# -------------------------------------------------------------------- intervals


def test_bin_test_is_the_dual_of_bin_bounds() -> None:
    """At the level 1 - p the interval of the same bins ends at 0."""
    low, high = [0.2, 0.5, 0.9], [0.7, 1.0, 1.4]
    p = float(intervals.bin_test(low, high, 0.5))
    assert 0.001 < p < 0.2
    edge, _ = intervals.bin_bounds(low, high, 0.5, level=1 - p)
    assert float(edge) == pytest.approx(0, abs=1e-3)


def test_bin_test_of_bins_that_vanish_is_the_t_test() -> None:
    x = np.array([1.0, 2.0, 4.0, 4.5])
    expected = float(intervals.t_test(x.mean(), x.std(ddof=1), 4))
    assert intervals.bin_test(x - 5e-4, x + 5e-4, 1e-3) == pytest.approx(expected, rel=0.02)


def test_bin_test_with_open_bins() -> None:
    """Open away from 0 it is tested as if closed; open towards 0 nothing is known."""
    closed = intervals.bin_test([1, 1, 1], [3, 3, 3], 2.0)
    assert intervals.bin_test([1, 1, 1], [np.inf, 3, 3], 2.0) == pytest.approx(closed)
    assert intervals.bin_test([-np.inf, 1, 1], [3, 3, 3], 2.0) == 1.0
    assert math.isnan(intervals.bin_test([1], [3], 2.0))
    assert intervals.bin_test([-1, -1, -1], [1, 1, 1], 2.0) == pytest.approx(1)
    assert intervals.bin_test([1e4] * 3, [1e4 + 1] * 3, 1.0) < 1e-6


# ------------------------------------------------------------------ interaction


def _crossed(off: Sequence[float], a: Sequence[float], b: Sequence[float], both: Sequence[float]):
    values = {"off": off, "rmsnorm": a, "zloss1e-4": b, "rmsnorm+zloss1e-4": both}
    (found,) = stabilisers.interactions(_values("lr_sensitivity", values), MARGINS, step=1.0)
    return found


def test_interaction_by_hand() -> None:
    """Each alone takes off about 1; together no more than rmsnorm alone.

    both - a - b + off, seed by seed: 1.0, 1.1, 0.9; sd 0.1, half width 4.3027 x 0.1 / sqrt 3.
    """
    found = _crossed(
        off=[2.00, 2.10, 1.90], a=[1.00, 1.00, 1.00], b=[1.01, 0.99, 1.00], both=[1.01, 0.99, 1.00]
    )
    effects = found["effects"]
    assert effects["interaction"]["value"] == pytest.approx(1.0)
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert effects["interaction"]["low"] == pytest.approx(1 - half)
    assert effects["first"]["value"] == pytest.approx(-1.0)
    assert effects["second_with_first"]["value"] == pytest.approx(0.0)
    # Mean of -1 (alone) and 0 (with the other).
    assert effects["main_first"]["value"] == pytest.approx(-0.5)
    assert effects["main_second"]["value"] == pytest.approx(-0.5)
    assert found["arms"] == ["off", "rmsnorm", "zloss1e-4", "rmsnorm+zloss1e-4"]
    assert found["verdict"] == "sub-additive"
    assert "zloss1e-4 adds nothing (within 0.1 nats) once rmsnorm is on" in found["sentence"]


def test_words_go_no_further_than_the_interval() -> None:
    """The same means with seeds that scatter: neither additive nor not, and nothing 'nothing'."""
    found = _crossed(
        off=[2.0, 3.0, 1.0], a=[1.0, 0.5, 1.5], b=[1.0, 1.6, 0.4], both=[1.4, 0.6, 1.0]
    )
    assert found["verdict"] == "not decided"
    assert "adds nothing" not in found["sentence"]
    assert "what zloss1e-4 adds once rmsnorm is on is not decided" in found["sentence"]


def test_effects_that_add_up() -> None:
    # both = off - 0.5 - 0.3, to a hundredth.
    found = _crossed(
        off=[2.0, 2.1, 1.9], a=[1.5, 1.61, 1.4], b=[1.7, 1.8, 1.61], both=[1.21, 1.3, 1.1]
    )
    assert found["verdict"] == "additive"
    assert "zloss1e-4 still helps once rmsnorm is on" in found["sentence"]


def test_interaction_of_edges_is_a_bin_of_four() -> None:
    """log10 edges 0, 1, 1, 3 in bins of a step: the interaction 3 - 1 - 1 + 0 = 1, +- 2 steps."""
    low = {"off": [0.0] * 3, "rmsnorm": [1.0] * 3, "zloss1e-4": [1.0] * 3}
    low |= {"rmsnorm+zloss1e-4": [3.0] * 3}
    high = {arm: [x + 1 for x in values] for arm, values in low.items()}
    (found,) = stabilisers.interactions(_values("max_stable_lr", low, high), MARGINS, step=1.0)
    interaction = found["effects"]["interaction"]
    assert interaction["value"] == pytest.approx(10.0)
    assert interaction["low"] < 10.0**-1
    assert interaction["high"] > 10.0**3
    assert found["verdict"] == "not decided"


def test_an_unknown_corner_leaves_the_interaction_unknown() -> None:
    nan = [math.nan] * 3
    found = _crossed(off=[2.0, 2.1, 1.9], a=[1.0] * 3, b=[1.0] * 3, both=nan)
    assert found["verdict"] == "not known"
    assert math.isnan(found["p_holm"])


def test_every_two_by_two_is_found_and_no_other() -> None:
    found = arms.factorials(
        ["off", "rmsnorm", "softcap50", "rmsnorm+softcap50", "rmsnorm+zloss1e-4", "zloss1e-4", "l2"]
    )
    assert [(f.first, f.second, f.neither) for f in found] == [
        ("rmsnorm", "softcap50", "off"),
        ("rmsnorm", "zloss1e-4", "off"),
    ]


# ------------------------------------------------------------------------- cost


def test_in_flight_is_the_mean_number_at_once() -> None:
    # 0-10 alone but for 5-10, in which a second runs: 15 cell-seconds in 10; 5-15: the same.
    # 20-30 alone; one of unknown times counts nowhere.
    started, ended = np.array([0.0, 5, 20, math.nan]), np.array([10.0, 15, 30, math.nan])
    got = stabilisers.in_flight(started, ended)
    np.testing.assert_allclose(got, [1.5, 1.5, 1.0, math.nan])
    assert len(stabilisers.in_flight(np.array([]), np.array([]))) == 0


def timed_by_hand() -> pd.DataFrame:
    """Cells two at a time, 100 steps in 8 s each; rmsnorm takes 10 s."""
    table = hand().sort_values(["seed", "lr", "arm"], ignore_index=True)
    start = np.arange(len(table)) // 2 * 10.0
    seconds = np.where(table["arm"] == "rmsnorm", 10.0, 8.0)
    return table.assign(started=start, ended=start + 10, seconds=seconds)


def test_cost_compares_like_with_like() -> None:
    """Left out: two that ran alone and twice as fast, and one that diverged."""
    table = timed_by_hand()
    n = len(table)
    table.loc[n - 1, ["started", "ended", "seconds"]] = [1000.0, 1010.0, 4.0]
    table.loc[n - 2, ["started", "ended", "seconds"]] = [2000.0, 2010.0, 4.0]
    table.loc[0, ["state", "seconds"]] = ["diverged", 1.0]
    assert len(stabilisers.timed(table)) == n - 3
    row = ranked(table, "step_ms").loc["rmsnorm"]
    assert row["change"] == pytest.approx(1.25)
    cost = stabilisers.step_cost(table).set_index("arm")["value"]
    assert set(cost["off"].round(9)) == {80.0}
    spread = stabilisers.cost_spread(table).set_index("arm")
    assert spread.loc["off", ["q1", "q3"]].tolist() == [80.0, 80.0]
    assert spread["n_cells"].sum() == n - 3


def test_a_busy_machine_slows_a_block_and_no_arm() -> None:
    """Every learning rate runs at another speed; the ratio of the arms stays 1.25 in each."""
    table = timed_by_hand()
    busy = {1e-3: 1.0, 1e-2: 3.0, 1e-1: 0.5, 1.0: 9.0}
    table["seconds"] *= table["lr"].map(busy)
    # A cell that was slow by itself does not decide.
    hit = (table["arm"] == "rmsnorm") & (table["lr"] == 1e-2)
    table.loc[hit, "seconds"] *= 1.2
    row = ranked(table, "step_ms").loc["rmsnorm"]
    assert row["change"] == pytest.approx(1.25)


def test_a_table_without_times_has_no_cost() -> None:
    rows = ranked(hand(), "step_ms")
    assert rows["value"].isna().all()
    assert rows["reason"].str.contains("could be timed").all()


# ------------------------------------------------------------------------- arms


def test_the_baseline_has_the_fewest_components() -> None:
    assert arms.names(hand()) == ["off", "rmsnorm", "zloss1e-4"]
    assert arms.baseline(["rmsnorm+zloss1e-4", "rmsnorm", "zloss1e-4"]) == "rmsnorm"


def test_arms_that_share_qk_norm_are_never_mixed() -> None:
    """zloss1e-4 is qk_norm = off as the baseline is; it is no part of the question of QK-norm."""
    table = hand()
    assert (table.loc[table["arm"] == "zloss1e-4", "qk_norm"] == "off").all()
    assert arms.qk_norm_arms(table) == ["off", "rmsnorm"]
    assert arms.has_stabilisers(table)
    pair = table[table["arm"].isin(["off", "rmsnorm"])]
    assert not arms.has_stabilisers(pair)
    assert arms.qk_norm_arms(pair) == ["off", "rmsnorm"]


def test_settings_of_qk_norm_alone_are_all_about_qk_norm() -> None:
    table = hand_tables.table(
        LRS, {(1, arm, 0): [2.0] * 4 for arm in ("off", "rmsnorm", "layernorm")}
    )
    table = table.assign(arm=table["qk_norm"])
    assert arms.qk_norm_arms(table) == ["off", "rmsnorm", "layernorm"]
    assert arms.has_stabilisers(table)
