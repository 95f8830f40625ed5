"""What attention, activations and weights look like, measured on a few fixed windows.

Formulas: docs/method.md. Everything is computed in float32 whatever the training
precision, and nothing here changes the model. Measures are functions of a tensor; `probe` and
`StepWatch` say which of them are taken, and where.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tune_study.attention import Attention, attention_logits
from tune_study.model import GPT, Block

Detail = Literal["cheap", "full"]

MEAN_OVER_LAYERS = ("attn/entropy", "attn/sink", "attn/logit_rms", "attn/q_norm", "attn/k_norm")
"""What is averaged over the layers; of the other measures the largest layer counts."""

SELECTS_BY_NUMPY = ("cpu",)
"""Devices whose medians NumPy finds: 7 times as fast as PyTorch at pilot size, 75 times at real
size, and the same element."""

SINK_ATTENTION = 0.3
"""Mean attention to the first token from which on a head is a sink (Gu et al. 2024)."""


WITHOUT_GRADIENT = torch.inference_mode
"""How the probe runs: a tenth faster than under `torch.no_grad`, with the same bits."""


def probe(model: GPT, ids_BT: Tensor, detail: Detail = "cheap") -> dict[str, float]:
    """Attention, activations and output of a model, layer by layer.

    Returns flat names to numbers: each measure as `attn/entropy/layer_i`, and without the layer,
    as the mean over layers for those in MEAN_OVER_LAYERS and the maximum for the others;
    `out/log_z`, in `full`, has no layer. Waits for the device once, at the end.
    """
    with WITHOUT_GRADIENT():
        return _probe(model, ids_BT, detail)


def _probe(model: GPT, ids_BT: Tensor, detail: Detail) -> dict[str, float]:
    measured: dict[str, Tensor] = {}
    entropy_limit_T = most_entropy(ids_BT.shape[-1], ids_BT.device)
    seen: list[tuple[Attention, Tensor, Tensor, Tensor]] = []
    x_BTC, first_BHTD = model.embed(ids_BT), None
    for block in model.blocks:
        assert isinstance(block, Block)
        # The block's own forward pass, with a look at queries and keys on the way.
        q_BHTD, k_BHTD, v_BHTD = block.attention.project(block.attention_norm(x_BTC), first_BHTD)
        x_BTC = block.add(x_BTC, block.attention.attend(q_BHTD, k_BHTD, v_BHTD))
        if model.value_residual and first_BHTD is None:
            first_BHTD = v_BHTD
        seen.append((block.attention, q_BHTD.float(), k_BHTD.float(), x_BTC.float()))
    with torch.autocast(ids_BT.device.type, enabled=False):
        for i, layer_tensors in enumerate(seen):
            layer = _layer(*layer_tensors, entropy_limit_T, detail)
            measured |= {f"{name}/layer_{i}": value for name, value in layer.items()}
    if detail == "full":
        measured["out/log_z"] = log_z(model.unembed(x_BTC)).mean()
    metrics = numbers(measured)
    layers = range(len(model.blocks))
    values = np.array([[metrics[f"{name}/layer_{i}"] for i in layers] for name in layer])
    means, maxima = values.mean(1).tolist(), values.max(1).tolist()  # NaN if one value is
    for name, mean, largest in zip(layer, means, maxima, strict=True):
        metrics[name] = mean if name.startswith(MEAN_OVER_LAYERS) else largest
    return metrics


def numbers(tensors: dict[str, Tensor]) -> dict[str, float]:
    """0-dimensional tensors as numbers, in one transfer from the device."""
    if not tensors:
        return {}
    values = torch.stack([value.float() for value in tensors.values()]).tolist()
    return dict(zip(tensors, values, strict=True))


def _layer(
    attention: Attention,
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    x_BTC: Tensor,
    entropy_limit_T: Tensor,
    detail: Detail,
) -> dict[str, Tensor]:
    measures = _attention(attention.logits(q_BHTD, k_BHTD), entropy_limit_T) | _activations(x_BTC)
    if detail == "full":
        uncapped_BHTT = attention_logits(q_BHTD, k_BHTD, attention.scale)
        measures |= _attention_in_full(q_BHTD, k_BHTD, uncapped_BHTT) | _activations_in_full(x_BTC)
    return measures


def _attention(logits_BHTT: Tensor, entropy_limit_T: Tensor) -> dict[str, Tensor]:
    p_BHTT = logits_BHTT.softmax(-1)  # once, for both that need them
    entropy_BHT = attention_entropy(p_BHTT)
    return {
        "attn/entropy": entropy_BHT.mean(),
        "attn/entropy_normalised": normalised(entropy_BHT, entropy_limit_T).mean(),
        "attn/max_logit": visible_max(logits_BHTT),
        "attn/sink": sink_share(p_BHTT),
    }


def _attention_in_full(q_BHTD: Tensor, k_BHTD: Tensor, logits_BHTT: Tensor) -> dict[str, Tensor]:
    return {
        "attn/max_logit_uncapped": visible_max(logits_BHTT),
        "attn/logit_rms": visible_rms(logits_BHTT),
        "attn/q_norm": q_BHTD.norm(dim=-1).mean(),
        "attn/k_norm": k_BHTD.norm(dim=-1).mean(),
    }


def _activations(x_BTC: Tensor) -> dict[str, Tensor]:
    return {"act/kurtosis": kurtosis(x_BTC).mean(), "act/massive": massive_ratio(x_BTC)}


def _activations_in_full(x_BTC: Tensor) -> dict[str, Tensor]:
    return {
        "act/kurtosis_centred": kurtosis(x_BTC - x_BTC.mean(-1, keepdim=True)).mean(),
        "act/kurtosis_pooled": kurtosis((x_BTC - x_BTC.mean()).flatten()),
        "act/kurtosis_neuron": kurtosis(x_BTC.flatten(0, -2).square().mean(0).sqrt()),
        "act/rms": x_BTC.square().mean().sqrt(),
        "act/max": x_BTC.abs().max(),
    }


# ------------------------------------------------------------------ attention


def attention_entropy(p_BHTT: Tensor) -> Tensor:
    """-sum p ln p of every query's attention, in nats, over the positions it sees: B H T.

    NaN for a query with a logit that is NaN.
    """
    return torch.special.entr(p_BHTT).sum(-1)


@lru_cache(maxsize=8)
def most_entropy(T: int, device: torch.device) -> Tensor:
    """ln(i), the largest entropy of query i = 1..T, which sees i positions: T."""
    return torch.arange(1, T + 1, device=device, dtype=torch.float32).log()


def normalised(entropy_BHT: Tensor, limit_T: Tensor) -> Tensor:
    """Entropy over its maximum for query i = 2..T (Zhai et al. 2023); B H T-1.

    The first query sees one position and has no entropy to speak of.
    """
    return entropy_BHT[..., 1:] / limit_T[1:]


def visible_max(logits_BHTT: Tensor) -> Tensor:
    """The largest |logit| among the positions that are seen."""
    return logits_BHTT.tril().abs().max()


def visible_rms(logits_BHTT: Tensor) -> Tensor:
    """Root mean square of the logits of the positions that are seen."""
    seen_BHTT = logits_BHTT != -math.inf
    squares_BHTT = torch.where(seen_BHTT, logits_BHTT, 0.0).square()
    return (squares_BHTT.sum() / seen_BHTT.sum()).sqrt()


def sink_share(p_BHTT: Tensor) -> Tensor:
    """The share of heads whose mean attention to the first token exceeds 0.3, per window.

    Gu et al. 2024 (arXiv 2410.10781), section 3: mean over all queries, the first included.
    NaN if a probability is NaN.
    """
    first_BH = p_BHTT[..., 0].mean(-1)
    return (first_BH > SINK_ATTENTION).float().mean() + 0 * first_BH.sum()  # NaN stays NaN


# ----------------------------------------------------------- activations, output


def massive_ratio(x_BTC: Tensor) -> Tensor:
    """Largest over median magnitude of the activations (Sun et al. 2024, arXiv 2402.17762).

    Over all tokens and channels; activations of which half are 0 give infinity, or NaN.
    """
    magnitude = x_BTC.abs()
    return magnitude.max() / median(magnitude)


def median(x: Tensor) -> Tensor:
    """The lower of the two middle values, over all elements, as `Tensor.median`; without NaN."""
    if x.device.type not in SELECTS_BY_NUMPY:
        return x.median()
    middle = (x.numel() - 1) // 2
    return torch.from_numpy(np.partition(x.numpy(), middle, axis=None)[middle : middle + 1])[0]


def kurtosis(x: Tensor) -> Tensor:
    """m4 / m2^2 over the last dimension, uncentred.

    Gaussian values give 3, equal magnitudes 1, one value alone their number; zeros give 0.
    Scaled by the largest magnitude first, so that large values stay finite. What it is taken over
    makes the four definitions in use: the channels of each token as they are (`act/kurtosis`),
    or less their mean (`_centred`); all values of a layer, less their mean (`_pooled`: Bondarenko
    et al. 2023, 2306.12929); the root mean squares of the channels over the tokens (`_neuron`: He
    et al. 2024, 2405.19279, section 2; channels of equal size give 1).
    """
    peak = x.abs().amax(-1, keepdim=True)
    x = x / peak.clamp(min=torch.finfo(x.dtype).tiny)
    square = x.square()
    m2 = square.mean(-1)
    return square.square().mean(-1) / m2.square().clamp(min=torch.finfo(m2.dtype).tiny)


def log_z(logits_BTV: Tensor) -> Tensor:
    """ln sum exp(logit): what the z-loss holds near 0; B T."""
    return logits_BTV.float().logsumexp(-1)


# -------------------------------------------------------------------- weights


class StepWatch:
    """Root mean squares of gradient, weights and update of one optimiser step, by block.

    watch = StepWatch(model)    # after the backward pass, before clipping
    ...                         # the step
    metrics = watch.metrics()   # grad/rms/layer_i, param/rms/layer_i, update/rms/layer_i, ...

    The blocks go by `layer_i`, token and position embeddings (and with them a tied head) by
    `embedding`, final norm and untied head by `head`.
    """

    def __init__(self, model: GPT) -> None:
        self.model = model
        self.gradients = {name: rms(p.grad for p in ps) for name, ps in _parts(model).items()}
        self.weights = {n: [p.detach().clone() for p in ps] for n, ps in _parts(model).items()}

    def metrics(self) -> dict[str, Tensor]:
        """The root mean squares; the weights' are those before the step."""
        metrics: dict[str, Tensor] = {}
        for name, parameters in _parts(self.model).items():
            before = self.weights[name]
            moved = [p.detach() - old for p, old in zip(parameters, before, strict=True)]
            metrics[f"grad/rms/{name}"] = self.gradients[name]
            metrics[f"param/rms/{name}"] = rms(before)
            metrics[f"update/rms/{name}"] = rms(moved)
        return metrics


def rms(tensors: Iterable[Tensor | None]) -> Tensor:
    """Root mean square over all elements of some tensors."""
    present = [t.float() for t in tensors if t is not None]
    squares = torch.stack([t.square().sum() for t in present]).sum()
    return (squares / sum(t.numel() for t in present)).sqrt()


def _parts(model: GPT) -> dict[str, list[Tensor]]:
    """Parameters by the part of the model that they belong to."""
    parts: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        first, _, rest = name.partition(".")
        if first == "blocks":
            part = f"layer_{rest.partition('.')[0]}"
        else:
            part = "embedding" if first in ("tokens", "positions") else "head"
        parts.setdefault(part, []).append(parameter)
    return parts
