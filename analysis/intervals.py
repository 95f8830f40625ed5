"""Uncertainty over seeds: intervals for a mean of a few values, or of a few bins.

A study has two, three, five seeds, so the interval is most of the answer. Two kinds of
number occur:

- plain values (LR sensitivity, a paired difference of losses): Student's t, `mean_interval`;
- bins (maximum stable LR, necessity threshold): the grid only says between which two
  learning rates a seed's value lies, or only from which one up. `bin_interval` treats them
  as interval-censored draws from a normal distribution, so that three seeds in one bin do
  not pass for a spread of zero.

The other methods here are the ones these two were chosen over. docs/estimators.md gives the
measured coverage of all of them; `make coverage` measures it again. Every function takes
arrays with the seeds on the last axis and works on all leading axes at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

Array = NDArray[np.float64]
Bounds = tuple[Array, Array]

LEVEL = 0.95
LEAST_SPREAD = 0.05
"""Smallest spread over seeds that is considered, in widths of the narrowest bin: what lies in bins
is not known more closely. Without it bins that overlap by a hair, as those of rounded learning
rates do, would pass for seeds that agree to a hair."""

RESAMPLES = 4000
"""Bootstrap resamples above five seeds; up to five, all n**n of them are enumerated."""


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its confidence interval.

    `low` and `high` are NaN where no honest interval exists (`note` says why) and may be
    infinite where the grid ends before the value does.
    """

    value: float
    low: float
    high: float
    n: int
    method: str
    note: str = ""

    @property
    def known(self) -> bool:
        """Whether there is an interval at all."""
        return not (np.isnan(self.low) or np.isnan(self.high))


# ---------------------------------------------------------------- plain values


def t_bounds(values: ArrayLike, level: float = LEVEL) -> Bounds:
    """Student's t interval of the mean: mean -+ t(n-1) sd / sqrt(n); NaN below 2 values."""
    x = np.asarray(values, dtype=float)
    n = x.shape[-1]
    mean = x.mean(axis=-1)
    if n < 2:
        return np.full(mean.shape, np.nan), np.full(mean.shape, np.nan)
    half = t_factor(n, level) * x.std(axis=-1, ddof=1)
    return mean - half, mean + half


def t_factor(n: ArrayLike, level: float = LEVEL) -> Array:
    """Half width of the t interval of n values, in standard deviations; NaN below n = 2."""
    count = np.maximum(np.asarray(n, dtype=float), 1)
    with np.errstate(invalid="ignore"):
        factor = special.stdtrit(count - 1, (1 + level) / 2) / np.sqrt(count)
    return np.where(count < 2, np.nan, factor)


def t_test(mean: ArrayLike, sd: ArrayLike, n: ArrayLike) -> Array:
    """Two-sided p-value of Student's t test that the mean is 0; NaN below n = 2 or at sd = 0."""
    m, s, count = (np.asarray(x, dtype=float) for x in (mean, sd, n))
    with np.errstate(invalid="ignore", divide="ignore"):
        t = np.abs(m) / (s / np.sqrt(count))
        p = 2 * special.stdtr(np.maximum(count - 1, 1), -t)
    return np.where((count < 2) | ~(s > 0), np.nan, p)


def percentile_bounds(values: ArrayLike, level: float = LEVEL) -> Bounds:
    """Percentile bootstrap of the mean (Efron 1979). Never wider than the values' range."""
    x = np.asarray(values, dtype=float)
    means = x @ _resample_weights(x.shape[-1]).T
    tail = (1 - level) / 2
    return np.quantile(means, tail, axis=-1), np.quantile(means, 1 - tail, axis=-1)


def bca_bounds(values: ArrayLike, level: float = LEVEL) -> Bounds:
    """Bias-corrected and accelerated bootstrap of the mean (Efron 1987).

    Acceleration from the jackknife; ties count half in the bias correction, which matters
    when all n**n resamples are enumerated.
    """
    x = np.asarray(values, dtype=float)
    n = x.shape[-1]
    mean = x.mean(axis=-1, keepdims=True)
    means = np.sort(x @ _resample_weights(n).T, axis=-1)
    # Resamples that tie with the mean differ from it by rounding only.
    tie = np.abs(means - mean) <= 1e-9 * np.ptp(x, axis=-1, keepdims=True)
    below = ((means < mean) & ~tie).mean(axis=-1) + tie.mean(axis=-1) / 2
    bias = special.ndtri(np.clip(below, 1e-9, 1 - 1e-9))
    deviations = x - mean  # jackknife means deviate from theirs by -deviation / (n - 1)
    square = (deviations**2).sum(axis=-1)
    cube = (deviations**3).sum(axis=-1)
    acceleration = np.divide(cube, 6 * square**1.5, out=np.zeros_like(cube), where=square > 0)

    def endpoint(tail: float) -> Array:
        z = bias + special.ndtri(tail)
        share = special.ndtr(bias + z / (1 - acceleration * z))
        index = np.clip(share * (means.shape[-1] - 1), 0, means.shape[-1] - 1)
        lower = np.floor(index).astype(int)
        upper = np.minimum(lower + 1, means.shape[-1] - 1)
        at = np.take_along_axis
        a = at(means, lower[..., None], axis=-1)[..., 0]
        b = at(means, upper[..., None], axis=-1)[..., 0]
        return a + (index - lower) * (b - a)

    return endpoint((1 - level) / 2), endpoint((1 + level) / 2)


