"""A cell's identity: one hash over everything that determines its numbers."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from importlib.metadata import version
from typing import Any

import interventions
from tune_study.config import ConfigError, TrialConfig

TRAINER_VERSION = 1
"""Version of the trainer's arithmetic; raised whenever the same cell gives other numbers."""


def determinants(config: TrialConfig, data_checksum: str) -> dict[str, Any]:
    """What the numbers of a cell depend on, as plain values.

    A component at its neutral value is left out, so that cells trained before it existed keep
    their identity. The checksum of the tokens stands for the data settings, so that moving or
    renaming a text changes nothing. An intervention counts with the text of its file. Device,
    precision, threads and compile are in the config; they change the last bits.

    Raises:
        ConfigError: if device or threads are not settled: `auto` and 0 name none.
    """
    if config.device == "auto" or config.threads == 0:
        raise ConfigError(
            f"device = {config.device!r}, threads = {config.threads}: a cell's identity needs "
            "those of the machine."
        )
    settings = config.telling()
    del settings["data"]
    if config.intervention is not None:
        settings["intervention_source"] = interventions.source(config.intervention)
    return {
        **settings,
        "data_checksum": data_checksum,
        "trainer_version": TRAINER_VERSION,
        "torch": _torch_version(),
    }


@cache
def _torch_version() -> str:
    """Without its build tag; read from the package's metadata, which needs no import."""
    return version("torch").split("+")[0]


def identity(config: TrialConfig, data_checksum: str) -> str:
    """16 hex digits; equal if and only if the determinants are."""
    text = json.dumps(determinants(config, data_checksum), sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
