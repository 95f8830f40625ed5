"""What Apple's MPS cannot do, noticed on a CPU: every operator that runs is looked at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OPERATORS = Path(__file__).parent / "fixtures" / "mps_operators.txt"

SYNCHRONISES = "aten._local_scalar_dense.default"
"""What `.item()`, `.tolist()`, `float()`, `int()` and `bool()` of a tensor come down to."""


def known_operators() -> frozenset[str]:
    """The committed list."""
    lines = OPERATORS.read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


class DispatchGuard(TorchDispatchMode):
    """Collects a line for everything that would fail, wait or be wrong on MPS.

    Args:
        may_wait: whether the host may wait for the device, as a report does.

    Attributes:
        faults: operators outside the list, float64 tensors, waits, and writes into memory that
            is not contiguous (which MPS has got wrong in silence).
        largest: bytes of the largest tensor seen.
    """

    def __init__(self, may_wait: bool) -> None:
        super().__init__()
        self.known = known_operators()
        self.may_wait = may_wait
        self.faults: set[str] = set()
        self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        if name == SYNCHRONISES:
            if not self.may_wait:
                self.faults.add(f"{name}: waits for the device inside a step")
        elif func.namespace == "aten" and name not in self.known:
            self.faults.add(f"{name}: not in {OPERATORS.name}")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in _tensors(value):
                    if not tensor.is_contiguous():
                        self.faults.add(f"{name}: writes into strides {tensor.stride()}")
        out = func(*args, **kwargs)
        for tensor in _tensors((args, kwargs, out)):
            if tensor.dtype == torch.float64:
                self.faults.add(f"{name}: float64")
            self.largest = max(self.largest, tensor.nbytes)
        return out


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))
