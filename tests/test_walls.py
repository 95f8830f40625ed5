"""The walls between the folders stand: docs/design.md says why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

MODULES = {
    folder: [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.name not in ("__main__.py", "convert.py")  # scripts
    ]
    for folder in ("analysis", "search_spaces")
}
TRAINING = ["trainer", "model", "optim", "diagnostics", "divergence", "data", "records", "store"]


@pytest.mark.parametrize(
    ("modules", "strangers"),
    [
        (MODULES["analysis"] + MODULES["search_spaces"], ("ray", "torch", "trainable")),
        ([f"tune_study.{name}" for name in TRAINING], ("ray", "analysis", "trainable")),
        (["tune_study.cli", "tune_study.config"], ("ray", "torch", "pandas", "altair")),
    ],
    ids=["analysis reads", "training needs no Ray", "the command line starts at once"],
)
def test_what_is_imported_with_it(modules, strangers):
    code = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        f"print(*[name for name in {strangers!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
