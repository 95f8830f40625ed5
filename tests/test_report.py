"""The report's files: complete, strict, deterministic, self-contained, and usable in LaTeX."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pandas as pd
import pyarrow.parquet
import pytest

from analysis import latex, page, report
from analysis.answer import answer
from analysis.compare import compare
from analysis.figures import figures
from analysis.load import Results
from analysis.plots import COLUMN, WIDE
from analysis.summary import (
    edge_text,
    interval_text,
    json_safe,
    lr_text,
    summarise,
)
from analysis.tables import CELL_COLUMNS, HISTORY_COLUMNS, HISTORY_METRICS, as_cells, meaning
from tests import fabricated
from tune_study.config import ConfigError, log_grid

SCHEMA = json.loads((Path(report.__file__).parent / "summary_schema.json").read_text())


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=refuse)


def rendered(results: Results, with_figures: bool = False) -> str:
    """The page, without the files beside it."""
    summary = json_safe(summarise(results))
    drawn = figures(results, summary) if with_figures else []
    specs = {f.name: {layout.name: f.spec(layout) for layout in (COLUMN, WIDE)} for f in drawn}
    return page.render(results, summary, drawn, specs)


@pytest.fixture(scope="module")
def small() -> Results:
    return fabricated.small()


@pytest.fixture(scope="module")
def out(small: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    assert report.write(small, folder) == folder / "index.html"
    return folder


@pytest.fixture(scope="module")
def awkward() -> Results:
    return fabricated.awkward()


# ------------------------------------------------------------------- the files


def test_every_figure_in_every_format(out: Path, small: Results) -> None:
    names = [f.name for f in figures(small, summarise(small))]
    assert names[0] == "lr_loss"
    for name in names:
        for stem in (name, f"{name}-wide"):
            assert (out / "figures" / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
            assert (out / "figures" / f"{stem}.pdf").read_bytes().startswith(b"%PDF")
            assert (out / "figures" / f"{stem}.svg").read_text().startswith("<svg")
            assert strict((out / "figures" / f"{stem}.vl.json").read_text())["$schema"]


def test_fonts_are_embedded_in_the_pdf(out: Path) -> None:
    content = (out / "figures" / "lr_loss.pdf").read_bytes()
    assert b"/FontFile" in content
    width = float(re.search(rb"/MediaBox \[0 0 ([\d.]+)", content)[1])  # type: ignore[index]
    assert width <= 88 / 25.4 * 72 * 1.02  # 88 mm in points


def test_nothing_half_written_is_left(out: Path) -> None:
    assert [path.name for path in out.rglob("*.part")] == []


def test_tables_round_trip_through_parquet(out: Path, small: Results) -> None:
    cells = pd.read_parquet(out / "cells.parquet")
    assert list(cells.columns) == list(CELL_COLUMNS)
    # as_cells restores what Parquet does not keep, such as pandas' own integers.
    pd.testing.assert_frame_equal(as_cells(cells.to_dict("records")), small.cells)
    history = pd.read_parquet(out / "history.parquet")
    assert len(history) == len(small.history)


def test_parquet_says_what_each_column_holds(out: Path) -> None:
    """Names, types and meanings as `analysis.tables` documents them."""
    arrow = {"str": "large_string", "float64": "double", "int64": "int64", "Int64": "int64"}
    arrow["list of float32"] = "list<element: float>"
    for name, described in (("cells", CELL_COLUMNS), ("history", HISTORY_COLUMNS)):
        for field in pyarrow.parquet.read_schema(out / f"{name}.parquet"):
            words = field.metadata[b"description"].decode()
            assert words == meaning(field.name, described)
            whole = field.name if field.name in described else field.name.rpartition("/")[0]
            assert str(field.type) == arrow[described[whole][0]], field.name


def test_the_documented_columns_are_those_of_the_tables() -> None:
    text = (Path(__file__).parent.parent / "docs" / "report.md").read_text()
    for name, (kind, words) in (CELL_COLUMNS | HISTORY_METRICS).items():
        assert f"| `{name}` | {kind} | {words} |\n" in text


def test_the_same_results_give_the_same_bytes(
    small: Results, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One figure is enough for the second time; the page is compared without its figures."""
    monkeypatch.setattr(report, "figures", lambda *study: figures(*study)[2:3])
    again = report.write(small, tmp_path).parent
    files = sorted(path.relative_to(again) for path in again.rglob("*") if path.is_file())
    assert len(files) > 10
    for name in files:
        if name.suffix == ".pdf" or name.name == "index.html":
            continue  # the converter orders a PDF's dictionaries at random
        assert (again / name).read_bytes() == (out / name).read_bytes(), name
    assert rendered(small) == rendered(small)


