"""The GPT: nanoGPT's architecture, built of the components that a config names.

Neutral components give learned positions, pre-LayerNorm blocks, GELU, 4x MLP, tied embeddings,
no biases, no dropout; weights normal with standard deviation 0.02, residual projections
scaled by 1/sqrt(2 depth) (Radford et al. 2019, section 2.3). Standard parametrisation unless the
config asks for muP. docs/method.md lists the components.

Shapes as in `tune_study.layers`.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import interventions
from tune_study.attention import Attention
from tune_study.config import TrialConfig
from tune_study.layers import MLPS, NORMS, SigmaLinear, softcap
from tune_study.loss import head_loss

EMBEDDINGS = ("tokens.weight", "positions.weight", "head.weight")
"""The matrices with one side that does not grow with the width; the others are hidden."""


class Block(nn.Module):
    """Attention, then MLP, each read from a norm of the residual stream and added to it.

    NormFormer norms what attention adds once more (Shleifer et al. 2021, 2110.09456, eq. 5).
    """

    def __init__(self, config: TrialConfig) -> None:
        super().__init__()
        norm = NORMS[config.block_norm]
        self.attention_norm = norm(config.width)
        self.attention = Attention(config)
        after = config.normformer_has("post_norm")
        self.post_norm = norm(config.width) if after else nn.Identity()
        self.mlp_norm = norm(config.width)
        self.mlp = MLPS[config.mlp](config)

    def forward(self, x_BTC: Tensor, first_BHTD: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The residual stream after the block, and the attention's values."""
        added_BTC, v_BHTD = self.attention(self.attention_norm(x_BTC), first_BHTD)
        return self.add(x_BTC, added_BTC), v_BHTD

    def add(self, x_BTC: Tensor, added_BTC: Tensor) -> Tensor:
        """The residual stream with what attention adds, and then the MLP."""
        x_BTC = x_BTC + self.post_norm(added_BTC)
        return x_BTC + self.mlp(self.mlp_norm(x_BTC))


class GPT(nn.Module):
    """The language model. `seed` fixes every initial weight; see `initialise`.

    Under muP the logits are divided by width / base width (Yang et al. 2022, 2203.03466, table 8).
    """

    def __init__(self, config: TrialConfig, vocab_size: int, seed: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, config.width)
        self.positions = None
        if config.positions == "learned":
            self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.final_norm = NORMS[config.block_norm](config.width)
        self.head = None  # the token embedding serves as output head
        if not config.tied_head:
            self.head = nn.Linear(config.width, vocab_size, bias=False)
        self.value_residual = config.value_residual
        self.width_ratio = config.width_ratio
        self.softcap = config.final_softcap
        self.z_loss = config.z_loss
        if config.intervention is not None:
            interventions.apply(config.intervention, self, config)
        initialise(self, seed)
        self._stateful = [
            m
            for m in self.modules()
            if isinstance(m, SigmaLinear) or (isinstance(m, Attention) and m.clip is not None)
        ]

    def embed(self, ids_BT: Tensor) -> Tensor:
        """Token plus position embedding, B T C."""
        x_BTC = self.tokens(ids_BT)
        return x_BTC if self.positions is None else x_BTC + self.positions.weight[: x_BTC.shape[1]]

    def hidden(self, ids_BT: Tensor) -> Tensor:
        """The last block's output, B T C."""
        x_BTC, first_BHTD = self.embed(ids_BT), None
        for block in self.blocks:
            x_BTC, v_BHTD = block(x_BTC, first_BHTD)
            if self.value_residual and first_BHTD is None:
                first_BHTD = v_BHTD
        return x_BTC

    def unembed(self, x_BTC: Tensor) -> Tensor:
        """Next-token logits of the last block's output, B T V."""
        logits_BTV = F.linear(self.final_norm(x_BTC), self.unembedding)
        if self.width_ratio != 1:
            logits_BTV = logits_BTV / self.width_ratio
        return logits_BTV if self.softcap is None else softcap(logits_BTV.float(), self.softcap)

    @property
    def unembedding(self) -> Tensor:
        """The output head's matrix, V C."""
        return (self.tokens if self.head is None else self.head).weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Next-token logits, B T V."""
        return self.unembed(self.hidden(ids_BT))

    def loss(self, windows_BT: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token of windows of T + 1 ids."""
        if self.width_ratio == 1 and self.softcap is None:
            x_NC = self.final_norm(self.hidden(windows_BT[:, :-1])).flatten(0, 1)
            return head_loss(x_NC, self.unembedding, windows_BT[:, 1:].flatten())
        return self._loss_and_logits(windows_BT)[0]

    def objective(self, windows_BT: Tensor) -> tuple[Tensor, Tensor]:
        """What training descends, and the loss that it reports, both means over the tokens.

        They differ by the z-loss, z (log Z)^2 with Z = sum exp(logits) (Chowdhery et al. 2022,
        2204.02311, section 5: z = 1e-4): it keeps log Z near 0 and has no parameters.
        """
        if not self.z_loss:
            loss = self.loss(windows_BT)
            return loss, loss
        loss, logits_NV = self._loss_and_logits(windows_BT)
        return loss + self.z_loss * logits_NV.logsumexp(-1).square().mean(), loss

    def _loss_and_logits(self, windows_BT: Tensor) -> tuple[Tensor, Tensor]:
        logits_NV = self(windows_BT[:, :-1]).flatten(0, 1).float()
        return F.cross_entropy(logits_NV, windows_BT[:, 1:].flatten()), logits_NV

    def after_step(self, frozen: Tensor) -> None:
        """What components do to themselves once the optimiser has moved the weights.

        Args:
            frozen: whether the weights were left as they are, a 0-dimensional bool.
        """
        for module in self._stateful:
            module.after_step(frozen)

    def parameter_count(self) -> int:
        """Number of parameters; a tied head counts once."""
        return sum(p.numel() for p in self.parameters())


@torch.no_grad()
def initialise(model: GPT, seed: int) -> None:
    """Draws each weight matrix from a generator of its own, seeded by (seed, its name).

    So a component that has no matrix draws nothing, one that has draws nothing away from
    the others, and what two arms or two depths have in common starts bit-identical
    (residual projections up to their depth-dependent scale). Under muP the standard deviation of
    hidden matrices falls with the root of the width (Yang et al. 2022, table 8).
    """
    residual_scale = (2 * len(model.blocks)) ** -0.5
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue  # gains keep their initial value
        std = 0.02 * (residual_scale if name.endswith("out.weight") else 1.0)
        if name not in EMBEDDINGS:
            std *= model.width_ratio**-0.5
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        parameter.normal_(0.0, std, generator=generator)
    for module in model.modules():
        if isinstance(module, SigmaLinear):
            module.reset()
