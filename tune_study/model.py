"""The GPT: nanoGPT's architecture with one thing to toggle, the norm on queries and keys.

Learned positions, pre-LayerNorm blocks, GELU, 4x MLP, tied embeddings, no biases, no
dropout; weights normal with standard deviation 0.02, residual projections scaled by
1/sqrt(2 depth) (Radford et al. 2019, section 2.3). Standard parametrisation: muP is off.

Shapes are written as suffixes: B windows, T positions, C width, H heads, D = C/H head
width, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tune_study.config import TrialConfig

NORM_EPS = 1e-5
"""Added to the variance or mean square in every norm; nanoGPT's value."""


class LayerNorm(nn.Module):
    """LayerNorm with a gain, initially 1, and no bias."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.gain.shape, self.gain, None, NORM_EPS)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) times a gain, initially 1 (Zhang and Sennrich 2019, eq. 4)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.gain.shape, self.gain, NORM_EPS)


QK_NORMS: dict[str, Callable[[int], nn.Module]] = {
    "off": lambda head_width: nn.Identity(),
    "rmsnorm": RMSNorm,
}
"""What `qk_norm` may be: a module over the head width D, one for q and one for k, shared by
the heads of a block (Wortsman et al. 2023, section 3.1.1, after Dehghani et al. 2023)."""


class Attention(nn.Module):
    """Causal multi-head self-attention; queries and keys pass through `qk_norm` first.

    The scale 1/sqrt(D) stays whatever the norm, so that the norm is the only difference
    between the arms.
    """

    def __init__(self, config: TrialConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.q_norm = QK_NORMS[config.qk_norm](config.width // config.heads)
        self.k_norm = QK_NORMS[config.qk_norm](config.width // config.heads)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def project(self, x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys (after their norm) and values, each B H T D."""
        B, T, C = x_BTC.shape
        qkv_BT3HD = self.qkv(x_BTC).view(B, T, 3, self.heads, C // self.heads)
        q_BHTD, k_BHTD, v_BHTD = qkv_BT3HD.permute(2, 0, 3, 1, 4).unbind(0)
        return self.q_norm(q_BHTD), self.k_norm(k_BHTD), v_BHTD

    def forward(self, x_BTC: Tensor) -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = self.project(x_BTC)
        y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        return self.out(y_BHTD.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """C -> 4C -> C with GELU between."""

    def __init__(self, config: TrialConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.out = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.out(F.gelu(self.up(x_BTC)))


class Block(nn.Module):
    """Attention, then MLP, each read from a norm of the residual stream and added to it."""

    def __init__(self, config: TrialConfig) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC))
        return x_BTC + self.mlp(self.mlp_norm(x_BTC))


class GPT(nn.Module):
    """The language model. `seed` fixes every initial weight; see `initialise`."""

    def __init__(self, config: TrialConfig, vocab_size: int, seed: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, config.width)  # also the output head
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.final_norm = LayerNorm(config.width)
        initialise(self, seed)

    def embed(self, ids_BT: Tensor) -> Tensor:
        """Token plus position embedding, B T C."""
        return self.tokens(ids_BT) + self.positions.weight[: ids_BT.shape[1]]

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Next-token logits, B T V."""
        x_BTC = self.embed(ids_BT)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return F.linear(self.final_norm(x_BTC), self.tokens.weight)

    def loss(self, windows_BT: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token of windows of T + 1 ids."""
        logits_BTV = self(windows_BT[:, :-1])
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), windows_BT[:, 1:].flatten())

    def parameter_count(self) -> int:
        """Number of parameters; the tied head counts once."""
        return sum(p.numel() for p in self.parameters())


@torch.no_grad()
def initialise(model: GPT, seed: int) -> None:
    """Draws each weight matrix from a generator of its own, seeded by (seed, its name).

    So a component that has no matrix draws nothing, one that has draws nothing away from
    the others, and what two arms or two depths have in common starts bit-identical
    (residual projections up to their depth-dependent scale).
    """
    residual_scale = (2 * len(model.blocks)) ** -0.5
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue  # gains keep their initial 1
        std = 0.02 * (residual_scale if name.endswith("out.weight") else 1.0)
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        parameter.normal_(0.0, std, generator=generator)
