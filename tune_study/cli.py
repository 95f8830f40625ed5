"""The command line: prepare, plan, sweep, status, cells, show, compare, report, bundle, ...

Exit codes: 0 done; 1 some cells errored, or the sweep could not go on; 2 a setting or file is
wrong, one line says which; 3 the time given by --hours is over; 130 interrupted. After 1, 3 and
130 the same command goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import search_spaces
from tune_study import logs, signals
from tune_study.concurrency import Policy, policy, policy_on
from tune_study.config import AXES, CRITERIA, ConfigError, Study, criterion_named
from tune_study.store import StudyFolder

if TYPE_CHECKING:
    from rich.console import Console

    from analysis.load import Results
    from tune_study.board import Board
    from tune_study.cluster import Cluster
    from tune_study.loggers import Background
    from tune_study.remote import Mirror
    from tune_study.sweep import Plan

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


def _studies(context: typer.Context, incomplete: str) -> list[str]:
    """For the shell's completion: what could be swept, and what was."""
    names = {*search_spaces.names()}
    names |= {file.parent.name for file in _runs(context).glob("*/study.json")}
    return sorted(name for name in names if name.startswith(incomplete))


def _cells(context: typer.Context, incomplete: str) -> list[str]:
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
        autocompletion=_studies,
    ),
]
CellName = Annotated[
    str,
    typer.Argument(metavar="CELL", help="Such as d2-off-lr1.000e-01-s0.", autocompletion=_cells),
]


def _no_uri(option: typer.CallbackParam, path: Path | None) -> Path | None:
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
        callback=_no_uri,
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

PROGRAM = os.environ.get("TUNE_STUDY_PROGRAM", "python -m tune_study")
"""What was typed in front of the verb."""

PIPE_WIDTH = 200
"""Columns of what is written into a pipe or a file."""

SHOW_CURSOR = b"\x1b[?25h"
"""The live progress line hides it."""

DEFAULT_RUNS, DEFAULT_DATA = Path("runs"), Path("data")
RUNS_OR_URI = str(DEFAULT_RUNS)


@app.command()
def prepare(
    study: StudyName,
    data: Data = DEFAULT_DATA,
    set_: Set = None,
) -> None:
    """Make the tokens of a study and print the data report. Does nothing twice."""
    _prepare(_changed(study, {}, set_, None), data)


@app.command()
def plan(
    study: StudyName,
    name: Name = None,
    lr: Lr = None,
    depth: Depth = None,
    qk_norm: QkNorm = None,
    arm: Arm = None,
    seed: Seed = None,
    set_: Set = None,
    criterion: CriterionName = None,
    max_concurrent: MaxConcurrent = None,
    runs: RunsOrUri = RUNS_OR_URI,
    data: Data = DEFAULT_DATA,
) -> None:
    """Print what a sweep would take: cells, parameters, tokens, FLOPs, disk and hours.

    Trains each size of model for a moment to see how fast this machine is; writes nothing.
    """
    from tune_study import cost, device, remote, sharing, threads
    from tune_study import sweep as engine
    from tune_study.data import open_tokens

    axes = {"lr": lr, "depth": depth, "qk_norm": qk_norm, "seed": seed}
    wanted = _changed(study, axes, set_, name, criterion, arm)
    wanted = wanted.replace(base=device.settle(wanted.base))
    folder = remote.outline(runs, wanted.name)
    checksum = folder.read()["data"]["checksum"] if folder.exists() else ""
    try:
        tokens = open_tokens(wanted.base.data, data, verify=False, checksum=checksum or None)
        vocab_size, prepared = tokens.vocab_size, "tokens are prepared"
    except ConfigError:
        vocab_size, prepared = cost.vocab_size(wanted.base.data), "tokens are not prepared yet"
    wanted = engine.with_evidence(wanted, folder, checksum)
    asked = engine.plan(wanted, folder, checksum, retry_errored=True)
    who = sharing.policy_for(asked, vocab_size, max_concurrent, folder.sharing, say=_aside)
    lines = _cost(asked, folder, vocab_size, who, in_full=True)
    print("\n".join([*lines, f"The {prepared}: {vocab_size:,} ids."]), flush=True)
    if max_concurrent is None and (line := threads.compared(asked, vocab_size, say=_aside)):
        print(line)


