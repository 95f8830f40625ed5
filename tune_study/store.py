"""A study's folder: where things lie, what it promised to be, and who is at work in it.

<runs>/<study>/study.json   the study as it was first started, and on what
<runs>/<study>/config.yaml  the study alone, to read and to run again
<runs>/<study>/tune/        Tune's experiments, one a start: sweep-001, sweep-002, ...
<runs>/<study>/report/      made from them
<runs>/<study>/calibration/ what rules of divergence do to a control study
<runs>/<study>/replays/     cells run again on CPU, one JSON file a cell
<runs>/<study>/tensorboard/ TensorBoard's event files, a folder a cell
<runs>/<study>/optuna.db    the study for Optuna's dashboard
<runs>/<study>/wandb/, mlflow.db  what `sweep --log` writes, unless it goes to a server
<runs>/<study>/weights/     final weights of the cells that the study keeps them of
<runs>/<study>/sharing.json how fast several of its cells were on one GPU
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tune_study import configs
from tune_study.config import ConfigError, Study
from tune_study.files import write_whole

CPUINFO = Path("/proc/cpuinfo")
"""Where Linux tells of the processor."""

NUMBERS = (("family", "cpu family"), ("model", "model"), ("stepping", "stepping"))
"""What tells models of processor apart, and what CPUINFO calls it."""

EXPERIMENT = re.compile(r"sweep-(\d+)")
"""What Tune's experiments in a study are called."""

HELD = ".held"
"""File in a copy of a study that lies in a store: the sweep that had it there, empty for none."""

LOCK_WAIT_S = 1.0
"""How long a start waits for the lock: `status` takes it for a moment to see whether it is free."""


class DamagedError(ConfigError):
    """A study.json that is there and cannot be read."""


