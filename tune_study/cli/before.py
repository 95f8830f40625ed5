"""Verbs in front of a sweep: prepare, plan, doctor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tune_study.cli.asked import changed
from tune_study.cli.options import (
    DEFAULT_DATA,
    RUNS_OR_URI,
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
from tune_study.cli.output import aside
from tune_study.concurrency import Policy
from tune_study.config import ConfigError, Study
from tune_study.store import StudyFolder

if TYPE_CHECKING:
    from tune_study.sweep import Plan


def prepare(
    study: StudyName,
    data: Data = DEFAULT_DATA,
    set_: Set = None,
) -> None:
    """Make the tokens of a study and print the data report. Does nothing twice."""
    prepare_tokens(changed(study, {}, set_, None), data)


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
    wanted = changed(study, axes, set_, name, criterion, arm)
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
    who = sharing.policy_for(asked, vocab_size, max_concurrent, folder.sharing, say=aside)
    lines = cost_lines(asked, folder, vocab_size, who, in_full=True)
    print("\n".join([*lines, f"The {prepared}: {vocab_size:,} ids."]), flush=True)
    if max_concurrent is None and (line := threads.compared(asked, vocab_size, say=aside)):
        print(line)


def doctor(
    study: Annotated[str, typer.Argument(metavar="[STUDY]")] = "pilot",
    set_: Set = None,
    runs: RunsOrUri = RUNS_OR_URI,
    data: Data = DEFAULT_DATA,
) -> None:
    """Examine this machine: what a sweep needs, and whether what it computes can be believed."""
    from tune_study.doctor import examine

    faults = 0
    for finding in examine(changed(study, {}, set_, None), runs, data):
        print(f"{finding.kind + ':':<6} {finding.text}", flush=True)
        faults += finding.kind == "fault"
    print(f"{faults} faults." if faults != 1 else "1 fault.")
    if faults:
        raise typer.Exit(1)


def prepare_tokens(study: Study, data: Path) -> None:
    from tune_study.data import prepare as prepare_tokens

    prepare_tokens(study.base.data, data)


def cost_lines(
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
        aside("Measuring how fast its models train here ...")
    estimated = cost.estimate(plan, vocab_size, who, bytes_)
    rest = cost.table(estimated) if in_full else []
    return [head, *rest, cost.line(estimated, who, study.base)]
