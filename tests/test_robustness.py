"""The robustness panel: every choice appears, and what changes a verdict shows."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis.hypotheses import judge
from analysis.robustness import conclusions, panel
from analysis.simulate import World, draw
from tune_study.config import ConfigError, Margins, log_grid

MARGINS = Margins()


@pytest.fixture(scope="module")
def cells() -> pd.DataFrame:
    lrs = log_grid(1e-3, 1.0, 4)
    return draw(World(), lrs, (1, 2), 3, 1, np.random.default_rng(7)).cells()


@pytest.fixture(scope="module")
def rows(cells: pd.DataFrame) -> pd.DataFrame:
    hopeless = cells.assign(state=np.where(cells["lr"] > 0.02, "failed", cells["state"]))

    def refused() -> pd.DataFrame:
        raise ConfigError("criterion: its history is not there.")

    return panel(cells, MARGINS, {"strict": lambda: hopeless, "lost": refused})


def test_every_choice_is_changed_and_the_verdicts_kept_apart(rows: pd.DataFrame) -> None:
    # Declared, 2 criteria, 3 grids, 6 margins twice, 3 seeds; three hypotheses each.
    assert len(rows) == 3 * (1 + 2 + 3 + 12 + 3)
    assert rows.loc[rows["choice"] == "as declared", "holds"].all()
    lost = rows[rows["change"] == "lost"]
    assert (lost["verdict"] == "not judged").all()
    assert "history is not there" in lost["note"].iloc[0]
    # With both arms failing alike, the maximum stable LR is not raised.
    strict = rows[(rows["change"] == "strict") & (rows["hypothesis"] == "H2")]
    assert not strict["holds"].any()


def test_leaving_a_seed_out_is_judging_the_rest(cells: pd.DataFrame, rows: pd.DataFrame) -> None:
    got = rows[rows["change"] == "without seed 2"].set_index("hypothesis")
    for verdict in judge(cells[cells["seed"] != 2], MARGINS):
        row = got.loc[verdict.hypothesis]
        assert row["verdict"] == verdict.verdict
        np.testing.assert_allclose((row["low"], row["high"]), verdict.interval)


def test_conclusions_count_what_holds_and_what_turns_round() -> None:
    rows = pd.DataFrame(
        {
            "choice": ["as declared", "margin", "margin", "seeds", "criterion"],
            "hypothesis": "H1",
            "arm": "rmsnorm",
            "verdict": ["supported", "supported", "inconclusive", "contradicted", "not judged"],
            "holds": [True, True, False, False, False],
        }
    )
    (row,) = conclusions(rows).to_dict("records")
    assert row["verdict"] == "supported"
    assert (row["n_changes"], row["n_holds"]) == (4, 1)
    assert (row["n_reversed"], row["n_not_judged"]) == (1, 1)


def test_one_seed_cannot_be_left_out(cells: pd.DataFrame) -> None:
    alone = panel(cells[cells["seed"] == cells["seed"].min()], Margins())
    assert "seeds" not in set(alone["choice"])
    assert len(alone) > 0
