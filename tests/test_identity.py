"""A cell's identity changes with all that its numbers depend on, and with nothing else."""

from __future__ import annotations

import pytest

from tune_study.config import ConfigError, TrialConfig
from tune_study.identity import identity

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
