"""The benchmarks run, and what they compare is the same work. Nothing here looks at a time."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.paired import alternate, ratio

ROOT = Path(__file__).resolve().parents[1]


def test_ways_take_turns() -> None:
    order: list[str] = []

    def way(name: str) -> float:
        order.append(name)
        return float(len(order))

    figures = alternate({"a": lambda: way("a"), "b": lambda: way("b")}, 2)
    assert order == ["a", "b", "b", "a"]
    assert figures == {"a": [1.0, 4.0], "b": [2.0, 3.0]}


def test_the_ratio_is_taken_within_a_round() -> None:
    # 2/1, 6/3 and 20/5: the median is 2, though 6/3 of the medians would be 2 and means give 3.1.
    assert ratio([2.0, 6.0, 20.0], [1.0, 3.0, 5.0]) == 2.0
    assert ratio([1.0], [4.0]) == 0.25


def test_trainer_benchmark_writes_strict_json(tmp_path: Path) -> None:
    out = tmp_path / "trainer.json"
    command = [sys.executable, "-m", "benchmarks.trainer", "--quick", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text(), parse_constant=pytest.fail)
    for size in ("pilot", "real"):
        assert figures[f"{size}: plain, times the plain loop"] == 1.0
        assert figures[f"{size}: fp32, MFU"] > 0
    assert all(math.isfinite(value) for value in figures.values())
    assert statistics.median(figures.values()) > 0
