"""Verbs that look at a study: status, cells, show, compare, report, export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tune_study.cli.options import (
    RUNS_OR_URI,
    CellName,
    CriterionName,
    RunsOrUri,
    StudyName,
    known_studies,
    no_uri,
)
from tune_study.cli.output import console, load_study, print_summary, write_report
from tune_study.config import ConfigError, criterion_named


def status(study: StudyName, runs: RunsOrUri = RUNS_OR_URI) -> None:
    """Print how far a study is, running or not.

    First what `sweep` shows while it runs: counts, time left, the cells at work, and a map with a
    sign for each learning rate and depth of an arm, over the seeds that have ended. Then what the
    study shows so far.
    """
    from analysis import terminal
    from analysis.summary import summarise

    results, screen = load_study(runs, study), console()
    screen.print(terminal.status(results, screen.width))
    screen.print()
    print_summary(summarise(results))
    for cell in results.cells[results.cells["state"] == "errored"].itertuples():
        print(f"errored: {cell.cell}: {cell.reason}")


def cells(
    study: StudyName,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WORD]...", help="Words that a line must have, such as d2 off s0."),
    ] = None,
    state: Annotated[
        str | None, typer.Option(help="Only stable, failed, diverged, errored or missing ones.")
    ] = None,
    by: Annotated[
        str | None, typer.Option(help="A column of cells.parquet to sort by, such as loss.")
    ] = None,
    runs: RunsOrUri = RUNS_OR_URI,
) -> None:
    """List cells by words, state or column.

    All the words must occur in a line: `cells pilot d2 off s0`. `show` prints one of them.
    """
    from analysis import terminal

    console().print(terminal.listing(load_study(runs, study), words or (), state, by))


def show(study: StudyName, cell: CellName, runs: RunsOrUri = RUNS_OR_URI) -> None:
    """Print one cell and its training.

    Its verdict, and loss, attention and gradients from the first report to the last.
    """
    from analysis import terminal

    screen = console()
    screen.print(terminal.cell(load_study(runs, study), cell, screen.encoding.startswith("utf")))


def compare(
    studies: Annotated[
        list[str], typer.Argument(metavar="STUDY STUDY...", autocompletion=known_studies)
    ],
    runs: RunsOrUri = RUNS_OR_URI,
) -> None:
    """Print studies side by side.

    The settings that differ, and what each arm came to. `report` with several studies writes the
    same as a page, with their figures.
    """
    from analysis import terminal

    console().print(terminal.comparison([load_study(runs, name) for name in studies]))


def report(
    studies: Annotated[list[str], typer.Argument(metavar="STUDY...", autocompletion=known_studies)],
    criterion: CriterionName = None,
    runs: RunsOrUri = RUNS_OR_URI,
) -> None:
    """Write the report of a study again, from what is there. Trains nothing.

    Under another criterion than the study's own, it goes into a folder of that name in there.
    With several studies, writes a page that sets them side by side instead.
    """
    from tune_study import remote

    folders = [remote.fetched(runs, name) for name in studies]
    rules = None if criterion is None else criterion_named(criterion)
    if len(folders) > 1:
        from analysis import load
        from analysis.compare import compare

        out = Path("-vs-".join(studies))  # of studies in a store, into this folder
        if not remote.is_uri(runs):
            out = folders[0].path.parent / out
        results = [load(folder.path, criterion=rules) for folder in folders]
        print(f"Comparison: {compare(results, out)}")
        return
    (folder,) = folders
    stored = folder.study()
    if rules is None or rules == stored.criterion:
        write_report(folder, stored, folder.report)
    else:
        write_report(folder, stored.replace(criterion=rules), folder.report / rules.name)
    if remote.is_uri(runs):
        print(f"Report: {remote.send_report(runs, folder)}")


def export(
    study: StudyName,
    tool: Annotated[str, typer.Argument(metavar="TOOL", help="tensorboard or optuna.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="A folder for TensorBoard, a file for Optuna; RUNS/STUDY/tensorboard and "
            "optuna.db if left out, of a study in a store STUDY-tensorboard, STUDY-optuna.db.",
            callback=no_uri,
        ),
    ] = None,
    runs: RunsOrUri = RUNS_OR_URI,
) -> None:
    """Write a study for the viewer of another tool: TensorBoard, or Optuna's dashboard.

    Works on a study that is finished, cut off or running; called again it brings the files up to
    date. `make tensorboard` and `make optuna` open the viewers on this machine.
    """
    from tune_study import remote

    if tool == "tensorboard":
        from exports import tensorboard

        out = out or remote.beside(runs, study, "tensorboard", f"{study}-tensorboard")
        count = tensorboard.write(load_study(runs, study), out)
        print(f"{count} cells written. View them: tensorboard --logdir {out}")
    elif tool == "optuna":
        from exports import optuna_study

        out = out or remote.beside(runs, study, "optuna.db", f"{study}-optuna.db")
        count = optuna_study.write(load_study(runs, study), out)
        print(f"{count} trials written. View them: optuna-dashboard sqlite:///{out}")
    else:
        raise ConfigError(f"export {tool}: unknown. Give one of: tensorboard, optuna.")
