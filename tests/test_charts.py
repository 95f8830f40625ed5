"""The figures from a script: three lines, and a name that is not there."""

from __future__ import annotations

import pytest

from analysis import charts
from tests import fabricated
from tune_study.config import ConfigError


def test_a_figure_by_name(tmp_path):
    results = fabricated.small()
    assert "lr_loss" in charts.names(results)
    charts.draw(results, "lr_loss").save(tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").read_text().startswith("<svg")


def test_a_figure_that_is_not_there_lists_those_that_are():
    with pytest.raises(ConfigError, match=r"figure = 'nosuch'.*lr_loss"):
        charts.draw(fabricated.small(), "nosuch")
