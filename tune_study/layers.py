"""What blocks are built of: norms, linear layers, MLPs. Each class is one choice of a setting.

Shapes are written as suffixes: B windows, T positions, C width, H heads, D = C/H head
width, V vocabulary, N whatever comes before.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tune_study.components import Gain
from tune_study.config import TrialConfig

NORM_EPS = 1e-5
"""Added to the variance or mean square in every norm; nanoGPT's value."""


def add_gain(module: nn.Module, initial: Tensor, kind: Gain) -> None:
    """Gives a module its `gain`: a parameter, a constant that checkpoints carry, or None."""
    module.register_parameter("gain", None)
    if kind == "learned":
        module.gain = nn.Parameter(initial)
    elif kind == "frozen":
        del module._parameters["gain"]
        module.register_buffer("gain", initial)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) times a gain, initially 1, and no bias (Ba et al. 2016,
    1607.06450, eq. 4)."""

    gain: Tensor | None

    def __init__(self, size: int, gain: Gain = "learned") -> None:
        super().__init__()
        add_gain(self, torch.ones(size), gain)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.gain, None, NORM_EPS)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) times a gain, initially 1 (Zhang and Sennrich 2019, 1910.07467,
    eq. 4)."""

    gain: Tensor | None

    def __init__(self, size: int, gain: Gain = "learned") -> None:
        super().__init__()
        add_gain(self, torch.ones(size), gain)

    def forward(self, x: Tensor) -> Tensor:
        # In float32, which is where PyTorch computes it too once x and gain differ in type.
        return F.rms_norm(x.float(), x.shape[-1:], self.gain, NORM_EPS).to(x.dtype)


NORMS: dict[str, type[LayerNorm] | type[RMSNorm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}
"""What `block_norm` may be: the norms on the residual stream, and those NormFormer adds."""


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap): near x for small x, within (-cap, cap) (Gemma 2, 2408.00118, sec. 2)."""
    return cap * torch.tanh(x / cap)


class SigmaLinear(nn.Linear):
    """A linear layer with sigmaReparam: W (gamma / sigma(W)) (Zhai et al. 2023, 2303.06296, eq. 5).

    sigma(W), the spectral norm, is left^T W right with singular vectors that follow W by one power
    iteration after each optimiser step; gradients flow through it, not through the vectors.
    They are buffers, and so in the checkpoint. gamma is one parameter a matrix; it starts at
    sigma of the initial weights, as in the authors' released code (in the paper's appendix, at
    1), so that the layer starts as the plain one, bit for bit. Draws no random number.
    """

    left: Tensor
    right: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.gamma = nn.Parameter(torch.ones(()))
        self.register_buffer("left", torch.zeros(outputs))
        self.register_buffer("right", torch.zeros(inputs))

    @torch.no_grad()
    def reset(self) -> None:
        """Takes the singular vectors and gamma from the weights as they are."""
        left, _, right = torch.linalg.svd(self.weight, full_matrices=False)
        self.left.copy_(left[:, 0])
        self.right.copy_(right[0])
        self.gamma.copy_(self.sigma())

    def sigma(self) -> Tensor:
        """The estimate of the spectral norm."""
        return self.left @ (self.weight @ self.right)

    @torch.no_grad()
    def after_step(self, frozen: Tensor) -> None:
        """One power iteration on the updated weights."""
        self.left.copy_(F.normalize(self.weight @ self.right, dim=0))
        self.right.copy_(F.normalize(self.weight.T @ self.left, dim=0))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * (self.gamma / self.sigma()))


def linear(config: TrialConfig, inputs: int, outputs: int) -> nn.Linear:
    """A layer of a block: plain, or with sigmaReparam. No biases."""
    if config.sigma_reparam:
        return SigmaLinear(inputs, outputs)
    return nn.Linear(inputs, outputs, bias=False)


class MLP(nn.Module):
    """C -> 4C -> C with GELU between (nanoGPT's)."""

    def __init__(self, config: TrialConfig) -> None:
        super().__init__()
        hidden = 4 * config.width
        self.up = linear(config, config.width, hidden)
        self.inner_norm = inner_norm(config, hidden)
        self.out = linear(config, hidden, config.width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.out(self.inner_norm(F.gelu(self.up(x_BTC))))


class SwiGLU(nn.Module):
    """out(silu(gate(x)) * up(x)) (Shazeer 2020, 2002.05202, eq. 6).

    The hidden width is 8C/3, rounded, for three matrices to have the parameters of the MLP's two.
    """

    def __init__(self, config: TrialConfig) -> None:
        super().__init__()
        hidden = round(8 * config.width / 3)
        self.gate = linear(config, config.width, hidden)
        self.up = linear(config, config.width, hidden)
        self.inner_norm = inner_norm(config, hidden)
        self.out = linear(config, hidden, config.width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.out(self.inner_norm(F.silu(self.gate(x_BTC)) * self.up(x_BTC)))


MLPS: dict[str, type[MLP] | type[SwiGLU]] = {"gelu": MLP, "swiglu": SwiGLU}
"""What `mlp` may be."""


def inner_norm(config: TrialConfig, hidden: int) -> nn.Module:
    """NormFormer's norm inside the MLP, after the activation (Shleifer et al. 2021, 2110.09456,
    eq. 6), or nothing."""
    return NORMS[config.block_norm](hidden) if config.normformer_has("mlp_norm") else nn.Identity()