@app.command()
def sweep(
    study: StudyName,
    name: Name = None,
    lr: Lr = None,
    depth: Depth = None,
    qk_norm: QkNorm = None,
    arm: Arm = None,
    seed: Seed = None,
    set_: Set = None,
    criterion: CriterionName = None,
    checkpoint_every: Annotated[
        float | None, typer.Option(help="Seconds between checkpoints of a running cell.")
    ] = None,
    keep_weights: Annotated[
        list[str] | None,
        typer.Option(
            help="Cell to keep the final weights of, such as d2-off-lr1.000e-01-s0 or 'd2-*-s0'."
        ),
    ] = None,
    cells: Annotated[
        int | None,
        typer.Option(help="Most cells that a search runs altogether; the same again goes on."),
    ] = None,
    retry_errored: Annotated[
        bool, typer.Option("--retry-errored", help="Also run cells that errored too often.")
    ] = False,
    max_concurrent: MaxConcurrent = None,
    hours: Annotated[
        float | None,
        typer.Option(help="Hours after which to stop in order, with exit code 3; goes on later."),
    ] = None,
    log: Annotated[
        list[str] | None,
        typer.Option("--log", help="Also log to wandb or to mlflow; may be given twice."),
    ] = None,
    address: Address = None,
    with_report: Annotated[
        bool, typer.Option("--report/--no-report", help="Write the report at the end.")
    ] = True,
    runs: RunsOrUri = RUNS_OR_URI,
    data: Data = DEFAULT_DATA,
) -> None:
    """Run what is missing of a study, from where it stands, then write its report.

    Options narrow or change the study without editing it. The result goes under another
    name, so that it never mixes with the study's own.
    """
    from tune_study import archive, device, remote, sharing
    from tune_study import sweep as engine
    from tune_study.data import open_tokens

    end = _end(hours)
    logs.check(log or ())
    axes = {"lr": lr, "depth": depth, "qk_norm": qk_norm, "seed": seed}
    wanted = _changed(study, axes, set_, name, criterion, arm)
    wanted = wanted.replace(base=device.settle(wanted.base))
    policy(wanted.base, max_concurrent)  # refuses a wrong number before anything is made
    if checkpoint_every is not None:
        wanted = wanted.replace(checkpoint_every_s=checkpoint_every)
    if keep_weights is not None:
        wanted = wanted.replace(keep_weights=tuple(keep_weights))
    if cells is not None:
        if wanted.search is None:
            raise ConfigError(
                f"--cells {cells}: {wanted.name} runs all of its cells. Give a study that is "
                "searched, such as edge."
            )
        wanted = wanted.replace(search=wanted.search.replace(cells=cells))
    if not remote.is_uri(runs) and archive.is_bundle(at := remote.local(runs) / wanted.name):
        raise ConfigError(f"{at}: holds a bundle. Sweep into another folder by --runs.")
    with (
        _cluster(address) as cluster,
        remote.working(runs, wanted.name) as (folder, mirror),
    ):
        if cluster is not None:
            policy_on(cluster.nodes(), wanted.base, max_concurrent)  # and no room for a cell
        _prepare(wanted, data)
        tokens = open_tokens(wanted.base.data, data)
        damage = folder.refuse_if_different(wanted, tokens.manifest.checksum)
        wanted = engine.with_evidence(wanted, folder, tokens.manifest.checksum)
        plan = engine.plan(wanted, folder, tokens.manifest.checksum, retry_errored)
        for line in (*damage, *plan.damage):
            print(f"damaged: {line}", file=sys.stderr)
        folder.write(wanted, tokens.manifest.model_dump(mode="json"))
        for checkpoint in plan.surplus:
            shutil.rmtree(checkpoint, ignore_errors=True)
        if plan.todo:
            # A report of what was known before must not stand as the answer meanwhile.
            shutil.rmtree(folder.report, ignore_errors=True)
            ids, file = tokens.vocab_size, folder.sharing
            who = sharing.policy_for(plan, ids, max_concurrent, file, True, cluster, _aside)
            outcome = _run(plan, folder, tokens, who, end, log or (), cluster, mirror)
        else:
            outcome = engine.Outcome(False, "", {})
            done = "all" if not plan.given_up else f"{plan.done} of"
            print(f"{wanted.name}: {done} {plan.asked} cells are done, none is to run.")
    if mirror is not None and mirror.behind:
        print(f"Not all is there yet: {mirror.behind} Then: {_command()}", file=sys.stderr)
        raise typer.Exit(1)
    if outcome.interrupted:
        print(f"Interrupted; everything reported is kept. Go on with: {_command()}")
        raise typer.Exit(130)
    if outcome.out_of_time:
        print(
            f"The {hours:g} hours are over; everything reported is kept. Go on with: {_command()}"
        )
        raise typer.Exit(3)
    if outcome.stopped:
        print(f"Everything reported is kept. Go on with: {_command()}", flush=True)
        print(f"Stopped: {outcome.stopped}", file=sys.stderr, flush=True)
        os._exit(1)  # Ray would wait for its servers at exit; the reaper has ended them
    if with_report:
        try:
            _report(folder, wanted, folder.report)
            if mirror is not None:
                print(f"Report: {remote.send_report(runs, folder)}")
        except ConfigError as nothing:  # every cell errored before it could report
            print(nothing, file=sys.stderr)
    for label, error in outcome.errors.items():
        print(f"{label}: errored: {error}", file=sys.stderr)
    for label, errors in plan.given_up.items():
        print(
            f"{label}: not run again after {engine.MAX_FAILURES} errors: {errors}", file=sys.stderr
        )
    if outcome.errors:
        print(f"{len(outcome.errors)} cells errored. Try them again with: {_command()}")
    if plan.given_up:
        print(f"{len(plan.given_up)} cells not run. Try them with --retry-errored.")
    if outcome.errors or plan.given_up:
        raise typer.Exit(1)


