"""A study for TensorBoard and for Optuna: every report and setting, by the tables it came from."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

from analysis import load
from analysis.load import Results
from exports import optuna_study, tensorboard
from exports.settings import settings
from tests import fabricated
from tune_study import cli
from tune_study.config import ConfigError
from tune_study.store import StudyFolder


@pytest.fixture(scope="module")
def results(finished: Any) -> Results:
    return load(finished[0] / "tiny")


def events(folder: Path) -> list[Event]:
    """All events of a run, by TFRecord's framing: length, its checksum, data, its checksum."""
    found = []
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            found.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return found


def plugin(run: list[Event], tag: str) -> HParamsPluginData:
    (value,) = [v for e in run for v in e.summary.value if v.tag == f"_hparams_/{tag}"]
    return HParamsPluginData.FromString(value.metadata.plugin_data.content)


def hparams(run: list[Event]) -> dict[str, Any]:
    found = plugin(run, "session_start_info").session_start_info.hparams
    return {
        k: v.number_value if v.HasField("number_value") else v.string_value
        for k, v in found.items()
    }


def test_every_report_of_every_cell_is_an_event(results: Results, tmp_path: Path) -> None:
    assert tensorboard.write(results, tmp_path) == 8
    assert {folder.name for folder in tmp_path.iterdir()} == set(results.cells["cell"])
    for cell in results.cells.itertuples():
        run = events(tmp_path / cell.cell)
        assert run[0].file_version == "brain.Event:2"
        reports = results.history[results.history["cell"] == cell.cell]
        scalars = {
            (e.step, v.tag): v.simple_value
            for e in run
            for v in e.summary.value
            if not v.tag.startswith("_")
        }
        for tag in ("val/loss", "train/loss", "attn/entropy/layer_0", "grad/norm"):
            for step, value in zip(reports["step"], reports[tag], strict=True):
                assert scalars[step, tag] == np.float32(value)
        assert hparams(run) == {
            "lr": cell.lr,
            "depth": cell.depth,
            "qk_norm": cell.qk_norm,
            "seed": cell.seed,
        }
        shown = [m.name.tag for m in plugin(run, "experiment").experiment.metric_infos]
        assert set(shown) <= {tag for _, tag in scalars}
        assert plugin(run, "session_end_info").session_end_info.status == 1


def test_a_running_study_is_added_to_and_a_changed_cell_written_anew(
    results: Results, tmp_path: Path
) -> None:
    ran = results.cells["cell"].iloc[0]
    early = replace(
        results,
        history=results.history[results.history["step"] == 10],
        cells=results.cells.assign(state="missing"),
    )
    assert tensorboard.write(early, tmp_path) == 8
    assert [e.step for e in events(tmp_path / ran)] == [0, 0, 0, 10]
    assert tensorboard.write(early, tmp_path) == 0
    (first,) = (tmp_path / ran).iterdir()
    before = first.read_bytes()
    assert tensorboard.write(results, tmp_path) == 8
    assert first.read_bytes() == before
    assert [e.step for e in events(tmp_path / ran)] == [0, 0, 0, 10, 20, 0]
    other = results.cells.assign(identity="0" * 16).iloc[:1]
    fewer = replace(
        results,
        cells=results.cells.assign(identity="0" * 16),
        history=results.history[results.history["cell"] == ran],
    )
    assert tensorboard.write(fewer, tmp_path) == 1
    (folder,) = tmp_path.iterdir()
    assert folder.name == other["cell"].item()
    assert [e.step for e in events(folder)] == [0, 0, 0, 10, 20, 0]


def test_what_was_not_finite_is_shown_as_such(results: Results, tmp_path: Path) -> None:
    history = results.history.copy()
    history["val/loss"] = math.nan
    history["nonfinite"] = "val/loss"
    history["attn/entropy"] = math.nan  # not named: not measured
    tensorboard.write(replace(results, history=history), tmp_path)
    for folder in tmp_path.iterdir():
        values = [v for e in events(folder) for v in e.summary.value]
        losses = [v.simple_value for v in values if v.tag == "val/loss"]
        assert len(losses) == 2
        assert all(map(math.isnan, losses))
        assert not [v for v in values if v.tag == "attn/entropy"]


def test_every_cell_is_a_trial_of_optuna(results: Results, tmp_path: Path) -> None:
    assert optuna_study.write(results, tmp_path / "optuna.db") == 8
    study = opened(tmp_path / "optuna.db", "tiny")
    cells = results.cells.set_index("cell")
    assert len(study.trials) == 8
    for trial in study.trials:
        cell = cells.loc[trial.user_attrs["cell"]]
        assert trial.params == {name: cell[name] for name in ("lr", "depth", "qk_norm", "seed")}
        assert trial.value == cell["loss"]
        reports = results.history[results.history["cell"] == cell.name]
        assert trial.intermediate_values == dict(
            zip(reports["step"], reports["val/loss"], strict=True)
        )
    assert study.best_value == cells["loss"].min()


def test_states_and_values_of_cells_that_did_not_go_well(tmp_path: Path) -> None:
    whole = fabricated.awkward()
    optuna_study.write(whole, tmp_path / "optuna.db")
    trials = {t.user_attrs["cell"]: t for t in opened(tmp_path / "optuna.db", "fabricated").trials}
    cells = whole.cells.set_index("cell")
    assert set(trials) == set(cells.index[cells["state"] != "missing"])
    for name, trial in trials.items():
        state = cells.loc[name, "state"]
        if state == "diverged":
            assert trial.state == TrialState.PRUNED
            assert trial.value <= cells.loc[name, "loss_init"]
        elif state == "errored":
            assert trial.state == TrialState.FAIL
            assert "out of memory" in trial.user_attrs["reason"]
        else:
            assert trial.state == TrialState.COMPLETE


def test_arms_and_what_else_varies_are_settings() -> None:
    rows = settings(fabricated.many_arms())
    assert set(rows[0]) == {
        "lr",
        "depth",
        "qk_norm",
        "seed",
        "arm",
        "z_loss",
        "attn_softcap",
        "sigma_reparam",
    }
    assert len({json.dumps(row) for row in rows}) == len(rows)
    assert {row["arm"] for row in rows} == set(fabricated.many_arms().cells["arm"])
    assert set(settings(fabricated.small())[0]) == {"lr", "depth", "qk_norm", "seed"}


def test_the_verb(finished: Any, capsys: pytest.CaptureFixture[str]) -> None:
    runs, _ = finished
    folder = StudyFolder(runs, "tiny")
    cli.export("tiny", "tensorboard", runs=str(runs))
    shown = capsys.readouterr().out
    assert shown.startswith("8 cells written. View them: tensorboard --logdir ")
    assert len(list(folder.tensorboard.glob("*/events.out.tfevents.*"))) == 8
    cli.export("tiny", "optuna", runs=str(runs))
    assert capsys.readouterr().out.startswith("8 trials written. View them: optuna-dashboard ")
    with pytest.raises(ConfigError, match=r"export excel: unknown\. Give one of: tensorboard"):
        cli.export("tiny", "excel", runs=str(runs))


def test_nothing_of_somebody_else_s_is_replaced(finished: Any, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is a folder of something else"):
        cli.export("tiny", "tensorboard", tmp_path, str(finished[0]))
    notes = tmp_path / "mine" / "notes.txt"
    with pytest.raises(ConfigError, match="is something else than an export"):
        cli.export("tiny", "optuna", notes, str(finished[0]))
    assert notes.read_text() == "mine"


def opened(file: Path, name: str) -> optuna.Study:
    return optuna.load_study(study_name=name, storage=f"sqlite:///{file}")