class StudyFolder:
    """The paths of one study and the file that says what it is."""

    def __init__(self, runs: Path, name: str) -> None:
        self.path = Path(runs).expanduser().resolve() / name
        self.experiments = self.path / "tune"
        self.report = self.path / "report"
        self.calibration = self.path / "calibration"
        self.replays = self.path / "replays"
        self.weights = self.path / "weights"
        self.tensorboard = self.path / "tensorboard"
        self.optuna = self.path / "optuna.db"
        self.sharing = self.path / "sharing.json"
        self._file = self.path / "study.json"

    def exists(self) -> bool:
        """Whether the study was ever started here."""
        return self._file.is_file()

    def read(self) -> dict[str, Any]:
        """Content of study.json: `study`, `data` (the manifest), `versions`.

        Raises:
            ConfigError: if there is none, or it is damaged.
        """
        try:
            content: dict[str, Any] = json.loads(self._file.read_bytes())
        except FileNotFoundError:
            raise ConfigError(
                f"{self.path}: holds no study. Start it with: "
                f"python -m tune_study sweep {self.path.name}"
            ) from None
        except (OSError, ValueError):
            content = {}
        if not isinstance(content, dict) or not all(
            isinstance(content.get(part), dict) for part in ("study", "data", "versions")
        ):
            raise DamagedError(
                f"{self._file}: is damaged. Run the study again, it is written anew, "
                "or bring the file back."
            )
        return content

    def study(self) -> Study:
        """The study that was started here."""
        return Study(**self.read()["study"])

    def write(self, study: Study, manifest: dict[str, Any]) -> None:
        """Records the study; the file appears whole or not at all."""
        self.path.mkdir(parents=True, exist_ok=True)
        content = {
            "study": study.model_dump(mode="json"),
            "data": manifest,
            "versions": versions(),
        }
        write_whole(self._file, json.dumps(content, indent=1, allow_nan=False) + "\n")
        write_whole(self.path / "config.yaml", configs.text(study))

    def refuse_if_different(self, study: Study, checksum: str) -> list[str]:
        """Refuses a study that differs from the stored one in more than its axes and arms.

        Other axes, arms or another search ask for other cells, which is an extension; anything
        else would mix results. A damaged study.json refuses nothing: cells are known by their
        identity, so what is not theirs stays apart all the same.

        Returns:
            a line on a study.json that is damaged; `write` replaces it.

        Raises:
            ConfigError: naming every difference and the remedy.
        """
        if not self.exists():
            return []
        try:
            stored = self.read()
        except DamagedError:
            return [f"{self._file.name}; it is written anew"]
        # Through Study: a setting that did not exist then stands at what it now is by default.
        old, new = (_flat(s.model_dump(mode="json")) for s in (self.study(), study))
        free = {"description", "checkpoint_every_s", "keep_weights", "arms", "base.diagnostics"}
        if old["margins.target_loss"] is None:
            free.add("margins.target_loss")  # nothing was concluded from it yet
        differences = [
            f"{key} was {old.get(key)!r}, is {new.get(key)!r}"
            for key in sorted(old.keys() | new.keys())
            if old.get(key) != new.get(key)
            and key not in free
            and not key.startswith(("axes.", "base.data.", "search"))
            # What goes with a new value of an axis is a part of the extension.
            and not (key.startswith("tied.") and not (key in old and key in new))
            and key not in {f"base.{axis}" for axis, _ in study.axes}
        ]
        if stored["data"]["checksum"] != checksum:
            differences.append(f"data was {stored['data']['checksum'][:12]}, is {checksum[:12]}")
        if differences:
            raise ConfigError(
                f"{study.name}: differs from the study in {self.path}: {'; '.join(differences)}. "
                "Give it another name (--name), or change it back."
            )
        return []

    def next_experiment(self) -> str:
        """Name of the next experiment, after all that are there."""
        named = (EXPERIMENT.fullmatch(path.name) for path in self.experiments.glob("*"))
        taken = (int(name[1]) for name in named if name)
        return f"sweep-{max(taken, default=0) + 1:03d}"

    def kept_weights(self, label: str) -> Path:
        """Where the final weights of a cell lie, if the study keeps them."""
        return self.weights / f"{label}.pt"

    def lock(self) -> FileLock:
        """Takes the study for this process; the operating system frees it when that ends.

        Raises:
            ConfigError: if another process holds it; says which.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=LOCK_WAIT_S)
        except Timeout:
            raise ConfigError(
                f"{self.path.name}: a sweep of this study is running ({self._holder()}). "
                f"Wait for it, or watch it with: python -m tune_study status {self.path.name}"
            ) from None
        (self.path / ".holder").write_text(f"{this_process()}\n", encoding="utf-8")
        return lock

    def _holder(self) -> str:
        try:
            return (self.path / ".holder").read_text(encoding="utf-8").strip()
        except OSError:
            return "another process"

    def holder(self) -> str:
        """The sweep that is at work in the study now, in words; empty for none."""
        if (held := self.path / HELD).is_file():
            return held.read_text(encoding="utf-8")
        if not (self.path / ".lock").exists():
            return ""
        lock = FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return self._holder()
        except OSError:
            return ""  # a folder that cannot be written is no sweep's
        lock.release()
        return ""


def this_process() -> str:
    """Who holds a study from now on, in words."""
    since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    return f"process {os.getpid()} on {platform.node()}, since {since} UTC"


def versions() -> dict[str, str]:
    """Versions of what produces the numbers, the code's git commit, and the platform."""
    packages = ("torch", "ray", "numpy", "pandas", "altair")
    return {
        "commit": _commit(),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
        "platform": f"{sys.platform} {platform.machine()}",
        "processor": processor(),
    }


def processor() -> str:
    """The processor's model; `unknown` where the system does not tell.

    Models with the same instructions may still add in another order, which changes last bits.
    """
    try:
        if sys.platform == "darwin":
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
            return done.stdout.strip() or "unknown"
        told = re.findall(r"^(.+?)\s*: *(.+)$", CPUINFO.read_text(encoding="utf-8"), re.M)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    of_first = dict(reversed(told))  # that of the first core is the last to be put in
    if "model name" not in of_first:
        return "unknown"
    # A virtual machine's name may say no more than the maker's.
    numbers = [f"{key} {of_first[name]}" for key, name in NUMBERS if name in of_first]
    return f"{of_first['model name']} ({', '.join(numbers)})"


def _commit() -> str:
    """The commit the code stands at, `-dirty` if changed since; `unknown` without git."""
    root = Path(__file__).resolve().parent.parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys; `axes`, a list of pairs, counts as one, `tied` too."""
    if prefix == "axes":
        value = dict(value)
    if prefix == "tied":
        value = {f"{axis}={at}": settings for axis, at, settings in value}
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flat(item, f"{prefix}.{key}" if prefix else key)
    return flat
