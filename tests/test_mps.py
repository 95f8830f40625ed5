"""The trainer keeps to what MPS can do. No Apple machine is needed: the operators say so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torchgen
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel

import search_spaces
from tests.dispatch_guard import DispatchGuard, known_operators
from tune_study import diagnostics, loss, trainer
from tune_study.components import NEUTRAL
from tune_study.model import GPT
from tune_study.trainer import Trainer

CHANGES = [
    *map(dict, search_spaces.get("stabilisers").arms or ()),
    {"qk_norm": "rmsnorm", "qk_gain": "frozen"},
    {"qk_norm": "l2", "qk_gain": "absent"},
    {"qk_norm": "rmsnorm", "qk_over": "width"},
    {"parametrisation": "mup"},
    {"positions": "rotary"},
    {"block_norm": "rmsnorm"},
    {"mlp": "swiglu"},
    {"kv_heads": 1},
    {"value_residual": True},
    {"tied_head": False},
    {"precision": "bf16", "grad_accum": 2},
]
"""Every arm of the question, and every component."""


def test_every_component_is_among_them():
    # muP's base sizes are numbers of the formula.
    assert {name for change in CHANGES for name in change} >= NEUTRAL.keys() - {
        "mup_base_width",
        "mup_base_head_width",
        "intervention",
    }


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_training_and_measuring_keep_to_what_mps_can_do(small, tokens, change, monkeypatch):
    run = Trainer(small.replace(diagnostics="full", **change), tokens)
    if not change:  # the loss in pieces, as at real size
        monkeypatch.setattr(loss, "CPU_LOGITS_BYTES", 4 * tokens.vocab_size * 10)
    # As on MPS, where attention that needs gradients goes through matrix products, and where the
    # optimiser does not skip its update by itself.
    monkeypatch.setattr(trainer, "SKIP_BY_THEMSELVES", ())
    monkeypatch.setattr(diagnostics, "SELECTS_BY_NUMPY", ())
    # In inference mode the guard sees composite operators, not what they are made of.
    monkeypatch.setattr(diagnostics, "WITHOUT_GRADIENT", torch.no_grad)
    with sdpa_kernel(SDPBackend.MATH):
        with DispatchGuard(may_wait=False) as step:
            run._advance(2)
        with DispatchGuard(may_wait=True) as report:
            run.train(2)
    assert step.faults | report.faults == set()


@pytest.mark.parametrize(
    ("act", "fault"),
    [
        (lambda x: x.sum().item(), "waits for the device"),
        (lambda x: x.double(), "float64"),
        (lambda x: torch.linalg.svd(x), "aten._linalg_svd.default: not in"),
        (lambda x: x.T.mul_(2), "writes into strides"),
    ],
)
def test_the_guard_notices(act, fault):
    with DispatchGuard(may_wait=False) as guard:
        act(torch.ones(3, 2))
    assert any(fault in line for line in guard.faults)


def test_the_list_is_what_pytorch_says_of_mps():
    """By the declarations PyTorch generates its dispatch from: a kernel for MPS, or for any."""
    path = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    entries = yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader)
    declared = {entry["func"].partition("(")[0]: entry for entry in entries}
    missing = set()
    for name in known_operators():
        entry = declared[name.removeprefix("aten.").removesuffix(".default")]
        entry = declared.get(entry.get("structured_delegate"), entry)
        keys = ", ".join(entry.get("dispatch", {"Composite": ""}))
        if "MPS" not in keys.split(", ") and "Composite" not in keys:
            missing.add(name)
    assert missing == set()


def test_no_tensor_of_the_real_study_is_large():
    """Metal refuses buffers beyond a share of the memory, 4 GB on the smallest machines."""
    config = max(search_spaces.get("tinystories").cells(), key=lambda cell: cell.depth)
    with torch.device("meta"), sdpa_kernel(SDPBackend.MATH):
        model = GPT(config, 8192, 0)
        windows = torch.zeros(config.batch_size, config.context + 1, dtype=torch.long)
        with DispatchGuard(may_wait=False) as guard:
            model.objective(windows)[0].backward()
    assert guard.largest <= loss.DEVICE_LOGITS_BYTES