# ------------------------------------------------------------------ the summary


@pytest.mark.parametrize("build", [fabricated.small, fabricated.awkward])
def test_summary_is_strict_json_and_fits_its_schema(build: Any) -> None:
    summary = json_safe(summarise(build()))
    jsonschema.validate(strict(json.dumps(summary, allow_nan=False)), SCHEMA)


def test_written_summary_is_strict_json(out: Path) -> None:
    jsonschema.validate(strict((out / "summary.json").read_text()), SCHEMA)


def test_counts_add_up(awkward: Results) -> None:
    """42 cells: 18 stable, 6 failed, 9 diverged, 1 errored make 34 found; 8 are missing."""
    cells = summarise(awkward)["cells"]
    assert cells == {
        "expected": 42,
        "found": 34,
        "stable": 18,
        "failed": 6,
        "diverged": 9,
        "errored": 1,
        "missing": 8,
        "untried": 0,
    }


def test_complete_only_if_every_cell_has_a_verdict(small: Results, awkward: Results) -> None:
    assert summarise(small)["complete"]
    assert not summarise(awkward)["complete"]
    assert not summarise(replace(small, running=True))["complete"]
    errored = small.cells.copy()
    errored.loc[0, "state"] = "errored"
    assert not summarise(replace(small, cells=errored))["complete"]


def test_leak_alarm(small: Results) -> None:
    """The floor is 0.6: a stable cell at 0.59 is impossible for an honest model."""
    assert not summarise(small)["leak_alarm"]
    cells = small.cells.copy()
    at = cells.index[cells["state"] == "stable"][0]
    cells.loc[at, "loss"] = 0.59
    leaking = replace(small, cells=cells)
    assert summarise(leaking)["leak_alarm"]
    assert "Leak alarm" in rendered(leaking)
    cells.loc[at, "state"] = "errored"  # no evidence, so no alarm
    assert not summarise(replace(small, cells=cells))["leak_alarm"]


def test_one_arm_alone_is_reported_without_a_verdict() -> None:
    alone = fabricated.results(fabricated.study(qk_norm=("off",), depth=(1,), seed=(0, 1)))
    summary = summarise(alone)
    assert summary["verdicts"] == []
    assert "only one arm" in summary["not_judged"]
    html = rendered(alone, with_figures=True)
    assert "No verdict" in html
    assert 'data-figure="necessity"' not in html


# --------------------------------------------------------------------- the page


def test_page_needs_no_network(out: Path) -> None:
    """No element loads anything: no src, no stylesheet, no import."""
    html = (out / "index.html").read_text()
    markup = re.sub(r"<script.*?</script>", "", html, flags=re.S)
    assert not re.search(r"""<(link|img|iframe|script)\b""", markup)
    assert "<script src" not in html
    assert "@import" not in html
    assert "url(" not in re.search(r"<style>.*?</style>", html, flags=re.S)[0]  # type: ignore[index]


def test_page_has_one_copy_of_the_code_and_of_each_dataset(out: Path) -> None:
    html = (out / "index.html").read_text()
    assert html.count("<script>") == 2  # Vega, and the page's own
    data = strict(re.search(r'id="data">(.*?)</script>', html, flags=re.S)[1])  # type: ignore[index]
    used = {
        key
        for figure in data["figures"].values()
        for layout in figure.values()
        for key in layout["datasets"].values()
    }
    assert used == set(data["datasets"])
    assert len({json.dumps(table) for table in data["datasets"].values()}) == len(used)


