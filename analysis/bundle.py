"""Packs a study as a bundle: `tune_study.archive` says what lies where in it.

A bundle is made of what the study's folder holds at that moment: rows are copied first, and
tables, figures and page are made of the copy, so that they belong together even while a sweep runs.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import report
from analysis.convert import replace_file
from analysis.load import Results, load
from analysis.plots.theme import COLUMN
from analysis.tables import HISTORY_COLUMNS
from analysis.text import lines
from tune_study import archive, commands, configs
from tune_study.config import ConfigError, DataConfig, Study
from tune_study.identity import TRAINER_VERSION, identity
from tune_study.store import StudyFolder, versions

ROWS = ("params.json", "config.yaml", "result.json", "error.txt")
"""What is kept of a trial's folder."""

SMALL_FIGURES = ("lr_loss", "max_stable_lr", "phase", "necessity", "robustness")
PICTURE = "figures/lr_loss.png"

SMALL_COLUMNS = re.compile(r"(?!time/)(?!.*/(layer_\d+|embedding|head)$)")
"""Columns of `history` that a small bundle keeps."""

LEFT_OUT = (
    f"{archive.HISTORY}: columns of single layers and parts, and clocks",
    "figures but " + ", ".join(SMALL_FIGURES),
    "the page, LaTeX tables and the cells' own rows",
)
"""What a small bundle does without."""

TOLD = ("commit", "processor")
"""Versions that the bundle's README names elsewhere."""

TEXTS = ("train", "validation", "gpt2_vocab", "gpt2_encoder")
"""Settings of the data that are paths on the machine of the sweep."""


def write(folder: StudyFolder, out: Path, small: bool = False) -> archive.Manifest:
    """Packs a study into a folder, or into an archive where `out` ends so.

    Args:
        folder: the study's.
        out: the bundle; a bundle that is there is replaced.
        small: leave out what LEFT_OUT lists.

    Raises:
        ConfigError: if there is no study, or only a bundle of it, or `out` is a folder of
            something else.
    """
    folder.read()
    if archive.is_bundle(folder.path):
        raise ConfigError(f"{folder.path}: is a bundle already. Give the folder of a sweep.")
    packed = out.name.endswith(archive.SUFFIXES)
    if not packed and out.is_dir() and any(out.iterdir()) and not archive.is_bundle(out):
        raise ConfigError(f"--out {out}: is a folder, and no bundle. Give another one.")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".bundle-", dir=out.parent) as scratch:
        made = Path(scratch) / folder.path.name
        manifest = _fill(made, folder, small, out)
        if packed:
            archive.pack(made, out)
        else:
            shutil.rmtree(out, ignore_errors=True)
            made.chmod(0o755)  # made for this user alone, as temporary folders are
            made.rename(out)
    return manifest


def _fill(made: Path, folder: StudyFolder, small: bool, out: Path) -> archive.Manifest:
    """Makes the bundle's folder."""
    running = bool(folder.holder())
    _copy(folder, made)
    results = replace(load(made), running=running)
    with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
        written = Path(scratch)
        report.write(results, written, (COLUMN,) if small else report.LAYOUTS)
        summary = json.loads((written / archive.SUMMARY).read_text(encoding="utf-8"))
        if small:
            shutil.rmtree(made / archive.LOGS, ignore_errors=True)
            _thin(written, results)
        shutil.copytree(written, made, dirs_exist_ok=True)
    resolved = json.dumps(_resolved(results), indent=1, allow_nan=False)
    replace_file(made / archive.CONFIG, resolved + "\n")
    content = _content(results, summary, small, out)
    replace_file(made / archive.README, _readme(results, summary, content))
    return archive.seal(made, **content)


