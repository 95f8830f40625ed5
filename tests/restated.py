"""The model written out once more, with sums, products and loops in float64.

It shares nothing with tune_study but the names of the weights.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

EPS = 1e-5


def layer_norm(x: Tensor, gain: Tensor | float = 1.0) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return gain * centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + EPS)


def rms_norm(x: Tensor, gain: Tensor | float = 1.0) -> Tensor:
    return gain * x / torch.sqrt((x**2).mean(-1, keepdim=True) + EPS)


NORM = {"layernorm": layer_norm, "rmsnorm": rms_norm}


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def cap(x: Tensor, at: float | None) -> Tensor:
    return x if at is None else at * torch.tanh(x / at)


def turned(x_TD: Tensor) -> Tensor:
    """Each pair of coordinates as a complex number, turned by its position."""
    T, D = x_TD.shape
    out = torch.empty_like(x_TD)
    for t in range(T):
        for i in range(D // 2):
            angle = t * 10_000.0 ** (-2 * i / D)
            z = complex(x_TD[t, i], x_TD[t, i + D // 2]) * complex(math.cos(angle), math.sin(angle))
            out[t, i], out[t, i + D // 2] = z.real, z.imag
    return out


class Restated:
    """One model, from its config and its weights."""

    def __init__(self, model: torch.nn.Module, config: Any) -> None:
        self.c = config
        self.w = {name: t.detach().double() for name, t in model.state_dict().items()}

    def weight(self, name: str) -> Tensor:
        """A matrix; with sigmaReparam, gamma W / sigma(W) with the largest singular value."""
        w = self.w[f"{name}.weight"]
        if f"{name}.gamma" in self.w:
            return self.w[f"{name}.gamma"] * w / torch.linalg.svdvals(w)[0]
        return w

    def norm(self, name: str, x: Tensor) -> Tensor:
        return NORM[self.c.block_norm](x, self.w[f"{name}.gain"])

    def qk(self, name: str, x_TC: Tensor, heads: int) -> list[Tensor]:
        """Queries or keys of each head, normed and turned."""
        c = self.c
        D = c.width // c.heads
        gain = self.w.get(f"{name}.gain", self.w.get(f"{name}.norm.gain", 1.0))
        if c.qk_over == "width" and c.qk_norm != "off":
            x_TC = NORM[c.qk_norm](x_TC, gain)
        out = []
        for h in range(heads):
            x = x_TC[:, h * D : (h + 1) * D]
            if c.qk_norm == "l2":
                x = gain * x / torch.sqrt((x**2).sum(-1, keepdim=True))
            elif c.qk_norm != "off" and c.qk_over == "head":
                x = NORM[c.qk_norm](x, gain)
            out.append(turned(x) if c.positions == "rotary" else x)
        return out

    def attention(
        self, b: str, x: Tensor, first: list[Tensor] | None
    ) -> tuple[Tensor, list[Tensor]]:
        c = self.c
        D, C, kv_heads = c.width // c.heads, c.width, c.kv_heads or c.heads
        projected = x @ self.weight(f"{b}.qkv").T
        q = self.qk(f"{b}.q_norm", projected[:, :C], c.heads)
        k = self.qk(f"{b}.k_norm", projected[:, C : C + kv_heads * D], kv_heads)
        v = projected[:, C + kv_heads * D :]
        values = [v[:, h * D : (h + 1) * D] for h in range(kv_heads)]
        if first is not None:
            values = [(own + old) / 2 for own, old in zip(values, first, strict=True)]
        scale = 1 / math.sqrt(D)
        if c.parametrisation == "mup":
            scale = math.sqrt(c.mup_base_head_width) / D
        if c.qk_norm == "l2" and c.qk_gain != "absent":
            scale = 1.0
        joined = torch.zeros(len(x), C, dtype=torch.float64)
        for h in range(c.heads):
            of = h * kv_heads // c.heads
            for t in range(len(x)):
                p = torch.exp(cap(scale * (k[of][: t + 1] @ q[h][t]), c.attn_softcap))
                joined[t, h * D : (h + 1) * D] = p / p.sum() @ values[of][: t + 1]
            if c.normformer in ("all", "head_scale"):
                joined[:, h * D : (h + 1) * D] *= self.w[f"{b}.head_scale"][h]
        return joined @ self.weight(f"{b}.out").T, values

    def mlp(self, b: str, x: Tensor) -> Tensor:
        inner = x @ self.weight(f"{b}.up").T
        if self.c.mlp == "swiglu":
            inner = silu(x @ self.weight(f"{b}.gate").T) * inner
        else:
            inner = gelu(inner)
        if self.c.normformer in ("all", "mlp_norm"):
            inner = self.norm(f"{b}.inner_norm", inner)
        return inner @ self.weight(f"{b}.out").T

    def logits(self, ids: Tensor) -> Tensor:
        """Next-token logits, windows x positions x vocabulary."""
        c, out = self.c, []
        for sequence in ids:
            x = self.w["tokens.weight"][sequence]
            if c.positions == "learned":
                x = x + self.w["positions.weight"][: len(sequence)]
            first = None
            for i in range(c.depth):
                b = f"blocks.{i}"
                read = self.norm(f"{b}.attention_norm", x)
                added, values = self.attention(f"{b}.attention", read, first)
                if c.value_residual and i == 0:
                    first = values
                if c.normformer in ("all", "post_norm"):
                    added = self.norm(f"{b}.post_norm", added)
                x = x + added
                x = x + self.mlp(f"{b}.mlp", self.norm(f"{b}.mlp_norm", x))
            head = self.w["tokens.weight" if c.tied_head else "head.weight"]
            logits = self.norm("final_norm", x) @ head.T
            if c.parametrisation == "mup":
                logits = logits / (c.width / c.mup_base_width)
            out.append(cap(logits, c.final_softcap))
        return torch.stack(out)