def test_page_stamps_what_is_incomplete(awkward: Results, small: Results) -> None:
    html = rendered(awkward)
    assert "Incomplete: 33 of 42 cells, 1 errored, 8 missing" in html
    assert "line 3 is torn" in html
    assert "Incomplete" not in rendered(small)
    assert "still running" in rendered(replace(small, running=True))


def test_page_says_how_the_runs_ended(awkward: Results, small: Results) -> None:
    html = rendered(awkward)
    for words in ("loss not finite", "RuntimeError: out of memory", "cut off", "There were none"):
        assert words in html
    assert 'id="calibration"' not in html
    summary = json_safe(summarise(small))
    row = {"criterion": "safe", "false_stops": 0, "n_stopped": 8, "n_failures": 14, "saved": 0.108}
    row |= {"sensitivity_shift": 0.018, "sensitivity_shift_sd": 0.21, "edge_shift": 0}
    summary["divergence"]["calibration"] = [row]
    html = page.render(small, summary, [], {})
    assert "<td>8 of 14</td><td>10.8 %</td><td>0.018 (0.21)</td><td>0</td>" in html


def test_page_has_the_method(small: Results) -> None:
    html = rendered(small)
    for words in ("7 from 0.001 to 1, peak", "400 steps of 512 tokens", "python 3.11.2", "fp32"):
        assert words in html


def test_text_cannot_break_out_of_the_page(small: Results) -> None:
    cells = small.cells.copy()
    cells.loc[0, "state"] = "errored"
    cells.loc[0, "reason"] = "</script><script>alert(1)</script><!--"
    html = rendered(replace(small, cells=cells, damage=("<b>torn</b>",)))
    assert "alert(1)</script>" not in html.replace("<\\/", "")
    assert html.count("</script>") == 3
    assert "&lt;b&gt;torn" in html


def test_size_of_the_page() -> None:
    """234 cells x 20 reports in less than 3 MB."""
    assert len(rendered(fabricated.results(), with_figures=True).encode()) < 3e6


@pytest.mark.slow
def test_size_of_a_large_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """13 x 3 x 2 x 129 = 10,062 cells of 100 reports below 10 MB; thinned, and it says so."""
    monkeypatch.setattr(fabricated, "REPORTS", range(4, 401, 4))
    large = fabricated.many(129)
    assert len(large.cells) == len(large.study) == 10_062
    html = rendered(large, with_figures=True)
    assert len(html.encode()) < 10e6
    assert re.search(r"thinned: \d+ of \d+ reports drawn, first and last kept", html)


# ------------------------------------------------------------------- sentences


def test_answer_has_the_numbers(small: Results) -> None:
    summary = json_safe(summarise(small))
    text = " ".join(answer(summary))
    for arm in summary["arms"]:
        assert edge_text(arm["max_stable_lr"]) in text
        assert f"{arm['lr_sensitivity']['value']:.2f}" in text
        assert f"at depth {arm['depth']}" in text


def test_answer_says_when_first_and_compares_seed_by_seed(small: Results) -> None:
    """Three sentences; the change of the stable range has the interval of H2's part."""
    summary = json_safe(summarise(small))
    sentences = answer(summary)
    assert len(sentences) == 3
    assert sentences[0].startswith("QK-norm (RMSNorm) is needed from a learning rate of ")
    (second,) = (v for v in summary["verdicts"] if v["hypothesis"] == "H2")
    ratio = next(p for p in second["parts"] if p["unit"] == "x" and p["depth"] == 1)
    interval = interval_text(ratio["low"], ratio["high"], ".2g")
    assert f"at depth 1 (×{ratio['effect']:.2g} {interval})" in sentences[1]
    drop = next(p for p in second["parts"] if p["unit"] == "nats" and p["depth"] == 2)
    assert f"at depth 2 (−{drop['effect']:.2f} [" in sentences[2]


