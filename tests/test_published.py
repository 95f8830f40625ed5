"""What results/ holds can be checked, and README shows what it holds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from analysis import load
from analysis.summary import edge_text, interval_text
from tests.conftest import ROOT
from tune_study import archive, cli, commands

RESULTS = ROOT / "results"
PILOT, STORIES = RESULTS / "pilot", RESULTS / "tinystories-small"
README = (ROOT / "README.md").read_text(encoding="utf-8")

MOST_BYTES = 5_000_000
"""Of all that is published, so that a clone stays small."""


def summary(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / archive.SUMMARY).read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize("folder", [PILOT, STORIES], ids=lambda folder: folder.name)
def test_a_published_result_is_complete_and_of_committed_code(folder):
    manifest = archive.read(folder)
    assert manifest.status == archive.Status(complete=True, running=False, problems=(), damage=())
    commits = {of["commit"] for of in (manifest.versions, manifest.packed_with)}
    assert all(re.fullmatch("[0-9a-f]{12}", commit) for commit in commits)


@pytest.mark.parametrize("folder", [PILOT, STORIES], ids=lambda folder: folder.name)
def test_its_readme_names_the_commands_that_made_it(folder):
    manifest, study = archive.read(folder), load(folder).study
    text, place = (folder / "README.md").read_text(), f"results/{folder.name}"
    assert manifest.commands == (
        commands.sweep(study),
        f"python -m tune_study bundle {study.name} --small --out {place}",
        f"python -m tune_study verify {place}",
    )
    assert all(command in text for command in manifest.commands)
    assert len(study.axis("seed")) == 5


def test_cells_of_the_pilot_give_the_same_again(data, capsys):
    cli.verify(PILOT, cells=1, data=data)
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.match(r"1 of 1 cell: (same bits|within)", last)


def test_without_its_text_the_other_is_checked_and_says_so(tmp_path, capsys):
    cli.verify(STORIES, data=tmp_path)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("No cell was trained again, as the text is not here.")
    listed = (RESULTS / "README.md").read_text()
    for source in archive.read(STORIES).data["sources"]:
        assert source["name"] in last
        assert f"| {source['name']} | {source['size']:,} | {source['sha256']} |" in listed


def test_nothing_published_names_a_machines_folders_and_all_is_small():
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MOST_BYTES
    for path in files:
        assert not re.search(rb"/(home|Users|tmp|root|work)/", path.read_bytes()), path


def test_readmes_picture_is_one_of_the_published():
    (picture,) = re.findall(r"!\[[^]]*\]\(([^)]+)\)", README)
    assert picture.removeprefix("results/pilot/") in archive.read(PILOT).files


def test_readmes_numbers_are_those_published():
    pilot, stories = summary(PILOT), summary(STORIES)
    lines = [_stable(0.316), _counts(pilot), _counts(stories), _ratios(pilot), _ratios(stories)]
    for one, other in zip(pilot["arms"], stories["arms"], strict=True):
        assert (one["depth"], one["arm"]) == (other["depth"], other["arm"])
        lines.append(f"| {one['depth']} | {one['arm']} | {_numbers(one)} | {_numbers(other)} |")
    ends = [f" | {verdicts} |\n" for verdicts in _verdicts(pilot, stories)]
    starts = [f"| H{number} | " for number in (1, 2, 3)]
    found = [line for line in README.splitlines(True) if line.startswith("| H")]
    pairs = zip(found, starts, ends, strict=True)
    assert all(line.startswith(start) and line.endswith(end) for line, start, end in pairs)
    assert [line for line in lines if line not in README] == []


def _counts(of: dict[str, Any]) -> str:
    counts = of["cells"]
    states = ", ".join(f"{counts[state]} {state}" for state in ("stable", "failed", "diverged"))
    return f"{counts['expected']} models: {states}"


def _numbers(arm: dict[str, Any]) -> str:
    edge, sensitivity = arm["max_stable_lr"], arm["lr_sensitivity"]
    return " | ".join(
        [
            f"{edge_text(edge)} {interval_text(edge['low'], edge['high'], '.2g')}".strip(),
            f"{sensitivity['value']:.2f} "
            f"{interval_text(sensitivity['low'], sensitivity['high'])}".strip(),
        ]
    )


def _stable(lr: float) -> str:
    """How many of the pilot's models are stable at a learning rate, arm by arm."""
    cells = load(PILOT).cells
    at = cells[cells["lr"] == lr]
    counts = at["state"].eq("stable").groupby(at["qk_norm"]).agg(["sum", "size"])
    (off, n), (on, _) = counts.loc["off"], counts.loc["rmsnorm"]
    return (
        f"At a learning rate of {lr:g}\n{off or 'none'} of the {n} models without QK-norm (orange) "
        f"is stable, and {on} of the {n} with it (blue)."
    )


def _ratios(of: dict[str, Any]) -> str:
    """By what factors the maximum stable LR rises, depth by depth, with intervals."""
    (verdict,) = [v for v in of["verdicts"] if v["hypothesis"] == "H2"]
    ratios = [part for part in verdict["parts"] if part["name"].startswith("ratio")]
    found = [
        f"{part['effect']:.2g} {interval_text(part['low'], part['high'], '.2g')}" for part in ratios
    ]
    return ", ".join(found)


def _verdicts(*studies: dict[str, Any]) -> list[str]:
    """The verdicts on each hypothesis, study by study."""
    found = [{v["hypothesis"]: v["verdict"] for v in of["verdicts"]} for of in studies]
    return [" | ".join(of[f"H{number}"] for of in found) for number in (1, 2, 3)]
