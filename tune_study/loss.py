"""Cross-entropy of a linear head, without ever holding all the logits.

With a vocabulary of 8,192 the logits of one step of the real study take 268 MB, and so do their
softmax and their gradient: on a CPU that is a fifth of the step, spent on memory. Here rows are
taken in pieces that stay in the cache, and each piece's gradients are computed while its logits
are still there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CPU_LOGITS_BYTES = 16 * 2**20
"""Logits at a time on a CPU, in bytes of float32; measured best among 4 to 64 MiB."""

DEVICE_LOGITS_BYTES = 256 * 2**20
"""The same on an accelerator, where few large pieces are faster; bounds their size."""


def head_loss(x_NC: Tensor, head_VC: Tensor, targets_N: Tensor) -> Tensor:
    """Mean over N of -ln softmax(x W^T)[target], in nats; computed in float32.

    Few rows go through PyTorch's own cross-entropy in one piece. The result is the same up to
    the order of summation over pieces.

    Args:
        x_NC: hidden states, N rows.
        head_VC: the output head W.
        targets_N: the ids to predict, int64.
    """
    budget = CPU_LOGITS_BYTES if x_NC.device.type == "cpu" else DEVICE_LOGITS_BYTES
    rows = max(1, budget // (4 * len(head_VC)))
    if len(x_NC) <= rows:
        return F.cross_entropy(F.linear(x_NC, head_VC).float(), targets_N)
    kind = x_NC.device.type
    if torch.is_autocast_enabled(kind):
        x_NC, head_VC = (t.to(torch.get_autocast_dtype(kind)) for t in (x_NC, head_VC))
    return _InPieces.apply(x_NC, head_VC, targets_N, rows)


class _InPieces(torch.autograd.Function):
    """Loss and gradients of all pieces in the forward pass; backward only scales them."""

    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, head_VC: Tensor, targets_N: Tensor, rows: int) -> Tensor:
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        n, exact = len(x_NC), torch.promote_types(x_NC.dtype, torch.float32)
        total = torch.zeros((), dtype=exact, device=x_NC.device)
        dx_NC = torch.empty_like(x_NC) if wanted else None
        dhead_VC = torch.zeros_like(head_VC, dtype=exact) if wanted else None
        with torch.autocast(x_NC.device.type, enabled=False):
            for x_RC, targets_R1, dx_RC in zip(
                x_NC.split(rows),
                targets_N[:, None].split(rows),
                dx_NC.split(rows) if dx_NC is not None else [None] * -(-n // rows),
                strict=True,
            ):
                logits_RV = (x_RC @ head_VC.mT).to(exact)
                log_sum_R1 = torch.logsumexp(logits_RV, dim=-1, keepdim=True)
                total += (log_sum_R1 - logits_RV.gather(1, targets_R1)).sum()
                if dx_RC is None or dhead_VC is None:
                    continue
                # d loss / d logits = (softmax - one-hot) / n, in the logits' own memory.
                slope_RV = logits_RV.sub_(log_sum_R1).exp_()
                slope_RV.scatter_add_(1, targets_R1, -torch.ones_like(log_sum_R1))
                slope_RV = slope_RV.div_(n).to(x_NC.dtype)
                torch.mm(slope_RV, head_VC, out=dx_RC)
                if x_NC.dtype == exact:
                    dhead_VC.addmm_(slope_RV.mT, x_RC)
                else:
                    dhead_VC += slope_RV.mT @ x_RC
        if dx_NC is not None and dhead_VC is not None:
            ctx.save_for_backward(dx_NC, dhead_VC.to(head_VC.dtype))
        return total / n

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dx_NC, dhead_VC = ctx.saved_tensors
        return dx_NC * slope, dhead_VC * slope, None, None
