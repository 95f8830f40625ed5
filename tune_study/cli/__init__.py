"""The command line: prepare, plan, sweep, status, cells, show, compare, report, bundle, ...

Exit codes: 0 done; 1 some cells errored, or the sweep could not go on; 2 a setting or file is
wrong, one line says which; 3 the time given by --hours is over; 130 interrupted. After 1, 3 and
130 the same command goes on. Nothing heavy is imported before a verb needs it.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import typer

from tune_study import signals
from tune_study.cli.before import doctor, plan, prepare
from tune_study.cli.bundles import bundle, verify
from tune_study.cli.judging import calibrate, replay
from tune_study.cli.looking import cells, compare, export, report, show, status
from tune_study.cli.output import PROGRAM, again
from tune_study.cli.sweeping import sweep
from tune_study.config import ConfigError

SHOW_CURSOR = b"\x1b[?25h"
"""The live progress line hides it."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="When does a small language model need QK-norm? Sweeps learning rate, depth, "
    "QK-norm and seed with Ray Tune, and reports what the sweep shows.",
    epilog="Exit codes: 0 done, 1 cells errored or the sweep was stopped, 2 wrong setting or "
    "file, 3 the time given by --hours is over, 130 interrupted.",
)

VERBS = (
    *(prepare, plan, sweep, doctor, status, cells, show, compare, report, export),
    *(calibrate, replay, bundle, verify),
)
"""In the order in which --help lists them."""

for _verb in VERBS:
    app.command()(_verb)


def main() -> None:
    """Runs the command line; a wrong setting is one line and exit code 2."""
    try:
        with signals.handling(_end_at_once):
            app(prog_name=PROGRAM.removeprefix("./"))
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def _end_at_once(number: int, frame: Any) -> None:
    """Ends this process; what it writes is whole or recognised, what Ray runs the reaper ends."""
    # Not through Python's streams: the signal may have come while they are in use.
    os.write(2, f"\nInterrupted. Go on with: {again()}\n".encode())
    if sys.stdout.isatty():
        os.write(1, SHOW_CURSOR)
    os._exit(130)
