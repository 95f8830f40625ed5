"""What a trial is and what a study is: validated, immutable, and nothing else.

`TrialConfig` is one training run; `Study` is a base run plus the axes it is varied
along. A value that cannot work is refused here, once, with a line that names the field,
the value and the remedy, so that nothing further down needs to check again.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator

import interventions
from tune_study.components import NEUTRAL, Components, arm_name
from tune_study.settings import Config, ConfigError, Scalar

Overrides = tuple[tuple[str, Scalar], ...]
"""Settings and their values, in place of the base's."""


class DataConfig(Config):
    """Which text, cut into which tokens. Everything that determines the token files.

    docs/data.md tells which settings belong to which corpus and tokenizer; one that is set
    but has no effect is refused.
    """

    corpus: Literal["synthetic", "text", "tinystories", "huggingface"] = Field(
        "synthetic",
        description="'synthetic' (built in), 'text' (local files), 'tinystories' or 'huggingface'",
    )
    train_documents: int | None = Field(
        None, ge=1, description="how many documents to train on, or null for the default"
    )
    validation_documents: int | None = Field(
        None, ge=1, description="how many documents to hold out, or null for the default"
    )
    seed: int = Field(0, ge=0, description="the seed of the story generator, 0 or above")

    name: str | None = Field(None, description="what to call the local text, or null")
    train: str | tuple[str, ...] | None = Field(
        None, description="the training text: a file, a folder or a list of them"
    )
    validation: str | tuple[str, ...] | None = Field(
        None, description="the validation text: a file, a folder or a list of them"
    )
    document_end: str | None = Field(
        "<|endoftext|>",
        min_length=1,
        description="the line that ends a document of a .txt file, or null for one a line",
    )
    column: str = Field("text", description="the field or column that holds the text")
    dataset: str | None = Field(None, description="a data set's name on the Hugging Face hub")
    subset: str | None = Field(None, description="the data set's configuration, or null")
    revision: str | None = Field(None, description="the commit of the data set to pin")
    train_split: str = Field("train", description="the data set's split to train on")
    validation_split: str = Field("validation", description="the data set's split to hold out")

    tokenizer: Literal["bpe", "gpt2", "gpt2-compact", "bytes"] = Field(
        "bpe", description="'bpe', 'gpt2', 'gpt2-compact' or 'bytes'"
    )
    vocab_size: int | None = Field(
        None, ge=257, le=2**20, description="a vocabulary of 257 to 1048576 ids, or null"
    )
    gpt2_vocab: str | None = Field(None, description="the path of GPT-2's vocab.bpe, or null")
    gpt2_encoder: str | None = Field(None, description="the path of GPT-2's encoder.json, or null")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        limits = {"train_documents", "validation_documents"}
        used = {
            "synthetic": limits | {"seed"},
            "text": limits | {"name", "train", "validation", "document_end", "column"},
            "tinystories": limits,
            "huggingface": limits
            | {"dataset", "subset", "revision", "train_split", "validation_split", "column"},
            "bpe": {"vocab_size"},
            "gpt2": {"gpt2_vocab", "gpt2_encoder"},
            "gpt2-compact": {"vocab_size", "gpt2_vocab", "gpt2_encoder"},
            "bytes": set(),
        }
        allowed = used[self.corpus] | used[self.tokenizer] | {"corpus", "tokenizer"}
        for field, info in type(self).model_fields.items():
            value = getattr(self, field)
            if field not in allowed and value != info.default:
                raise ValueError(
                    f"{field} = {value!r}: has no effect with corpus {self.corpus!r} and "
                    f"tokenizer {self.tokenizer!r}. Leave it out"
                )
        needed = {"text": ("train", "validation"), "huggingface": ("dataset", "revision")}
        for field in needed.get(self.corpus, ()):
            if not getattr(self, field):
                raise ValueError(
                    f"{field}: missing with corpus {self.corpus!r}. "
                    f"Give {type(self).model_fields[field].description}"
                )
        if (self.gpt2_vocab is None) != (self.gpt2_encoder is None):
            raise ValueError(
                "gpt2_vocab and gpt2_encoder: only one of the two is set. Give both or neither"
            )
        return self


