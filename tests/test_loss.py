"""The head's cross-entropy in pieces: the value and gradients of the whole."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tune_study import loss
from tune_study.loss import head_loss


@pytest.fixture
def pieces_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eleven ids, four rows a piece."""
    monkeypatch.setattr(loss, "CPU_LOGITS_BYTES", 4 * 4 * 11)


def inputs(rows: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 3, generator=numbers, dtype=dtype).requires_grad_()
    head = torch.randn(11, 3, generator=numbers, dtype=dtype).requires_grad_()
    return x, head, torch.randint(0, 11, (rows,), generator=numbers)


def test_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    # Logits (0, ln 3) and (0, 0), both targets the second id, one row a piece:
    # -ln(3/4) and -ln(1/2), mean (ln 4/3 + ln 2) / 2.
    monkeypatch.setattr(loss, "CPU_LOGITS_BYTES", 1)
    x = torch.tensor([[1.0], [0.0]])
    head = torch.tensor([[0.0], [math.log(3)]])
    value = head_loss(x, head, torch.tensor([1, 1]))
    assert value.item() == pytest.approx((math.log(4 / 3) + math.log(2)) / 2, abs=1e-6)


@pytest.mark.usefixtures("pieces_of_four")
@pytest.mark.parametrize("rows", [4, 5, 8, 13])
def test_equals_the_whole(rows: int) -> None:
    x, head, targets = inputs(rows)
    value = head_loss(x, head, targets)
    whole = F.cross_entropy(x @ head.T, targets)
    ours = torch.autograd.grad(3 * value, (x, head))
    theirs = torch.autograd.grad(3 * whole, (x, head))
    assert value.item() == pytest.approx(whole.item(), abs=1e-6)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("pieces_of_four")
def test_gradients_by_differences() -> None:
    x, head, targets = inputs(9)
    assert torch.autograd.gradcheck(lambda x, head: head_loss(x, head, targets), (x, head))


@pytest.mark.usefixtures("pieces_of_four")
def test_without_gradients_the_value_is_the_same() -> None:
    x, head, targets = inputs(13, torch.float32)
    with torch.no_grad():
        bare = head_loss(x, head, targets)
    assert bare.item() == head_loss(x, head, targets).item()


@pytest.mark.usefixtures("pieces_of_four")
def test_bfloat16_sums_in_float32() -> None:
    x, head, targets = inputs(13, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = head_loss(x, head, targets)
    assert value.dtype == torch.float32
    slopes = torch.autograd.grad(value, (x, head))
    whole = F.cross_entropy(x @ head.T, targets)
    assert value.item() == pytest.approx(whole.item(), rel=0.01)
    for a, b in zip(slopes, torch.autograd.grad(whole, (x, head)), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0.1, atol=0.01)


@pytest.mark.usefixtures("pieces_of_four")
def test_what_is_not_finite_stays_visible() -> None:
    x, head, targets = inputs(13)
    with torch.no_grad():
        x[7] = math.nan
    assert head_loss(x, head, targets).isnan()
