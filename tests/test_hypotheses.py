"""Verdicts: each can be reached, for the right reason, and never from no evidence."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from analysis import hypotheses
from analysis.hypotheses import Verdict, judge
from analysis.simulate import Arm, World, draw
from tests.hand_tables import states, table
from tune_study.config import ConfigError, Margins, log_grid

LRS = log_grid(1e-3, 1.0, 4)
MARGINS = Margins()
SAME = World(on=World().off)
FALLING = World(
    off=Arm(edge=0.16, depth_exponent=-1.0), on=Arm(edge=0.4, edge_sd=0.1, shoulder=0.17)
)


def study(world: World, seeds: int = 5, depths: tuple[int, ...] = (1, 2, 4)) -> pd.DataFrame:
    return draw(world, LRS, depths, seeds, 1, np.random.default_rng(7)).cells()


def verdicts(cells: pd.DataFrame, margins: Margins = MARGINS) -> dict[str, Verdict]:
    return {v.hypothesis: v for v in judge(cells, margins)}


def test_an_effect_of_the_pilots_size_is_found() -> None:
    got = verdicts(study(World()))
    assert (got["H1"].verdict, got["H2"].verdict) == ("supported", "supported")
    assert len(got["H1"].parts) == len(got["H2"].parts) == 6
    assert got["H1"].needed == got["H2"].needed == ""


def test_a_falling_threshold_is_found_and_a_level_one_is_not() -> None:
    assert verdicts(study(FALLING))["H3"].verdict == "supported"
    level = verdicts(study(World()))["H3"]
    assert level.verdict != "supported"
    assert level.needed


def test_no_effect_supports_nothing() -> None:
    assert "supported" not in {v.verdict for v in verdicts(study(SAME)).values()}


def test_a_harmful_arm_contradicts() -> None:
    swapped = World(off=World().on, on=World().off)
    got = verdicts(study(swapped))
    assert (got["H1"].verdict, got["H2"].verdict) == ("contradicted", "contradicted")
    assert got["H2"].deciding.verdict == "contradicted"


def test_help_at_low_learning_rates_contradicts_h1() -> None:
    eager = replace(World(), on=replace(World().on, slow_lr=5e-4))
    got = verdicts(study(eager))["H1"]
    assert got.verdict == "contradicted"
    assert "up to off's best LR" in got.deciding.name


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_every_verdict_is_strict_json_with_a_sentence(seeds: int) -> None:
    world = World(missing=0.03, errored=0.02, stopped=0.3)
    for verdict in judge(study(world, seeds), MARGINS):
        text = json.dumps(verdict.to_dict(), allow_nan=False)
        assert verdict.hypothesis in verdict.sentence
        assert json.loads(text)["n_asked"] == seeds
        assert (verdict.verdict == "inconclusive") or verdict.deciding.n >= 2


def test_one_seed_decides_nothing() -> None:
    for verdict in judge(study(World(), seeds=1), MARGINS):
        assert verdict.verdict == "inconclusive"
        assert "seed" in verdict.needed


def test_h1_by_hand() -> None:
    # Off's best LR is 1e-2 in both seeds. Mean gains up to it: (0.02 + 0) / 2 = 0.01 and
    # (0 + 0.04) / 2 = 0.02; above it (0.5 + 2.8) / 2 = 1.65 and (0.7 + 2.8) / 2 = 1.75.
    f = ("failed", 4.8)
    curves = {
        (2, "off", 0): [2.52, 2.0, 2.5, f],
        (2, "rmsnorm", 0): [2.50, 2.0, 2.0, 2.0],
        (2, "off", 1): [2.50, 2.04, 2.7, f],
        (2, "rmsnorm", 1): [2.50, 2.00, 2.0, 2.0],
    }
    cells = table((1e-3, 1e-2, 1e-1, 1.0), curves)
    low, high = verdicts(cells)["H1"].parts
    assert low.effect == pytest.approx(0.015)
    assert high.effect == pytest.approx(1.7)
    # Two seeds, t(1) = 12.706: 0.015 +- 12.706 * 0.005 = +-0.0635, and 1.7 +- 0.6353.
    assert (low.low, low.high) == (
        pytest.approx(-0.0485, abs=1e-3),
        pytest.approx(0.0785, abs=1e-3),
    )
    assert high.low == pytest.approx(1.0647, abs=1e-3)
    assert (low.verdict, high.verdict) == ("supported", "supported")


def test_an_edge_beyond_the_grid_can_still_support() -> None:
    lrs = log_grid(1e-3, 1.0, 4)
    curves = {(2, "off", s): states("ssss" + "f" * 9) for s in range(3)}
    curves |= {(2, "rmsnorm", s): states("s" * 13) for s in range(3)}
    ratio = verdicts(table(lrs, curves))["H2"].parts[0]
    assert ratio.high == np.inf
    assert ratio.verdict == "supported"
    assert np.isnan(ratio.effect)


def test_ratio_of_edges_in_one_bin_is_as_wide_as_the_bins() -> None:
    # Every seed: off in [0.1, 1), on in [1, 10): the ratio lies between 1 and 100.
    lrs = (1e-2, 1e-1, 1e0, 1e1)
    curves = {(2, "off", s): states("ssff") for s in range(3)}
    curves |= {(2, "rmsnorm", s): states("sssf") for s in range(3)}
    ratio = verdicts(table(lrs, curves))["H2"].parts[0]
    assert ratio.effect == pytest.approx(10)
    assert ratio.low <= 1
    assert ratio.high >= 100
    assert ratio.verdict == "inconclusive"
    assert "a grid with steps of" in ratio.needed


def test_lost_seed_lowers_n_and_is_named() -> None:
    cells = study(World(), seeds=3, depths=(2,))
    hit = (cells["seed"] == 1) & (cells["qk_norm"] == "off") & (cells["lr"] == 0.01)
    cells.loc[hit, ["state", "loss"]] = ["errored", np.nan]
    got = verdicts(cells)
    drop = got["H2"].parts[1]
    assert (drop.n, drop.n_asked) == (2, 3)
    assert "1 of 3 seeds have no value" in drop.note


def test_off_best_at_the_top_of_the_grid_leaves_nothing_above_it() -> None:
    curves = {(2, arm, s): [3.0, 2.5, 2.0 + s / 100] for arm in ("off", "rmsnorm") for s in (0, 1)}
    high = verdicts(table((1e-3, 1e-2, 1e-1), curves))["H1"].parts[1]
    assert (high.verdict, high.n) == ("inconclusive", 0)
    assert "no seed has learning rates there" in high.needed


def test_one_depth_has_no_slope() -> None:
    got = verdicts(study(World(), depths=(2,)))["H3"]
    assert (got.verdict, got.n) == ("inconclusive", 0)
    assert "at least two depths" in got.needed


def test_cells_run_unlike_are_refused() -> None:
    cells = study(World(), seeds=2, depths=(1,))
    cells.loc[cells["seed"] == 1, "steps"] = 800
    with pytest.raises(ConfigError, match="steps differ"):
        judge(cells, MARGINS)


def test_margins_move_the_verdict() -> None:
    cells = study(World())
    strict = verdicts(cells, MARGINS.replace(stable_lr_ratio=100.0, sensitivity=5.0))
    assert strict["H2"].verdict == "contradicted"


def test_fewer_seeds_are_the_same_as_a_smaller_study() -> None:
    cells = study(World(), seeds=4, depths=(1, 2))
    evidence = hypotheses.gather(cells, "rmsnorm", MARGINS).of_seeds([0, 1, 3])
    got = hypotheses.judge_evidence(evidence, MARGINS)
    expected = judge(cells[cells["seed"] != 2], MARGINS)
    assert [v.to_dict() for v in got] == [v.to_dict() for v in expected]