def bootstrap_t_bounds(values: ArrayLike, level: float = LEVEL) -> Bounds:
    """Bootstrap-t of the mean (Efron 1979; Hall 1988).

    Resamples without spread have no t value; they are left out, as is usual.
    """
    x = np.asarray(values, dtype=float)
    n = x.shape[-1]
    weights = _resample_weights(n)
    mean = x.mean(axis=-1, keepdims=True)
    means = x @ weights.T
    # Squares of deviations, not of values: a far-off mean must not drown the spread.
    square = (x - mean) ** 2 @ weights.T - (means - mean) ** 2
    spread = np.sqrt(np.maximum(square, 0) / max(n - 1, 1))
    least = 1e-6 * np.ptp(x, axis=-1, keepdims=True)
    t = np.where(spread > least, (means - mean) / np.where(spread > 0, spread, 1), np.nan)
    empty = np.isnan(t).all(axis=-1)
    t[empty] = 0
    tails = np.nanquantile(t, [(1 - level) / 2, (1 + level) / 2], axis=-1)
    error = x.std(axis=-1, ddof=1) / np.sqrt(n) if n > 1 else np.full(x.shape[:-1], np.nan)
    return mean[..., 0] - tails[1] * error, mean[..., 0] - tails[0] * error


def _resample_weights(n: int) -> Array:
    """Rows of weights, one row a resample: all n**n up to 5 values, else RESAMPLES draws."""
    if n <= 5:
        picks = np.array(list(itertools.product(range(n), repeat=n)))
    else:
        picks = np.random.default_rng(0).integers(0, n, size=(RESAMPLES, n))
    return np.stack([(picks == k).mean(axis=1) for k in range(n)], axis=1)


# ------------------------------------------------------------------------ bins


def closed_bins(low: ArrayLike, high: ArrayLike, width: float) -> tuple[Array, Array]:
    """Bins with an open end replaced by a bin `width` wide at the end that is known."""
    a, b = (np.asarray(x, dtype=float) for x in (low, high))
    return np.where(np.isinf(a), b - width, a), np.where(np.isinf(b), a + width, b)


def bin_bounds(low: ArrayLike, high: ArrayLike, width: float, level: float = LEVEL) -> Bounds:
    """Interval of the mean of a normal distribution whose draws are only known up to a bin.

    Draw i lies between low[..., i] and high[..., i]. The interval holds every mean mu that the
    profile likelihood does not reject,

        2 [max l - max_sigma l(mu, sigma)] <= n ln(1 + t^2 / (n - 1)),
        l(mu, sigma) = sum_i ln(Phi((high_i - mu) / sigma) - Phi((low_i - mu) / sigma)),

    with t the two-sided quantile of Student's t with n - 1 degrees. The right-hand side is
    what the likelihood ratio of a normal mean equals at t, so with vanishing bins this is
    the t interval (to 1 % of its width); with all draws in one bin it is about that bin. The
    likelihood is log-concave in (mu / sigma, 1 / sigma) (Burridge 1981), so the accepted means
    form one interval. Sigma is at least LEAST_SPREAD; the part that all bins share, where it may
    be 0, belongs to the interval besides.

    Where a bin is open above ("at least x"), the interval has no upper end, and its lower end
    is found as if that draw lay in a bin just above x: the mean of draws cut off there, which
    the true mean can only exceed. Open below likewise.

    Args:
        width: width of the bin that stands for an open one.

    Returns:
        low, high: NaN below 2 draws, infinite where a bin is open.
    """
    unbounded = [np.isinf(np.asarray(x, dtype=float)).any(axis=-1) for x in (low, high)]
    a, b = closed_bins(low, high, width)
    shape, n = a.shape[:-1], a.shape[-1]
    if n < 2:
        nothing = np.full(shape, np.nan)
        return nothing, nothing.copy()
    a, b = a.reshape(-1, n), b.reshape(-1, n)
    t = special.stdtrit(n - 1, (1 + level) / 2)
    cut = n * np.log1p(t**2 / (n - 1)) / 2
    unit = b.max(axis=-1) - a.min(axis=-1)
    profile = _profile(a, b)
    centre, most = _maximum(profile, a, b)
    least = most - cut
    # Moving every draw to the far end of its bin gives a t interval at most this wide.
    reach = np.array([[-1.0], [1.0]]) * unit * (2 + t / np.sqrt(n - 1))
    inside, outside = np.repeat(centre[None], 2, axis=0), centre + reach
    for _ in range(25):
        middle = (inside + outside) / 2
        keep = profile(middle) >= least
        inside, outside = np.where(keep, middle, inside), np.where(keep, outside, middle)
    # Means in the part that all bins share are never rejected, however small the spread.
    first, last = a.max(axis=-1), b.min(axis=-1)
    lower = np.where(first < last, np.minimum(inside[0], first), inside[0])
    upper = np.where(first < last, np.maximum(inside[1], last), inside[1])
    return (
        np.where(unbounded[0], -np.inf, lower.reshape(shape)),
        np.where(unbounded[1], np.inf, upper.reshape(shape)),
    )