def _copy(folder: StudyFolder, made: Path) -> None:
    """What the study's folder holds, but checkpoints, weights and what Ray needs; without paths."""
    hidden = _Paths(folder)
    made.mkdir()
    stored = folder.read()
    study = _without_paths(Study(**stored["study"]))
    stored["study"] = study.model_dump(mode="json")
    replace_file(made / archive.STUDY, report.dump_json(stored, indent=1))
    replace_file(made / archive.YAML, configs.text(study))
    for path in sorted(folder.experiments.glob("sweep-*/*/*")):
        if path.name not in ROWS:
            continue
        copy = made / path.relative_to(folder.path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.name == "result.json":
            shutil.copyfile(path, copy)
        else:
            copy.write_bytes(hidden.hide(path.read_bytes()))
    for part in (folder.calibration, folder.replays):
        if part.is_dir():
            shutil.copytree(part, made / part.name)


class _Paths:
    """Replaces paths of this machine: they say nothing to others, and may name a person."""

    def __init__(self, folder: StudyFolder) -> None:
        code = Path(__file__).resolve().parents[1]
        places = {folder.path.parent: "runs", Path(sys.prefix): ".venv", code: "."}
        places |= {Path.home(): "~"} | {text: text.name for text in _texts(folder.study())}
        # The longest first, since one may lie in another.
        self._places = sorted(places.items(), key=lambda place: -len(str(place[0])))

    def hide(self, text: bytes) -> bytes:
        """The text with each of them by the name that the documents use."""
        found = re.search(rb'"root": "([^"]+)"', text)  # in params.json: where the tokens lie
        if found:
            text = text.replace(found[1], b"data")
        for path, name in self._places:
            if len(path.parts) > 1:
                text = text.replace(str(path).encode(), name.encode())
        return text


def _texts(study: Study) -> list[Path]:
    """The paths that the study's data settings name."""
    data = study.base.data
    given = [getattr(data, setting) for setting in TEXTS]
    return [Path(p) for ps in given if ps for p in ([ps] if isinstance(ps, str) else ps)]


def _without_paths(study: Study) -> Study:
    """The study with texts by their names alone; they are no part of an identity."""
    data = study.base.data.model_dump()
    for setting in TEXTS:
        given = data[setting]
        if isinstance(given, str):
            data[setting] = Path(given).name
        elif given:
            data[setting] = tuple(Path(path).name for path in given)
    return study.replace(base=study.base.replace(data=DataConfig(**data)))


def _thin(written: Path, results: Results) -> None:
    """Leaves in a report what a small bundle holds."""
    for path in sorted(written.rglob("*"), reverse=True):
        name = path.relative_to(written).as_posix()
        kept = name in (archive.CELLS, archive.SUMMARY, PICTURE) or (
            path.suffix == ".svg" and path.stem in SMALL_FIGURES
        )
        if path.is_file() and not kept:
            path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    history = results.history
    columns = [name for name in history.columns if SMALL_COLUMNS.match(name)]
    table = report.parquet(history[columns], HISTORY_COLUMNS, dense=True)
    replace_file(written / archive.HISTORY, table)


def _resolved(results: Results) -> dict[str, Any]:
    """The settings that all cells share, and those of each, with its identity."""
    checksum = results.manifest["checksum"]
    cells = {
        config.label: (config.model_dump(mode="json"), identity(config, checksum))
        for config in results.study.cells()
    }
    every = [settings for settings, _ in cells.values()]
    shared = {k: v for k, v in every[0].items() if all(other[k] == v for other in every)}
    return {
        "shared": shared,
        "cells": {
            label: {
                "identity": name,
                "settings": {k: v for k, v in settings.items() if k not in shared},
            }
            for label, (settings, name) in cells.items()
        },
    }


def _content(results: Results, summary: dict[str, Any], small: bool, out: Path) -> dict[str, Any]:
    """The manifest but for its files."""
    data = results.manifest
    return {
        "study": results.study.name,
        "status": {
            "complete": summary["complete"],
            "running": results.running,
            "problems": _problems(results, summary),
            "damage": results.damage,
        },
        "left_out": LEFT_OUT if small else (),
        "commands": _commands(results, small, out),
        "trainer_version": TRAINER_VERSION,
        "versions": results.versions,
        "packed_with": versions(),
        "hardware": _hardware(results.cells),
        "data": {
            "corpus": data["corpus"],
            "checksum": data["checksum"],
            "tokens": data["sha256"],
            "tokenizer": data["tokenizer_sha256"],
            "sources": data["sources"],
        },
    }


def _problems(results: Results, summary: dict[str, Any]) -> tuple[str, ...]:
    cells = summary["cells"]
    problems = []
    if results.running:
        problems.append("running now: what was reported until it was packed is in here")
    if cells["missing"]:
        found, asked = cells["expected"] - cells["missing"], cells["expected"]
        problems.append(f"incomplete: {found} of {asked} cells have ended")
    if cells["errored"]:
        problems.append(f"errored: {cells['errored']} of {cells['expected']} cells")
    if summary["leak_alarm"]:
        problems.append("a cell ended below the entropy of the corpus; the data leaks")
    return (*problems, *(f"damaged: {line}" for line in results.damage))


def _commands(results: Results, small: bool, out: Path) -> tuple[str, ...]:
    """What to type, from the sweep to the check of this bundle."""
    study = results.study
    place = out.as_posix() if not out.is_absolute() else out.name
    options = f"{' --small' if small else ''} --out {place}"
    return (
        commands.sweep(study) or f"{commands.PROGRAM} sweep {archive.YAML}",
        f"{commands.PROGRAM} bundle {study.name}{options}",
        f"{commands.PROGRAM} verify {place}",
    )


def _hardware(cells: pd.DataFrame) -> list[dict[str, Any]]:
    ran = cells[cells["device"] != ""]
    counts = Counter(zip(ran["device"], ran["precision"], ran["threads"], strict=True))
    return [
        {"device": device, "precision": precision, "threads": int(threads), "cells": count}
        for (device, precision, threads), count in sorted(counts.items())
    ]


def _readme(results: Results, summary: dict[str, Any], content: dict[str, Any]) -> str:
    """What the bundle is, for a reader who has nothing else."""
    study, data = results.study, results.manifest
    swept, packed = (content[part]["commit"] for part in ("versions", "packed_with"))
    status = content["status"]
    problems = [f"**{problem}**" for problem in status["problems"]]
    left_out = [f"- {line}" for line in content["left_out"]]
    hardware = [
        f"{row['cells']} cells on {row['device']}, {row['precision']}, {row['threads']} "
        f"thread{'s' if row['threads'] > 1 else ''}"
        for row in content["hardware"]
    ]
    processor = results.versions.get("processor", "unknown")
    text = [
        f"# {study.name}",
        study.description or "A study of tune_study.",
        *problems,
        _indented(lines(summary)),
        "## The commands",
        f"With the code at commit {swept}"
        + (f", from the second on at {packed}:" if packed != swept else ":"),
        _indented(content["commands"]),
        "## What it ran on",
        f"{'; '.join(hardware) or 'nothing yet'}. Processor: {processor}. "
        + ", ".join(f"{k} {v}" for k, v in results.versions.items() if k not in TOLD)
        + ".",
        "## The text",
        f"{data['corpus']}: {data['train']['documents']:,} documents to train on, "
        f"{data['validation']['documents']:,} held out, {data['train']['tokens']:,} and "
        f"{data['validation']['tokens']:,} tokens, checksum {data['checksum']}.",
        *_sources(data),
        "## Files",
        "manifest.json has the SHA-256 of each. config.yaml is the study, for `sweep config.yaml`, "
        "study.json the same with its tokens' manifest, config.json every cell's settings as "
        "resolved, cells.parquet a row a cell, "
        "history.parquet a row a report, summary.json the numbers.",
        *(["Left out, to be small:", "\n".join(left_out)] if left_out else []),
    ]
    return "\n\n".join(text) + "\n"


def _sources(data: dict[str, Any]) -> list[str]:
    """The files that the text came from; nothing for text that the code makes."""
    if not data["sources"]:
        return []
    rows = [
        f"{source['split']}: {source['name']}, {source['size']:,} bytes, SHA-256 {source['sha256']}"
        for source in data["sources"]
    ]
    need = (
        "To train a cell again `verify` needs these files: "
        "`--train FILE --validation FILE`. Without them it checks hashes and numbers."
    )
    return [_indented(rows), need]


def _indented(rows: Any) -> str:
    return "\n".join(f"    {row}" for row in rows)
