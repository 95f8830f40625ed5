"""What verbs that print share: the terminal, a study read, a report written."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tune_study.config import Study
from tune_study.store import StudyFolder

if TYPE_CHECKING:
    from rich.console import Console

    from analysis.load import Results


PROGRAM = os.environ.get("TUNE_STUDY_PROGRAM", "python -m tune_study")
"""What was typed in front of the verb."""

PIPE_WIDTH = 200
"""Columns of what is written into a pipe or a file."""


def aside(line: str) -> None:
    """Says what takes a moment, beside what was asked for."""
    print(line, file=sys.stderr, flush=True)


def again() -> str:
    """The command that was given, to be given again."""
    if command := os.environ.get("TUNE_STUDY_COMMAND"):
        return command  # the Makefile knows what was typed
    return " ".join([PROGRAM, *sys.argv[1:]])


def console() -> Console:
    """Standard output; in a pipe as wide as what is written, so that no line is folded there."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def load_study(runs: Path | str, name: str) -> Results:
    from analysis import load
    from tune_study import remote

    return load(remote.fetched(str(runs), name).path)


def write_report(folder: StudyFolder, study: Study, out: Path) -> None:
    from analysis import load
    from analysis.report import write

    print("Writing the report ...", file=sys.stderr, flush=True)
    index = write(load(folder.path, study=study), out)
    print_summary(json.loads(index.with_name("summary.json").read_text(encoding="utf-8")))
    print(f"Report: {index}")


def print_summary(summary: dict[str, Any]) -> None:
    from analysis.text import lines

    for line in lines(summary):
        print(line)
