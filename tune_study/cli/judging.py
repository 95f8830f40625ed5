"""Verbs that look at verdicts anew: calibrate, replay."""

from __future__ import annotations

from typing import Annotated

import typer

from tune_study.cli.options import DEFAULT_DATA, DEFAULT_RUNS, CellName, Data, Runs, StudyName
from tune_study.cli.output import load_study
from tune_study.store import StudyFolder


def calibrate(
    studies: Annotated[
        list[str], typer.Argument(metavar="STUDY...", help="Studies swept with --criterion off.")
    ],
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Compare the rules of divergence with what they would have cut short. Trains nothing."""
    from analysis.calibration_report import write

    for name in studies:
        folder = StudyFolder(runs, name)
        for line in write(load_study(runs, name), folder.calibration):
            print(line)
        print(f"Written: {folder.calibration}")


def replay(
    study: StudyName,
    cell: CellName,
    runs: Runs = DEFAULT_RUNS,
    data: Data = DEFAULT_DATA,
) -> None:
    """Run one cell again on CPU in float32, and say whether it diverges there too."""
    from tune_study.data import open_tokens
    from tune_study.replay import replay as run_again

    folder = StudyFolder(runs, study)
    tokens = open_tokens(folder.study().base.data, data, checksum=folder.read()["data"]["checksum"])
    outcome = run_again(folder, cell, tokens)
    print(f"{outcome.cell}: {outcome.state} on {outcome.device}; {outcome.sentence}")
