"""LayerNorm on the embeddings before the first block (Dettmers et al. 2021, 2110.02861, sec. 2.3).

There before the positions are added; here after, as in BLOOM (Le Scao et al. 2022, 2211.05100,
section 3.2.2). One gain of width C, initially 1. Draws no random number.
"""

from __future__ import annotations

from torch import Tensor

from tune_study.config import TrialConfig
from tune_study.layers import LayerNorm
from tune_study.model import GPT


def apply(model: GPT, config: TrialConfig) -> None:
    """Norms what `embed` returns."""
    plain = model.embed
    norm = LayerNorm(config.width)
    model.add_module("embed_norm", norm)

    def embed(ids_BT: Tensor) -> Tensor:
        return norm(plain(ids_BT))

    model.embed = embed  # type: ignore[method-assign]
