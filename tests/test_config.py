"""Configuration: what is refused, how, and that a Study is exactly its product of axes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import search_spaces
from tune_study.config import (
    CRITERIA,
    ConfigError,
    Criterion,
    DataConfig,
    Study,
    TrialConfig,
    criterion_named,
    log_grid,
)
from tune_study.store import StudyFolder

AXES = {"lr": (1e-3, 1e-2), "depth": (1, 2), "qk_norm": ("off", "rmsnorm"), "seed": (0, 1, 2)}


def study(**settings):
    """A study whose arms are given."""
    axes = {name: values for name, values in AXES.items() if name != "qk_norm"}
    return Study(name="a", **{"axes": axes} | settings)


@pytest.mark.parametrize(
    ("build", "parts"),
    [
        (lambda: TrialConfig(lr=-1), ["lr = -1", "greater than 0", "such as 1e-3"]),
        (lambda: TrialConfig(lr=float("nan")), ["lr = nan", "finite"]),
        (lambda: TrialConfig(lr="fast"), ["lr = 'fast'", "number"]),
        (lambda: TrialConfig(heads=3), ["heads = 3", "divisor of 32"]),
        (lambda: TrialConfig(qk_norm="on"), ["qk_norm = 'on'", "'rmsnorm'"]),
        (lambda: TrialConfig(warmup_steps=400), ["warmup_steps = 400", "at most 399"]),
        (lambda: TrialConfig(report_every=401), ["report_every = 401", "at most 400"]),
        (lambda: TrialConfig(momentum=1), ["momentum", "not a setting", "beta1"]),
        (lambda: TrialConfig(data={"vocab_size": 3}), ["data.vocab_size = 3", "257"]),
        (lambda: Study(name="a/b", axes=AXES), ["name = 'a/b'", "letters"]),
        (lambda: Study(name="a", axes=AXES | {"lr": ()}), ["axes.lr", "no values"]),
        (lambda: Study(name="a", axes=AXES | {"lr": ("1e-2", 0.01)}), ["axes.lr", "twice"]),
        (lambda: Study(name="a", axes=AXES | {"lr": (0,)}), ["axes.lr = 0", "greater than 0"]),
        (lambda: Study(name="a", axes=AXES | {"size": (1,)}), ["axes.size", "not a setting"]),
        (lambda: Study(name="a", axes={"lr": (1,)}), ["depth", "no values"]),
        (lambda: study(arms=()), ["arms", "no values"]),
        (lambda: study(arms=({}, {"size": 1})), ["arms.size", "z_loss"]),
        (lambda: study(arms=({}, {"lr": 1})), ["arms.lr", "z_loss"]),
        (lambda: study(arms=({}, {"z_loss": -1})), ["arms: z_loss = -1", "greater"]),
        (lambda: study(arms=({"z_loss": 1e-4}, {"z_loss": "1e-4"})), ["two", "'zloss1e-4'"]),
        (lambda: study(arms=({}, {"heads": 3})), ["heads = 3", "divisor of 32"]),
        (lambda: Study(name="a", axes=AXES, arms=({},)), ["axes.qk_norm", "lists its arms"]),
        (
            lambda: study(arms=({},), tied={"width": {64: {"heads": 4}}}),
            ["tied.width", "not varied"],
        ),
        (lambda: log_grid(1e-3, 2e-2, 4), ["log_grid", "5.20 steps"]),
        (lambda: search_spaces.get("pilt"), ["study = 'pilt'", "pilot"]),
    ],
)
def test_a_wrong_value_is_one_line_with_field_value_and_remedy(build, parts):
    with pytest.raises(ConfigError) as error:
        build()
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_configs_cannot_be_changed():
    with pytest.raises(Exception, match="frozen"):
        TrialConfig().lr = 1.0
    assert hash(Study(name="a", axes=AXES)) == hash(Study(name="a", axes=AXES))


def test_a_study_is_the_product_of_its_axes_seed_by_seed():
    study = Study(name="a", axes=AXES)
    cells = list(study.cells())
    assert len(study) == len(cells) == len(set(cells)) == 2 * 2 * 2 * 3
    assert [cell.seed for cell in cells] == [0] * 8 + [1] * 8 + [2] * 8
    assert len({cell.label for cell in cells}) == 24


def test_axes_given_as_text_become_the_type_of_their_field():
    study = Study(name="a", axes=AXES | {"lr": ("1e-3", "3e-5"), "depth": ("4",)})
    assert study.axis("lr") == (1e-3, 3e-5)
    assert study.axis("depth") == (4,)
    assert {cell.label.split("-lr")[1][:9] for cell in study.cells()} == {"1.000e-03", "3.000e-05"}


def test_a_study_survives_json():
    study = search_spaces.get("pilot")
    assert Study(**json.loads(study.model_dump_json())) == study


def test_named_studies_are_what_the_readme_says():
    pilot = search_spaces.get("pilot")
    assert len(pilot) == 13 * 3 * 2 * 3
    assert pilot.axis("lr")[0] == 1e-3
    assert pilot.axis("lr")[-1] == 1.0
    tinystories = search_spaces.get("tinystories")
    assert (tinystories.base.width, tinystories.base.context) == (320, 256)
    assert len(tinystories) == 13 * 3 * 2 * 3
    assert tinystories.axis("lr")[-1] == 0.3


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.integers(-5, 1), st.integers(1, 4), st.sampled_from([1, 2, 4, 8, 16]))
def test_log_grid_is_distinct_sorted_and_keeps_its_ends(exponent, decades, per_decade):
    low, high = 10.0**exponent, 10.0 ** (exponent + decades)
    grid = log_grid(low, high, per_decade)
    assert len(grid) == decades * per_decade + 1
    assert list(grid) == sorted(set(grid))
    assert grid[0] == pytest.approx(low)
    assert grid[-1] == pytest.approx(high)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.dictionaries(st.sampled_from(["lr", "depth", "steps", "eps", "seed"]), st.floats()))
def test_any_numbers_build_a_config_or_one_line(values):
    try:
        config = TrialConfig(**values)
    except ConfigError as error:
        one_line = str(error).count("\n") == 0
    else:
        one_line = TrialConfig(**config.model_dump()) == config
    assert one_line


def test_data_settings_without_effect_are_refused():
    with pytest.raises(ConfigError, match="has no effect"):
        DataConfig(corpus="synthetic", train="stories.txt")


def test_criteria_have_their_names_and_the_default_is_safe():
    assert all(name == criterion.name for name, criterion in CRITERIA.items())
    assert Criterion() == CRITERIA["safe"]
    assert not CRITERIA["off"].stop
    assert search_spaces.get("control").criterion == criterion_named("off")
    assert search_spaces.get("control").axes == search_spaces.get("pilot").axes
    with pytest.raises(ConfigError, match=r"criterion = 'strict': unknown. Give one of: off"):
        criterion_named("strict")


def test_criterion_rejects_a_margin_outside_0_1():
    with pytest.raises(ConfigError, match=r"failed_margin = 1\.5"):
        Criterion(failed_margin=1.5)


def test_an_arm_is_named_by_the_components_that_are_on():
    names = {
        "off": {},
        "rmsnorm": {"qk_norm": "rmsnorm"},
        "zloss1e-4": {"z_loss": 1e-4},
        "finalcap30": {"final_softcap": 30},
        "rmsnorm+zloss1e-4": {"z_loss": 1e-4, "qk_norm": "rmsnorm"},
    }
    assert {TrialConfig(**settings).arm for settings in names.values()} == set(names)
    arms = study(arms=tuple(names.values()))
    assert arms.arm_names() == tuple(names)
    assert len(arms) == len(list(arms.cells())) == 2 * 2 * 5 * 3
    assert next(arms.cells()).label == "d1-off-lr1.000e-03-s0"
    assert Study(**json.loads(arms.model_dump_json())) == arms


def test_where_qk_norm_alone_varies_it_is_the_arm():
    modern = Study(name="a", base=TrialConfig(z_loss=1e-4, width=64), axes=AXES)
    assert modern.arm_names() == ("off", "rmsnorm")
    assert all(cell.arm == cell.qk_norm for cell in modern.cells())
    assert all(cell.z_loss == 1e-4 for cell in modern.cells())


def test_an_axis_beyond_the_four_makes_arms_named_against_the_base():
    wide = Study(name="a", axes=AXES | {"beta2": (0.95, 0.99), "width": (32, 64)})
    assert len(wide) == len({cell.label for cell in wide.cells()}) == 24 * 4
    assert set(wide.arm_names()) == {
        "+".join(filter(None, parts)) or "off"
        for parts in itertools.product(("", "rmsnorm"), ("", "width=64"), ("", "beta2=0.99"))
    }
    capped = study(base=TrialConfig(final_softcap=30), arms=({}, {"final_softcap": None}))
    assert capped.arm_names() == ("off", "final_softcap=off")


def test_tied_settings_go_with_their_axis_and_name_no_arm():
    tied = {"depth": {1: {"width": 64, "heads": 4}}}
    narrow = Study(name="a", axes=AXES | {"depth": ("1", "2")}, tied=tied)
    assert {(c.depth, c.width, c.heads) for c in narrow.cells()} == {(1, 64, 4), (2, 32, 2)}
    assert narrow.arm_names() == ("off", "rmsnorm")
    assert Study(**json.loads(narrow.model_dump_json())) == narrow
    assert isinstance(hash(narrow), int)


def test_a_study_stored_before_components_existed_loads_and_goes_on(tmp_path):
    (tmp_path / "pilot").mkdir()
    content = (Path(__file__).parent / "fixtures/study_before_components.json").read_text()
    (tmp_path / "pilot" / "study.json").write_text(content)
    folder, pilot = StudyFolder(tmp_path, "pilot"), search_spaces.get("pilot")
    checksum = json.loads(content)["data"]["checksum"]
    folder.refuse_if_different(pilot, checksum)
    more = pilot.replace(axes=dict(pilot.axes) | {"seed": range(9)})
    folder.refuse_if_different(more, checksum)
    assert folder.study().margins.target_loss is None  # declaring one later mixes no results
    assert folder.study().replace(margins=pilot.margins) == pilot
    with pytest.raises(ConfigError, match=r"base.z_loss was 0.0, is 0.0001"):
        folder.refuse_if_different(pilot.replace(base=pilot.base.replace(z_loss=1e-4)), checksum)


def test_the_studies_of_stabilisers_name_their_arms():
    assert search_spaces.get("stabilisers").arm_names() == (
        *("off", "rmsnorm", "layernorm", "l2", "softcap50", "finalcap30", "zloss1e-4"),
        *("sigmareparam", "normformer", "qkclip100"),
    )
    assert len(search_spaces.get("stabilisers")) == 13 * 10 * 3
    assert search_spaces.get("interaction").arm_names() == (
        *("off", "rmsnorm", "zloss1e-4", "rmsnorm+zloss1e-4"),
        *("softcap50", "rmsnorm+softcap50"),
    )
