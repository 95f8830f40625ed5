"""The study that a command line asks for: one by name, narrowed and changed by options."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import search_spaces
from tune_study.config import AXES, ConfigError, Study, criterion_named


def changed(
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
