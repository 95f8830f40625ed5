"""The page in a real browser, without a network: drawn in full, linked, filtered, adapted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from analysis.load import Results
from tests import fabricated
from tests.browser import Tab
from tests.test_report import rendered


@pytest.fixture(scope="module")
def small() -> Results:
    return fabricated.small()


@pytest.fixture(scope="module")
def small_page(small: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "index.html"
    path.write_text(rendered(small, with_figures=True))
    return path


@pytest.fixture(scope="module")
def awkward() -> Results:
    return fabricated.awkward()


@pytest.fixture(scope="module")
def awkward_page(awkward: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("awkward") / "index.html"
    path.write_text(rendered(awkward, with_figures=True))
    return path


@pytest.fixture
def tab(browser: Any, small_page: Path) -> Iterator[Tab]:
    tab = Tab(browser, small_page, viewport={"width": 1000, "height": 900})
    yield tab
    tab.context.close()


@pytest.mark.parametrize("width", [390, 1000])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_awkward_study_is_drawn_in_full(
    browser: Any, awkward: Results, awkward_page: Path, width: int, scheme: str
) -> None:
    """No error, nothing fetched, every chart there, every cell drawn once, nothing cut off."""
    tab = Tab(browser, awkward_page, viewport={"width": width, "height": 900}, color_scheme=scheme)
    assert tab.wrong == []
    assert [url for url in tab.requests if not url.startswith("file:")] == []
    for chart in tab.page.query_selector_all("[data-figure]"):
        box = chart.query_selector("svg.marks").bounding_box()
        assert box["height"] > 50
        assert box["x"] + box["width"] <= width + 1
    drawn = Counter(datum["state"] for datum in tab.marks("lr_loss", "cells_"))
    assert drawn == Counter(awkward.cells["state"])
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    background = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")
    tab.context.close()


def test_counts_on_the_page_are_the_cells(tab: Tab, small: Results) -> None:
    for state, count in small.cells["state"].value_counts().items():
        assert tab.page.inner_text(f"#count-{state}") == str(count)


def test_a_click_in_the_curves_of_loss_brings_out_the_training_curve(
    tab: Tab, small: Results
) -> None:
    """The chosen cell's line stays, all others fade; its row is marked; a second click ends it."""
    tab.page.locator("[data-figure=lr_loss] g.cells_1_marks path").nth(3).click(force=True)
    tab.page.wait_for_function("picked.length === 1")
    name = tab.page.evaluate("picked[0]")
    assert name in set(small.cells["cell"])
    opacity = opacity_of_curves(tab, "curves")
    assert len(opacity) == len(small.cells)
    assert opacity.pop(name) > 0.5
    assert max(opacity.values()) < 0.1
    assert tab.page.locator(f"tr.picked[data-cell='{name}']").count() == 1


def opacity_of_curves(tab: Tab, figure: str) -> dict[str, float]:
    """Of each cell's training curve, once what is chosen has been drawn."""
    walk = """async (figure) => {
      const view = views[figure], seen = {};
      await view.runAsync();
      const walk = (node) => {
        if (node.marktype === "line") {
          for (const { datum, strokeOpacity } of node.items) seen[datum.cell] = strokeOpacity;
        } else for (const child of node.items ?? []) walk(child);
      };
      walk(view.scenegraph().root);
      return seen;
    }"""
    found: dict[str, float] = tab.page.evaluate(walk, figure)
    return found


def test_the_curve_of_any_arm_is_brought_out(browser: Any, tmp_path: Path) -> None:
    """Also of an arm that is neither the baseline nor RMSNorm."""
    many = fabricated.many_arms(lr=(0.01, 0.1), seed=(0, 1))
    page = tmp_path / "index.html"
    page.write_text(rendered(many, with_figures=True))
    tab = Tab(browser, page)
    name = many.cells.loc[many.cells["arm"] == "zloss1e-4", "cell"].iloc[0]
    tab.page.locator(f"tr[data-cell='{name}']").click()
    opacity = opacity_of_curves(tab, "stabilisers_curves")
    assert len(opacity) == len(many.cells)
    assert opacity.pop(name) > 0.5
    assert max(opacity.values()) < 0.1
    assert tab.wrong == []
    tab.context.close()


def test_a_click_in_the_table_brings_out_the_training_curve(tab: Tab) -> None:
    row = tab.page.locator("#cell-table tbody tr").first
    name = row.get_attribute("data-cell")
    row.click()
    assert tab.page.evaluate("views.curves.signal('chosen')") == [name]
    row.click()
    assert tab.page.evaluate("views.curves.signal('chosen')") == []


def test_filter_of_the_table(tab: Tab, small: Results) -> None:
    """'d1 rmsnorm' finds the cells of depth 1 with RMSNorm; nonsense finds none."""
    expected = small.cells["depth"].eq(1) & small.cells["qk_norm"].eq("rmsnorm")
    tab.page.fill("#filter", "d1 rmsnorm")
    assert tab.page.locator("#cell-table tbody tr").count() == int(expected.sum())
    shown = tab.page.evaluate("document.getElementById('shown').value")
    assert shown == f"{int(expected.sum())} of {len(small.cells)} cells"
    tab.page.fill("#filter", "no such cell")
    assert tab.page.locator("#cell-table tbody tr").count() == 0


def test_order_of_the_table(tab: Tab, small: Results) -> None:
    """A click on a heading sorts by it, a second one the other way round."""
    heading = tab.page.locator("#cell-table th", has_text="loss").first
    column = list(tab.page.evaluate("columns")).index("loss")
    for reverse in (False, True):
        heading.click()
        texts = tab.page.locator(f"#cell-table tbody td:nth-child({column + 1})").all_inner_texts()
        values = [float(text) for text in texts]
        assert values == sorted(values, reverse=reverse)


def test_a_layer_can_be_chosen(tab: Tab, small: Results) -> None:
    """All layers: every cell; layer 1: only the cells of depth 2."""
    assert len(tab.marks("max_logit", "values_")) == len(small.cells)
    tab.page.select_option("[data-figure=max_logit] select", "1")
    tab.page.evaluate("views.max_logit.runAsync().then(() => null)")
    assert len(tab.marks("max_logit", "values_")) == int(small.cells["depth"].eq(2).sum())


def test_print_shows_every_cell_and_fits_the_paper(tab: Tab, small: Results) -> None:
    pdf = tab.page.pdf(format="A4")
    assert pdf.startswith(b"%PDF")
    tab.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.page.locator("#cell-table tbody tr").count() == len(small.cells)
    tab.page.emulate_media(media="print")
    assert not tab.page.locator("#filter").is_visible()
