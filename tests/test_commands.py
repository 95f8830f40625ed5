"""The command that a bundle names makes the very same study."""

from __future__ import annotations

import shlex

import pytest
import typer.main

import search_spaces
from tune_study import cli, commands
from tune_study.cli.asked import changed
from tune_study.config import CRITERIA, Study

PILOT = search_spaces.get("pilot")


def asked(line: str) -> Study:
    """The study that the command line of `sweep` asks for."""
    words = shlex.split(line)
    assert words[:4] == ["python", "-m", "tune_study", "sweep"]
    verb = typer.main.get_command(cli.app).commands["sweep"]
    given = verb.make_context("sweep", words[4:]).params
    axes = {name: given[name] for name in ("lr", "depth", "qk_norm", "seed")}
    study = changed(
        given["study"], axes, given["set_"], given["name"], given["criterion"], given["arm"]
    )
    if given["checkpoint_every"] is not None:
        study = study.replace(checkpoint_every_s=given["checkpoint_every"])
    if given["cells"] is not None:
        study = study.replace(search=study.search.replace(cells=given["cells"]))
    return study.replace(keep_weights=tuple(given["keep_weights"] or ()))


CHANGED = [
    *map(search_spaces.get, search_spaces.names()),
    PILOT.replace(axes=dict(PILOT.axes) | {"seed": range(5)}),
    PILOT.replace(name="a", axes=dict(PILOT.axes) | {"lr": (1e-5, 0.0316), "qk_norm": ("off",)}),
    PILOT.replace(name="b", criterion=CRITERIA["off"], keep_weights=("d2-*-s0",)),
    PILOT.replace(name="c", checkpoint_every_s=7.5, base=PILOT.base.replace(tied_head=False)),
    search_spaces.get("tinystories").replace(
        name="d",
        base=search_spaces.get("tinystories").base.replace(
            device="cpu",
            threads=2,
            data={"corpus": "text", "train": "a b.txt", "validation": "b", "document_end": None},
        ),
    ),
    search_spaces.get("stabilisers").replace(
        name="e", arms=search_spaces.get("stabilisers").arms[:3]
    ),
    search_spaces.get("edge").replace(name="f", search={"cells": 40}),
]


@pytest.mark.parametrize("study", CHANGED, ids=lambda study: study.name)
def test_the_command_asks_for_the_same_study(study):
    line = commands.sweep(study)
    assert line is not None
    again = asked(line)
    # Values of an axis that were typed are kept as they were typed.
    typed = {axis: again.axis(axis) for axis, _ in again.axes}
    assert again.replace(axes=typed) == study.replace(description=again.description)
    assert commands.sweep(again) == line
    if study == search_spaces.get("pilot"):
        assert line == "python -m tune_study sweep pilot"


@pytest.mark.parametrize(
    "study",
    [
        PILOT.replace(margins={"usable": 0.2}),
        PILOT.replace(axes=dict(PILOT.axes) | {"beta2": (0.9, 0.95)}),
        PILOT.replace(criterion=CRITERIA["safe"].replace(name="mine", patience=3)),
        PILOT.replace(
            base=PILOT.base.replace(
                data={"corpus": "text", "train": ("a", "b")} | {"validation": "c"}
            )
        ),
    ],
)
def test_a_study_that_no_command_makes_has_none(study):
    assert commands.sweep(study) is None
