"""What a study records of the machine it ran on."""

from __future__ import annotations

import sys

import pytest

from tune_study import store

CPUINFO = """processor\t: 0
cpu family\t: 26
model\t\t: 2
model name\t: AMD EPYC
stepping\t: 1

processor\t: 1
cpu family\t: 27
model\t\t: 3
model name\t: another
stepping\t: 2
"""


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS tells of its processor otherwise")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CPUINFO, "AMD EPYC (family 26, model 2, stepping 1)"),
        ("processor\t: 0\nBogoMIPS\t: 50.00\n", "unknown"),
        (None, "unknown"),
    ],
)
def test_the_processors_model_is_the_first_cores(tmp_path, monkeypatch, text, expected):
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(store, "CPUINFO", file)
    assert store.processor() == expected
    assert store.versions()["processor"] == expected