class TrialConfig(Components):
    """One training run: one cell of a study.

    `lr`, `depth`, `qk_norm` and `seed` are the axes of the question. Defaults of the optimiser are
    those of Wortsman et al. 2023 (arXiv 2309.14322, section 2): AdamW with betas
    (0.9, 0.95), eps 1e-8, clipping at 1, linear warm-up, cosine decay, independent weight
    decay 1e-4. The architecture is nanoGPT's, as long as the components stand at their neutral
    values; muP is off.
    """

    lr: float = Field(1e-2, gt=0, description="the peak learning rate, above 0, such as 1e-3")
    depth: int = Field(2, ge=1, le=256, description="the number of blocks, 1 to 256")
    qk_norm: Literal["off", "rmsnorm", "layernorm", "l2"] = Field(
        "off", description="'off', 'rmsnorm', 'layernorm' or 'l2'"
    )
    seed: int = Field(0, ge=0, lt=2**31, description="a seed from 0 to 2147483647")

    width: int = Field(32, ge=2, description="the residual width, a multiple of heads")
    heads: int = Field(2, ge=1, description="the number of attention heads, a divisor of width")
    context: int = Field(32, ge=2, description="tokens a window, 2 or more")

    steps: int = Field(400, ge=1, description="optimiser steps, 1 or more")
    warmup_steps: int = Field(40, ge=0, description="steps of linear warm-up, fewer than steps")
    min_lr_fraction: float = Field(
        0.0, ge=0, le=1, description="the last learning rate as a fraction of the peak, 0 to 1"
    )
    batch_size: int = Field(16, ge=1, description="windows a forward pass, 1 or more")
    grad_accum: int = Field(1, ge=1, description="forward passes an optimiser step, 1 or more")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's beta1, 0 up to below 1")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW's beta2, 0 up to below 1")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon, above 0")
    weight_decay: float = Field(1e-4, ge=0, description="weight decay, 0 or above")
    decay_mode: Literal["independent", "coupled"] = Field(
        "independent",
        description="'independent' (scaled by the schedule) or 'coupled' (by the learning rate)",
    )
    grad_clip: float = Field(1.0, gt=0, description="the gradient norm to clip at, above 0")

    report_every: int = Field(20, ge=1, description="steps between reports, at most steps")
    val_windows: int = Field(128, ge=1, description="validation windows a report, 1 or more")
    probe_windows: int = Field(8, ge=1, description="windows the diagnostics look at, 1 or more")

    diagnostics: Literal["cheap", "full"] = Field(
        "cheap", description="what a report measures: 'cheap' or 'full'"
    )

    data: DataConfig = Field(default_factory=DataConfig, description="a DataConfig")

    device: Literal["auto", "cpu", "mps", "cuda"] = Field(
        "auto", description="'auto', 'cpu', 'mps' or 'cuda'"
    )
    precision: Literal["fp32", "bf16"] = Field("fp32", description="'fp32' or 'bf16'")
    threads: int = Field(
        1, ge=0, le=1024, description="CPU threads a trial, 1 or more, or 0 for all cores"
    )
    compile: bool = Field(False, description="true or false")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.width % self.heads:
            raise ValueError(
                f"heads = {self.heads}: does not divide width = {self.width}. "
                f"Give a divisor of {self.width}"
            )
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"warmup_steps = {self.warmup_steps}: not below steps = {self.steps}. "
                f"Give at most {self.steps - 1}"
            )
        if self.report_every > self.steps:
            raise ValueError(
                f"report_every = {self.report_every}: above steps = {self.steps}. "
                f"Give at most {self.steps}"
            )
        self._check_components()
        return self

    def _check_components(self) -> None:
        """Refuses components that do not fit the model, or would have no effect."""
        if self.intervention is not None:
            interventions.check(self.intervention)
        if self.heads % self.key_heads:
            raise ValueError(
                f"kv_heads = {self.kv_heads}: does not divide heads = {self.heads}. "
                f"Give a divisor of {self.heads}, or null"
            )
        if self.positions == "rotary" and self.head_width % 2:
            raise ValueError(
                f"positions = 'rotary': turns pairs, and a head is {self.head_width} wide. "
                "Give an even width a head"
            )
        if self.qk_norm == "l2" and self.qk_over == "width":
            raise ValueError("qk_over = 'width': not with qk_norm 'l2'. Give 'head'")
        if self.qk_norm == "off":
            self._without_effect("qk_gain", "qk_over", why="qk_norm 'off'")
        else:
            self._without_effect("qk_clip", why=f"qk_norm {self.qk_norm!r}, which undoes it")
        if self.sigma_reparam:
            self._without_effect("qk_clip", why="sigma_reparam, which undoes it")
        if self.key_heads != self.heads:
            self._without_effect("qk_clip", why="kv_heads, whose keys belong to several heads")
        if self.parametrisation == "standard":
            self._without_effect(
                "mup_base_width", "mup_base_head_width", why="parametrisation 'standard'"
            )

    def _without_effect(self, *fields: str, why: str) -> None:
        for field in fields:
            if (value := getattr(self, field)) != NEUTRAL[field]:
                raise ValueError(f"{field} = {value!r}: does not work with {why}. Leave it out")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """The run among the settings of a trial, which has others, too."""
        return cls(**{name: settings[name] for name in cls.model_fields if name in settings})

    @property
    def head_width(self) -> int:
        """Width of a head, D."""
        return self.width // self.heads

    @property
    def key_heads(self) -> int:
        """Number of key and value heads."""
        return self.kv_heads or self.heads

    @property
    def width_ratio(self) -> float:
        """Width over muP's base width; 1 in the standard parametrisation."""
        return self.width / self.mup_base_width if self.parametrisation == "mup" else 1.0

    @property
    def tokens_per_step(self) -> int:
        """Training tokens one optimiser step consumes."""
        return self.batch_size * self.grad_accum * self.context

    _arm: str | None = PrivateAttr(None)

    @property
    def arm(self) -> str:
        """Readable name of the cell's intervention, such as `off` or `rmsnorm+zloss1e-4`.

        A cell of a study is named by what the study varies; a run by itself, by the components
        that are not at their neutral values.
        """
        if self._arm is not None:
            return self._arm
        return arm_name({k: getattr(self, k) for k in ("qk_norm", *NEUTRAL)}, NEUTRAL)

    @property
    def label(self) -> str:
        """Readable, unique name of the cell inside its study, safe as a folder name."""
        return f"d{self.depth}-{self.arm}-lr{self.lr:.3e}-s{self.seed}"

    def telling(self) -> dict[str, Any]:
        """The settings that determine a run, without components at their neutral value.

        As plain values. What is made of these stays the same when a version of the code adds a
        component, and whatever is measured beside.
        """
        settings = self.model_dump(mode="json", exclude={"diagnostics"})
        return {k: v for k, v in settings.items() if k not in NEUTRAL or v != NEUTRAL[k]}


