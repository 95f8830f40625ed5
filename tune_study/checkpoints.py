"""A cell's checkpoint on disk: a file of tensors, and a stamp that says whether it is whole.

Tune copies a checkpoint into the study's folder, and anything may happen meanwhile. So it counts
only with its stamp, and only if the file is byte for byte the one that was stamped. The stamp
also says after which reports it was taken: going on from a checkpoint under other reports would
join two runs, which on an accelerator differ.

Stamps are read without torch.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tune_study.divergence import Row

FILE = "trainer.pt"
"""What torch wrote: the trainer's state."""

STAMP = "stamp.json"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used. Its text says why."""


@dataclass(frozen=True)
class Stamp:
    """What a checkpoint is.

    Attributes:
        step: of the trainer.
        digest: of all reports up to that step.
        sha256: of the file.
    """

    step: int
    digest: str
    sha256: str


def digest(before: str, row: Row) -> str:
    """The digest of a run's reports: of those before, and of this one's values, clocks aside."""
    values = {name: value for name, value in row.items() if not name.startswith("time/")}
    text = before + json.dumps(values, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def save(state: Mapping[str, Any], digest: str, folder: Path) -> None:
    """Writes a trainer's state and its stamp into an existing folder."""
    import torch

    # Through memory: on a full disk torch's own writer gives no reason.
    content = io.BytesIO()
    torch.save(dict(state), content)
    (folder / FILE).write_bytes(content.getbuffer())
    made = Stamp(state["step"], digest, hashlib.sha256(content.getbuffer()).hexdigest())
    (folder / STAMP).write_text(json.dumps(asdict(made)) + "\n", encoding="utf-8")


def stamp(folder: Path) -> Stamp:
    """The stamp of a checkpoint.

    Raises:
        CheckpointError: if there is none, or it is damaged.
    """
    try:
        content = json.loads((folder / STAMP).read_bytes())
        return Stamp(int(content["step"]), str(content["digest"]), str(content["sha256"]))
    except OSError:
        raise CheckpointError("is incomplete") from None
    except (ValueError, KeyError, TypeError):
        raise CheckpointError("has a damaged stamp") from None


def load(folder: Path) -> dict[str, Any]:
    """The trainer's state, tensors on the CPU.

    Raises:
        CheckpointError: if the checkpoint is not whole.
    """
    import torch

    made = stamp(folder)
    try:
        with (folder / FILE).open("rb") as file:
            intact = hashlib.file_digest(file, "sha256").hexdigest() == made.sha256
    except OSError:
        raise CheckpointError("is incomplete") from None
    if not intact:
        raise CheckpointError(f"{FILE} is not what was saved")
    state: dict[str, Any] = torch.load(folder / FILE, weights_only=True, map_location="cpu")
    return state


def surplus(newest_first: Sequence[Path], diverged: bool, device: str) -> Sequence[Path]:
    """The checkpoints that a cell which has ended no longer needs: its rows are its result.

    Of a cell that diverged on an accelerator the newest one stays, so that `replay` can tell a
    fault of the backend from a learning rate that is too high.
    """
    return newest_first[1 if diverged and device != "cpu" else 0 :]
