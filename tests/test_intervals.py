"""Intervals against textbook numbers, their limits, and what they refuse to say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from analysis import intervals as iv


def test_t_interval_by_hand() -> None:
    # 1, 2, 4: mean 7/3, sd 1.5275, / sqrt 3 = 0.8819, t(2) = 4.3027: half width 3.7946.
    low, high = iv.t_bounds([1, 2, 4])
    assert (low, high) == (pytest.approx(7 / 3 - 3.7946, abs=1e-3), pytest.approx(6.1279, abs=1e-3))


def test_one_seed_has_no_interval_and_says_so() -> None:
    one = iv.mean_interval([2.5])
    assert (one.value, one.n, one.method, one.known) == (2.5, 1, "none", False)
    assert one.note == "one seed has no spread"
    assert not iv.bin_interval([0.0], [1.0], 1.0).known
    none = iv.mean_interval([math.nan])
    assert (none.n, none.note) == (0, "no seed has a value")


def test_a_seed_without_a_value_lowers_n() -> None:
    assert iv.mean_interval([1.0, math.nan, 3.0]).n == 2
    bins = iv.bin_interval([0, -np.inf, 0], [1, np.inf, 1], 1.0)
    assert bins.n == 2


def test_bins_that_vanish_give_the_t_interval() -> None:
    x = np.array([1.0, 2.0, 4.0, 4.5])
    low, high = iv.bin_bounds(x - 5e-4, x + 5e-4, 1e-3)
    t_low, t_high = iv.t_bounds(x)
    assert (low, high) == (pytest.approx(t_low, abs=0.02), pytest.approx(t_high, abs=0.02))


def test_all_seeds_in_one_bin_never_give_a_zero_width() -> None:
    # Three draws in [0, 1]: the limit is where max over sigma of P(bin)^3 falls below
    # exp(-cut), cut = 3/2 ln(1 + 4.3027^2 / 2) = 3.4906, so P = exp(-1.1635) = 0.3124.
    low, high = iv.bin_bounds([0, 0, 0], [1, 1, 1], 1.0)
    sigma = np.logspace(-2, 2, 4001)
    best = (stats.norm.cdf((1 - low) / sigma) - stats.norm.cdf((0 - low) / sigma)).max()
    assert best == pytest.approx(0.3124, abs=1e-3)
    assert low + high == pytest.approx(1)


def test_bins_that_overlap_by_a_hair_are_no_agreement() -> None:
    # Bins of rounded learning rates: [0, 2], [1, 3], [2, 4] meet at 2, give or take a little.
    touching = np.array([[0, 2], [0, 2], [1, 3], [1, 3], [2, 4]], dtype=float)
    for hair in (-1e-3, 0.0, 1e-3, 1e-2):
        low, high = iv.bin_bounds(touching[:, 0] - hair, touching[:, 1] + hair, 2.0)
        assert low < 1.3
        assert high > 2.5
    # What all bins share is wholly inside, even where it is all that is left.
    low, high = iv.bin_bounds([0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], 1.0)
    assert low <= 0
    assert high >= 1


def test_bin_interval_does_not_depend_on_order_or_place() -> None:
    a = iv.bin_interval([0, 0.25, 0.5], [0.25, 0.5, 0.75], 0.25)
    b = iv.bin_interval([10.5, 10, 10.25], [10.75, 10.25, 10.5], 0.25)
    assert (b.low - 10, b.high - 10) == (pytest.approx(a.low), pytest.approx(a.high))
    assert a.value == pytest.approx(0.375)


def test_open_bin_leaves_the_interval_open_on_that_side_only() -> None:
    closed = iv.bin_interval([0, 0, 1], [1, 1, 2], 1.0)
    above = iv.bin_interval([0, 0, 1], [1, 1, np.inf], 1.0)
    assert above.low == pytest.approx(closed.low)
    assert above.high == math.inf
    assert math.isnan(above.value)
    below = iv.bin_interval([-np.inf, 1, 1], [1, 2, 2], 1.0)
    assert below.low == -math.inf
    assert below.high == pytest.approx(iv.bin_interval([0, 1, 1], [1, 2, 2], 1.0).high)


def test_every_method_works_on_leading_axes_and_moves_with_the_data() -> None:
    x = np.random.default_rng(0).normal(size=(4, 3, 5))
    for method in iv.MEAN_METHODS.values():
        low, high = method(x)
        assert low.shape == high.shape == (4, 3)
        assert (low <= high).all()
        moved_low, moved_high = method(2 * x + 7)
        np.testing.assert_allclose(moved_low, 2 * low + 7)
        np.testing.assert_allclose(moved_high, 2 * high + 7)
        one = method(x[1, 2])
        np.testing.assert_allclose(one, (low[1, 2], high[1, 2]))


def test_bootstraps_enumerate_small_samples() -> None:
    # Two values: means of the 4 resamples are 0, 1/2, 1/2, 1; the 2.5 % quantile by linear
    # interpolation of 4 points is 0.075 of the way from 0 to 1/2.
    low, high = iv.percentile_bounds([0, 1])
    assert (low, high) == (pytest.approx(0.0375), pytest.approx(0.9625))


def test_bca_of_symmetric_values_is_symmetric() -> None:
    low, high = iv.bca_bounds([-3, -1, 0, 1, 3])
    assert low == pytest.approx(-high)


def test_normal_draws_are_covered_at_the_nominal_rate() -> None:
    x = np.random.default_rng(1).normal(size=(1000, 3))
    low, high = iv.t_bounds(x)
    assert 0.93 < np.mean((low < 0) & (high > 0)) < 0.97
    # Bins half as wide as the spread: never below nominal.
    low, high = iv.bin_bounds(np.floor(2 * x[:300]) / 2, np.floor(2 * x[:300]) / 2 + 0.5, 0.5)
    assert np.mean((low < 0) & (high > 0)) > 0.92


def test_seeds_needed_is_the_first_number_that_suffices() -> None:
    # t(n-1) / sqrt(n): n = 4 -> 1.591, n = 5 -> 1.2417.
    assert iv.seeds_needed(sd=1.0, clearance=1.25) == 5
    assert iv.seeds_needed(sd=1.0, clearance=1.24) == 6
    assert iv.seeds_needed(sd=1.0, clearance=1e-3) is None


def test_t_test_agrees_with_scipy() -> None:
    x = np.array([0.2, 0.5, 0.1, 0.6])
    expected = stats.ttest_1samp(x, 0).pvalue
    assert iv.t_test(x.mean(), x.std(ddof=1), 4) == pytest.approx(expected)
    assert math.isnan(iv.t_test(1.0, 0.0, 3))


def test_holm_by_hand() -> None:
    # Sorted 0.01, 0.02, 0.04 times 3, 2, 1: 0.03, 0.04, 0.04; the untested stays out.
    adjusted = iv.holm([0.04, math.nan, 0.01, 0.02])
    np.testing.assert_allclose(adjusted, [0.04, np.nan, 0.03, 0.04])
    np.testing.assert_allclose(iv.holm([0.5, 0.9]), [1.0, 1.0])
