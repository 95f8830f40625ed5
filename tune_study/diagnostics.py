"""What attention and activations look like, measured on a few fixed windows.

Formulas: docs/method.md. Everything is computed in float32 whatever the training
precision, and nothing here changes the model.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tune_study.model import GPT, Block

MEAN_OVER_LAYERS = ("attn/entropy", "attn/sink")

SINK_ATTENTION = 0.3
"""Mean attention to the first token from which on a head is a sink (Gu et al. 2024)."""


@torch.no_grad()
def probe(model: GPT, ids_BT: Tensor) -> dict[str, Tensor]:
    """Attention entropy, largest attention logit and activation kurtosis, layer by layer.

    Returns flat names to 0-dimensional float32 tensors, left on the device so that the
    caller decides when to wait for them: `attn/entropy/layer_i` (nats),
    `attn/entropy_normalised/layer_i` (0 to 1), `attn/max_logit/layer_i`, `attn/sink/layer_i`
    (0 to 1), `act/kurtosis/layer_i`, `act/massive/layer_i`, and each without the layer: the mean
    over layers for entropy and sinks, the maximum for the others.
    """
    metrics: dict[str, Tensor] = {}
    per_layer: dict[str, list[Tensor]] = {}
    x_BTC = model.embed(ids_BT)
    for i, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        q_BHTD, k_BHTD, _ = block.attention.project(block.attention_norm(x_BTC))
        logits_BHTT = attention_logits(q_BHTD.float(), k_BHTD.float())
        entropy_BHT = attention_entropy(logits_BHTT)
        x_BTC = block(x_BTC)
        layer = {
            "attn/entropy": entropy_BHT.mean(),
            "attn/entropy_normalised": normalised(entropy_BHT).mean(),
            "attn/max_logit": visible_max(logits_BHTT),
            "attn/sink": sink_share(logits_BHTT),
            "act/kurtosis": kurtosis(x_BTC.float()).mean(),
            "act/massive": massive_ratio(x_BTC.float()),
        }
        for name, value in layer.items():
            metrics[f"{name}/layer_{i}"] = value
            per_layer.setdefault(name, []).append(value)
    for name, values in per_layer.items():
        stacked = torch.stack(values)
        metrics[name] = stacked.mean() if name.startswith(MEAN_OVER_LAYERS) else stacked.max()
    return metrics


def attention_logits(q_BHTD: Tensor, k_BHTD: Tensor) -> Tensor:
    """q k^T / sqrt(D), with -inf where a query may not look: B H T T."""
    T, D = q_BHTD.shape[-2:]
    logits_BHTT = q_BHTD @ k_BHTD.mT * D**-0.5
    hidden_TT = torch.ones(T, T, dtype=torch.bool, device=q_BHTD.device).triu(1)
    return logits_BHTT.masked_fill(hidden_TT, -math.inf)


def attention_entropy(logits_BHTT: Tensor) -> Tensor:
    """-sum p ln p of every query's attention, in nats, over the positions it sees: B H T.

    A query that sees nothing at all has entropy 0; a logit that is NaN gives NaN.
    """
    p_BHTT = torch.softmax(logits_BHTT, dim=-1).masked_fill(logits_BHTT == -math.inf, 0.0)
    return torch.special.entr(p_BHTT).sum(-1)


def normalised(entropy_BHT: Tensor) -> Tensor:
    """Entropy over its maximum ln(i) for query i = 2..T (Zhai et al. 2023); B H T-1.

    The first query sees one position and has no entropy to speak of.
    """
    T = entropy_BHT.shape[-1]
    sees_T = torch.arange(1, T + 1, device=entropy_BHT.device, dtype=entropy_BHT.dtype)
    return entropy_BHT[..., 1:] / sees_T[1:].log()


def visible_max(logits_BHTT: Tensor) -> Tensor:
    """The largest |logit| among the positions that are seen."""
    return logits_BHTT.masked_fill(logits_BHTT == -math.inf, 0.0).abs().max()


def sink_share(logits_BHTT: Tensor) -> Tensor:
    """The share of heads whose mean attention to the first token exceeds 0.3, per window.

    Gu et al. 2024 (arXiv 2410.10781), section 3: mean over all queries, the first included.
    NaN if a logit is NaN.
    """
    first_BH = torch.softmax(logits_BHTT, dim=-1)[..., 0].mean(-1)
    share = (first_BH > SINK_ATTENTION).float().mean()
    return torch.where(first_BH.isnan().any(), math.nan, share)


def massive_ratio(x_BTC: Tensor) -> Tensor:
    """Largest over median magnitude of the activations (Sun et al. 2024, arXiv 2402.17762).

    Over all tokens and channels; activations of which half are 0 give infinity, or NaN.
    """
    magnitude = x_BTC.abs().flatten()
    return magnitude.max() / magnitude.median()


def kurtosis(x_BTC: Tensor) -> Tensor:
    """m4 / m2^2 over the channels of each token, uncentred: B T.

    Gaussian activations give 3, equal magnitudes 1, one channel alone C; a token of zeros
    gives 0. Scaled by the largest magnitude first, so that large activations stay finite.
    """
    peak_BT1 = x_BTC.abs().amax(-1, keepdim=True)
    x_BTC = x_BTC / peak_BT1.clamp(min=torch.finfo(x_BTC.dtype).tiny)
    square_BTC = x_BTC.square()
    m2_BT = square_BTC.mean(-1)
    return square_BTC.square().mean(-1) / m2_BT.square().clamp(min=torch.finfo(m2_BT.dtype).tiny)
