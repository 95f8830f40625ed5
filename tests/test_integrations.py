"""Against the real tools, which no default install has: `make test-integrations` installs them.

A tool that is not installed skips its tests by name. All of it runs on loopback.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from analysis import load
from analysis.load import Results
from exports import optuna_study, tensorboard
from tests.conftest import ROOT, SHORT
from tests.test_logs import row, trial
from tune_study.config import ConfigError
from tune_study.store import StudyFolder

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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of an MLflow server of our own, on loopback."""
    for package in ("mlflow", "flask", "flask_cors", "aiohttp"):
        installed(package)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    folder = tmp_path_factory.mktemp("mlflow")
    store = f"sqlite:///{folder / 'server.db'}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", port]
    command += ["--workers", "1", "--backend-store-uri", store]
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(
            command, stdout=log, stderr=log, env=os.environ | quiet, start_new_session=True
        ) as process,
    ):
        url = f"http://127.0.0.1:{port}"
        while process.poll() is None:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        assert process.poll() is None, (folder / "log").read_text()
        yield url
        os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def logged(server: str, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Folder of a study of 4 cells that was swept with both trackers, in two starts."""
    installed("wandb")
    runs = tmp_path_factory.mktemp("runs")
    words = [sys.executable, "-m", "tune_study", "sweep", "smoke", "--name", "tracked", *SHORT]
    words += ["--lr", "1e-2", "--depth", "1", "--runs", str(runs), "--data", str(data)]
    words += ["--log", "wandb", "--log", "mlflow", "--no-report"]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "MLFLOW"))}
    # A home of its own: no key of W&B's may be there.
    env |= {"MLFLOW_TRACKING_URI": server, "HOME": str(runs)}
    for seeds in ("0", "0,1"):
        done = subprocess.run(
            [*words, "--seed", seeds],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env=env,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "not all is logged" not in done.stderr
    return runs / "tracked", load(runs / "tracked")


def offline(folder: Path) -> Iterator[tuple[str, Any]]:
    """Kinds and contents of the records of W&B's offline file, which is framed like LevelDB's log:
    blocks of 32 kB, in them pieces of records with checksum, length and which piece it is."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("*.wandb")
    content = file.read_bytes()
    at, record = 7, b""
    while at < len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, piece = struct.unpack("<HB", content[at + 4 : at + 7])
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if piece in (1, 4):  # whole, or last
            found = Record.FromString(record)
            kind = found.WhichOneof("record_type")
            yield kind, getattr(found, kind)
            record = b""


def items(found: Any) -> dict[str, Any]:
    return {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in found}


def test_wandb_offline_has_every_cell_and_report(logged: tuple[Path, Any]) -> None:
    folder, results = logged
    cells = results.cells.set_index("cell")
    runs = list((folder / "wandb").glob("offline-run-*"))
    assert len(runs) == len(cells) == 4
    for path in runs:
        records = list(offline(path))
        (run,) = [content for kind, content in records if kind == "run"]
        cell = cells.loc[run.display_name]
        assert (run.project, run.run_group) == ("tune_study", "tracked")
        config = items(run.config.update)
        assert config["lr"] == cell["lr"]
        assert config["identity"] == cell["identity"]
        assert run.run_id == f"tracked-{cell['identity']}"
        rows = [items(content.item) for kind, content in records if kind == "history"]
        reports = results.history[results.history["cell"] == cell.name]
        assert [r["_step"] for r in rows] == reports["step"].tolist() == [10, 20]
        assert [r["val/loss"] for r in rows] == reports["val/loss"].tolist()


def test_mlflow_s_server_has_every_cell_and_report(logged: tuple[Path, Any], server: str) -> None:
    import mlflow

    _, results = logged
    client = mlflow.MlflowClient(server)
    experiment = client.get_experiment_by_name("tracked").experiment_id
    runs = {run.info.run_name: run for run in client.search_runs([experiment])}
    assert sorted(runs) == sorted(results.cells["cell"])
    for cell in results.cells.itertuples():
        run = runs[cell.cell]
        assert run.info.status == "FINISHED"
        assert float(run.data.params["lr"]) == cell.lr
        assert run.data.params["qk_norm"] == cell.qk_norm
        assert run.data.metrics["attn/max_logit"] == cell.max_logit
        points = client.get_metric_history(run.info.run_id, "val/loss")
        reports = results.history[results.history["cell"] == cell.cell]
        assert [p.step for p in points] == reports["step"].tolist()
        assert [p.value for p in points] == reports["val/loss"].tolist()


def test_mlflow_goes_on_in_the_same_run(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second start repeats a report, as one that was killed between checkpoints does."""
    import mlflow

    from tune_study.loggers import make

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    folder = StudyFolder(tmp_path, "cut")
    for steps in ((20, 40), (40, 60)):
        (logger,) = make(["mlflow"], folder)
        cell = trial(f"start-at-{steps[0]}")
        logger.setup()
        logger.on_trial_start(0, [], cell)
        for step in steps:
            lost = {"val/loss": None, "nonfinite": "val/loss"} if step == 60 else {}
            logger.on_trial_result(0, [], cell, row(step, **lost))
        logger.on_trial_complete(0, [], cell)
        logger.on_experiment_end([])
        assert logger.fault == ""
    client = mlflow.MlflowClient(server)
    (run,) = client.search_runs([client.get_experiment_by_name("cut").experiment_id])
    points = client.get_metric_history(run.info.run_id, "val/loss")
    assert [p.step for p in points] == [20, 40, 60]
    assert math.isnan(points[-1].value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_without_a_server_mlflow_logs_into_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("mlflow")
    from tune_study.loggers import make

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = StudyFolder(tmp_path, "alone")
    folder.path.mkdir()
    make(["mlflow"], folder)
    assert (folder.path / "mlflow.db").stat().st_size > 0


@pytest.mark.parametrize(
    ("name", "variable", "value", "expected"),
    [
        ("mlflow", "MLFLOW_TRACKING_URI", "http://127.0.0.1:9", "Start the server that MLFLOW"),
        ("wandb", "WANDB_MODE", "online", "Run: wandb login, or leave WANDB_MODE out"),
    ],
)
def test_a_tracker_that_cannot_be_reached_is_one_line(
    name: str,
    variable: str,
    value: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed(name)
    from tune_study import logs
    from tune_study.loggers import make

    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    logs.check([name])
    with pytest.raises(ConfigError, match=expected) as error:
        make([name], StudyFolder(tmp_path, "none"))
    assert "\n" not in str(error.value)
