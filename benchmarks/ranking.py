"""What a ranking of many arms is worth: false distinctions, and real ones found.

    python -m benchmarks.ranking [--studies N] [--arms N] [--figure NAME]

Draws each arm's values seed by seed, ranks them as a report does, and counts studies. The
spreads over seeds are the pilot's: 0.1 nats of LR sensitivity and 0.1 decades of log10
maximum stable LR, a third of the variance shared by the arms of a seed; the grid has four
learning rates a decade. In the first rows all arms are equal, so that anything told
apart is false. In the others one arm is better by `gain`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
import pandas as pd

from analysis.stabilisers import BY_NAME, ranking

STEP = 0.25
SPREAD = {"lr_sensitivity": 0.1, "max_stable_lr": 0.1}
GAINS = {"lr_sensitivity": (0.0, 0.3, 0.9), "max_stable_lr": (0.0, 0.5, 1.0)}
SHARED = 1 / 3
SEEDS = (3, 5, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--studies", type=int, default=300, help="simulated studies a row")
    parser.add_argument("--arms", type=int, default=10, help="arms with the baseline")
    parser.add_argument("--figure", choices=GAINS, help="one of them (all)")
    args = parser.parse_args()
    print("| figure | gain | seeds | false, against the baseline | false rank | found | first |")
    print("|---|---|---|---|---|---|---|")
    for quantity in [args.figure] if args.figure else GAINS:
        gains = GAINS[quantity]
        for gain in gains:
            for seeds in SEEDS:
                shares = _shares(quantity, gain, seeds, args.arms, args.studies)
                print(f"| {quantity} | {gain:g} | {seeds} | " + " | ".join(shares) + " |")


def _shares(quantity: str, gain: float, seeds: int, arms: int, studies: int) -> Iterator[str]:
    """Shares of studies, in %: with a false outcome, with a false rank, that found the better
    arm against the baseline, that ranked it first alone."""
    rng = np.random.default_rng([seeds, arms, round(100 * gain)])
    counts = np.zeros(4)
    for _ in range(studies):
        rows = ranking(_drawn(quantity, gain, seeds, arms, rng), "a0", STEP).set_index("arm")
        better, others = rows.loc["a1"], rows.drop(index="a1")
        real = gain > 0
        equal = others if real else rows
        counts += (
            (equal["outcome"] != "").any(),
            # Among equal arms nobody is ahead, but for the better one.
            (equal["rank_first"] > 1 + real).any() or (equal["rank_last"] < arms).any(),
            real and better["outcome"] == "better",
            real and better["rank_last"] == 1,
        )
    return (f"{100 * share:.1f}" for share in counts / studies)


def _drawn(
    quantity: str, gain: float, seeds: int, arms: int, rng: np.random.Generator
) -> pd.DataFrame:
    """One study's values, as `by_seed`; arm a1 is better by `gain`."""
    spread = SPREAD[quantity]
    common, own = rng.normal(size=(1, seeds)), rng.normal(size=(arms, seeds))
    x = spread * (np.sqrt(SHARED) * common + np.sqrt(1 - SHARED) * own)
    # The truth anywhere between two grid points.
    x += rng.uniform(0, STEP)
    x[1] += -gain if BY_NAME[quantity].lower_is_better else gain
    low = np.floor(x / STEP) * STEP if BY_NAME[quantity].bin_steps else x
    high = low + STEP if BY_NAME[quantity].bin_steps else x
    arm, seed = np.indices(x.shape).reshape(2, -1)
    return pd.DataFrame(
        {
            "quantity": quantity,
            "depth": 1,
            "arm": [f"a{i}" for i in arm],
            "seed": seed,
            "value": 10 ** low.ravel() if BY_NAME[quantity].log else low.ravel(),
            "low": low.ravel(),
            "high": high.ravel(),
            "censored": "",
            "reason": "",
        }
    )


if __name__ == "__main__":
    main()