class Criterion(Config):
    """When a run counts as diverged or failed. docs/divergence.md gives the evidence.

    The defaults are the preset `safe`; `CRITERIA` holds it and the others by name.
    """

    name: str = Field("safe", description="a name for this set of rules")
    stop: bool = Field(True, description="true to stop diverged runs early")
    loss_above_init: bool = Field(
        True, description="true: smoothed training loss above the loss at init is divergence"
    )
    max_logit: float | None = Field(
        1e4, gt=0, description="the attention logit above which a run diverged, or null"
    )
    plateau: float | None = Field(
        0.95,
        gt=0,
        description="the share of the unigram entropy below which the validation loss must not "
        "lie for a large logit to count, or null for any loss",
    )
    patience: int = Field(
        2, ge=1, description="reports in a row that must agree before a run is called diverged"
    )
    failed_margin: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="the normalised final loss above which a finished run failed, 0 to 1",
    )


CRITERIA: Mapping[str, Criterion] = {
    "off": Criterion(name="off", stop=False, loss_above_init=False, max_logit=None, plateau=None),
    "safe": Criterion(),
    "eager": Criterion(name="eager", max_logit=1e3, plateau=None),
}
"""Presets. `off` stops nothing and calls diverged only what is not finite; `safe` stops only on
what was never seen to come back; `eager` saves more, and bends what it measures."""


