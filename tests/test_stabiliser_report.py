"""The report of a study of many arms: nothing mixes arms, and every claim has its evidence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pandas as pd
import pytest

from analysis import charts, estimators, latex, report, stabiliser_report, text
from analysis.answer import answer, scope
from analysis.compare import compare
from analysis.figures import figures
from analysis.load import Results
from analysis.plots import COLUMN, WIDE
from analysis.summary import json_safe, summarise
from tests import fabricated
from tests.test_report import SCHEMA, rendered, strict
from tune_study.config import ConfigError

ARMS = {
    *("off", "rmsnorm", "zloss1e-4", "softcap50", "sigmareparam"),
    *("rmsnorm+zloss1e-4", "rmsnorm+softcap50"),
}


@pytest.fixture(scope="module")
def many() -> Results:
    return fabricated.many_arms()


@pytest.fixture(scope="module")
def pair(many: Results) -> Results:
    """The same cells of off and rmsnorm, as a study of QK-norm alone would have left them."""
    kept = ["off", "rmsnorm"]
    cells = many.cells[many.cells["arm"].isin(kept)].reset_index(drop=True)
    reports = many.history[many.history["arm"].isin(kept)].reset_index(drop=True)
    axes = {"lr": (1e-3,), "depth": (2,), "qk_norm": ("off", "rmsnorm"), "seed": (0,)}
    return replace(
        many, study=many.study.replace(arms=None, axes=axes), cells=cells, history=reports
    )


@pytest.fixture(scope="module")
def summary(many: Results) -> dict[str, Any]:
    return json_safe(summarise(many))


# ---------------------------------------------------------------- nothing is mixed


def test_what_is_said_of_qk_norm_is_what_its_pair_alone_says(
    summary: dict[str, Any], pair: Results
) -> None:
    """z-loss, the softcap and sigmaReparam are qk_norm = off too, and change nothing here."""
    alone = json_safe(summarise(pair))
    assert summary["verdicts"] == alone["verdicts"]
    assert summary["necessity"] == alone["necessity"]
    assert [a for a in summary["arms"] if a["arm"] in ("off", "rmsnorm")] == alone["arms"]
    assert alone["stabilisers"] is None
    assert answer(summary)[:-1] == answer(alone)
    assert "compare off and rmsnorm only" in answer(summary)[-1]
    assert scope(alone) == []


def test_figures_of_qk_norm_draw_the_pair_alone(
    many: Results, summary: dict[str, Any], pair: Results
) -> None:
    def drawn(results: Results, of: dict[str, Any]) -> dict[str, Any]:
        return {
            figure.name: figure.spec(COLUMN)
            for figure in figures(results, of)
            if figure.name not in ("robustness", *stabiliser_report.FIGURES)
        }

    assert drawn(many, summary) == drawn(pair, json_safe(summarise(pair)))
    names = [figure.name for figure in figures(many, summary)]
    assert names[-5:] == list(stabiliser_report.FIGURES)


def test_estimators_refuse_a_table_of_arms_that_share_qk_norm(many: Results) -> None:
    """Whoever groups them by qk_norm is told, not given a mean of several arms."""
    with pytest.raises(ConfigError, match="two rows that differ"):
        estimators.max_stable_lr(many.cells)


def test_counts_tables_and_macros_have_every_arm(
    many: Results, summary: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("analysis.compare.SIDE_BY_SIDE", ())
    assert summary["cells"]["found"] == len(many.cells) == 7 * 7 * 3
    assert summary["complete"]
    assert {arm["arm"] for arm in summary["arms"]} == ARMS
    norms = {arm["arm"]: arm["qk_norm"] for arm in summary["arms"]}
    assert norms["softcap50"] == "off"
    assert norms["rmsnorm+zloss1e-4"] == "rmsnorm"
    assert "MaxStableLrRmsnormZlossOneEFourDepthTwo" in latex.macros(summary)
    assert "softcap50" in latex.arms_table(summary)
    other = replace(many, study=many.study.replace(name="again"))
    html = compare([many, other], tmp_path).read_text()
    assert "rmsnorm+softcap50" in html


# ------------------------------------------------------------------- the section


def test_summary_fits_its_schema(summary: dict[str, Any]) -> None:
    jsonschema.validate(strict(json.dumps(summary, allow_nan=False)), SCHEMA)
    assert {row["arm"] for row in summary["stabilisers"]["ranking"]} == ARMS
    crossed = {(x["first"], x["second"]) for x in summary["stabilisers"]["interactions"]}
    assert crossed == {("rmsnorm", "zloss1e-4"), ("rmsnorm", "softcap50")}


def test_findings_name_every_arm_once_a_figure(summary: dict[str, Any]) -> None:
    findings = stabiliser_report.findings(summary["stabilisers"])
    assert len(findings) == 5
    for sentence in findings:
        for arm in ARMS - {"off"}:
            pieces = sentence.replace(";", ",").replace(":", ",").replace(".", ",").split(",")
            assert sum(piece.split(" (")[0].strip() == arm for piece in pieces) == 1, sentence
    # A step of softcap50 takes 1.2 times as long, give or take a hundredth.
    (cost,) = [s for s in findings if s.startswith("Cost")]
    assert "worse: " in cost
    assert "softcap50 (×1.2" in cost.split("worse: ")[1].split(";")[0]
    (sensitivity,) = [s for s in findings if s.startswith("LR sensitivity")]
    assert "better" in sensitivity
    assert "zloss1e-4" in sensitivity.split("not told apart from off: ")[1]


def test_a_low_sensitivity_of_an_arm_that_learns_badly_is_said_with_its_loss(
    summary: dict[str, Any],
) -> None:
    content = json.loads(json.dumps(summary["stabilisers"]))
    for row in content["ranking"]:
        if (row["arm"], row["quantity"]) == ("rmsnorm", "best_loss"):
            row["outcome"] = "worse"
    sensitivity = stabiliser_report.findings(content)[0]
    assert sensitivity.count("from a worse best loss") == 1


def test_an_arm_is_called_better_only_where_its_numbers_say_so(summary: dict[str, Any]) -> None:
    for row in summary["stabilisers"]["ranking"]:
        if row["outcome"]:
            assert row["p_holm"] < 0.05
            none = 1 if row["quantity"] in ("max_stable_lr", "step_ms") else 0
            low, high = row["change_low"], row["change_high"]
            assert (low is not None and low > none) or (high is not None and high < none)


def test_text_tables_and_terminal_agree(summary: dict[str, Any]) -> None:
    content = summary["stabilisers"]
    markdown = stabiliser_report.markdown(content)
    rows = [line for line in markdown.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(ARMS)
    assert any(row.startswith("| **off** |") for row in rows)
    tex = stabiliser_report.latex_table(content)
    assert tex.count(r"\\") == 1 + len(ARMS)
    shown = "\n".join(text.lines(summary))
    for sentence in stabiliser_report.findings(content):
        assert sentence in shown


def test_page_has_the_section_and_says_what_is_compared(many: Results) -> None:
    html = rendered(many, with_figures=True)
    assert 'id="stabilisers"' in html
    for name in stabiliser_report.FIGURES:
        assert html.count(f'data-figure="{name}"') == 1
    assert "compare off and rmsnorm only" in html
    plain = rendered(fabricated.small())
    assert 'id="stabilisers"' not in plain


def test_a_report_of_many_arms_has_its_tables(
    many: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "figures", lambda *study: [])
    report.write(many, tmp_path)
    assert "rmsnorm+zloss1e-4" in (tmp_path / "tables" / "stabilisers.tex").read_text()
    assert "| **off** |" in (tmp_path / "tables" / "stabilisers.md").read_text()
    jsonschema.validate(strict((tmp_path / "summary.json").read_text()), SCHEMA)


def test_charts_draw_by_name(many: Results) -> None:
    with pytest.raises(ConfigError, match=", ".join(stabiliser_report.FIGURES)):
        charts.draw(many, "no such figure")
    assert charts.draw(many, "stabilisers_change").to_dict()


# ------------------------------------------------------------------- the figures


def specs(results: Results) -> dict[str, Any]:
    content = json_safe(summarise(results))["stabilisers"]
    return {f.name: f.spec(WIDE) for f in stabiliser_report.figures(results, content)}


def test_small_multiples_draw_every_cell_once(many: Results) -> None:
    spec = specs(many)["stabilisers_loss"]
    assert len(spec["concat"]) == len(ARMS) - 1
    assert len(spec["datasets"]["cells"]) == len(many.cells)
    # In each panel two lines and two sets of points: the baseline behind, the arm before.
    for panel in spec["concat"]:
        filters = [layer["transform"][0]["filter"] for layer in panel["layer"]]
        assert [("'off'" in f) for f in filters] == [True, True, False, False]


def test_an_arm_has_the_colour_of_every_other_figure(many: Results) -> None:
    rows = specs(many)["stabilisers_change"]["datasets"]["changes"]
    colours = {row["arm"]: row["colour"] for row in rows}
    assert colours["rmsnorm"] == "#0072B2"
    assert colours["softcap50"] == colours["zloss1e-4"] not in ("#0072B2", "#D55E00")
    assert len(rows) == 5 * (len(ARMS) - 1)


def test_open_intervals_end_in_an_arrow_and_have_no_invented_middle() -> None:
    """A softcap that never fails on this grid: at least so much better, no more is known."""
    many = fabricated.many_arms()
    cells = many.cells.copy()
    cells.loc[cells["arm"] == "softcap50", "state"] = "stable"
    content = json_safe(summarise(replace(many, cells=cells)))["stabilisers"]
    (row,) = [
        r for r in content["ranking"] if (r["arm"], r["quantity"]) == ("softcap50", "max_stable_lr")
    ]
    assert (row["censored"], row["change"], row["change_high"]) == ("above", None, None)
    assert stabiliser_report.value_text(row) == "≥ 1"
    assert "∞" in stabiliser_report.change_text(row)
    by_name = specs(replace(many, cells=cells))
    drawn = [
        r
        for r in by_name["stabilisers_change"]["datasets"]["changes"]
        if r["arm"] == "softcap50" and r["right"] is not None
    ]
    assert drawn
    assert all(r["change"] is None and r["low"] is not None for r in drawn)


def test_lost_cells_are_counted_not_hidden(many: Results) -> None:
    cells = many.cells.copy()
    gone = cells["arm"].eq("sigmareparam")
    cells.loc[gone, ["state", "reason"]] = ["missing", "not started"]
    cells.loc[gone, ["loss", "loss_init"]] = np.nan
    results = replace(many, cells=cells)
    spec = specs(results)
    assert "21 of 147 cells errored or missing" in str(spec["stabilisers_loss"]["title"])
    assert "not known for" in str(spec["stabilisers_change"]["title"])
    tiles = spec["stabilisers_phase"]["datasets"]["phases"]
    assert {t["text"] for t in tiles if t["arm"] == "sigmareparam"} == {"?"}
    findings = stabiliser_report.findings(json_safe(summarise(results))["stabilisers"])
    assert all("not tested: sigmareparam" in sentence for sentence in findings)
    assert "sigmareparam" in rendered(results)


def test_several_depths_stand_apart() -> None:
    two = fabricated.many_arms(depth=(1, 2), seed=(0, 1))
    content = json_safe(summarise(two))["stabilisers"]
    assert len(stabiliser_report.findings(content)) == 10
    assert "at depth 1" in stabiliser_report.findings(content)[0]
    assert stabiliser_report.markdown(content).startswith("| depth | arm |")
    assert pd.DataFrame(content["ranking"])["depth"].nunique() == 2
    assert rendered(two)


def test_a_study_without_rmsnorm_says_why_there_is_no_verdict(many: Results) -> None:
    cells = many.cells[many.cells["arm"].isin(["off", "softcap50"])].reset_index(drop=True)
    lone = replace(many, cells=cells)
    found = json_safe(summarise(lone))
    assert found["verdicts"] == []
    assert "no arm adds RMSNorm alone to the baseline" in found["not_judged"]
    assert {row["arm"] for row in found["stabilisers"]["ranking"]} == {"off", "softcap50"}
    assert rendered(lone, with_figures=True)