def test_answer_does_not_hide_what_is_unknown(awkward: Results) -> None:
    text = " ".join(answer(json_safe(summarise(awkward))))
    assert "< 0.001" in text  # off at depth 2 is nowhere stable
    assert "≥ 1" in text  # rmsnorm at depth 1 is stable everywhere
    assert "unknown" in text  # rmsnorm at depth 4 was never run
    assert "not monotone" in text  # off at depth 1
    assert "to an unknown value at depth 4" in text
    assert "nan" not in text.lower()


def test_answer_of_a_study_that_has_begun_says_what_is_not_known(small: Results) -> None:
    """Every arm lacks its highest learning rate: 8 of 56 cells."""
    begun = small.cells.copy()
    begun.loc[begun["lr"] == 1.0, ["state", "loss"]] = ["missing", math.nan]
    sentences = answer(json_safe(summarise(replace(small, cells=begun))))
    without = "is not known: 8 of 56 cells are without a result."
    assert (
        sentences[-1] == f"What QK-norm (RMSNorm) does to LR sensitivity (nats a token) {without}"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0316227766, "0.0316"),
        (3e-5, "3e-5"),
        (1.7783e-5, "1.78e-5"),
        (1.0, "1"),
        (None, "–"),
        (math.nan, "–"),
    ],
)
def test_learning_rates_are_readable(value: float | None, text: str) -> None:
    assert lr_text(value) == text


def test_learning_rates_of_a_fine_grid_stay_distinct() -> None:
    grid = log_grid(1e-5, 1e-3, 16)
    assert len({lr_text(lr) for lr in grid}) == len(grid)


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [(0.1, 0.25, "[0.10, 0.25]"), (0.1, None, "[0.10, ∞]"), (None, 2, "[−∞, 2.00]")],
)
def test_intervals(low: float | None, high: float | None, text: str) -> None:
    assert interval_text(low, high) == text
    assert interval_text(None, None) == ""


def test_large_ends_of_an_interval_are_plain() -> None:
    assert interval_text(0.0026, 3821.0, ".2g") == "[0.0026, 3800]"
    assert interval_text(1.0, 1.234e8, ".2g") == "[1, 1.2e8]"
    assert interval_text(6.04e-8, None, ".2g") == "[6e-8, ∞]"


def test_json_safe() -> None:
    value = {"a": np.float64("nan"), "b": [np.int64(1), math.inf], "c": pd.NA, "d": np.bool_(True)}
    assert json_safe(value) == {"a": None, "b": [1, None], "c": None, "d": True}


# ----------------------------------------------------------------------- LaTeX


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        (("max stable lr", "off", "depth", 2), "MaxStableLrOffDepthTwo"),
        (("x", "depth", 10), "XDepthOneZero"),
        (("verdict", "H3", "rmsnorm"), "VerdictHThreeRmsnorm"),
    ],
)
def test_command_names_are_letters(parts: tuple[str | int, ...], name: str) -> None:
    assert latex.command_name(*parts) == name


def test_macros_are_defined_once(awkward: Results) -> None:
    lines = latex.macros(json_safe(summarise(awkward))).splitlines()
    names = [re.match(r"\\newcommand\{\\([A-Za-z]+)\}", line) for line in lines[1:]]
    assert all(names)
    assert len({match[1] for match in names if match}) == len(names)