def criterion_named(name: str) -> Criterion:
    """The preset of that name.

    Raises:
        ConfigError: if there is none; lists those there are.
    """
    if name not in CRITERIA:
        raise ConfigError(f"criterion = {name!r}: unknown. Give one of: {', '.join(CRITERIA)}.")
    return CRITERIA[name]


class Margins(Config):
    """What counts as a difference, declared before the study runs."""

    usable: float = Field(
        0.1, gt=0, description="nats above the best loss at which a learning rate is usable"
    )
    necessity: float = Field(
        0.1, gt=0, description="nats by which off must lose to on before QK-norm is needed"
    )
    equivalence: float = Field(
        0.1, gt=0, description="nats within which the arms count as equal at low learning rate"
    )
    superiority: float = Field(
        0.25, ge=0, description="mean nats by which on must win at high learning rate, 0 or above"
    )
    sensitivity: float = Field(
        0.1, ge=0, description="nats by which on must lower LR sensitivity, 0 or above"
    )
    stable_lr_ratio: float = Field(
        1.2, ge=1, description="the factor by which on must raise the maximum stable LR, 1 or above"
    )
    depth_slope: float = Field(
        0.1,
        ge=0,
        description="decades the necessity threshold must fall a decade of depth, 0 or above",
    )
    lr_range: tuple[float, float] | None = Field(
        None,
        description="the lowest and highest LR that LR sensitivity averages over, such as "
        "[1e-3, 1], or null for the whole grid",
    )
    target_loss: float | None = Field(
        None,
        gt=0,
        description="the validation loss, in nats a token, whose time to reach is compared, or "
        "null to compare none",
    )

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.lr_range is not None and not 0 < self.lr_range[0] < self.lr_range[1]:
            raise ValueError(
                f"lr_range = {list(self.lr_range)}: is not 0 < low < high. "
                "Give the lowest and the highest LR, such as [1e-3, 1]"
            )
        return self


class Search(Config):
    """How a study is searched in place of running all of its grid. docs/edge.md has the method.

    The axis `lr` is then the lattice that the cells are chosen from.
    """

    best_lr: bool = Field(
        True, description="true to look for the best LR of every arm, depth and seed, too"
    )
    error: float = Field(
        0.05, gt=0, lt=0.5, description="the share of verdicts taken to be wrong, above 0"
    )
    confidence: float = Field(
        0.8, gt=0, lt=1, description="the belief that an edge lies within one LR, 0 to 1"
    )
    beneath: int = Field(
        3,
        ge=1,
        description="the most stable cells in a row that an edge must stand on; fewer where one of "
        "them is far from failure",
    )
    every: int | None = Field(
        None,
        ge=1,
        description="n, for every n-th LR to run on every line so that LR sensitivity has a grid, "
        "1 or more, or null",
    )
    threshold: bool = Field(
        False,
        description="true to run the cells near off's edge in the other arms, too, for the "
        "necessity threshold",
    )
    batch: int = Field(12, ge=1, description="the most cells a round runs, 1 or more")
    cells: int | None = Field(
        None, ge=1, description="the most cells to run altogether, 1 or more, or null"
    )
    given: tuple[tuple[str, tuple[Scalar, ...]], ...] = Field(
        (),
        description="the axes of a grid that was finished in the study's folder before the search "
        "began: its cells are evidence from the first round on. A sweep fills it in",
    )

    @field_validator("given", mode="before")
    @classmethod
    def _given_from_mapping(cls, given: Any) -> Any:
        return _pairs(given)


AXES = ("lr", "depth", "qk_norm", "seed")

NOT_ARMS = ("lr", "depth", "seed", "data", "device", "threads", "diagnostics")
"""Settings that an arm cannot have: they have axes of their own, or belong to the whole study."""


