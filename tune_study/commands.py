"""The command that asks for a study as it stands: what to type to get the same again."""

from __future__ import annotations

import shlex
from typing import Any

import search_spaces
from tune_study.config import AXES, CRITERIA, Study

PROGRAM = "python -m tune_study"


def sweep(study: Study) -> str | None:
    """The shortest command line that sweeps exactly this study; None if none does.

    That is a study of search_spaces/ with options of `sweep`. One that was made in Python, or of a
    search space that has changed since, may have none.
    """
    found = [(name, _options(search_spaces.get(name), study)) for name in search_spaces.names()]
    lines = [
        shlex.join([*PROGRAM.split(), "sweep", name, *options])
        for name, options in found
        if options is not None
    ]
    return min(lines, key=lambda line: (len(line), line), default=None)


def _options(named: Study, study: Study) -> list[str] | None:
    """Options that make `study` of the named one; None if there are none that do."""
    same = ("tied", "margins")
    if any(getattr(named, field) != getattr(study, field) for field in same):
        return None
    parts = [
        _axes(named, study),
        _arms(named, study),
        _settings(named.base.model_dump(mode="json"), study.base.model_dump(mode="json")),
        _criterion(named, study),
        _search(named, study),
    ]
    options: list[str] = []
    for part in parts:
        if part is None:
            return None
        options += part
    # A study that is changed gets a name of its own where none is given.
    name = ["--name", study.name] if options or study.name != named.name else []
    if named.checkpoint_every_s != study.checkpoint_every_s:
        options += ["--checkpoint-every", f"{study.checkpoint_every_s:g}"]
    for pattern in study.keep_weights:
        options += ["--keep-weights", pattern]
    return options + name


def _axes(named: Study, study: Study) -> list[str] | None:
    axes = [axis for axis, _ in study.axes]
    if axes != [axis for axis, _ in named.axes]:
        return None
    changed = [axis for axis in axes if named.axis(axis) != study.axis(axis)]
    if not set(changed) <= set(AXES):
        return None
    options = []
    for axis in changed:
        options += [f"--{axis.replace('_', '-')}", ",".join(map(str, study.axis(axis)))]
    return options


def _arms(named: Study, study: Study) -> list[str] | None:
    if named.arms == study.arms:
        return []
    if not named.arms or not study.arms or not set(study.arms) <= set(named.arms):
        return None
    return ["--arm", ",".join(study.arm_names())]


def _settings(named: dict[str, Any], wanted: dict[str, Any], prefix: str = "") -> list[str] | None:
    """--set for each setting of the base that differs; None where one cannot be typed."""
    options: list[str] = []
    for key, value in wanted.items():
        if value == named[key]:
            continue
        inner: list[str] | None
        if isinstance(value, dict):
            inner = _settings(named[key], value, f"{prefix}{key}.")
        elif isinstance(value, list) or (key in AXES and not prefix):
            inner = None
        else:
            inner = ["--set", f"{prefix}{key}={_typed(value)}"]
        if inner is None:
            return None
        options += inner
    return options


def _typed(value: Any) -> str:
    return {None: "null", True: "true", False: "false"}[value] if _is_word(value) else str(value)


def _is_word(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _criterion(named: Study, study: Study) -> list[str] | None:
    if named.criterion == study.criterion:
        return []
    known = CRITERIA.get(study.criterion.name)
    return ["--criterion", study.criterion.name] if known == study.criterion else None


def _search(named: Study, study: Study) -> list[str] | None:
    if named.search == study.search:
        return []
    if named.search is None or study.search is None:
        return None
    if named.search.replace(cells=study.search.cells) != study.search or not study.search.cells:
        return None
    return ["--cells", str(study.search.cells)]