@app.command()
def doctor(
    study: Annotated[str, typer.Argument(metavar="[STUDY]")] = "pilot",
    set_: Set = None,
    runs: RunsOrUri = RUNS_OR_URI,
    data: Data = DEFAULT_DATA,
) -> None:
    """Examine this machine: what a sweep needs, and whether what it computes can be believed."""
    from tune_study.doctor import examine

    faults = 0
    for finding in examine(_changed(study, {}, set_, None), runs, data):
        print(f"{finding.kind + ':':<6} {finding.text}", flush=True)
        faults += finding.kind == "fault"
    print(f"{faults} faults." if faults != 1 else "1 fault.")
    if faults:
        raise typer.Exit(1)


@app.command()
def status(study: StudyName, runs: RunsOrUri = RUNS_OR_URI) -> None:
    """Print how far a study is, running or not.

    First what `sweep` shows while it runs: counts, time left, the cells at work, and a map with a
    sign for each learning rate and depth of an arm, over the seeds that have ended. Then what the
    study shows so far.
    """
    from analysis import terminal
    from analysis.summary import summarise

    results, console = _load(runs, study), _console()
    console.print(terminal.status(results, console.width))
    console.print()
    _print_summary(summarise(results))
    for cell in results.cells[results.cells["state"] == "errored"].itertuples():
        print(f"errored: {cell.cell}: {cell.reason}")


@app.command()
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

    _console().print(terminal.listing(_load(runs, study), words or (), state, by))


@app.command()
def show(study: StudyName, cell: CellName, runs: RunsOrUri = RUNS_OR_URI) -> None:
    """Print one cell and its training.

    Its verdict, and loss, attention and gradients from the first report to the last.
    """
    from analysis import terminal

    console = _console()
    console.print(terminal.cell(_load(runs, study), cell, console.encoding.startswith("utf")))


@app.command()
def compare(
    studies: Annotated[
        list[str], typer.Argument(metavar="STUDY STUDY...", autocompletion=_studies)
    ],
    runs: RunsOrUri = RUNS_OR_URI,
) -> None:
    """Print studies side by side.

    The settings that differ, and what each arm came to. `report` with several studies writes the
    same as a page, with their figures.
    """
    from analysis import terminal

    _console().print(terminal.comparison([_load(runs, name) for name in studies]))


