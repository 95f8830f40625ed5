"""The verb that trains: sweep."""

from __future__ import annotations

import os
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tune_study import logs
from tune_study.cli.asked import changed
from tune_study.cli.before import cost_lines, prepare_tokens
from tune_study.cli.options import (
    DEFAULT_DATA,
    RUNS_OR_URI,
    Address,
    Arm,
    CriterionName,
    Data,
    Depth,
    Lr,
    MaxConcurrent,
    Name,
    QkNorm,
    RunsOrUri,
    Seed,
    Set,
    StudyName,
)
from tune_study.cli.output import again, aside, write_report
from tune_study.concurrency import Policy, policy, policy_on
from tune_study.config import ConfigError
from tune_study.store import StudyFolder

if TYPE_CHECKING:
    from tune_study.board import Board
    from tune_study.cluster import Cluster
    from tune_study.loggers import Background
    from tune_study.remote import Mirror
    from tune_study.sweep import Plan


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
    wanted = changed(study, axes, set_, name, criterion, arm)
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
        prepare_tokens(wanted, data)
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
            who = sharing.policy_for(plan, ids, max_concurrent, file, True, cluster, aside)
            outcome = _run(plan, folder, tokens, who, end, log or (), cluster, mirror)
        else:
            outcome = engine.Outcome(False, "", {})
            done = "all" if not plan.given_up else f"{plan.done} of"
            print(f"{wanted.name}: {done} {plan.asked} cells are done, none is to run.")
    if mirror is not None and mirror.behind:
        print(f"Not all is there yet: {mirror.behind} Then: {again()}", file=sys.stderr)
        raise typer.Exit(1)
    if outcome.interrupted:
        print(f"Interrupted; everything reported is kept. Go on with: {again()}")
        raise typer.Exit(130)
    if outcome.out_of_time:
        print(f"The {hours:g} hours are over; everything reported is kept. Go on with: {again()}")
        raise typer.Exit(3)
    if outcome.stopped:
        print(f"Everything reported is kept. Go on with: {again()}", flush=True)
        print(f"Stopped: {outcome.stopped}", file=sys.stderr, flush=True)
        os._exit(1)  # Ray would wait for its servers at exit; the reaper has ended them
    if with_report:
        try:
            write_report(folder, wanted, folder.report)
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
        print(f"{len(outcome.errors)} cells errored. Try them again with: {again()}")
    if plan.given_up:
        print(f"{len(plan.given_up)} cells not run. Try them with --retry-errored.")
    if outcome.errors or plan.given_up:
        raise typer.Exit(1)


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
    print("\n".join(cost_lines(plan, folder, tokens.vocab_size, who)), flush=True)
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
        print(f"Everything reported is kept. Go on with: {again()}", file=sys.stderr, flush=True)
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


def _end(hours: float | None) -> float | None:
    """When the time is over, by `time.monotonic`."""
    if hours is None:
        return None
    if not 0 < hours < float("inf"):
        raise ConfigError(f"--hours {hours:g}: is no time to run. Give a number above 0.")
    return time.monotonic() + 3600 * hours
