"""Numbers of parameters by formula are those of the model."""

from __future__ import annotations

import pytest

import search_spaces
from tune_study.config import ConfigError, TrialConfig
from tune_study.model import GPT
from tune_study.size import parameter_count, width_for


@pytest.mark.parametrize(("depth", "width"), [(1, 32), (2, 32), (5, 24)])
def test_the_formula_counts_the_model(depth, width):
    config = TrialConfig(depth=depth, width=width, context=20)
    assert parameter_count(depth, width, 300, 20) == GPT(config, 300, 0).parameter_count()


def test_width_by_hand():
    # one block, heads of 8: 8 wide 11C + 12C^2 + 2C = 872, 16 wide 3280, 24 wide 7224
    size = {"depth": 1, "vocab_size": 7, "context": 3, "head_width": 8}
    assert parameter_count(1, 16, 7, 3) == 3280
    assert width_for(parameters=3000, **size) == {"width": 16, "heads": 2}
    assert width_for(parameters=5253, **size) == {"width": 24, "heads": 3}
    with pytest.raises(ConfigError, match="parameters = 500: too few for depth 1"):
        width_for(parameters=500, **size)


def test_isoparameter_cells_have_12_million_parameters_within_5_percent():
    study = search_spaces.get("isoparameter")
    shapes = {(cell.depth, cell.width, cell.heads) for cell in study.cells()}
    assert shapes == {(3, 480, 15), (4, 416, 13), (6, 352, 11), (8, 320, 10), (12, 256, 8)}
    for depth, width, _ in shapes:
        assert parameter_count(depth, width, 8192, 256) == pytest.approx(12e6, rel=0.05)
    assert study.arm_names() == ("off", "rmsnorm")


def test_widths_are_arms_named_against_the_base():
    study = search_spaces.get("width")
    assert {(cell.width, cell.heads) for cell in study.cells()} == {(32, 2), (64, 4), (128, 8)}
    assert study.arm_names() == (
        *("off", "width=64", "width=128", "rmsnorm", "rmsnorm+width=64", "rmsnorm+width=128"),
    )