@app.command()
def report(
    studies: Annotated[list[str], typer.Argument(metavar="STUDY...", autocompletion=_studies)],
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

        if remote.is_uri(runs):
            raise ConfigError(f"--runs {runs}: a page of several studies needs a folder.")
        out = folders[0].path.parent / "-vs-".join(studies)
        results = [load(folder.path, criterion=rules) for folder in folders]
        print(f"Comparison: {compare(results, out)}")
        return
    (folder,) = folders
    stored = folder.study()
    if rules is None or rules == stored.criterion:
        _report(folder, stored, folder.report)
    else:
        _report(folder, stored.replace(criterion=rules), folder.report / rules.name)
    if remote.is_uri(runs):
        print(f"Report: {remote.send_report(runs, folder)}")


@app.command()
def export(
    study: StudyName,
    tool: Annotated[str, typer.Argument(metavar="TOOL", help="tensorboard or optuna.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="A folder for TensorBoard, a file for Optuna; RUNS/STUDY/tensorboard and "
            "optuna.db if left out, of a study in a store STUDY-tensorboard, STUDY-optuna.db.",
            callback=_no_uri,
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
        count = tensorboard.write(_load(runs, study), out)
        print(f"{count} cells written. View them: tensorboard --logdir {out}")
    elif tool == "optuna":
        from exports import optuna_study

        out = out or remote.beside(runs, study, "optuna.db", f"{study}-optuna.db")
        count = optuna_study.write(_load(runs, study), out)
        print(f"{count} trials written. View them: optuna-dashboard sqlite:///{out}")
    else:
        raise ConfigError(f"export {tool}: unknown. Give one of: tensorboard, optuna.")


@app.command()
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
        for line in write(_load(runs, name), folder.calibration):
            print(line)
        print(f"Written: {folder.calibration}")


@app.command()
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


@app.command()
def bundle(
    study: StudyName,
    out: Annotated[
        Path | None,
        typer.Option(
            help="An archive (.tar.gz) or a folder; RUNS/STUDY/STUDY.tar.gz if left out, of a "
            "study in a store STUDY.tar.gz here.",
            callback=_no_uri,
        ),
    ] = None,
    small: Annotated[
        bool, typer.Option("--small", help="Tables, summary and main figures only, to be kept.")
    ] = False,
    runs: RunsOrUri = RUNS_OR_URI,
) -> None:
    """Pack a study with tables, figures, settings, logs, versions, hashes and commands.

    Trains nothing. `verify` checks what this writes.
    """
    from analysis.bundle import write
    from tune_study import remote

    folder = remote.fetched(runs, study)
    archive = f"{study}.tar.gz"
    out = out or remote.beside(runs, study, archive, archive)
    manifest = write(folder, out, small)
    for problem in manifest.status.problems:
        print(f"{study}: {problem}")
    print(f"Bundle: {out}, {len(manifest.files) + 1} files. Check it with: {PROGRAM} verify {out}")


@app.command()
def verify(
    bundle: Annotated[
        Path, typer.Argument(metavar="BUNDLE", help="What `bundle` wrote: archive or folder.")
    ],
    cells: Annotated[
        int | None,
        typer.Option(min=0, help="How many cells to train again, 3 if left out; 0 for none."),
    ] = None,
    cell: Annotated[
        list[str] | None, typer.Option(help="A cell to train again, in place of drawn ones.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws the cells.")] = 0,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0, help="Nats by which final losses may differ, in place of same bits."),
    ] = None,
    train: Annotated[str | None, typer.Option(help="The text trained on, if it was files.")] = None,
    validation: Annotated[str | None, typer.Option(help="The text held out, likewise.")] = None,
    data: Data = DEFAULT_DATA,
) -> None:
    """Check a bundle: hashes, numbers against its tables, and some cells by training them again.

    Exit codes: 0 all agrees, 1 something differs, 2 it cannot be checked. Where the text of a
    bundle is not here, and no cells were asked for, the rest is checked and that is said.
    """
    from analysis import bundled
    from tune_study import archive

    if (train is None) != (validation is None):
        raise ConfigError("--train, --validation: only one of the two is given. Give both.")
    with archive.opened(bundle) as path:
        manifest = archive.read(path)
        print(f"{manifest.study}: manifest SHA-256 {archive.sha256(path / archive.MANIFEST)}")
        for problem in manifest.status.problems:
            print(f"{manifest.study}: {problem}")
        if faults := archive.faults(path, manifest):
            print("\n".join(faults))
            print(f"Differs from its manifest: {len(faults)} files.")
            raise typer.Exit(1)
        print(f"{len(manifest.files)} files: hashes agree.")
        folder = StudyFolder(path.parent, path.name)
        if differences := bundled.differences(folder):
            print("\n".join(differences))
            print("The numbers do not follow from the tables.")
            raise typer.Exit(1)
        print("Verdicts and summary: agree with what the tables give.", flush=True)
        if cells == 0 and not cell:
            print("No cell was trained again.")
            return
        texts = {"train": train, "validation": validation} if train and validation else {}
        if not _train_again(folder, manifest.versions, cells, cell, seed, tolerance, texts, data):
            raise typer.Exit(1)


def _train_again(
    folder: StudyFolder,
    versions: dict[str, str],
    cells: int | None,
    labels: list[str] | None,
    seed: int,
    tolerance: float | None,
    texts: dict[str, str],
    data: Path,
) -> bool:
    """Trains cells of a bundle again; whether they agree."""
    from analysis import bundled, load
    from tune_study import verify as again

    results = load(folder.path)
    rows: list[dict[str, Any]] = results.cells.to_dict("records")  # type: ignore[assignment]
    known = again.recorded(rows, bundled.rows(results.history), bundled.configs(folder))
    why = {label: again.other_machine(cell, versions) for label, cell in known.items()}
    for label in labels or ():
        if label not in known:
            raise ConfigError(
                f"--cell {label}: has no result in this bundle. Give one that has, such as "
                f"{min(known, default='none')}."
            )
    chosen = labels or again.choose(known, why, 3 if cells is None else cells, seed)
    if not chosen:
        print("No cell was trained again: none is stable at a learning rate up to the best.")
        return True
    try:
        tokens = again.find_tokens(
            known[chosen[0]].config.data, results.manifest, data, texts, lambda line: None
        )
    except again.TextMissingError as error:
        if labels or cells is not None:
            raise
        print(f"No cell was trained again, as the text is not here. {error}")
        return True
    outcomes = []
    for label in chosen:
        outcomes.append(
            again.train(label, known[label], tokens, results.study.criterion, why[label], tolerance)
        )
        print(outcomes[-1].told, flush=True)
    print(again.verdict(outcomes, {why[label] for label in chosen} - {""}))
    return all(outcome.agrees for outcome in outcomes)


def _prepare(study: Study, data: Path) -> None:
    from tune_study.data import prepare as prepare_tokens

    prepare_tokens(study.base.data, data)


@contextmanager
def _cluster(address: str | None) -> Iterator[Cluster | None]:
    """The cluster at an address; None for none."""
    if not address or address == "local":
        yield None
        return
    from tune_study.cluster import connected

    with connected(address) as cluster:
        yield cluster


def _run(
    plan: Plan,
    folder: StudyFolder,
    tokens: Any,
    who: Policy,
    end: float | None,
    log: Sequence[str],
    cluster: Cluster | None,
    mirror: Mirror | None,
) -> Any:
    from tune_study import sweep as engine
    from tune_study.progress import Progress

    loggers: list[Background] = []
    if log:
        from tune_study.loggers import make

        loggers = make(log, folder)
    print("\n".join(_cost(plan, folder, tokens.vocab_size, who)), flush=True)
    progress = Progress(_board(folder, plan), who.at_once)
    try:
        return engine.run(
            plan,
            folder,
            tokens,
            progress,
            who=who,
            end=end,
            loggers=loggers,
            cluster=cluster,
            fault=None if mirror is None else lambda: mirror.fault,
        )
    except ConfigError:
        raise
    except Exception:
        progress.close()
        traceback.print_exc()
        print(f"Everything reported is kept. Go on with: {_command()}", file=sys.stderr, flush=True)
        os._exit(1)  # Ray, whose servers the reaper has ended, would abort before a word is said
    finally:
        progress.close()
        for logger in loggers:
            if logger.fault:
                rest = "The study itself has all reports."
                print(f"{logger.name}: not all is logged: {logger.fault}. {rest}", file=sys.stderr)


def _board(folder: StudyFolder, plan: Plan) -> Board:
    """What earlier starts found; nothing has to be read where there were none."""
    from tune_study.board import Board

    if not plan.done:
        return Board(plan.study, [*(cell.label for cell in plan.todo), *plan.given_up])
    from analysis import load
    from analysis.terminal import board

    return board(load(folder.path, study=plan.study))


def _cost(
    plan: Plan, folder: StudyFolder, vocab_size: int, who: Policy, in_full: bool = False
) -> list[str]:
    """What a start will do and take, for people."""
    from tune_study import cost, disk
    from tune_study import sweep as engine

    study = plan.study
    needs = disk.needs(plan, folder, vocab_size, who.at_once, engine.CHECKPOINTS_KEPT)
    bytes_ = sum(n for parts in needs.values() for n in parts.values())
    due = "to run" if plan.search is None else "in the next round"
    head = f"{study.name}: {cost.product(study)}; {plan.done} done, {len(plan.todo)} {due}."
    if not plan.todo:
        return [head]
    if in_full:  # up to a minute for large models
        _aside("Measuring how fast its models train here ...")
    estimated = cost.estimate(plan, vocab_size, who, bytes_)
    rest = cost.table(estimated) if in_full else []
    return [head, *rest, cost.line(estimated, who, study.base)]


def _aside(line: str) -> None:
    """Says what takes a moment, beside what was asked for."""
    print(line, file=sys.stderr, flush=True)


def _end(hours: float | None) -> float | None:
    """When the time is over, by `time.monotonic`."""
    if hours is None:
        return None
    if not 0 < hours < float("inf"):
        raise ConfigError(f"--hours {hours:g}: is no time to run. Give a number above 0.")
    return time.monotonic() + 3600 * hours


def _console() -> Console:
    """Standard output; in a pipe as wide as what is written, so that no line is folded there."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def _load(runs: Path | str, name: str) -> Results:
    from analysis import load
    from tune_study import remote

    return load(remote.fetched(str(runs), name).path)


def _report(folder: StudyFolder, study: Study, out: Path) -> None:
    from analysis import load
    from analysis.report import write

    print("Writing the report ...", file=sys.stderr, flush=True)
    index = write(load(folder.path, study=study), out)
    _print_summary(json.loads(index.with_name("summary.json").read_text(encoding="utf-8")))
    print(f"Report: {index}")


def _print_summary(summary: dict[str, Any]) -> None:
    from analysis.text import lines

    for line in lines(summary):
        print(line)


def _changed(
    name: str,
    axes: dict[str, str | None],
    settings: list[str] | None,
    new_name: str | None,
    criterion: str | None = None,
    arm: str | None = None,
) -> Study:
    """The named study, narrowed and changed; under a name of its own if it differs."""
    study = _named(name)
    arms = study.arms if arm is None else _arms(study, _values("arm", arm))
    narrowed = dict(study.axes) | {k: tuple(_values(k, v)) for k, v in axes.items() if v}
    changes: dict[str, Any] = {}
    for setting in settings or []:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ConfigError(
                f"--set {setting}: has no value. Give FIELD=VALUE, such as steps=200."
            )
        if key in AXES:
            raise ConfigError(
                f"--set {setting}: is an axis. Give --{key.replace('_', '-')} {text}."
            )
        inside, field = changes, key
        for outer in key.split(".")[:-1]:
            inside, field = inside.setdefault(outer, {}), key.rpartition(".")[2]
        inside[field] = _scalar(text)
    base = study.base.model_dump()
    for key, value in changes.items():
        base[key] = base.get(key, {}) | value if isinstance(value, dict) else value
    rules = study.criterion if criterion is None else criterion_named(criterion)
    result = study.replace(base=base, axes=narrowed, arms=arms, criterion=rules)
    if result == study and new_name is None:
        return study
    if new_name is None:
        # The same changes give the same name, so that going on works.
        what: list[Any] = [result.base.telling(), result.axes]
        what += [] if result.arms is None else [result.arms]
        what += [] if criterion is None else [criterion]
        text = json.dumps(what)
        new_name = f"{study.name}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
    return result.replace(name=new_name)


def _named(name: str) -> Study:
    """The study of a file, such as runs/pilot/config.yaml, or of search_spaces/."""
    if not name.endswith((".yaml", ".yml")):
        return search_spaces.get(name)
    from tune_study import configs

    return configs.read(Path(name), Study)


def _arms(study: Study, names: list[str]) -> Any:
    if study.arms is None:
        raise ConfigError(f"--arm: {study.name} lists no arms. Give --qk-norm.")
    by_name = dict(zip(study.arm_names(), study.arms, strict=True))
    for name in names:
        if name not in by_name:
            raise ConfigError(f"--arm {name}: unknown. Give one of: {', '.join(by_name)}.")
    return tuple(by_name[name] for name in names)


def _values(name: str, text: str) -> list[str]:
    values = [part.strip() for part in text.split(",")]
    if not all(values):
        raise ConfigError(f"--{name} {text!r}: has an empty value. Give values between commas.")
    return values


def _scalar(text: str) -> Any:
    """null, true and false by name; anything else as text, which the config parses."""
    return {"null": None, "true": True, "false": False}.get(text, text)


def _command() -> str:
    """The command that was given, to be given again."""
    if command := os.environ.get("TUNE_STUDY_COMMAND"):
        return command  # the Makefile knows what was typed
    return " ".join([PROGRAM, *sys.argv[1:]])


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
    os.write(2, f"\nInterrupted. Go on with: {_command()}\n".encode())
    if sys.stdout.isatty():
        os.write(1, SHOW_CURSOR)
    os._exit(130)
