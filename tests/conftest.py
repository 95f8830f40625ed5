"""Shared fixtures: a small prepared corpus and a small cell."""

from __future__ import annotations

from pathlib import Path

import pytest

from tune_study.config import DataConfig, TrialConfig
from tune_study.data import Tokens, open_tokens, prepare

SMALL_DATA = DataConfig(vocab_size=300, train_documents=400, validation_documents=60)


@pytest.fixture(scope="session")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the prepared small corpus."""
    root = tmp_path_factory.mktemp("data")
    prepare(SMALL_DATA, root, say=lambda line: None)
    return root


@pytest.fixture(scope="session")
def tokens(data_root: Path) -> Tokens:
    return open_tokens(SMALL_DATA, data_root)


@pytest.fixture
def small() -> TrialConfig:
    """A cell of a second: 12 steps, 3 reports."""
    return TrialConfig(
        depth=2,
        width=16,
        heads=2,
        context=16,
        batch_size=4,
        steps=12,
        warmup_steps=3,
        report_every=4,
        val_windows=16,
        probe_windows=4,
        data=SMALL_DATA,
        device="cpu",
    )
