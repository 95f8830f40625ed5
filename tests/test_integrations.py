"""Against the real tools, which no default install has: `make test-integrations` installs them.

A tool that is not installed skips its tests by name. All of it runs on loopback.
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from analysis import load
from analysis.load import Results
from exports import optuna_study, tensorboard

NOT_INSTALLED = "is not installed: make test-integrations"


def installed(package: str) -> Any:
    return pytest.importorskip(package, reason=f"{package} {NOT_INSTALLED}")


def answer(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


@pytest.fixture(scope="module")
def results(finished: Any) -> Results:
    return load(finished[0] / "tiny")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_tensorboard_shows_runs_scalars_and_hparams(results: Results, tmp_path: Path) -> None:
    program = installed("tensorboard.program")
    tensorboard.write(results, tmp_path)
    board = program.TensorBoard()
    board.configure(logdir=str(tmp_path), load_fast="false", host="127.0.0.1", port=0)
    url = board.launch() + "data/"
    while len(answer(url + "runs")) < 8:
        pass
    assert sorted(answer(url + "runs")) == sorted(results.cells["cell"])
    name = results.cells["cell"].iloc[-1]
    drawn = answer(f"{url}plugin/scalars/scalars?tag=val/loss&run={name}")
    reports = results.history[results.history["cell"] == name]
    assert [step for _, step, _ in drawn] == reports["step"].tolist()
    assert [loss for _, _, loss in drawn] == pytest.approx(reports["val/loss"].tolist())
    asked = {"experimentName": "", "colParams": [], "startIndex": 0, "sliceSize": 100}
    asked["allowedStatuses"] = ["STATUS_SUCCESS"]
    groups = answer(url + "plugin/hparams/session_groups", asked)["sessionGroups"]
    cells = results.cells.set_index("cell")
    assert len(groups) == 8
    for group in groups:
        cell = cells.loc[group["name"]]
        assert group["hparams"] == {k: cell[k] for k in ("lr", "depth", "qk_norm", "seed")}
        shown = {m["name"]["tag"]: m["value"] for m in group["metricValues"]}
        assert shown["val/loss"] == pytest.approx(cell["loss"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_optuna_s_dashboard_shows_every_trial(results: Results, tmp_path: Path) -> None:
    dashboard = installed("optuna_dashboard")
    optuna_study.write(results, tmp_path / "optuna.db")
    app = dashboard.wsgi(f"sqlite:///{tmp_path / 'optuna.db'}")

    def get(path: str, query: str = "") -> Any:
        begun: list[str] = []
        asked = {"REQUEST_METHOD": "GET", "PATH_INFO": path, "QUERY_STRING": query}
        parts = app(asked, lambda status, headers, *rest: begun.append(status))
        body = b"".join(parts)
        getattr(parts, "close", lambda: None)()
        assert begun == ["200 OK"]
        return body

    assert b"<html" in get("/dashboard")
    (summary,) = json.loads(get("/api/studies"))["study_summaries"]
    assert summary["study_name"] == "tiny"
    trials = json.loads(get(f"/api/studies/{summary['study_id']}", "after=0"))["trials"]
    assert len(trials) == 8
    assert {p["name"] for p in trials[0]["params"]} == {"lr", "depth", "qk_norm", "seed"}
    assert [t["values"][0] for t in trials] == pytest.approx(results.cells["loss"].tolist())
    assert all(len(trial["intermediate_values"]) == 2 for trial in trials)
