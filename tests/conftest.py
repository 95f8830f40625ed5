"""Shared fixtures: a small prepared corpus, a small cell, and a small study that was swept."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tune_study.config import DataConfig, TrialConfig
from tune_study.data import Tokens, open_tokens, prepare

ROOT = Path(__file__).resolve().parent.parent
GRID = ["--lr", "1e-2,1e-1", "--depth", "1", "--seed", "0,1"]
SHORT = ["--set", "steps=20", "--set", "warmup_steps=5"]

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


Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tokens of studies that are swept from the command line."""
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture(scope="session")
def run(data: Path) -> Callable[..., Done]:
    """Runs one verb of the command line: run(runs, "status", "tiny")."""

    def call(runs: Path, *words: str) -> Done:
        command = [sys.executable, "-m", "tune_study", *words, "--runs", str(runs)]
        command += ["--data", str(data)] if words[0] == "sweep" else []
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)

    return call


@pytest.fixture(scope="session")
def finished(
    run: Callable[..., Done], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Done]:
    """Folder of runs with the study `tiny`, swept undisturbed: 8 cells of 2 reports."""
    runs = tmp_path_factory.mktemp("runs")
    result = run(runs, "sweep", "smoke", *GRID, *SHORT, "--name", "tiny")
    assert result.returncode == 0, result.stdout + result.stderr
    return runs, result


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, driven by Playwright; tests that ask for it skip where either is not installed."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no chromium is installed")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        # Chromium's sandbox needs rights that containers do not give.
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()
