"""The benchmarks run, and what they compare is the same work. Nothing here looks at a time."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import batched
from benchmarks.paired import alternate, ratio
from benchmarks.plain_loop import PlainLoop
from benchmarks.trainer import RandomTokens
from tune_study.config import TrialConfig
from tune_study.model import GPT

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


def test_cells_trained_together_have_the_gradients_of_each_alone() -> None:
    config = TrialConfig(depth=2, qk_norm="rmsnorm")
    stack = batched.Together(config, cells=2, compiled=False)
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(batched.VOCAB, (3, 33), generator=generator)
    gradients = stack.compute(windows)
    for seed in (0, 1):
        model = GPT(config, batched.VOCAB, seed)
        model.loss(windows).backward()
        for name, weight in model.named_parameters():
            torch.testing.assert_close(gradients[name][seed], weight.grad, atol=1e-6, rtol=1e-4)
    found = batched.measure(config, cells=2, compiled=False, repeats=1, steps=1)
    assert found["speed together, times one after the other"] > 0


def figures_of(benchmark: str, out: Path, *words: str) -> dict[str, float]:
    """What a benchmark writes, run as a person does; strict JSON of finite numbers."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", *words, "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures: dict[str, float] = json.loads(out.read_text(), parse_constant=pytest.fail)
    assert all(math.isfinite(value) for value in figures.values())
    return figures


def test_the_plain_loop_learns_and_is_the_same_model() -> None:
    config = TrialConfig(lr=1e-2, steps=40, warmup_steps=4, report_every=20, device="cpu")
    first, last = PlainLoop(config, RandomTokens(3)).reports()
    assert [first["step"], last["step"]] == [20, 40]
    assert last["val/loss"] == pytest.approx(math.log(3), abs=0.1)  # ids are uniform
    model = GPT(config, 3, seed=config.seed)
    start = PlainLoop(config, RandomTokens(3))
    assert all(map(torch.equal, model.parameters(), start.model.parameters()))


def test_reading_is_timed_on_the_cells_it_says(tmp_path: Path) -> None:
    figures = figures_of("load", tmp_path / "load.json", "--quick")
    assert figures["cells"] >= 190
    assert figures["rows"] == 20 * figures["cells"]


def test_trainer_benchmark_writes_strict_json(tmp_path: Path) -> None:
    figures = figures_of("trainer", tmp_path / "trainer.json", "--quick")
    for size in ("pilot", "real"):
        assert figures[f"{size}: plain, times the plain loop"] == 1.0
        assert figures[f"{size}: fp32, MFU"] > 0
    assert statistics.median(figures.values()) > 0
