"""A study and a run as YAML: equal when read back, forgiving to hands, clear about mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import search_spaces
from analysis import load
from tune_study import configs
from tune_study.cli.asked import changed
from tune_study.config import ConfigError, Study, TrialConfig
from tune_study.identity import identity
from tune_study.store import StudyFolder


@pytest.mark.parametrize("name", search_spaces.names())
def test_every_study_comes_back_equal(name: str, tmp_path: Path) -> None:
    study = search_spaces.get(name)
    file = tmp_path / "config.yaml"
    file.write_text(configs.text(study))
    assert configs.read(file, Study) == study
    assert [c.label for c in configs.read(file, Study).cells()] == [c.label for c in study.cells()]


@example(lr=1e-2, eps=1e-8, word="1e-2")
@example(lr=1.0, eps=1.0, word="off")
@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    lr=st.floats(1e-300, 1e300, exclude_min=True),
    eps=st.floats(1e-300, 1.0, exclude_min=True),
    word=st.text(min_size=1).filter(lambda text: "\0" not in text and text.isprintable()),
)
def test_a_run_comes_back_equal(tmp_path_factory: pytest.TempPathFactory, lr, eps, word) -> None:
    config = TrialConfig(lr=lr, eps=eps, data={"document_end": word, "corpus": "text"} | TEXT)
    file = tmp_path_factory.getbasetemp() / "run.yaml"
    file.write_text(configs.text(config), encoding="utf-8")
    assert configs.read(file, TrialConfig) == config


TEXT = {"train": "a", "validation": "b"}


def test_a_sweep_leaves_its_study_and_every_run_as_yaml(finished) -> None:
    folder = StudyFolder(finished[0], "tiny")
    study, results = folder.study(), load(folder.path)
    written = configs.read(folder.path / "config.yaml", Study)
    assert list(written.cells()) == list(study.cells())
    by_label = {config.label: config for config in study.cells()}
    files = sorted(folder.experiments.glob("sweep-001/*/config.yaml"))
    assert {file.parent.name for file in files} == set(by_label)
    checksum = folder.read()["data"]["checksum"]
    names = dict(zip(results.cells["cell"], results.cells["identity"], strict=True))
    for file in files:
        config = configs.read(file, TrialConfig)
        assert config.model_dump() == by_label[file.parent.name].model_dump()
        assert identity(config, checksum) == names[file.parent.name]
    named = changed(str(folder.path / "config.yaml"), {}, None, None)
    assert named == written
    other = changed(str(folder.path / "config.yaml"), {}, ["steps=30"], None)
    assert other.name.startswith("tiny-")


def test_a_study_written_by_hand(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "name: mine\naxes:\n  lr: [1e-3, .01, 1]\n  depth: [2]\n  qk_norm: [off, rmsnorm]\n"
        "  seed: [0]\nbase: {compile: false, eps: 1e-8, qk_clip: null}\n"
    )
    study = configs.read(file, Study)
    assert study.axis("lr") == (1e-3, 1e-2, 1.0)
    assert study.axis("qk_norm") == ("off", "rmsnorm")
    assert study.base == TrialConfig()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "No such file"),
        ("a: [", "is no YAML in line 1"),
        ("pilot", "holds no settings"),
        ("name: x\naxes: {lr: [1]}\nstepz: 3\n", "stepz is not a setting of Study"),
        ("1: 2\n", "keywords must be strings"),
    ],
)
def test_a_file_that_is_no_study_is_one_line(tmp_path, content, expected) -> None:
    file = tmp_path / "broken.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=expected) as error:
        configs.read(file, Study)
    assert "\n" not in str(error.value)