class Study(Config):
    """A base run and the axes it is varied along; every combination is one cell.

    The arms are what is compared. Without `arms` they are the values of the axis `qk_norm`,
    crossed with those of every axis beyond lr, depth and seed. With `arms`, a list of
    settings each, such as `[{}, {"qk_norm": "rmsnorm"}, {"z_loss": 1e-4}]`, they are those, and
    lr, depth and seed the only axes.

    `tied` holds settings that go with a value of an axis, such as
    `{"depth": {3: {"width": 512, "heads": 8}}}`; they are no intervention, and no arm is named
    by them.

    Mappings are kept as tuples of pairs, so that a Study is hashable and cannot be changed.
    """

    name: str = Field(description="a name of letters, digits, '-', '_', '.' and '+'")
    description: str = Field("", description="one line on what the study asks")
    base: TrialConfig = Field(default_factory=TrialConfig, description="a TrialConfig")
    axes: tuple[tuple[str, tuple[Scalar, ...]], ...] = Field(
        description="a mapping from axis to values, with lr, depth, qk_norm (unless there are "
        "arms) and seed"
    )
    arms: tuple[Overrides, ...] | None = Field(
        None, description="a list of mappings from setting to value, one an arm, or null"
    )
    tied: tuple[tuple[str, Scalar, Overrides], ...] = Field(
        (), description="a mapping from axis to value to the settings that go with it"
    )
    criterion: Criterion = Field(default_factory=Criterion, description="a Criterion")
    margins: Margins = Field(default_factory=Margins, description="Margins")
    search: Search | None = Field(
        None, description="a Search, or null to run every combination of the axes"
    )
    checkpoint_every_s: float = Field(
        30.0, ge=0, description="seconds between checkpoints of a running cell, 0 or above"
    )
    keep_weights: tuple[str, ...] = Field(
        (), description="a list of cells, or patterns such as 'd2-*-s0', to keep final weights of"
    )

    @field_validator("axes", mode="before")
    @classmethod
    def _axes_from_mapping(cls, axes: Any) -> Any:
        return _pairs(axes)

    @field_validator("arms", mode="before")
    @classmethod
    def _arms_from_mappings(cls, arms: Any) -> Any:
        return tuple(map(_pairs, arms)) if isinstance(arms, list | tuple) else arms

    @field_validator("tied", mode="before")
    @classmethod
    def _tied_from_mappings(cls, tied: Any) -> Any:
        if not isinstance(tied, dict):
            return tied
        return tuple(
            (axis, value, _pairs(settings))
            for axis, by_value in tied.items()
            for value, settings in by_value.items()
        )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", self.name):
            raise ValueError(
                f"name = {self.name!r}: not usable as a folder name. "
                "Give letters, digits, '-', '_', '.' and '+'"
            )
        for name, _ in self.axes:
            if name not in TrialConfig.model_fields:
                raise ValueError(
                    f"axes.{name}: not a setting of a trial. Give one of: "
                    + ", ".join(sorted(TrialConfig.model_fields))
                )
        names = [name for name, _ in self.axes]
        if self.arms is not None and (others := set(names) - {"lr", "depth", "seed"}):
            other = min(others)
            raise ValueError(f"axes.{other}: the study lists its arms. Put {other} into them")
        needed = [name for name in AXES if self.arms is None or name != "qk_norm"]
        if missing := [name for name in needed if name not in names]:
            raise ValueError(f"axes: {missing[0]} has no values. Give at least one")
        varied = {*names, *(name for arm in self.arms or () for name, _ in arm)}
        if loose := [axis for axis, _, _ in self.tied if axis not in varied]:
            raise ValueError(f"tied.{loose[0]}: is not varied. Give an axis of the study")
        for name, axis_values in self.axes:
            if not axis_values:
                raise ValueError(f"axes.{name}: has no values. Give at least one")
            try:
                typed = [getattr(self._with({name: v}), name) for v in axis_values]
            except ConfigError as error:
                raise ValueError(f"axes.{str(error).rstrip('.')}") from None
            if len(set(typed)) != len(typed):
                raise ValueError(f"axes.{name} = {typed}: has a value twice. Give each once")
        self._check_arms()
        self._check_search()
        return self

    def _check_search(self) -> None:
        """The learning rates that all lines run end where the lattice ends."""
        every = None if self.search is None else self.search.every
        steps = len(dict(self.axes)["lr"]) - 1
        if every is not None and (steps % every or steps == 0):
            raise ValueError(
                f"search.every = {every}: does not divide the {steps} steps of the axis lr. "
                f"Give {_divisors(steps)}, or null"
            )

    def _check_arms(self) -> None:
        """Every arm builds at every depth, and has a name of its own."""
        if self.arms == ():
            raise ValueError("arms: has no values. Give at least one, or null")
        for name in {name for arm in self.arms or () for name, _ in arm}:
            if name not in TrialConfig.model_fields or name in NOT_ARMS:
                raise ValueError(
                    f"arms.{name}: not a setting that an arm can have. Give one of: "
                    + ", ".join(sorted(TrialConfig.model_fields.keys() - set(NOT_ARMS)))
                )
        axes = dict(self.axes)
        try:
            names = [self._cell(at).arm for at in self._product({"depth": axes["depth"]})]
        except ConfigError as error:
            raise ValueError(f"arms: {str(error).rstrip('.')}") from None
        per_depth = names[: len(names) // len(axes["depth"])]
        if twice := [name for name in per_depth if per_depth.count(name) > 1]:
            raise ValueError(f"arms: two are called {twice[0]!r}. Give each once")

    def axis(self, name: str) -> tuple[Any, ...]:
        """The values of one axis, in the order given, in the type of their field."""
        return tuple(getattr(self._with({name: v}), name) for v in dict(self.axes)[name])

    def arm_names(self) -> tuple[str, ...]:
        """The arms, in the order given."""
        first = dict(self.axes)["depth"][0]
        return tuple(self._cell(at).arm for at in self._product({"depth": (first,)}))

    def cells(self) -> Iterator[TrialConfig]:
        """Every cell, seed by seed, so that a cut sweep leaves whole grids behind."""
        axes = dict(self.axes)
        for at in self._product({name: axes[name] for name in ("seed", "lr", "depth")}):
            yield self._cell(at)

    def __len__(self) -> int:
        return math.prod(len(values) for _, values in self.axes) * len(self.arms or ((),))

    def _product(self, axes: Mapping[str, tuple[Scalar, ...]]) -> Iterator[dict[str, Scalar]]:
        """The settings of every combination of these axes with those that make the arms."""
        others = {name: values for name, values in self.axes if name not in {"seed", "lr", "depth"}}
        names = [*axes, *others]
        for values in itertools.product(*axes.values(), *others.values()):
            for arm in self.arms or ((),):
                yield dict(zip(names, values, strict=True)) | dict(arm)

    def _with(self, settings: Mapping[str, Scalar]) -> TrialConfig:
        """The base with these settings and what is tied to them."""
        tied = {
            name: value
            for axis, at, overrides in self.tied
            if axis in settings and str(settings[axis]) == str(at)
            for name, value in overrides
        }
        return self.base.replace(**tied | dict(settings))

    def _cell(self, settings: Mapping[str, Scalar]) -> TrialConfig:
        """One cell, which knows by what name the study calls its arm."""
        cell, plain = self._with(settings), self._with({"depth": settings["depth"]})
        varied = {"qk_norm", *settings} - {"seed", "lr", "depth"}
        names = [name for name in TrialConfig.model_fields if name in varied]
        cell._arm = arm_name(*({name: getattr(c, name) for name in names} for c in (cell, plain)))
        return cell


def _divisors(n: int) -> str:
    return ", ".join(str(k) for k in range(1, n + 1) if n % k == 0) or "an axis of more values"


def _pairs(settings: Any) -> Any:
    return tuple(settings.items()) if isinstance(settings, dict) else settings


def log_grid(low: float, high: float, per_decade: int) -> tuple[float, ...]:
    """Log-spaced values from low to high, both included, rounded to three digits.

    Three digits keep names and axis labels readable; at 16 points a decade they are still
    distinct.

    Raises:
        ConfigError: if high is not a whole number of grid steps above low.
    """
    count = math.log10(high / low) * per_decade
    if abs(count - round(count)) > 0.05:
        raise ConfigError(
            f"log_grid: {low:g} to {high:g} is {count:.2f} steps at {per_decade} a decade. "
            "Give ends that lie on the grid."
        )
    return tuple(float(f"{low * 10 ** (k / per_decade):.3g}") for k in range(round(count) + 1))