def bin_test(low: ArrayLike, high: ArrayLike, width: float) -> Array:
    """Two-sided p-value that the mean of draws known up to a bin is 0; NaN below 2 draws.

    The dual of `bin_bounds`: p is 1 - level of the widest interval that leaves 0 out,

        2 [max l - max_sigma l(0, sigma)] = n ln(1 + t^2 / (n - 1)),  p = 2 P(T_{n-1} > t).

    Draws open on the side of the mean's own sign only make the case against 0 stronger than
    it is counted; where one is open on the other side, the mean may be 0, and p is 1.
    """
    opened = [np.isinf(np.asarray(x, dtype=float)).any(axis=-1) for x in (low, high)]
    a, b = closed_bins(low, high, width)
    shape, n = a.shape[:-1], a.shape[-1]
    if n < 2:
        return np.full(shape, np.nan)
    a, b = a.reshape(-1, n), b.reshape(-1, n)
    profile = _profile(a, b)
    centre, most = _maximum(profile, a, b)
    ratio = 2 * (most - profile(np.zeros((1, len(a))))[0])
    t = np.sqrt((n - 1) * np.expm1(np.clip(ratio / n, 0, 700)))
    p, centre = 2 * special.stdtr(n - 1, -t).reshape(shape), centre.reshape(shape)
    return np.where(np.where(centre > 0, opened[0], opened[1]), 1.0, p)


def _profile(low: Array, high: Array) -> Callable[[Array], Array]:
    """The log likelihood of closed bins, shape (R, n), as a function of the mean, maximised
    over sigma: means of shape (K, R) to likelihoods of that shape."""
    unit = high.max(axis=-1) - low.min(axis=-1)
    least = np.maximum(1e-3 * unit, LEAST_SPREAD * (high - low).min(axis=-1))
    sigma = np.geomspace(least, 10**1.5 * unit, 55, axis=-1)
    return lambda mu: _peak(_binned_log_likelihood(low, high, mu, sigma))


def _maximum(profile: Callable[[Array], Array], low: Array, high: Array) -> tuple[Array, Array]:
    """The mean at which a profile of closed bins is highest, and how high, each shape (R,)."""
    first, last = low.min(axis=-1), high.max(axis=-1)
    tried = first + np.linspace(0, 1, 41)[:, None] * (last - first)
    likelihoods = profile(tried)
    centre = np.take_along_axis(tried, likelihoods.argmax(axis=0)[None], axis=0)[0]
    return centre, likelihoods.max(axis=0)


def _binned_log_likelihood(low: Array, high: Array, mu: Array, sigma: Array) -> Array:
    """Log likelihood of normal draws known up to a bin.

    Shapes: low, high (R, n); mu (K, R); sigma (R, S); result (K, R, S).
    """
    a = (low - mu[..., None])[..., None, :] / sigma[..., None]
    b = (high - mu[..., None])[..., None, :] / sigma[..., None]
    # Far out on the right the difference of two upper tails keeps the digits.
    a, b = np.where(a > 0, -b, a), np.where(a > 0, -a, b)
    return np.log(np.maximum(special.ndtr(b) - special.ndtr(a), 1e-300)).sum(axis=-1)


def _peak(values: Array) -> Array:
    """Height of the parabola through the largest value and its neighbours, on the last axis; the
    largest value itself at either end."""
    top = values.argmax(axis=-1)
    inner = np.clip(top, 1, values.shape[-1] - 2)
    left, middle, right = (
        np.take_along_axis(values, (inner + k)[..., None], -1)[..., 0] for k in (-1, 0, 1)
    )
    curvature = left - 2 * middle + right
    bends = (curvature < 0) & (top == inner)
    rise = np.where(bends, (left - right) ** 2 / np.where(bends, -8 * curvature, 1), 0)
    return np.maximum(middle + rise, values.max(axis=-1))


# ---------------------------------------------------------------- the defaults

Method = Callable[..., Bounds]

