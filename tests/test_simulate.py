"""The simulator: its truth is what it says, and its studies look like the measured ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from analysis import estimators
from analysis.simulate import Arm, World, curve, draw, true_log_edges, true_thresholds
from analysis.tables import ASKED, CELL_COLUMNS, STATES
from tune_study.config import log_grid

LRS = log_grid(1e-3, 1.0, 4)
QUIET = World(
    off=Arm(edge=0.08, edge_sd=0.0),
    on=Arm(edge=0.4, edge_sd=0.0, shoulder=0.17),
    seed_sd=0.0,
    cell_sd=0.0,
    jitter=0.0,
)


def test_tables_have_every_column_and_one_row_a_cell() -> None:
    world = World(missing=0.1, errored=0.1, stopped=0.5)
    cells = draw(world, LRS, (1, 2), 3, 4, np.random.default_rng(0)).cells(slice(None))
    assert list(cells) == list(CELL_COLUMNS)
    assert len(cells) == 4 * 13 * 2 * 2 * 3
    assert not cells.duplicated(["lr", "depth", "qk_norm", "seed"]).any()
    assert set(cells["state"].unique()) == set(ASKED)
    assert cells.loc[cells["state"].isin(["missing", "errored"]), "loss"].isna().all()


def test_same_generator_same_studies() -> None:
    a, b = (draw(World(), LRS, (2,), 3, 2, np.random.default_rng(5)) for _ in range(2))
    np.testing.assert_array_equal(a.loss, b.loss)
    np.testing.assert_array_equal(a.state, b.state)


def test_curves_are_those_of_the_tables() -> None:
    world = World(missing=0.1, errored=0.1, stopped=0.5)
    drawn = draw(world, LRS, (1, 2), 3, 4, np.random.default_rng(0))
    for got, expected in (
        (drawn.curves(), estimators.curves(drawn.cells(slice(None)))),
        (drawn.curves(slice(2, 3)), estimators.curves(drawn.cells(2))),
    ):
        pd.testing.assert_frame_equal(got.keys, expected.keys)
        for name in ("lr", "state", "loss", "loss_init", "unigram_entropy"):
            np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))


def test_failed_and_stopped_runs_stand_where_they_were_measured() -> None:
    drawn = draw(World(stopped=0.5), LRS, (2,), 200, 1, np.random.default_rng(0))
    loss, state = drawn.loss[0, 0, 0], drawn.state[0, 0, 0]
    # Far above the edge a failed run ends at 0.97 of the way from 0.85 to 4.88 nats: 4.76.
    end = loss[:, -1][state[:, -1] == STATES.index("failed")]
    assert end.mean() == pytest.approx(4.76, abs=0.02)
    # A stopped one stood above H1, by 0.04 x sqrt(2 / pi) = 3.2 % of it on average.
    stop = loss[state == STATES.index("diverged")] / 4.88
    assert stop.min() >= 1
    assert stop.mean() == pytest.approx(1.032, abs=0.004)


def test_the_normalised_loss_is_half_at_the_edge() -> None:
    for arm in (QUIET.off, QUIET.on):
        high = replace(arm, slow_lr=1e-9)
        loss = curve(QUIET, high, np.log10([arm.edge]), np.log10(arm.edge))
        middle = QUIET.best + (QUIET.plateau - QUIET.best) / 2
        assert loss == pytest.approx(middle, abs=0.01)


def test_without_noise_the_edge_is_bracketed_and_the_ratio_is_true() -> None:
    cells = draw(QUIET, LRS, (1,), 1, 1, np.random.default_rng(0)).cells()
    edges = estimators.max_stable_lr(cells)
    for (_, row), log_edge in zip(edges.iterrows(), true_log_edges(QUIET, (1,))[0], strict=True):
        assert row["low"] <= 10**log_edge < row["high"]
    assert edges["low"].tolist() == [0.0562, 0.316]


def test_true_threshold_lies_in_the_bin_the_estimator_finds() -> None:
    cells = draw(QUIET, LRS, (1,), 1, 1, np.random.default_rng(0)).cells()
    row = estimators.necessity_by_seed(cells, margin=0.1).iloc[0]
    truth = 10 ** true_thresholds(QUIET, (1,), 0.1, draws=1)[0]
    assert row["low"] < truth <= row["high"]


def test_thresholds_follow_the_depth_exponent() -> None:
    falling = replace(QUIET, off=replace(QUIET.off, depth_exponent=-0.5))
    one, four = true_thresholds(falling, (1, 4), 0.1, draws=1)
    assert four - one == pytest.approx(-0.5 * np.log10(4), abs=0.02)


def test_spread_over_seeds_grows_near_the_edge_as_measured() -> None:
    # Measured at pilot size: sd 0.02 at lr 1e-2, about 0.4 at off's edge.
    off = draw(World(), LRS, (2,), 400, 1, np.random.default_rng(0)).loss[0, 0, 0]
    spread = off.std(axis=0)
    assert 0.01 < spread[LRS.index(0.01)] < 0.03
    assert 0.25 < spread[LRS.index(0.0562)] < 0.6


def test_shifting_everything_keeps_the_curve_on_the_shifted_grid() -> None:
    moved = draw(QUIET, LRS, (1,), 1, 1, np.random.default_rng(0), log_shift=0.25).loss[0, 0]
    still = draw(QUIET, LRS, (1,), 1, 1, np.random.default_rng(0)).loss[0, 0]
    # A quarter decade is one grid step, up to the rounding of the grid to three digits.
    np.testing.assert_allclose(moved[:, :, 1:], still[:, :, :-1], rtol=0.02)
