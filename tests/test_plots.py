"""The charts: every cell is drawn exactly once, and nothing that is lost goes unsaid."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import pytest
import vl_convert

from analysis import plots
from analysis.figures import Figure, figures
from analysis.plots import theme
from analysis.summary import summarise
from analysis.tables import STATES
from tests import fabricated
from tune_study.config import log_grid


def drawn(results: Any) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures(results, summarise(results))}


@pytest.fixture(scope="module")
def awkward() -> Any:
    return fabricated.awkward()


@pytest.fixture(scope="module")
def awkward_figures(awkward: Any) -> dict[str, Figure]:
    return drawn(awkward)


@pytest.fixture(scope="module")
def specs(awkward_figures: dict[str, Figure]) -> dict[str, dict[str, Any]]:
    """The awkward study's figures at both columns' width, checked against the schema."""
    return {
        name: figure.draw(plots.WIDE).to_dict(validate=True)
        for name, figure in awkward_figures.items()
    }


def subtitle(spec: dict[str, Any]) -> str:
    return " ".join(spec["title"]["subtitle"])


def marks(spec: dict[str, Any], prefix: str) -> list[dict[str, Any]]:
    """The items of the marks whose view's name begins with `prefix`, as Vega lays them out."""
    scenegraph = vl_convert.vegalite_to_scenegraph(spec, vl_version=theme.VEGALITE)

    def walk(node: Any) -> Iterator[dict[str, Any]]:
        if not isinstance(node, dict):
            return
        if str(node.get("name", "")).startswith(prefix) and node.get("marktype") == "symbol":
            yield from node["items"]
            return
        for item in node.get("items", []):
            yield from walk(item)

    return list(walk(scenegraph["scenegraph"]))


def test_every_cell_is_one_visible_mark(awkward: Any, specs: dict[str, dict[str, Any]]) -> None:
    """42 cells, 42 marks: also those without a loss, or with one that is not finite."""
    items = marks(specs["lr_loss"], "cells_")
    assert len(items) == len(awkward.cells)
    assert all(math.isfinite(item["x"]) and math.isfinite(item["y"]) for item in items)


def test_marks_by_state(awkward: Any, specs: dict[str, dict[str, Any]]) -> None:
    spec = specs["lr_loss"]
    rows = spec["datasets"]["cells"]
    assert Counter(row["state"] for row in rows) == Counter(awkward.cells["state"])
    assert all(row["y"] is not None for row in rows)
    # The legend carries each state's count.
    labels = {row["state_label"] for row in rows}
    counts = awkward.cells["state"].value_counts()
    assert labels == {f"{state} ({counts[state]})" for state in STATES if state in counts}


def test_lost_losses_are_drawn_at_the_loss_at_init_and_counted(
    specs: dict[str, dict[str, Any]],
) -> None:
    """Depth 2 off: 3 NaN, 2 infinite, 2 at 9.0 where the loss at init is about 6.24."""
    spec = specs["lr_loss"]
    heights = [
        row["y"]
        for row in spec["datasets"]["cells"]
        if row["depth"] == 2 and row["qk_norm"] == "off"
    ]
    assert heights == pytest.approx([fabricated.INIT] * 7, abs=0.1)
    assert "7 non-finite or above the loss at init, drawn at it" in subtitle(spec)


def test_subtitle_names_what_is_missing(specs: dict[str, dict[str, Any]]) -> None:
    text = subtitle(specs["lr_loss"])
    assert "1 errored" in text
    assert "8 missing" in text
    assert "1 seed" in text
    assert "no LR sensitivity: off at depth 2; RMSNorm at depth 2, 4" in text
    assert "best LR at an end of the known grid: RMSNorm at depth 1" in text


def test_a_line_never_spans_a_gap() -> None:
    """Losing the middle of three learning rates leaves a null between two numbers."""
    results = fabricated.results(fabricated.study(lr=(0.01, 0.1, 1.0), depth=(1,), seed=(0,)))
    middle = results.cells["lr"].eq(0.1)
    results.cells.loc[middle, "state"] = "missing"
    results.cells.loc[middle, "loss"] = np.nan
    spec = drawn(results)["lr_loss"].spec(plots.WIDE)
    curve = [row for row in spec["datasets"]["curve"] if row["qk_norm"] == "off"]
    assert [row["median"] is None for row in curve] == [False, True, False]
    lines = [layer for layer in spec_layers(spec) if layer["mark"].get("type") == "line"]
    assert lines
    assert all(layer["mark"]["invalid"] == "break-paths-filter-domains" for layer in lines)