MEAN_METHODS: dict[str, Method] = {
    "percentile bootstrap": percentile_bounds,
    "BCa bootstrap": bca_bounds,
    "bootstrap-t": bootstrap_t_bounds,
    "t": t_bounds,
}
"""Compared by `make coverage`; `t` is the default."""


def mean_interval(values: ArrayLike, level: float = LEVEL) -> Interval:
    """Mean of the values that are there, with its t interval.

    Args:
        values: one a seed; NaN = a seed without a value. It lowers n, and shows there.
    """
    x = np.asarray(values, dtype=float)
    x = x[~np.isnan(x)]
    n = len(x)
    if n == 0:
        return Interval(np.nan, np.nan, np.nan, 0, "none", "no seed has a value")
    if n == 1:
        return Interval(float(x[0]), np.nan, np.nan, 1, "none", "one seed has no spread")
    low, high = t_bounds(x, level)
    return Interval(float(x.mean()), float(low), float(high), n, "t")


def bin_interval(low: ArrayLike, high: ArrayLike, width: float, level: float = LEVEL) -> Interval:
    """Mean over seeds of a quantity known up to a bin, with the interval of `bin_bounds`.

    Args:
        low, high: one bin a seed, on the scale to average on (log10 for learning rates);
            a seed with both ends infinite or NaN says nothing and lowers n.
        width: width of the bin that stands for one with an open end.

    Returns:
        Interval: value is the mean of the bins' middles, NaN if any bin is open.
    """
    a, b = (np.asarray(x, dtype=float) for x in (low, high))
    told = ~(np.isnan(a) | np.isnan(b)) & (np.isfinite(a) | np.isfinite(b))
    a, b = a[told], b[told]
    n = len(a)
    if n == 0:
        return Interval(np.nan, np.nan, np.nan, 0, "none", "no seed has a value")
    whole = np.isfinite(a).all() and np.isfinite(b).all()
    value = float(((a + b) / 2).mean()) if whole else np.nan
    if n == 1:
        return Interval(value, np.nan, np.nan, 1, "none", "one seed has no spread")
    # Measured from their lowest end and sorted, the bins of a grid form few patterns.
    start = float(min(a[np.isfinite(a)].min(initial=np.inf), b[np.isfinite(b)].min(initial=np.inf)))
    pattern = sorted(zip((a - start).round(9).tolist(), (b - start).round(9).tolist(), strict=True))
    lower, upper = _pattern_bounds(tuple(pattern), width, level)
    return Interval(value, start + lower, start + upper, n, "interval-censored t")


@lru_cache(maxsize=4096)
def _pattern_bounds(
    bins: tuple[tuple[float, float], ...], width: float, level: float
) -> tuple[float, float]:
    low, high = np.array(bins).T
    lower, upper = bin_bounds(low, high, width, level)
    return float(lower), float(upper)


def bin_p_value(low: ArrayLike, high: ArrayLike, width: float) -> float:
    """`bin_test` of the seeds that say something; NaN with fewer than two.

    Args:
        low, high: one bin a seed, as for `bin_interval`.
        width: width of the bin that stands for one with an open end.
    """
    a, b = (np.asarray(x, dtype=float) for x in (low, high))
    told = ~(np.isnan(a) | np.isnan(b)) & (np.isfinite(a) | np.isfinite(b))
    pattern = sorted(zip(a[told].round(9).tolist(), b[told].round(9).tolist(), strict=True))
    return _pattern_p_value(tuple(pattern), width)


@lru_cache(maxsize=4096)
def _pattern_p_value(bins: tuple[tuple[float, float], ...], width: float) -> float:
    low, high = np.array(bins).reshape(-1, 2).T
    return float(bin_test(low, high, width))


def seeds_needed(sd: float, clearance: float, level: float = LEVEL, most: int = 200) -> int | None:
    """Smallest number of seeds whose t interval is narrower than the clearance.

    Args:
        sd: standard deviation over seeds.
        clearance: distance from the mean to the bound it must exclude, same unit.

    Returns:
        The number, or None above `most`.
    """
    for n in range(2, most + 1):
        if t_factor(n, level) * sd < clearance:
            return n
    return None


def holm(p_values: ArrayLike) -> Array:
    """Holm's (1979) adjusted p-values, which control the family-wise error.

    p_(k) sorted upwards becomes max over j <= k of (m - j + 1) p_(j), at most 1. NaN (not
    tested) stays NaN and does not count.
    """
    p = np.asarray(p_values, dtype=float)
    adjusted = np.full(p.shape, np.nan)
    tested = np.flatnonzero(~np.isnan(p))
    order = tested[np.argsort(p[tested], kind="stable")]
    factors = np.arange(len(order), 0, -1)
    adjusted[order] = np.minimum(np.maximum.accumulate(factors * p[order]), 1)
    return adjusted
