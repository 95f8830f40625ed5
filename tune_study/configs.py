"""Studies and runs as YAML: a file to read, to change and to run again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar

import yaml

from tune_study.config import Study, TrialConfig
from tune_study.settings import ConfigError

Kind = TypeVar("Kind", Study, TrialConfig)

_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # in C, where it was built with it

_BOOL, _FLOAT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:float"
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?$")


class _Reader(yaml.SafeLoader):
    """YAML as people write it: `off` is a word, and 1e-3 a number (YAML 1.1 has it otherwise)."""


class _Writer(_Dumper):
    """YAML that both understand."""


_Reader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag not in (_BOOL, _FLOAT)]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Reader.add_implicit_resolver(_BOOL, re.compile("(?:true|false)$"), list("tf"))
for _kind in (_Reader, _Writer):
    _kind.add_implicit_resolver(_FLOAT, _NUMBER, list("-+.0123456789"))


def text(config: Study | TrialConfig) -> str:
    """A study or one run, which `read` gives back equal."""
    content = config.model_dump(mode="json")
    if isinstance(config, Study):
        content["axes"] = {name: list(config.axis(name)) for name, _ in config.axes}
        content["arms"] = config.arms and [dict(arm) for arm in content["arms"]]
        tied: dict[str, Any] = {}
        for axis, value, settings in content["tied"]:
            tied.setdefault(axis, {})[value] = dict(settings)
        content["tied"] = tied
        if config.search is not None:
            given = {axis: list(values) for axis, values in content["search"]["given"]}
            content["search"]["given"] = given
    written: str = yaml.dump(content, Dumper=_Writer, sort_keys=False, allow_unicode=True)
    return written


def read(path: Path, kind: type[Kind]) -> Kind:
    """The study, or the run, that a file holds.

    Raises:
        ConfigError: if it cannot be read, is no YAML, or holds something else.
    """
    try:
        content = yaml.load(path.read_bytes(), _Reader)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}. Give a file that can be read.") from None
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" in line {where.line + 1}" if where else ""
        raise ConfigError(
            f"{path}: is no YAML{line}. Write it as runs/STUDY/config.yaml."
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: holds no settings. Write it as runs/STUDY/config.yaml.")
    try:
        return kind(**content)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{path}: {error}") from None