def spec_layers(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if isinstance(node.get("mark"), dict):
            yield node
        for value in node.values():
            yield from spec_layers(value)
    elif isinstance(node, list):
        for value in node:
            yield from spec_layers(value)


def test_a_lost_seed_is_written_beside_the_line() -> None:
    """Two seeds at 2.1 and 2.2, one diverged: '2/3', wherever the median lies."""
    results = fabricated.results(fabricated.study(depth=(1,)))
    at = results.cells.index[results.cells["lr"].eq(0.01) & results.cells["qk_norm"].eq("off")]
    results.cells.loc[at, "loss"] = [2.1, 2.2, math.nan]
    results.cells.loc[at[2], "state"] = "diverged"
    spec = drawn(results)["lr_loss"].spec(plots.WIDE)
    row = next(
        row
        for row in spec["datasets"]["curve"]
        if row["qk_norm"] == "off" and row["lr"] == pytest.approx(0.01)
    )
    assert row["stable"] == "2/3"


def test_on_a_fine_grid_there_is_room_for_the_number_alone() -> None:
    results = fabricated.results(fabricated.study(depth=(1, 2, 4), lr=log_grid(1e-3, 1, 8)))
    spec = drawn(results)["lr_loss"].spec(plots.WIDE)
    assert "k: only k of the 3 seeds are stable there" in str(spec["title"])
    assert {row["stable"] for row in spec["datasets"]["curve"]} <= {"", "0", "1", "2"}


def test_where_a_search_ran_closely_there_is_room_for_the_number_alone() -> None:
    """Ten learning rates over three decades, eight of them an eighth of a decade apart."""
    lrs = (1e-3, *log_grid(1e-3, 1, 8)[13:21], 1.0)
    results = fabricated.results(fabricated.study(depth=(1, 2, 4), lr=lrs))
    spec = drawn(results)["lr_loss"].spec(plots.WIDE)
    assert "k: only k of the 3 seeds are stable there" in str(spec["title"])
    one = results.cells.index[results.cells["lr"].eq(lrs[3])][0]
    results.cells.loc[one, "state"] = "untried"
    spec = drawn(results)["lr_loss"].spec(plots.WIDE)
    assert "k: only k of the seeds that ran are stable there" in str(spec["title"])


@pytest.mark.parametrize("layout", [plots.COLUMN, plots.WIDE], ids=lambda layout: layout.name)
def test_every_figure_draws_within_its_width(
    awkward_figures: dict[str, Figure], layout: plots.Layout
) -> None:
    for name, figure in awkward_figures.items():
        spec = figure.spec(layout)
        svg = vl_convert.vegalite_to_svg(spec, vl_version=theme.VEGALITE)
        assert "NaN" not in svg, name
        assert "undefined" not in svg, name
        width = float(svg.split('width="')[1].split('"')[0])
        assert width <= layout.width * 1.02, f"{name} is {width} wide in {layout.width}"


def test_field_names_are_plain(specs: dict[str, dict[str, Any]]) -> None:
    """Vega-Lite reads a dot or a bracket in a field's name as a path, and draws nothing."""
    for spec in specs.values():
        for rows in spec["datasets"].values():
            for name in rows[0] if rows else ():
                assert name.replace("_", "").isalnum(), name


def test_the_arm_keeps_its_colour_in_every_figure(specs: dict[str, dict[str, Any]]) -> None:
    expected = {"QK-norm off": "#D55E00", "QK-norm on (RMSNorm)": "#0072B2"}
    for name, spec in specs.items():
        for layer in spec_layers(spec):
            colour = layer.get("encoding", {}).get("color", {})
            if colour.get("field") == "arm":
                scale = dict(zip(colour["scale"]["domain"], colour["scale"]["range"], strict=True))
                assert scale.items() <= expected.items(), name


def test_cells_can_be_chosen_in_every_figure_that_shows_them(
    specs: dict[str, dict[str, Any]],
) -> None:
    """Every layer whose marks carry a cell fades the cells that are not chosen."""
    choosable = set()
    for name, spec in specs.items():
        with_cells = {key for key, rows in spec["datasets"].items() if rows and "cell" in rows[0]}
        for layer in spec_layers(spec):
            if layer["data"]["name"] in with_cells:
                choosable.add(name)
                assert "chosen" in layer["encoding"]["strokeOpacity"]["condition"]["test"], name
        assert (name in choosable) == ("chosen" in {p["name"] for p in spec.get("params", [])})
    assert {"lr_loss", "curves", "steps_to_loss", "max_logit", "early_warning"} <= choosable


def test_unknown_arms_get_colours_of_their_own() -> None:
    colours = theme.arm_colours(["zeta", "off", "alpha"])
    assert list(colours) == ["off", "alpha", "zeta"]
    assert len(set(colours.values())) == 3


def test_zero_on_a_log_axis_is_drawn_at_its_foot_and_counted(
    awkward: Any, specs: dict[str, dict[str, Any]]
) -> None:
    """Depth 1 has logits of 0 (14 cells); 2 cells of depth 4 have none that is finite."""
    spec = specs["max_logit"]
    text = subtitle(spec)
    assert "14 at or below 0, drawn at the foot of the log axis" in text
    found = int((~awkward.cells["state"].isin(["errored", "missing"])).sum())
    lost = len(awkward.cells) - found + 2
    assert f"{lost} without a finite value are not drawn" in text
    rows = [row for row in spec["datasets"]["values"] if row["layer"] == "all layers"]
    assert len(rows) == len(awkward.cells) - lost
    assert all(row["y"] > 0 for row in rows)


def test_censored_edges_get_arrows(awkward: Any, specs: dict[str, dict[str, Any]]) -> None:
    """Off at depth 2 never is stable: its edge is below the grid; rmsnorm at depth 1 above."""
    seeds = specs["max_stable_lr"]["datasets"]["seeds"]
    by = {(row["depth"], row["qk_norm"]): row for row in seeds}
    assert by[2, "off"]["down"] is not None
    assert by[2, "off"]["up"] is None
    assert by[1, "rmsnorm"]["up"] is not None
    text = subtitle(specs["max_stable_lr"])
    assert "1 of 6 seeds have a stable cell above an unstable one" in text
    assert "nothing known: RMSNorm at depth 4" in text


def test_curves_are_thinned_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    results = fabricated.small()
    monkeypatch.setattr("analysis.plots.curves.MOST_POINTS", 300)
    spec = plots.training_curves(results.cells, results.history).to_dict()
    rows = pd.DataFrame(spec["datasets"]["curves"])
    assert len(rows) < len(results.history)
    assert any("thinned" in line for line in spec["title"]["subtitle"])
    steps = rows.groupby("cell")["step"]
    assert steps.min().eq(0).all()
    last = results.history.groupby("cell")["step"].max()
    assert steps.max().sort_index().tolist() == last.sort_index().tolist()


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([1e-3, 1.0], [0.001, 0.01, 0.1, 1.0]),
        ([1e-5, 3e-4], [1e-5, 2e-5, 5e-5, 1e-4, 2e-4]),
        ([2.1, 18.0], [3.0, 5.0, 7.0, 10.0]),
        ([3.1, 6.4], [4.0, 5.0, 6.0]),
        ([0.0, math.inf], []),
        ([0.02], [0.02]),
    ],
)
def test_ticks_of_a_log_axis(values: list[float], ticks: list[float]) -> None:
    assert theme.decades(values) == pytest.approx(ticks)


