"""Every command and snippet of README and tutorial is run, or named here with the reason it is not.

A block that this file does not know makes it fail. Commands run in this process, as typed, on a
study that stands under the name `pilot`: a few cells, trained here, shaped like the real one.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import search_spaces
from search_spaces.pilot import STUDY as PILOT
from tests.conftest import ROOT, SMALL_DATA
from tests.left_study import leave_all
from tune_study import cli
from tune_study.cli.asked import changed
from tune_study.config import Study
from tune_study.data import Tokens
from tune_study.store import StudyFolder

DOCUMENTS = ("README.md", "docs/tutorial.md")

RUN = {
    "make sweep",
    "python -m tune_study --help",
    "python -m tune_study plan pilot",
    "python -m tune_study status pilot",
    "python -m tune_study show pilot d2-off-lr1.000e-01-s0",
}

NOT_RUN = {
    "make test": "is what runs this",
    "make sweep STUDY=tinystories": "trains for days, and needs a text from the network",
    "make prepare STUDY=tinystories": "needs a network",
    "make sweep STUDY=edge": "trains for minutes; test_sweep.py runs a part of it",
    "make sweep STUDY=centred": "test_interventions.py runs it, smaller",
    "make bundle STUDY=pilot": "test_bundle.py runs it",
    "python -m tune_study verify runs/pilot/pilot.tar.gz": "test_bundle.py runs it",
    "python -m tune_study doctor": "test_doctor.py runs it",
    "python -m tune_study report pilot": "test_report_of_a_sweep.py runs it",
    "python -m tune_study sweep pilot --lr 1e-3,1e-2,1e-1 --depth 2 --seed 0,1 --set steps=200": (
        "trains; test_sweep.py runs its like"
    ),
    "python -m tune_study sweep pilot --name mine --depth 2 --lr 1e-3,1e-2,1e-1,1 --seed 0,1": (
        "trains; test_sweep.py runs its like"
    ),
    "python -m tune_study sweep pilot --name mine --depth 2 --lr 1e-3,1e-2,1e-1,1 --seed 0,1,2": (
        "trains; test_sweep.py runs its like"
    ),
    "python -m tune_study sweep pilot --name mine --set data.corpus=text "
    "--set data.train=train.txt --set data.validation=valid.txt": (
        "trains; test_data_preparation.py prepares a text"
    ),
    "python -m tune_study sweep pilot --name text --set data.corpus=text "
    "--set data.train=train.txt --set data.validation=valid.txt": (
        "trains; test_data_preparation.py prepares a text"
    ),
}
"""Their verbs, options, settings and studies are looked at all the same."""

FILES = ("interventions/centred_qk.py", "search_spaces/centred.py")
"""Snippets of the tutorial that are files; test_interventions.py runs them."""


def blocks(document: str) -> Iterator[tuple[str, str]]:
    """Language and text of every fenced block, and of every indented one, whose language is ''."""
    text = (ROOT / document).read_text(encoding="utf-8")
    for fenced in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.M | re.S):
        yield fenced[1] or "?", fenced[2]
    rest = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.M | re.S)
    for indented in re.finditer(r"(?:^    .*\n(?:\n(?=    ))*)+", rest, re.M):
        yield "", re.sub(r"^    ", "", indented[0], flags=re.M)


def commands(block: str) -> list[str]:
    """The commands of a block, without comments, `.venv/bin/` and line breaks."""
    lines = re.sub(r"\\\n\s*", "", block).splitlines()
    plain = (re.sub(r"\s+#.*", "", line).strip().removeprefix(".venv/bin/") for line in lines)
    return list(filter(None, plain))


def is_python(language: str, block: str) -> bool:
    return language == "python" or block.startswith(("from ", "import "))


def is_listing(block: str) -> bool:
    """Whether every entry is a path with words on it."""
    return all(re.match(r"[\w/.]+(/|\.\w+)\s{2,}\S|\s{8,}\S", line) for line in block.splitlines())


ALL = [(name, *found) for name in DOCUMENTS for found in blocks(name)]
LISTINGS = [block for _, language, block in ALL if language == "" and is_listing(block)]
SHELL = list(
    dict.fromkeys(
        command
        for _, language, block in ALL
        if not is_python(language, block) and block not in LISTINGS
        for command in commands(block)
    )
)


@pytest.fixture(scope="module")
def there(data_root: Path, tokens: Tokens, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the repository's is after `make sweep`, with tokens and the study `pilot`."""
    folder = tmp_path_factory.mktemp("there")
    study = small_pilot()
    leave_all(folder / "runs", study, tokens)
    shutil.copytree(folder / "runs" / "pilot", folder / "runs" / "mine")
    mine = study.replace(name="mine")
    StudyFolder(folder / "runs", "mine").write(mine, tokens.manifest.model_dump(mode="json"))
    (folder / "data").symlink_to(data_root)
    return folder


