"""The search of edges against other ways of choosing cells, where verdicts are sometimes wrong.

    python -m benchmarks.edge_simulated [--studies N] [--samplers N]

A simulated study has 3 depths, 2 arms, 5 seeds and 25 learning rates. The edge of a line lies
around its arm's and depth's, 1.2 learning rates (0.15 decades) apart over seeds; a share of the
verdicts is wrong, each cell for itself. Every way gets as many cells a line as the search used on
average, rounded up, and its verdicts are read by the same rule, the place most believed in within
one, from an even prior with the true share of wrong verdicts. An error is a line whose place lies
more than one learning rate off.

    search      this project's, edges alone: lines tell each other where to look
    one line    its rule for a line by itself
    bisection   plain bisection, its own answer; it stops after five cells
    random      random learning rates
    TPE, GP     Optuna's samplers, asked to maximise the learning rate that is stable: the number
                of a stable one, minus the number of an unstable one
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable, Mapping

import numpy as np

from tune_study.config import Criterion, Search
from tune_study.search import edge
from tune_study.search.course import Course
from tune_study.search.ends import End, Line, Place
from tune_study.search.rounds import Rounds

SIZE, ENTROPY, BEST = 25, 4.9, 0.9
LRS = [10 ** (-3 + place / 8) for place in range(SIZE)]
DEPTHS, ARMS, SEEDS = (1, 2, 4), {"off": 14.5, "rmsnorm": 21.0}, range(5)
SPREAD = 1.2
WRONG = (0.0, 0.02, 0.05)

Ask = Callable[[int], bool]
"""The verdict of a place: whether it is stable."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--studies", type=int, default=100, help="simulated studies a row")
    parser.add_argument("--samplers", type=int, default=4, help="studies for Optuna's samplers")
    args = parser.parse_args()
    print("| wrong verdicts | way | cells a line | errors | lines |")
    print("|---|---|---|---|---|")
    for wrong in WRONG:
        rng = np.random.default_rng(round(1000 * wrong))
        studies = [study(rng, wrong) for _ in range(args.studies)]
        cells, errors, alone = [], [], []
        for truth, ends in studies:
            course = search(ends)
            tried = by_line(course.ends)
            cells += [len(tried[line]) for line in truth]
            errors += [missed(tried[line], truth[line], wrong) for line in truth]
        budget = math.ceil(np.mean(cells))
        _row(wrong, "search", cells, errors)
        verdicts = [
            (at, by_line(ends)[line]) for truth, ends in studies for line, at in truth.items()
        ]
        few = verdicts[: args.samplers * len(DEPTHS) * len(ARMS) * len(SEEDS)]
        for name, way, lines in (
            ("one line", one_line, verdicts),
            ("bisection", bisection, verdicts),
            ("random", random_cells(rng), verdicts),
            ("TPE", sampler("TPESampler"), few),
            ("GP", sampler("GPSampler"), few),
        ):
            runs = [(at, way(line.__getitem__, budget)) for at, line in lines]
            if name == "bisection":
                alone = [abs(edge.bracket(tried, SIZE)[1] - at) > 1 for at, tried in runs]
            else:
                alone = [missed(tried, at, wrong) for at, tried in runs]
            _row(wrong, name, [len(tried) for _, tried in runs], alone)


def study(rng: np.random.Generator, wrong: float) -> tuple[dict[Line, int], dict[Place, End]]:
    """True edges of all lines, and how every cell ends."""
    truth: dict[Line, int] = {}
    ends: dict[Place, End] = {}
    for depth in DEPTHS:
        for arm, middle in ARMS.items():
            around = middle - math.log2(depth) + rng.normal()
            for seed in SEEDS:
                line = Line(depth, arm, seed)
                at = truth[line] = int(np.clip(round(around + SPREAD * rng.normal()), 1, SIZE))
                optimum = min(11 + 0.7 * rng.normal(), at - 2)
                for place in range(SIZE):
                    stable = (place < at) != (rng.random() < wrong)
                    loss = BEST + 0.012 * (place - optimum) ** 2 + 0.01 * abs(rng.normal())
                    loss = min(loss, 2.4) if stable else ENTROPY * (0.95 + 0.04 * rng.random())
                    ends[line, place] = End(loss, ENTROPY, not stable and place > at + 4)
    return truth, ends


def search(ends: Mapping[Place, End]) -> Course:
    """The search for edges alone, to its end."""
    lines = list(dict.fromkeys(line for line, _ in ends))
    return Course(Rounds(lines, LRS, Search(best_lr=False), Criterion()), ends.get)


def by_line(ends: Mapping[Place, End]) -> dict[Line, dict[int, bool]]:
    """The verdicts: here an end is stable if it has learned."""
    found: dict[Line, dict[int, bool]] = {}
    for (line, place), end in ends.items():
        learned = end.loss is not None and end.loss < ENTROPY / 2
        found.setdefault(line, {})[place] = learned and not end.diverged
    return found


def missed(stable: Mapping[int, bool], truth: int, wrong: float) -> bool:
    """Whether the place most believed in lies more than one off."""
    after = edge.belief(stable, edge.prior(SIZE), max(wrong, 1e-3))
    return abs(edge.within_one(after)[0] - truth) > 1


def one_line(ask: Ask, budget: int) -> dict[int, bool]:
    """The search's rule for one line, without others to learn from."""
    rules, stable = Search(), {}
    while len(stable) < budget:
        place = edge.next_place(
            stable, edge.prior(SIZE), rules.error, rules.confidence, (), rules.beneath
        )
        if place is None:
            break
        stable[place] = ask(place)
    return stable


def bisection(ask: Ask, budget: int) -> dict[int, bool]:
    """Halves the bracket until it is closed."""
    low, high, stable = -1, SIZE, {}
    while high - low > 1 and len(stable) < budget:
        place = (low + high) // 2
        stable[place] = ask(place)
        low, high = (place, high) if stable[place] else (low, place)
    return stable


def random_cells(rng: np.random.Generator) -> Callable[[Ask, int], dict[int, bool]]:
    """Random learning rates, none twice."""

    def run(ask: Ask, budget: int) -> dict[int, bool]:
        return {int(place): ask(place) for place in rng.permutation(SIZE)[:budget]}

    return run


def sampler(name: str) -> Callable[[Ask, int], dict[int, bool]]:
    """One of Optuna's samplers; a place asked for again costs nothing, up to four times over."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    made = getattr(optuna.samplers, name)

    def run(ask: Ask, budget: int) -> dict[int, bool]:
        stable: dict[int, bool] = {}
        # By default they draw ten at random first, which is more than there are.
        study = optuna.create_study(direction="maximize", sampler=made(seed=0, n_startup_trials=2))
        for _ in range(4 * budget):
            trial = study.ask()
            place = trial.suggest_int("place", 0, SIZE - 1)
            stable[place] = ask(place)
            study.tell(trial, place + 1 if stable[place] else -place - 1)
            if len(stable) == budget:
                break
        return stable

    return run


def _row(wrong: float, name: str, cells: list[int], errors: list[bool]) -> None:
    print(
        f"| {wrong:.0%} | {name} | {np.mean(cells):.1f} | {np.mean(errors):.1%} | {len(errors)} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