def test_linear_ticks() -> None:
    """0 to 6.24 with room for 7 ticks: every 1; with room for 4: every 2."""
    assert theme.linear_ticks(0, 6.24, most=7) == [0, 1, 2, 3, 4, 5, 6]
    assert theme.linear_ticks(0, 6.24, most=4) == [0, 2, 4, 6]


def test_arms_stand_beside_each_other() -> None:
    """0.2 grid steps apart: with 8 a decade, x is lr times 10 ** -+0.0125; at most as with 4."""
    table = pd.DataFrame({"lr": [1.0, 1.0], "qk_norm": ["off", "rmsnorm"]})
    moved = theme.dodged(table, ["off", "rmsnorm"], [10**-0.125, 1.0])
    assert moved["x"].tolist() == pytest.approx([10**-0.0125, 10**0.0125])
    coarse = theme.dodged(table, ["off", "rmsnorm"], [0.1, 1.0])
    assert coarse["x"].tolist() == pytest.approx([10**-0.025, 10**0.025])
    assert moved["lr"].tolist() == [1.0, 1.0]


def test_punctuation_that_would_merge_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="not distinct"):
        theme.chartable(pd.DataFrame({"a.b": [1], "a/b": [2]}))


def test_charts_are_altair_charts() -> None:
    results = fabricated.small()
    assert isinstance(plots.training_curves(results.cells, results.history), alt.ConcatChart)
