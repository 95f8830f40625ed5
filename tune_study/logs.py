"""Which trackers a sweep may log to, and what must be there before it begins.

Knows no Ray and imports none of the trackers: `loggers.py` does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec

from tune_study.config import ConfigError

TRACKERS = ("wandb", "mlflow")

INSTALL = ".venv/bin/pip install -r requirements-integrations.txt"

DEFAULTS = {
    "WANDB_MODE": "offline",  # no network unless it is asked for
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    # Else a server that is gone is waited for as long as four minutes (measured), a request.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
"""Settings of the trackers, where the environment has none."""


def check(names: Sequence[str]) -> None:
    """Refuses what cannot be logged to, and sets the trackers' defaults.

    Raises:
        ConfigError: for an unknown tracker, or one whose package is not installed.
    """
    for name in names:
        if name == "tensorboard":
            raise ConfigError(
                "--log tensorboard: its files are made of the study, without a logger, at any "
                "time. Run: make tensorboard"
            )
        if name not in TRACKERS:
            raise ConfigError(f"--log {name}: unknown. Give one of: {', '.join(TRACKERS)}.")
        if find_spec(name) is None:
            raise ConfigError(f"--log {name}: the package is not installed. Run: {INSTALL}")
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