def small_pilot() -> Study:
    sizes = {"width": 16, "context": 16, "batch_size": 4, "val_windows": 8, "probe_windows": 2}
    steps = {"steps": 12, "warmup_steps": 3, "report_every": 4}
    axes = {"lr": (1e-3, 1e-2, 1e-1), "depth": (1, 2), "qk_norm": ("off", "rmsnorm"), "seed": (0,)}
    return PILOT.replace(base=PILOT.base.replace(**sizes, **steps, data=SMALL_DATA), axes=axes)


def test_a_block_is_a_command_a_snippet_or_a_listing() -> None:
    """Anything else, such as a language not known here, is to be decided on."""
    assert len(ALL) > 12
    for document, language, block in ALL:
        assert language in ("", "python"), f"{document}: a block of {language}"
        if not is_python(language, block) and block not in LISTINGS:
            for command in commands(block):
                assert command.startswith(("make ", "python -m tune_study ")), command


def test_every_command_is_known_here_and_every_one_known_stands_there() -> None:
    assert set(SHELL) == RUN | set(NOT_RUN)


@pytest.mark.parametrize("command", SHELL)
def test_command(
    command: str,
    there: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = made(command) if command.startswith("make ") else shlex.split(command)
    if words is None:
        assert command in NOT_RUN  # a target that is no verb
        return
    assert words[:3] == ["python", "-m", "tune_study"], command
    if command not in RUN:
        look_at(words[3:])
        return
    at_home(there, monkeypatch)
    program = typer.main.get_command(cli.app)
    assert not program.main(words[3:], "tune_study", standalone_mode=False)
    shown = capsys.readouterr().out
    assert shown
    if command == "make sweep":
        assert "pilot: all 12 cells are done" in shown
        check_listings(there)


def at_home(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In that folder, where `pilot` is the small one."""
    monkeypatch.chdir(there)
    for variable in ("RUNS", "DATA", "TUNE_STUDY_COMMAND"):
        monkeypatch.delenv(variable, raising=False)
    studies = {"pilot": small_pilot()}
    find = search_spaces.get
    monkeypatch.setattr(search_spaces, "get", lambda name: studies.get(name) or find(name))


def made(command: str) -> list[str] | None:
    """What `make` would run: the words of the one line that calls the command line, if any."""
    targets = shlex.split(command)[1:]
    known = ["-o", ".venv/installed", "-o", ".venv/installed-dev", "-o", "requirements.txt"]
    dry = subprocess.run(
        ["make", "-n", *known, *targets], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert dry.returncode == 0, dry.stderr
    lines = [line for line in dry.stdout.splitlines() if " -m tune_study " in line]
    if not lines:
        return None
    words = shlex.split(lines[-1])
    while "=" in words[0]:  # variables set for the command
        words.pop(0)
    return [words[0].removeprefix(".venv/bin/"), *words[1:]]


def look_at(words: list[str]) -> None:
    """The verb is there, its options and their types, and the study that they make of another."""
    group = typer.main.get_command(cli.app)
    with group.make_context("tune_study", list(words), resilient_parsing=False) as outer:
        name, command, rest = group.resolve_command(outer, list(words))
        context = command.make_context(name, rest, parent=outer)
    given: dict[str, Any] = context.params
    if name in ("sweep", "plan", "prepare") and given["study"] != "centred":
        axes = {axis: given.get(axis) for axis in ("lr", "depth", "qk_norm", "seed")}
        study = changed(given["study"], axes, given.get("set_"), given.get("name"))
        assert len(list(study.cells())) == len(study)


def check_listings(there: Path) -> None:
    """What the documents list is there after a sweep, or in the repository."""
    found = [re.match(r"(\S+)\s{2,}", line) for block in LISTINGS for line in block.splitlines()]
    paths = [match[1] for match in found if match]
    assert len(paths) > 12
    for path in paths:
        assert (there / path).exists() or (ROOT / path).exists(), path


def test_snippets(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(there)
    snippets = [block for _, language, block in ALL if is_python(language, block)]
    tutorial = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    files = [block for block in snippets if is_file(block, tutorial)]
    assert len(files) == len(FILES)
    for block in snippets:
        if block not in files:
            exec(compile(block, "docs", "exec"), {})
    assert (there / "figure.pdf").read_bytes().startswith(b"%PDF")
    assert (there / "figure.png").read_bytes().startswith(b"\x89PNG")


def is_file(block: str, tutorial: str) -> bool:
    """Whether the tutorial says that a snippet is one of FILES."""
    before = tutorial.partition(f"```python\n{block}")[0].rstrip().splitlines()[-1]
    return any(name in before for name in FILES)
