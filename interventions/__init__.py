"""Changes to the model that are one file each, tried without touching the rest of the code.

A file `NAME.py` here has a function

    def apply(model: GPT, config: TrialConfig) -> None

that changes a model just built: wraps one of its methods, puts another module in a place, adds
parameters. Then the weights are drawn: each matrix by its name, so a new one shifts no other, and
vectors stay as they are. The setting `intervention = "NAME"` turns it on. The text of the file is
part of a cell's identity: a changed file makes other cells. docs/tutorial.md has an example.
"""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING

from tune_study.settings import ConfigError

if TYPE_CHECKING:
    from tune_study.config import TrialConfig
    from tune_study.model import GPT


def names() -> list[str]:
    """Names of all interventions, as the setting takes them."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def check(name: str) -> None:
    """Refuses a name that has no file.

    Raises:
        ConfigError: listing those there are.
    """
    if name not in names():
        raise ConfigError(
            f"intervention = {name!r}: not in interventions/. "
            f"Give one of: {', '.join(names())}, or null."
        )


def source(name: str) -> str:
    """The SHA-256 of the intervention's file."""
    return hashlib.sha256((Path(__path__[0]) / f"{name}.py").read_bytes()).hexdigest()


def apply(name: str, model: GPT, config: TrialConfig) -> None:
    """Changes a model that was just built, before its weights are drawn."""
    importlib.import_module(f"{__name__}.{name}").apply(model, config)
