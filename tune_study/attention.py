"""Causal self-attention and everything that can be put at its logits.

Shapes as in `tune_study.layers`; K is the number of key and value heads, H unless they are
shared.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tune_study.components import Gain
from tune_study.config import TrialConfig
from tune_study.layers import LayerNorm, RMSNorm, add_gain, linear, softcap

ROTARY_BASE = 10_000
"""Of the wavelengths (Su et al. 2021, 2104.09864, section 3.2.2)."""


class UnitVectors(nn.Module):
    """x / |x| times a scalar gain, if there is one."""

    gain: Tensor | None

    def __init__(self, initial: float | None, gain: Gain) -> None:
        super().__init__()
        add_gain(self, torch.tensor(initial or 1.0), "absent" if initial is None else gain)

    def forward(self, x: Tensor) -> Tensor:
        # Its gradient is made in place, in the input's strides.
        unit = F.normalize(x.contiguous(), dim=-1)
        return unit if self.gain is None else unit * self.gain


class OverWidth(nn.Module):
    """A norm taken over all heads of a token together (OLMo 2, 2501.00656, section 3.3.2)."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x_BHTD: Tensor) -> Tensor:
        x_BTC = x_BHTD.transpose(1, 2).flatten(2)
        return self.norm(x_BTC).view(x_BHTD.transpose(1, 2).shape).transpose(1, 2)


def qk_norms(config: TrialConfig) -> tuple[nn.Module, nn.Module]:
    """What queries and keys pass through, as `qk_norm`, `qk_gain` and `qk_over` say.

    `rmsnorm` and `layernorm`: the norm of each head, one gain for queries and one for keys,
    shared by the heads of a block (Dehghani et al. 2023, 2302.05442, section 2; Wortsman et
    al. 2023, 2309.14322, section 3.1.1); or over the width, with a gain as wide. `l2`: unit
    vectors, whose product is scaled by one learned g a block, initially log2(L^2 - L) for L
    positions (Henry et al. 2020, 2010.04245, eq. 4 and section 3): held by the queries' side.
    """
    if config.qk_norm == "off":
        return nn.Identity(), nn.Identity()
    if config.qk_norm == "l2":
        g = math.log2(config.context**2 - config.context)
        return UnitVectors(g, config.qk_gain), UnitVectors(None, config.qk_gain)
    norm = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}[config.qk_norm]
    if config.qk_over == "width":
        sizes = (config.width, config.key_heads * config.head_width)
        q_norm, k_norm = (OverWidth(norm(size, config.qk_gain)) for size in sizes)
        return q_norm, k_norm
    return norm(config.head_width, config.qk_gain), norm(config.head_width, config.qk_gain)


def logit_scale(config: TrialConfig) -> float | None:
    """What multiplies q k^T: None for 1/sqrt(D), which stays whatever the norm of q and k.

    1 for `l2`, whose g replaces it (without a gain it stays). Under muP 1/D, times sqrt(D) at the
    base's head width, where the two are equal (Yang et al. 2022, 2203.03466, definition 4.1).
    """
    if config.qk_norm == "l2" and config.qk_gain != "absent":
        return 1.0
    if config.parametrisation == "mup" and config.head_width != config.mup_base_head_width:
        return math.sqrt(config.mup_base_head_width) / config.head_width
    return None


