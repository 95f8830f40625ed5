"""Damage to a study's files while nothing runs. Each returns what it did, or nothing to damage."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

Damage = Callable[[Path, random.Random], str]
"""Takes the study's folder; returns '' where there was nothing to damage."""


def _one(study: Path, pattern: str, rng: random.Random) -> Path | None:
    found = sorted(study.glob(f"tune/sweep-[0-9][0-9][0-9]/{pattern}"))
    return rng.choice(found) if found else None


def _two(study: Path, pattern: str, rng: random.Random) -> tuple[Path, Path] | None:
    """Two that differ."""
    one, other = (_one(study, pattern, rng) for _ in range(2))
    return None if one is None or other is None or one == other else (one, other)


def _cut(path: Path | None, rng: random.Random) -> str:
    if path is None:
        return ""
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content) + 1)])
    return f"{path.name} cut off"


def _deleted(path: Path | None) -> str:
    if path is None:
        return ""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    return f"{path.name} deleted"


def rows_cut(study: Path, rng: random.Random) -> str:
    return _cut(_one(study, "*/result.json", rng), rng)


def rows_deleted(study: Path, rng: random.Random) -> str:
    return _deleted(_one(study, "*/result.json", rng))


def rows_overwritten(study: Path, rng: random.Random) -> str:
    """A block of zeros, as a file system leaves it after a power failure."""
    path = _one(study, "*/result.json", rng)
    if path is None:
        return ""
    content = bytearray(path.read_bytes())
    at = rng.randrange(len(content) + 1)
    content[at : at + 512] = bytes(len(content[at : at + 512]))
    path.write_bytes(content)
    return "zeros in result.json"


def row_doubled(study: Path, rng: random.Random) -> str:
    path = _one(study, "*/result.json", rng)
    lines = path.read_bytes().splitlines(keepends=True) if path else []
    if path is None or not lines:
        return ""
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
    path.write_bytes(b"".join(lines))
    return "a line of result.json doubled"


def row_of_another_cell(study: Path, rng: random.Random) -> str:
    if (two := _two(study, "*/result.json", rng)) is None:
        return ""
    shutil.copy(*two)
    return "result.json of another cell"


def params_cut(study: Path, rng: random.Random) -> str:
    return _cut(_one(study, "*/params.json", rng), rng)


def params_deleted(study: Path, rng: random.Random) -> str:
    return _deleted(_one(study, "*/params.json", rng))


def checkpoint_cut(study: Path, rng: random.Random) -> str:
    return _cut(_one(study, "*/checkpoint_*/trainer.pt", rng), rng)


def checkpoint_altered(study: Path, rng: random.Random) -> str:
    path = _one(study, "*/checkpoint_*/trainer.pt", rng)
    if path is None:
        return ""
    content = bytearray(path.read_bytes())
    if not content:
        return ""
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return "one bit of trainer.pt altered"


def checkpoint_file_deleted(study: Path, rng: random.Random) -> str:
    return _deleted(_one(study, "*/checkpoint_*/trainer.pt", rng))


def stamp_cut(study: Path, rng: random.Random) -> str:
    return _cut(_one(study, "*/checkpoint_*/stamp.json", rng), rng)


def checkpoint_deleted(study: Path, rng: random.Random) -> str:
    return _deleted(_one(study, "*/checkpoint_*", rng))


def checkpoint_of_another_cell(study: Path, rng: random.Random) -> str:
    if (two := _two(study, "*/checkpoint_*", rng)) is None:
        return ""
    source, target = two
    shutil.rmtree(target)
    shutil.copytree(source, target)
    return "checkpoint of another cell"


def trial_deleted(study: Path, rng: random.Random) -> str:
    return _deleted(_one(study, "d*", rng))


def trial_copied(study: Path, rng: random.Random) -> str:
    path = _one(study, "d*", rng)
    if path is None:
        return ""
    shutil.copytree(path, path.with_name(f"{path.name} copy"), dirs_exist_ok=True)
    return "trial folder copied"


def experiment_copied(study: Path, rng: random.Random) -> str:
    """Under a name that would make it the newest."""
    found = sorted(study.glob("tune/sweep-[0-9][0-9][0-9]"))
    if not found:
        return ""
    number = int(found[-1].name[-3:]) + 1
    shutil.copytree(rng.choice(found), found[-1].with_name(f"sweep-{number:03d}"))
    return "experiment copied"


def experiment_deleted(study: Path, rng: random.Random) -> str:
    found = sorted(study.glob("tune/sweep-[0-9][0-9][0-9]"))
    return _deleted(rng.choice(found)) if found else ""


def foreign_folders(study: Path, rng: random.Random) -> str:
    for name in ("sweep-1 copy", "notes", "sweep-x"):
        (study / "tune" / name / "thing").mkdir(parents=True, exist_ok=True)
    (study / "tune" / ".DS_Store").write_bytes(b"\0\0")
    return "foreign folders"


def study_file_cut(study: Path, rng: random.Random) -> str:
    path = study / "study.json"
    return _cut(path if path.exists() else None, rng)


def study_file_deleted(study: Path, rng: random.Random) -> str:
    path = study / "study.json"
    return _deleted(path if path.exists() else None)


def stale_holder(study: Path, rng: random.Random) -> str:
    (study / ".lock").touch()
    (study / ".holder").write_text("process 1 on another-machine\n")
    return "stale lock"


def error_damaged(study: Path, rng: random.Random) -> str:
    path = _one(study, "d*", rng)
    if path is None:
        return ""
    (path / "error.txt").write_bytes(rng.choice([b"", b"\xff\xfe", b"Traceback\n\n"]))
    return "error.txt without a reason"


ALL: dict[str, Damage] = {
    function.__name__.replace("_", " "): function
    for function in (
        rows_cut,
        rows_deleted,
        rows_overwritten,
        row_doubled,
        row_of_another_cell,
        params_cut,
        params_deleted,
        checkpoint_cut,
        checkpoint_altered,
        checkpoint_file_deleted,
        stamp_cut,
        checkpoint_deleted,
        checkpoint_of_another_cell,
        trial_deleted,
        trial_copied,
        experiment_copied,
        experiment_deleted,
        foreign_folders,
        study_file_cut,
        study_file_deleted,
        stale_holder,
        error_damaged,
    )
}
