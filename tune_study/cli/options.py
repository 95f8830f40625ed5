"""Arguments and options that verbs share, and what the shell completes them to."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import typer

import search_spaces
from tune_study.config import CRITERIA, ConfigError
from tune_study.store import StudyFolder

DEFAULT_RUNS, DEFAULT_DATA = Path("runs"), Path("data")
RUNS_OR_URI = str(DEFAULT_RUNS)


def known_studies(context: typer.Context, incomplete: str) -> list[str]:
    """For the shell's completion: what could be swept, and what was."""
    names = {*search_spaces.names()}
    names |= {file.parent.name for file in _runs(context).glob("*/study.json")}
    return sorted(name for name in names if name.startswith(incomplete))


def known_cells(context: typer.Context, incomplete: str) -> list[str]:
    """For the shell's completion: the cells of the study named before."""
    try:
        study = StudyFolder(_runs(context), context.params["study"]).study()
    except ConfigError:
        return []
    return [cell.label for cell in study.cells() if cell.label.startswith(incomplete)]


def _runs(context: typer.Context) -> Path:
    return Path(context.params.get("runs") or os.environ.get("RUNS") or DEFAULT_RUNS)


StudyName = Annotated[
    str,
    typer.Argument(
        metavar="STUDY",
        help="A study of search_spaces/, such as pilot, or one made of it; where it is to be run, "
        "also a file such as runs/pilot/config.yaml.",
        autocompletion=known_studies,
    ),
]
CellName = Annotated[
    str,
    typer.Argument(
        metavar="CELL", help="Such as d2-off-lr1.000e-01-s0.", autocompletion=known_cells
    ),
]


def no_uri(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Of a URI Path has eaten one of the two slashes."""
    if path is not None and re.match(r"[a-z][a-z0-9+]+:/", str(path)):
        uri = str(path).replace(":/", "://", 1)
        raise ConfigError(f"--{option.name} {uri}: is a URI. Give a path of this machine.")
    return path


Runs = Annotated[
    Path,
    typer.Option(
        envvar="RUNS",
        help="Folder of all studies' results.",
        show_default=True,
        callback=no_uri,
    ),
]
RunsOrUri = Annotated[
    str,
    typer.Option(
        envvar="RUNS", help="Folder or URI, such as s3://bucket/runs, of all studies' results."
    ),
]
Data = Annotated[Path, typer.Option(envvar="DATA", help="Folder of all prepared tokens.")]
Name = Annotated[
    str | None, typer.Option(help="Name for a narrowed or changed study; made up if left out.")
]
Lr = Annotated[str | None, typer.Option(help="Peak learning rates, such as 1e-3,1e-2.")]
Depth = Annotated[str | None, typer.Option(help="Depths, such as 1,2,4.")]
QkNorm = Annotated[str | None, typer.Option(help="Arms, such as off,rmsnorm.")]
Arm = Annotated[
    str | None, typer.Option(help="Arms of a study that lists them, such as off,zloss1e-4.")
]
Seed = Annotated[str | None, typer.Option(help="Seeds, such as 0,1,2.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Changes the base config, such as steps=200 or data.vocab_size=1024."
    ),
]

CriterionName = Annotated[
    str | None,
    typer.Option("--criterion", help="Rules of divergence: " + ", ".join(CRITERIA) + "."),
]

MaxConcurrent = Annotated[
    int | None,
    typer.Option(help="Cells at a time, in place of what suits device and threads."),
]

Address = Annotated[
    str | None,
    typer.Option(
        envvar="RAY_ADDRESS",
        help="Run on a Ray cluster: host:port of its head, or auto; else on this machine.",
    ),
]