class Rotary(nn.Module):
    """Turns the pair (x_i, x_{i + D/2}) of position t by t / 10000^(2i/D): Su et al. 2021, eq. 34.

    It follows the norms of q and k, as in Qwen3 and OLMo 2: it keeps their lengths, so that what a
    norm did stays done. No parameters.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: TrialConfig) -> None:
        super().__init__()
        half = config.head_width // 2
        rates = ROTARY_BASE ** (-torch.arange(half, dtype=torch.float32) / half)
        angles_TD = torch.arange(config.context, dtype=torch.float32)[:, None] * rates
        self.register_buffer("cos", angles_TD.cos(), persistent=False)
        self.register_buffer("sin", angles_TD.sin(), persistent=False)

    def forward(self, x_BHTD: Tensor) -> Tensor:
        T = x_BHTD.shape[-2]
        first, second = x_BHTD.chunk(2, -1)
        cos, sin = self.cos[:T], self.sin[:T]
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        return turned.to(x_BHTD.dtype)


class Attention(nn.Module):
    """Causal multi-head self-attention: project, norm q and k, turn, attend, join.

    With `kv_heads`, groups of query heads share a key and value head (Ainslie et al. 2023,
    2305.13245, section 2.2). With `value_residual`, values are the mean of the block's own and
    the first block's (Zhou et al. 2024, 2410.17897, Identity-ResFormer).
    """

    largest_logit: Tensor

    def __init__(self, config: TrialConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.queries_a_key = config.heads // config.key_heads
        kv_width = config.key_heads * config.head_width
        self.sizes = [config.width, kv_width, kv_width]
        self.qkv = linear(config, config.width, sum(self.sizes))
        self.q_norm, self.k_norm = qk_norms(config)
        self.turn = Rotary(config) if config.positions == "rotary" else nn.Identity()
        self.scale = logit_scale(config)
        self.cap, self.clip = config.attn_softcap, config.qk_clip
        self.head_scale = None
        if config.normformer_has("head_scale"):
            self.head_scale = nn.Parameter(torch.ones(config.heads))
        if self.clip is not None:
            self.register_buffer("largest_logit", torch.zeros(config.heads), persistent=False)
        self.out = linear(config, config.width, config.width)

    def project(self, x_BTC: Tensor, first_BHTD: Tensor | None = None) -> tuple[Tensor, ...]:
        """Queries and keys as they are multiplied, and values, each B H T D.

        Args:
            first_BHTD: the first block's values, where they are to be mixed in.
        """
        q_BTC, k_BTC, v_BTC = self.qkv(x_BTC).split(self.sizes, -1)
        q_BHTD = self.turn(self.q_norm(self._heads(q_BTC)))
        k_BHTD = self.turn(self.k_norm(self._heads(k_BTC)))
        v_BHTD = self._heads(v_BTC)
        if self.queries_a_key > 1:
            k_BHTD = k_BHTD.repeat_interleave(self.queries_a_key, 1)
            v_BHTD = v_BHTD.repeat_interleave(self.queries_a_key, 1)
        if first_BHTD is not None:
            v_BHTD = 0.5 * (v_BHTD + first_BHTD)
        return q_BHTD, k_BHTD, v_BHTD

    def forward(self, x_BTC: Tensor, first_BHTD: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What attention adds to the residual stream, and the values it mixed."""
        q_BHTD, k_BHTD, v_BHTD = self.project(x_BTC, first_BHTD)
        return self.attend(q_BHTD, k_BHTD, v_BHTD), v_BHTD

    def attend(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        """Mixes the values by the attention, and joins the heads: B T C."""
        if self.clip is not None and torch.is_grad_enabled():
            self._watch(q_BHTD, k_BHTD)
        if self.cap is None:
            y_BHTD = F.scaled_dot_product_attention(
                q_BHTD, k_BHTD, v_BHTD, is_causal=True, scale=self.scale
            )
        else:
            p_BHTT = self.logits(q_BHTD, k_BHTD).softmax(-1)
            y_BHTD = p_BHTT.to(v_BHTD.dtype) @ v_BHTD
        if self.head_scale is not None:
            y_BHTD = y_BHTD * self.head_scale[:, None, None]
        return self.out(y_BHTD.transpose(1, 2).flatten(2))

    def logits(self, q_BHTD: Tensor, k_BHTD: Tensor) -> Tensor:
        """What softmax sees, B H T T in float32."""
        return attention_logits(q_BHTD, k_BHTD, self.scale, self.cap)

    def _heads(self, x_BTC: Tensor) -> Tensor:
        """Splits the width into heads: B K T D."""
        B, T, C = x_BTC.shape
        return x_BTC.view(B, T, C // self.head_width, self.head_width).transpose(1, 2)

    @torch.no_grad()
    def _watch(self, q_BHTD: Tensor, k_BHTD: Tensor) -> None:
        """Keeps the largest logit of each head since the last step, before any cap."""
        largest_H = attention_logits(q_BHTD, k_BHTD, self.scale).amax((0, 2, 3))
        self.largest_logit.copy_(torch.maximum(self.largest_logit, largest_H))

    @torch.no_grad()
    def after_step(self, frozen: Tensor) -> None:
        """QK-clip (Kimi Team 2025, 2507.20534, section 2.1): a head whose largest logit S of the
        step exceeds tau has its rows of W_q and W_k scaled by sqrt(tau / S) each."""
        assert self.clip is not None
        S_H = self.largest_logit
        over_H = S_H.gt(self.clip) & S_H.isfinite() & ~frozen
        factor_H = torch.where(over_H, (self.clip / S_H).sqrt(), 1.0)
        rows = factor_H.repeat_interleave(self.head_width).repeat(2)
        self.qkv.weight[: len(rows)].mul_(rows[:, None])
        self.largest_logit.zero_()


def attention_logits(
    q_BHTD: Tensor, k_BHTD: Tensor, scale: float | None = None, cap: float | None = None
) -> Tensor:
    """q k^T times the scale (1/sqrt(D) if None), capped if there is a cap (Gemma 2), and -inf
    where a query may not look: B H T T in float32."""
    T, D = q_BHTD.shape[-2:]
    logits_BHTT = (q_BHTD @ k_BHTD.mT).float() * (D**-0.5 if scale is None else scale)
    if cap is not None:
        logits_BHTT = softcap(logits_BHTT, cap)
    hidden_TT = torch.ones(T, T, dtype=torch.bool, device=q_BHTD.device).triu(1)
    return logits_BHTT.masked_fill(hidden_TT, -math.inf)
