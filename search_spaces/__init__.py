"""The studies that can be named: one module each, holding a `STUDY`.

A new study is a new file here: its axes and its base config, nothing else.
"""

from __future__ import annotations

import importlib
import pkgutil

from tune_study.config import ConfigError, Study


def names() -> list[str]:
    """Names of all studies, as the command line takes them."""
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__))


def get(name: str) -> Study:
    """The study of that name.

    Raises:
        ConfigError: if there is none; lists those there are.
    """
    if name not in names():
        raise ConfigError(
            f"study = {name!r}: not in search_spaces/. Give one of: {', '.join(names())}."
        )
    study: Study = importlib.import_module(f"search_spaces.{name.replace('-', '_')}").STUDY
    return study
