"""A cell's identity changes with all that its numbers depend on, and with nothing else."""

from __future__ import annotations

import pytest

import search_spaces
from tune_study.components import NEUTRAL
from tune_study.config import ConfigError, TrialConfig
from tune_study.identity import _torch_version, determinants, identity

BASE = TrialConfig(device="cpu")


@pytest.mark.parametrize(
    "changes",
    [
        {"lr": 2e-2},
        {"depth": 3},
        {"qk_norm": "rmsnorm"},
        {"seed": 1},
        {"steps": 401},
        {"report_every": 10},
        {"val_windows": 64},
        {"threads": 2},
        {"precision": "bf16"},
        {"compile": True},
        {"device": "cuda"},
    ],
)
def test_other_numbers_other_identity(changes):
    assert identity(BASE.replace(**changes), "abc") != identity(BASE, "abc")


def test_other_tokens_other_identity():
    assert identity(BASE, "abc") != identity(BASE, "abd")


def test_where_the_text_lies_does_not_matter():
    here = BASE.replace(data={"corpus": "text", "train": "/here/t", "validation": "/here/v"})
    there = BASE.replace(data={"corpus": "text", "train": "/there/t", "validation": "/there/v"})
    assert identity(here, "abc") == identity(there, "abc")


def test_auto_is_no_device():
    with pytest.raises(ConfigError, match="auto"):
        identity(BASE.replace(device="auto"), "abc")


def test_a_component_at_its_neutral_value_is_no_part_of_it():
    # Written down when components did not exist; torch's version is part of it.
    if _torch_version() == "2.13.0":
        config = search_spaces.get("pilot").base.replace(lr=0.1)
        tokens = "4dc813ea3039e3d8bc442dcf405ca0c4e1ab717be12c7fb21e9608f1f0fdf26f"
        assert identity(config, tokens) == "d45506ba4538e386"
    assert not NEUTRAL.keys() & determinants(BASE, "abc").keys()
    on = BASE.replace(z_loss=1e-4)
    assert determinants(on, "abc")["z_loss"] == 1e-4
    assert identity(on, "abc") != identity(BASE, "abc")
