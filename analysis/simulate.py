"""Whole studies with a known truth, to measure what intervals and verdicts are worth.

A simulated cell's loss is a curve in log LR (too slow on the left, its best in the middle, a
climb to the unigram entropy beyond the arm's edge) plus noise. The edge differs from seed to
seed and, a little, from cell to cell, so that the spread over seeds grows near the edge and
some seeds are not monotone. The default world has the sizes that were measured at pilot
size: a seed spread of 0.02 nats at lr 1e-2 and of about 0.4 at off's edge, off's edge near
0.08 and on's near 0.7 at depth 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import expit, logit

from analysis.estimators.grid import DIVERGED, ERRORED, FAILED, MISSING, STABLE, Curves
from analysis.tables import CELL_COLUMNS, STATES

Array = NDArray[np.float64]

ARMS = ("off", "rmsnorm")
FAILED_MARGIN = 0.5
"""Normalised loss above which a simulated run on the high side failed; the edge is there."""

ON_PLATEAU = 0.9
"""Normalised loss at which a run that is stopped would have ended, at least: with that, the mean
error of what it counts with is 0.035 nats; in the control it was 0.02."""

STOP_HEIGHT = 0.04
"""Spread of the loss at the stop above the unigram entropy, as a share of it: 55 stopped cells of
the pilot and of TinyStories text stood at 0.96 to 1.27 times H1, the median at 1.02."""


@dataclass(frozen=True)
class Arm:
    """One arm's curve. Learning rates are absolute, spreads and slopes in decades.

    Attributes:
        edge: geometric mean over seeds of the LR at which the normalised loss is 0.5, depth 1.
        depth_exponent: the edge goes as depth to this power.
        edge_sd: spread of log10 edge over seeds.
        steepness: of the climb at the edge, per decade, as of a logistic curve.
        shoulder, shoulder_lr: share of the climb that comes early, and where.
        slow_lr: LR at which half of the way to the best loss is made.
    """

    edge: float
    depth_exponent: float = 0.0
    edge_sd: float = 0.07
    steepness: float = 12.0
    shoulder: float = 0.0
    shoulder_lr: float = 0.1
    slow_lr: float = 8.6e-4


@dataclass(frozen=True)
class World:
    """What is true: both arms, the losses they share, and the noise.

    Attributes:
        best, plateau, init: best loss, unigram entropy, loss at init, in nats.
        slow_power: sharpness of the fall at low LR.
        seed_sd, cell_sd: spread of the loss over seeds (shared by a seed's cells) and over
            cells, in nats.
        shared: share of the variance of log10 edge that a seed's arms and depths have in common.
        jitter: spread of log10 edge from cell to cell of a seed, in decades.
        settled: how far failed runs end, on the way from the best loss to the plateau.
        stopped: share of the failed cells that end near the plateau that are stopped early, about
            as far above it as measured.
        missing, errored: shares of all cells.
    """

    off: Arm = field(default_factory=lambda: Arm(edge=0.08))
    on: Arm = field(
        default_factory=lambda: Arm(edge=0.7, edge_sd=0.1, shoulder=0.17, slow_lr=8.1e-4)
    )
    best: float = 0.85
    plateau: float = 4.88
    init: float = 6.24
    slow_power: float = 1.8
    seed_sd: float = 0.012
    cell_sd: float = 0.015
    shared: float = 0.3
    jitter: float = 0.03
    settled: float = 0.97
    stopped: float = 0.0
    missing: float = 0.0
    errored: float = 0.0


@dataclass(frozen=True)
class Drawn:
    """Simulated studies: arrays of shape (studies, depths, arms, seeds, lrs); states by number."""

    world: World
    lrs: Array
    depths: Array
    loss: Array
    state: NDArray[np.int8]

    def curves(self, study: slice = slice(None)) -> Curves:
        """`estimators.curves(cells(study))` without the table between, for thousands of studies."""
        order = (1, 2, 0, 3, 4)
        loss, state = self.loss[study].transpose(order), self.state[study].transpose(order)
        depths, arms, studies, seeds, lrs = loss.shape
        index = np.indices((depths, arms, studies * seeds)).reshape(3, -1)
        keys = pd.DataFrame(
            {
                "depth": self.depths[index[0]],
                "qk_norm": pd.array(ARMS, dtype="str").take(index[1]),
                "seed": index[2],
            }
        )
        loss, state = loss.reshape(len(keys), lrs), state.reshape(len(keys), lrs)
        lost = (state == MISSING) | (state == ERRORED)
        init = np.where(lost, np.nan, self.world.init)
        return Curves(keys, self.lrs, state, loss, init, self.world.plateau)

    def cells(self, study: int | slice = 0) -> pd.DataFrame:
        """The `cells` table of one study, or of several as one: seeds numbered on and on."""
        chosen = slice(study, study + 1) if isinstance(study, int) else study
        loss, state = self.loss[chosen], self.state[chosen]
        seeds = loss.shape[3]
        index = np.indices(loss.shape).reshape(5, -1)
        found = ~np.isin(state.ravel(), [MISSING, ERRORED])
        table = {
            "cell": [f"c{k}" for k in range(loss.size)],
            "lr": self.lrs[index[4]],
            "depth": self.depths[index[1]],
            "qk_norm": np.array(ARMS)[index[2]],
            "arm": np.array(ARMS)[index[2]],
            "seed": index[0] * seeds + index[3],
            "state": np.array(STATES)[state.ravel()],
            "reason": "",
            "step": 400,
            "steps": 400,
            "loss": loss.ravel(),
            "loss_init": np.where(found, self.world.init, np.nan),
            "unigram_entropy": self.world.plateau,
            "bytes_per_token": 3.0,
            "precision": "fp32",
            "params": 1,
            "threads": 1,
        }
        blank = {"str": "", "float64": np.nan}
        columns = {n: table.get(n, blank.get(t)) for n, (t, _) in CELL_COLUMNS.items()}
        return pd.DataFrame(columns).astype({n: t for n, (t, _) in CELL_COLUMNS.items()})


def draw(
    world: World,
    lrs: Sequence[float],
    depths: Sequence[int],
    seeds: int,
    studies: int,
    rng: np.random.Generator,
    log_shift: float = 0.0,
) -> Drawn:
    """Simulates studies of the grid lrs x depths x both arms x seeds.

    Args:
        log_shift: moves everything that has a place on the LR axis by this many decades, so
            that a truth can be put anywhere between two grid points.
    """
    x = np.log10(np.asarray(lrs, dtype=float)) - log_shift
    shape = (studies, len(depths), len(ARMS), seeds, len(x))
    edges = _edges(world, np.asarray(depths, dtype=float), seeds, studies, rng)
    jittered = edges[..., None] + world.jitter * rng.normal(size=shape)
    loss = np.empty(shape)
    for k, arm in enumerate((world.off, world.on)):
        loss[:, :, k] = curve(world, arm, x, jittered[:, :, k])
    noise = world.seed_sd * rng.normal(size=(studies, len(depths), 1, seeds, 1))
    loss += noise + world.cell_sd * rng.normal(size=shape)
    best = loss.min(axis=(2, 4), keepdims=True)
    normalised = (loss - best) / (world.plateau - best)
    turn = loss.mean(axis=3, keepdims=True).argmin(axis=4, keepdims=True)
    failed = (normalised > FAILED_MARGIN) & (np.arange(len(x)) > turn)
    state = np.where(failed, FAILED, STABLE).astype(np.int8)
    # Runs are stopped on the plateau only, and those end near it.
    stopped = failed & (normalised > ON_PLATEAU) & (rng.random(shape) < world.stopped)
    state[stopped] = DIVERGED
    at_stop = world.plateau * (1 + STOP_HEIGHT * np.abs(rng.normal(size=shape)))
    loss = np.where(stopped, at_stop, loss)
    lost = rng.random(shape)
    state[lost < world.missing + world.errored] = ERRORED
    state[lost < world.missing] = MISSING
    loss[lost < world.missing + world.errored] = np.nan
    return Drawn(world, np.asarray(lrs, dtype=float), np.asarray(depths), loss, state)


def _edges(
    world: World, depths: Array, seeds: int, studies: int, rng: np.random.Generator
) -> Array:
    """log10 edges, shape (studies, depths, arms, seeds)."""
    common = rng.normal(size=(studies, 1, 1, seeds))
    own = rng.normal(size=(studies, len(depths), len(ARMS), seeds))
    z = np.sqrt(world.shared) * common + np.sqrt(1 - world.shared) * own
    sd = np.array([world.off.edge_sd, world.on.edge_sd])[:, None]
    return true_log_edges(world, depths)[:, :, None] + sd * z


def true_log_edges(world: World, depths: Sequence[int] | Array) -> Array:
    """Mean of log10 edge over seeds, shape (depths, arms)."""
    d = np.log10(np.asarray(depths, dtype=float))[:, None]
    return np.array([[np.log10(a.edge) for a in (world.off, world.on)]]) + d * np.array(
        [[a.depth_exponent for a in (world.off, world.on)]]
    )


def curve(world: World, arm: Arm, x: Array, log_edge: Array) -> Array:
    """Loss without noise at log10 LR x for log10 edges that broadcast with it."""
    slow = (world.init - world.best) / (1 + (10**x / arm.slow_lr) ** world.slow_power)
    early = arm.shoulder * expit(arm.steepness * (x - np.log10(arm.shoulder_lr)))
    # Shifted so that shoulder and climb together reach the failing margin at the edge.
    rest = world.settled - arm.shoulder
    at_edge = logit((FAILED_MARGIN - arm.shoulder) / rest)
    climb = early + rest * expit(arm.steepness * (x - log_edge) + at_edge)
    return np.asarray(world.best + slow + np.clip(climb, 0, 1) * (world.plateau - world.best))


def true_thresholds(
    world: World, depths: Sequence[int], margin: float, draws: int = 2000, seed: int = 0
) -> Array:
    """Mean over seeds of the log10 necessity threshold on a grid of 400 points a decade.

    Noise is left out and edges are kept, as the threshold is a property of a seed's two curves.
    NaN for a depth at which some seed needs no QK-norm up to on's edge. Shape (depths,).
    """
    x = np.arange(-3, 1, 1 / 400)
    edges = _edges(world, np.asarray(depths, float), draws, 1, np.random.default_rng(seed))[0]
    result = []
    for d in range(len(depths)):
        off = curve(world, world.off, x, edges[d, 0][:, None])
        on = curve(world, world.on, x, edges[d, 1][:, None])
        domain = x <= edges[d, 1][:, None]
        needed = (off - on > margin) | (x > edges[d, 0][:, None])
        broken = domain & ~needed
        last = len(x) - 1 - broken[:, ::-1].argmax(axis=1)
        start = np.where(broken.any(axis=1), last + 1, 0)
        never = x[np.minimum(start, len(x) - 1)] > edges[d, 1]
        result.append(np.nan if never.any() else float(x[start].mean()))
    return np.array(result)
