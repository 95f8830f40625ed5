"""Verbs about archives: bundle, verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tune_study.cli.options import DEFAULT_DATA, RUNS_OR_URI, Data, RunsOrUri, StudyName, no_uri
from tune_study.cli.output import PROGRAM
from tune_study.config import ConfigError
from tune_study.store import StudyFolder


def bundle(
    study: StudyName,
    out: Annotated[
        Path | None,
        typer.Option(
            help="An archive (.tar.gz) or a folder; RUNS/STUDY/STUDY.tar.gz if left out, of a "
            "study in a store STUDY.tar.gz here.",
            callback=no_uri,
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
