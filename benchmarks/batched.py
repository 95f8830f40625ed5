"""Would cells of equal shape train faster together in one process than one after the other?

    python -m benchmarks.batched [--cells 4,16] [--compile] [--repeats 5] [--quick] [--json FILE]

Together: their weights are stacked, one call of vmap computes all gradients, and one AdamW over
the stacked tensors moves them, with a learning rate and a clipping norm for each cell. Attention is
written out there: PyTorch's fused one on CPU cannot be stacked. One after the other: the Trainer's
own step. Both on one thread, in processor time of this process, so that other work on the machine
disturbs less.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, stack_module_state, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import search_spaces
from benchmarks.paired import alternate, options_of, ratio, show
from benchmarks.trainer import RandomTokens
from tune_study.config import TrialConfig
from tune_study.model import GPT
from tune_study.trainer import Trainer

VOCAB = 512


class Together:
    """Several models of one shape and their AdamW, stepped at once."""

    def __init__(self, config: TrialConfig, cells: int, compiled: bool) -> None:
        models = [GPT(config, VOCAB, seed) for seed in range(cells)]
        stacked, _ = stack_module_state(models)
        self.weights = {name: weight.detach().clone() for name, weight in stacked.items()}
        self.first = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.second = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.config, self.lrs, self.step = config, torch.logspace(-3, -1, cells), 0
        with torch.device("meta"):
            shape = GPT(config, VOCAB, 0)

        def loss(weights: dict[str, Tensor], windows_BT: Tensor) -> Tensor:
            logits_BTV = functional_call(shape, weights, (windows_BT[:, :-1],))
            return F.cross_entropy(logits_BTV.flatten(0, 1), windows_BT[:, 1:].flatten())

        gradients: Callable = vmap(grad_and_value(loss), in_dims=(0, None))
        self.gradients = torch.compile(gradients, dynamic=False) if compiled else gradients

    def compute(self, windows_BT: Tensor) -> dict[str, Tensor]:
        """Every cell's gradients on the same batch, before clipping."""
        with sdpa_kernel(SDPBackend.MATH):
            return self.gradients(self.weights, windows_BT)[0]

    def advance(self, windows_BT: Tensor) -> None:
        """One step of all cells on the same batch."""
        config, self.step = self.config, self.step + 1
        gradients = self.compute(windows_BT)
        squares = [g.flatten(1).square().sum(1) for g in gradients.values()]
        norms = torch.stack(squares).sum(0).sqrt()
        clip = (config.grad_clip / (norms + 1e-6)).clamp(max=1)
        unbias_1, unbias_2 = 1 - config.beta1**self.step, 1 - config.beta2**self.step
        for name, gradient in gradients.items():
            each = (-1, *[1] * (gradient.ndim - 1))
            gradient = gradient * clip.view(each)
            first, second = self.first[name], self.second[name]
            first.lerp_(gradient, 1 - config.beta1)
            second.mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
            change = first / unbias_1 / (second / unbias_2).sqrt().add_(config.eps)
            self.weights[name].sub_(self.lrs.view(each) * change)


def main() -> None:
    """Prints all figures, and writes them as JSON if asked."""
    parser = options_of(__doc__, quick="one depth, two cells, one round")
    parser.add_argument("--cells", default="4,16", help="how many together, comma between")
    parser.add_argument("--compile", action="store_true", help="compile the gradients")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pilot = search_spaces.get("pilot")
    depths = [1] if options.quick else pilot.axis("depth")
    together = [2] if options.quick else [int(n) for n in options.cells.split(",")]
    repeats = 1 if options.quick else options.repeats
    figures: dict[str, float] = {}
    for depth in depths:
        for cells in together:
            config = pilot.base.replace(depth=depth)
            found = measure(config, cells, options.compile, repeats, 2 if options.quick else 20)
            figures |= {f"depth {depth}, {cells} cells: {k}": v for k, v in found.items()}
    show(figures, options.json)


def measure(
    config: TrialConfig, cells: int, compiled: bool, repeats: int, steps: int
) -> dict[str, float]:
    """Milliseconds of processor time a step of a cell, both ways."""
    trainer, stack = Trainer(config, RandomTokens(VOCAB)), Together(config, cells, compiled)
    windows_BT = torch.from_numpy(trainer.batches.range(0, 1))[0]

    def alone() -> float:
        started = time.process_time()
        trainer._advance(steps)
        return 1e3 * (time.process_time() - started) / steps

    def stacked() -> float:
        started = time.process_time()
        for _ in range(steps):
            stack.advance(windows_BT)
        return 1e3 * (time.process_time() - started) / steps / cells

    ways = {"one after the other, ms": alone, "together, ms": stacked}
    alternate(ways, 1)  # the first time pays for memory and compilation
    found = alternate(ways, repeats)
    medians = {name: sorted(values)[len(values) // 2] for name, values in found.items()}
    one, all_ = found.values()
    return {**medians, "speed together, times one after the other": ratio(one, all_)}


if __name__ == "__main__":
    main()
