"""The coordinate check tells muP from the standard parametrisation."""

from __future__ import annotations

import pandas as pd
import pytest

from benchmarks import coord_check


def test_activations_grow_with_width_unless_mup_is_on(tokens):
    table = coord_check.measure(tokens, widths=[32, 64, 128], lr=1e-2, steps=4, seeds=[0])
    assert len(table) == 2 * 3 * 1 * 4 * 3
    assert (table["change"] > 0).all()
    base = table[table["width"] == 32].pivot_table(
        index=["step", "what"], columns="parametrisation", values="change"
    )
    assert (base["mup"] == base["standard"]).all()  # at the base shape they are one model
    found = coord_check.exponents(table).pivot(
        index="what", columns="parametrisation", values="exponent"
    )
    assert (found["standard"] > found["mup"] + 0.3).all()
    assert found["standard"]["output logits"] > 0.5
    assert found["mup"].abs().max() < 0.35
    chart = coord_check.draw(table).to_dict()
    (drawn,) = chart["datasets"].values()
    assert len(drawn) == 2 * 3 * 4 * 3


def test_exponents_by_hand():
    # doubling the width doubles one change and leaves the other
    rows = [
        {"parametrisation": p, "what": "x", "width": w, "seed": 0, "step": 1, "change": c}
        for p, w, c in [("standard", 2, 3), ("standard", 4, 6), ("mup", 2, 5), ("mup", 4, 5)]
    ]
    found = coord_check.exponents(pd.DataFrame(rows)).set_index("parametrisation")["exponent"]
    assert found["standard"] == pytest.approx(1)
    assert found["mup"] == pytest.approx(0)