def test_macros_have_thresholds_and_effects(small: Results, awkward: Results) -> None:
    """What the answer's first lines say is there under a name each."""
    summary = json_safe(summarise(small))
    found = dict(re.findall(r"\\newcommand\{\\(\w+)\}\{(.*)\}", latex.macros(summary)))
    (row,) = (row for row in summary["necessity"] if row["depth"] == 2)
    assert found["NecessityRmsnormDepthTwo"] == lr_text(row["value"])
    (third,) = (v for v in summary["verdicts"] if v["hypothesis"] == "H3")
    assert found["VerdictHThreeRmsnorm"] == third["verdict"]
    assert found["MaxStableLrRatioRmsnormDepthOne"][0].isdigit()
    for name in (
        "EffectHThreeRmsnorm",
        "LrSensitivityDropRmsnormDepthTwo",
        "NecessityRmsnormDepthOne",
    ):
        assert {name, f"{name}Interval"} <= set(found)
    assert "StepsSavedPercent" in found
    unknown = latex.macros(json_safe(summarise(awkward)))
    assert r"\newcommand{\NecessityRmsnormDepthFour}{unknown}" in unknown


def test_latex_special_characters() -> None:
    assert latex.escape("95 % of d_head ≥ 1 & more") == r"95 \% of d\_head $\geq$ 1 \& more"


PAPER = r"""
\documentclass[conference]{IEEEtran}
\usepackage{booktabs,graphicx}
\input{macros.tex}
\begin{document}
\title{A study}\author{Somebody}\maketitle
The edge moves from \MaxStableLrOffDepthTwo{} to \MaxStableLrRmsnormDepthTwo{}, a factor of
\MaxStableLrRatioRmsnormDepthTwo{} \MaxStableLrRatioRmsnormDepthTwoInterval{}. QK-norm is needed
from \NecessityRmsnormDepthTwo{} \NecessityRmsnormDepthTwoInterval{} up; the slope is
\EffectHThreeRmsnorm{} \EffectHThreeRmsnormInterval{}, \VerdictHThreeRmsnorm{}.
\begin{figure}\includegraphics[width=\columnwidth]{figures/lr_loss.pdf}\caption{A}\end{figure}
\begin{figure*}\includegraphics{figures/lr_loss-wide.pdf}\caption{B}\end{figure*}
\begin{table}\caption{C}\input{tables/arms.tex}\end{table}
\begin{table}\caption{D}\input{tables/verdicts.tex}\end{table}
\end{document}
"""


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="LaTeX is not installed")
def test_an_ieee_paper_compiles_with_tables_macros_and_figures(out: Path, tmp_path: Path) -> None:
    if not _has_class("IEEEtran"):
        pytest.skip("LaTeX is installed without IEEEtran")
    paper = tmp_path / "paper"
    shutil.copytree(out, paper)
    (paper / "paper.tex").write_text(PAPER)
    run = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"],
        cwd=paper,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-2000:]
    # No box may stick out by more than a point: the tables fit their column.
    overfull = [float(x) for x in re.findall(r"Overfull \\hbox \(([\d.]+)pt", run.stdout)]
    assert max(overfull, default=0.0) < 1.0, run.stdout


def _has_class(name: str) -> bool:
    found = subprocess.run(
        ["kpsewhich", f"{name}.cls"], capture_output=True, text=True, check=False
    )
    return bool(found.stdout.strip())


# ------------------------------------------------------------------- comparison


def test_two_studies_side_by_side(
    small: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second has another range of learning rates: its losses are refused, by name."""
    monkeypatch.setattr("analysis.compare.SIDE_BY_SIDE", ("max_stable_lr",))
    other = fabricated.results(fabricated.study(lr=(0.01, 0.1, 1.0), depth=(1,), seed=(0, 1)))
    other = replace(other, study=other.study.replace(name="coarse"))
    html = compare([small, other], tmp_path).read_text()
    assert "coarse" in html
    assert "7 from 0.001 to 1" in html
    assert "3 from 0.01 to 1" in html
    assert "not compared: learning rates" in html
    assert "LR sensitivity <small>" not in html
    twin = replace(small, study=small.study.replace(name="twin"))
    html = compare([small, twin], tmp_path).read_text()
    assert "Nothing but the name" in html
    assert "LR sensitivity <small>twin" in html


def test_a_comparison_needs_two_studies(small: Results, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs at least two"):
        compare([small, small], tmp_path)
