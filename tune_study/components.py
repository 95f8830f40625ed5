"""What can be changed in the model besides its size, and the names that such changes go by.

Every field stands at a neutral value by default: the baseline of docs/method.md. A field at its
neutral value is not part of a cell's identity, so that what was trained before the
field existed is still what it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from tune_study.settings import Config

Gain = Literal["learned", "frozen", "absent"]

OFF = "off"
"""The name of the arm that changes nothing, which the others are compared with."""


class Components(Config):
    """The interventions beside `qk_norm`, each a choice of its own; docs/method.md has formulas
    and sources."""

    qk_gain: Gain = Field(
        "learned",
        description="the gain of qk_norm: 'learned', 'frozen' at its start, or 'absent'",
    )
    qk_over: Literal["head", "width"] = Field(
        "head", description="what qk_norm takes together: 'head' or 'width'"
    )
    attn_softcap: float | None = Field(
        None, gt=0, description="the cap on the attention logits, such as 50, or null for none"
    )
    final_softcap: float | None = Field(
        None, gt=0, description="the cap on the output logits, such as 30, or null for none"
    )
    z_loss: float = Field(
        0.0, ge=0, description="the weight of the squared log-partition, such as 1e-4, or 0"
    )

    sigma_reparam: bool = Field(False, description="true or false")
    normformer: Literal["off", "all", "head_scale", "post_norm", "mlp_norm"] = Field(
        "off", description="'off', 'all' or one part: 'head_scale', 'post_norm' or 'mlp_norm'"
    )
    qk_clip: float | None = Field(
        None, gt=0, description="the largest attention logit, such as 100, or null for any"
    )

    parametrisation: Literal["standard", "mup"] = Field(
        "standard", description="'standard' or 'mup'"
    )
    mup_base_width: int = Field(32, ge=1, description="the width at which muP changes nothing")
    mup_base_head_width: int = Field(
        16, ge=1, description="the width of a head at which muP changes nothing"
    )

    positions: Literal["learned", "rotary"] = Field("learned", description="'learned' or 'rotary'")
    block_norm: Literal["layernorm", "rmsnorm"] = Field(
        "layernorm", description="'layernorm' or 'rmsnorm'"
    )
    mlp: Literal["gelu", "swiglu"] = Field("gelu", description="'gelu' or 'swiglu'")
    kv_heads: int | None = Field(
        None, ge=1, description="the number of key and value heads, a divisor of heads, or null"
    )
    value_residual: bool = Field(False, description="true or false")
    tied_head: bool = Field(True, description="true or false")

    intervention: str | None = Field(
        None, description="the name of a file in interventions/, without its ending, or null"
    )

    def normformer_has(self, part: str) -> bool:
        """Whether a part of NormFormer is on."""
        return self.normformer in ("all", part)


NEUTRAL: dict[str, Any] = {name: field.default for name, field in Components.model_fields.items()}
"""The value at which each component is as if it were not there."""

_NAMES = {
    "qk_gain": "{}gain",
    "qk_over": "over{}",
    "attn_softcap": "softcap{}",
    "final_softcap": "finalcap{}",
    "z_loss": "zloss{}",
    "sigma_reparam": "sigmareparam",
    "normformer": "normformer-{}",
    "qk_clip": "qkclip{}",
    "parametrisation": "{}",
    "positions": "{}",
    "block_norm": "block{}",
    "mlp": "{}",
    "kv_heads": "kvheads{}",
    "value_residual": "valueresidual",
    "tied_head": "untied",
    "intervention": "{}",
}
"""How a component that is on is called in the name of an arm; others as `field=value`."""


def arm_name(settings: Mapping[str, Any], reference: Mapping[str, Any]) -> str:
    """The name of what `settings` change: `off`, `rmsnorm`, `rmsnorm+zloss1e-4`, ...

    Args:
        settings: the settings that make the arm, `qk_norm` among them.
        reference: what the same settings are where nothing is changed. `qk_norm` needs no
            reference: its `off` is left out, any other value told.
    """
    parts = [] if settings["qk_norm"] == "off" else [str(settings["qk_norm"])]
    parts += [
        _part(name, value)
        for name, value in settings.items()
        if name != "qk_norm" and value != reference[name]
    ]
    return "+".join(parts) or OFF


def _part(name: str, value: Any) -> str:
    if name in _NAMES and value != NEUTRAL[name]:
        return _NAMES[name].format(_text(value)).removesuffix("-all")
    return f"{name}={_text(value)}"


def _text(value: Any) -> str:
    """A value as short as it can be read: 50, 0.99, 1e-4, off."""
    if value is None or isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        mantissa, _, exponent = f"{value:.5e}".partition("e")
        if value and not -3 <= int(exponent) < 6:
            return f"{float(mantissa):g}e{int(exponent)}"
        return f"{value:.6g}"
    return str(value)
