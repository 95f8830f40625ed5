"""The notebook runs from its first cell to its last on a study, and its answer is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest

from analysis import load
from tests.conftest import ROOT

NOTEBOOK = ROOT / "notebooks" / "explore.ipynb"


def test_it_is_kept_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_it_remakes_the_figure_and_answers_a_new_question(
    finished: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nbclient import NotebookClient

    study = finished[0] / "tiny"
    monkeypatch.setenv("STUDY_FOLDER", str(study))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")  # this environment's kernel, not the user's
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    asked = nbformat.v4.new_code_cell("print(answer.to_json(double_precision=15))")
    notebook.cells.append(asked)
    paths = {"metadata": {"path": str(NOTEBOOK.parent)}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=paths).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/svg+xml" in output.get("data", {}) for output in shown) == 2
    cells = load(study).cells.set_index(["arm", "lr", "seed"])["loss"]
    norm = [cells["off", 0.1, s] - cells["rmsnorm", 0.1, s] for s in (0, 1)]
    lower = [cells["off", 0.1, s] - cells["off", 0.01, s] for s in (0, 1)]
    answer = json.loads(shown[-1]["text"])
    (at,) = answer["QK-norm"]
    assert answer["QK-norm"][at] == pytest.approx(sum(norm) / 2)
    assert answer["next lower LR"][at] == pytest.approx(sum(lower) / 2)
