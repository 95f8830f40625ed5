"""The trainer's speed, against a plain loop over the same model and against the GEMM peak.

    python -m benchmarks.trainer [--repeats 5] [--quick] [--json FILE]

The plain loop (benchmarks/plain_loop.py) is what one writes without thinking of speed. It runs in
float32, eager and compiled, each in a process of its own with PyTorch's settings. Ways take turns,
a few steps each; figures are medians over the rounds. MFU is model FLOPs over the largest rate
that a matrix product of this machine reached.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.paired import alternate, elsewhere, options_of, ratio, show
from benchmarks.plain_loop import PlainLoop
from tune_study.config import Criterion, TrialConfig
from tune_study.divergence import diverged
from tune_study.size import flops_per_token
from tune_study.trainer import Trainer, strict

CORES = os.cpu_count() or 1
PILOT = TrialConfig(lr=1e-2, depth=2, device="cpu", threads=1, steps=100_000)
REAL = TrialConfig(
    lr=1e-3,
    depth=8,
    width=320,
    heads=5,
    context=256,
    batch_size=32,
    report_every=50,
    device="cpu",
    threads=CORES,
    steps=100_000,
)
QUICK = REAL.replace(depth=1, width=32, heads=2, context=64, batch_size=2, report_every=2)


class RandomTokens:
    """Uniform ids: speed does not depend on what they say."""

    def __init__(self, vocab_size: int) -> None:
        numbers = np.random.default_rng(0)
        self.vocab_size = vocab_size
        self.train = numbers.integers(0, vocab_size, 1_000_000).astype(np.uint16)
        self.validation = numbers.integers(0, vocab_size, 100_000).astype(np.uint16)


def main() -> None:
    """Prints all figures, and writes them as JSON if asked."""
    parser = options_of(__doc__, quick="small models, one round")
    options = parser.parse_args()
    repeats = 1 if options.quick else options.repeats
    figures: dict[str, float] = {}
    for name, config, vocab, steps in (
        ("pilot", PILOT, 512, 2 if options.quick else 100),
        ("real", QUICK if options.quick else REAL, 8192, 1 if options.quick else 2),
    ):
        print(f"{name}: {config.threads} threads, {config.tokens_per_step} tokens a step")
        figures |= {f"{name}: {key}": v for key, v in size(config, vocab, steps, repeats).items()}
    show(figures, options.json)


def size(config: TrialConfig, vocab: int, steps: int, repeats: int) -> dict[str, float]:
    """All figures at one size."""
    tokens = RandomTokens(vocab)
    torch.set_num_threads(config.threads)
    modes = {
        "fp32": config,
        "fp32 + compile": config.replace(compile=True),
        "bf16": config.replace(precision="bf16"),
        "bf16 + compile": config.replace(precision="bf16", compile=True),
    }
    with_norm = config.replace(qk_norm="rmsnorm")
    compiling: dict[str, float] = {}
    ways: dict[str, Callable[[], float]] = {}
    for name, mode in {**modes, "fp32, QK-norm": with_norm}.items():
        trainer = Trainer(mode, tokens)
        started = time.perf_counter()
        trainer._advance(1)
        compiling[name] = time.perf_counter() - started
        ways[name] = lambda trainer=trainer: _rate(trainer, steps)
    with (
        elsewhere(plain, config, tokens, steps, False) as ways["plain"],
        elsewhere(plain, config, tokens, steps, True) as ways["plain, compiled"],
    ):
        for way in ways.values():
            way()  # the first time pays for memory and compilation
        rates = alternate(ways, repeats)
    peak = {"fp32": gemm_peak(torch.float32), "bf16": gemm_peak(torch.bfloat16)}
    matrices = 12 * config.depth * config.width**2 + vocab * config.width
    flops = flops_per_token(matrices, config.depth, config.width, config.context)
    figures: dict[str, float] = {}
    for name in ways:
        precision = "bf16" if name.startswith("bf16") else "fp32"
        rate = statistics.median(rates[name])
        figures[f"{name}, tokens/s"] = rate
        figures[f"{name}, times the plain loop"] = ratio(rates[name], rates["plain"])
        figures[f"{name}, MFU"] = rate * flops / peak[precision]
    for name in modes:
        if name.endswith("compile"):
            figures[f"{name}, first step, s"] = compiling[name]
    figures |= {f"GEMM peak {name}, GFLOP/s": value / 1e9 for name, value in peak.items()}
    figures["QK-norm, times the step without"] = ratio(rates["fp32"], rates["fp32, QK-norm"])
    return figures | watching(config, tokens, steps, repeats)


def _rate(trainer: Trainer, steps: int) -> float:
    started = time.perf_counter()
    trainer._advance(steps)
    return steps * trainer.config.tokens_per_step / (time.perf_counter() - started)


def plain(
    config: TrialConfig, tokens: RandomTokens, steps: int, compiled: bool
) -> Callable[[], float]:
    """The plain loop; each call runs `steps` steps."""
    torch.set_num_threads(config.threads)
    loop = PlainLoop(config, tokens, compiled)

    def run() -> float:
        started = time.perf_counter()
        for _ in range(steps):
            loop.step()
        return steps * config.tokens_per_step / (time.perf_counter() - started)

    return run


def watching(
    config: TrialConfig, tokens: RandomTokens, steps: int, repeats: int
) -> dict[str, float]:
    """What diagnostics, divergence checks and validation take of the training time."""
    trainer = Trainer(config, tokens)
    shares: dict[str, list[float]] = {"diagnostics and divergence": [], "validation": []}
    row = trainer.train(1)
    row["data/unigram_entropy"] = 1.0
    # Half of the reports of a run of 400 steps: what the verdict looks through on average.
    rows = [{**row, "step": (i + 1) * config.report_every} for i in range(10)]
    for _ in range(repeats):
        started = time.perf_counter()
        trainer._advance(steps)
        training = (time.perf_counter() - started) * config.report_every / steps
        started = time.perf_counter()  # in the order of Trainer.train
        trainer._probe()
        strict(row)
        diverged(rows, Criterion(), config.warmup_steps)
        shares["diagnostics and divergence"].append((time.perf_counter() - started) / training)
        started = time.perf_counter()
        trainer.evaluate()
        shares["validation"].append((time.perf_counter() - started) / training)
    return {f"{k}, % of training": 100 * statistics.median(v) for k, v in shares.items()}


def gemm_peak(dtype: torch.dtype, size: int = 2048, tries: int = 8) -> float:
    """The largest rate of a square matrix product here, in FLOP/s."""
    a, b = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
    best = 0.0
    for _ in range(tries):
        started = time.perf_counter()
        a @ b
        best = max(best, 2 * size**3 / (time.perf_counter() - started))
    return best


if __name__ == "__main__":
    main()
