"""A study as TensorBoard's event files: a run a cell, metrics as scalars, settings as hparams.

Made of the tables, so that every study has them, finished, running or swept long ago, and a sweep
writes nothing for them. Format: `tensorboardX`'s framed protocol buffers.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tensorboardX.proto.api_pb2 import Status
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.plugin_hparams_pb2 import (
    HParamsPluginData,
    SessionEndInfo,
)
from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboardX.record_writer import RecordWriter
from tensorboardX.summary import hparams

from analysis.load import Results
from analysis.tables import HISTORY_KEYS
from exports.settings import settings
from tune_study.config import ConfigError

SHOWN = ("val/loss", "val/loss_min", "attn/max_logit", "attn/entropy", "grad/norm")
"""Scalars whose last value stands in TensorBoard's table of hparams."""

NOTES = "nonfinite"
"""Column of `history` that names the metrics of a report that were not finite."""

NOT_SCALARS = frozenset({*HISTORY_KEYS, NOTES, "train/losses", "nonfinite_step", "resumed_step"})
"""Columns of `history` that are nothing to plot over the steps."""


def write(results: Results, out: Path) -> int:
    """Writes the reports that are not there yet, a folder a cell; removes what is no cell's here.

    Called again while the study runs, it adds files with what was reported since, which a
    TensorBoard that is open shows.

    Returns:
        the number of cells written or added to.

    Raises:
        ConfigError: if `out` holds something else.
    """
    out.mkdir(parents=True, exist_ok=True)
    ours = re.compile(r"events\.out\.tfevents\.|part$")
    if any(not ours.match(path.name) for path in out.glob("*/*")):
        raise ConfigError(f"{out}: is a folder of something else. Give another one by --out.")
    reports = dict(tuple(results.history.groupby("cell", sort=False)))
    for folder in out.iterdir():
        if folder.is_dir() and folder.name not in reports:
            shutil.rmtree(folder)
    cells = zip(results.cells.to_dict("records"), settings(results), strict=True)
    return sum(
        _add(out / cell["cell"], cell, values, reports[cell["cell"]])
        for cell, values in cells
        if cell["cell"] in reports
    )


def _add(folder: Path, cell: dict[Any, Any], values: dict[str, Any], reports: pd.DataFrame) -> bool:
    """One more event file with what the folder's others lack; False if they lack nothing.

    TensorBoard reads the files of a folder in the order of their names, which say the steps they
    have, whether the cell has ended, and whose they are.
    """
    ended = cell["state"] != "missing"
    last, whose = int(reports["step"].iloc[-1]), cell["identity"]
    name = f"events.out.tfevents.{last:010d}.{'ended' if ended else 'cut'}.{whose}"
    if (folder / name).exists():
        return False
    others = list(folder.glob("events.*"))
    if any(path.suffix != f".{whose}" for path in others):
        shutil.rmtree(folder)  # the same cell under other settings
        others = []
    done = max((int(path.name.split(".")[3]) for path in others), default=0)
    started = cell["started"] if math.isfinite(cell["started"]) else 0.0
    begin, start, end = _hparams(cell, values, started)
    events = [] if others else [Event(wall_time=started, file_version="brain.Event:2")]
    events += [] if others else [Event(wall_time=started, summary=s) for s in (begin, start)]
    events += _scalars(reports[reports["step"] > done], started)
    events += [Event(wall_time=events[-1].wall_time, summary=end)] if ended else []
    folder.mkdir(exist_ok=True)
    part = folder / "part"
    writer = RecordWriter(str(part))
    for event in events:
        writer.write(event.SerializeToString())
    writer.close()
    os.replace(part, folder / name)
    return True


def _hparams(
    cell: dict[Any, Any], values: dict[str, Any], started: float
) -> tuple[Summary, Summary, Summary]:
    """What the plugin reads: which settings and results there are, this cell's, how it ended."""
    experiment, start, _ = hparams(values, dict.fromkeys(SHOWN))
    errored = cell["state"] == "errored"
    status = Status.Value("STATUS_FAILURE" if errored else "STATUS_SUCCESS")
    end = HParamsPluginData(session_end_info=SessionEndInfo(status=status))
    data = SummaryMetadata.PluginData(plugin_name="hparams", content=end.SerializeToString())
    tagged = Summary.Value(
        tag="_hparams_/session_end_info", metadata=SummaryMetadata(plugin_data=data)
    )
    return experiment, start, Summary(value=[tagged])


def _scalars(reports: pd.DataFrame, started: float) -> list[Event]:
    """An event a report; what was not finite is NaN, what was not measured is left out."""
    names = [name for name in reports if name not in NOT_SCALARS]
    table = reports[names].to_numpy(dtype=np.float64)
    events = []
    for step, seconds, notes, row in zip(
        reports["step"], reports["time/train_s"], reports[NOTES], table, strict=True
    ):
        lost = notes.split(",")
        scalars = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in zip(names, row.tolist(), strict=True)
            if not math.isnan(value) or name in lost
        ]
        wall_time = started + seconds
        events.append(Event(wall_time=wall_time, step=int(step), summary=Summary(value=scalars)))
    return events
