"""Which figures a report has: the tables each is drawn from, and what its caption says."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
from altair.utils.schemapi import debug_mode

from analysis import estimators, plots, robustness
from analysis.load import Results, load
from analysis.plots.metrics import ALL_LAYERS
from analysis.summary import has_pairs
from tune_study.config import CRITERIA, Criterion


@dataclass(frozen=True)
class Figure:
    """A figure under its file name, with the caption that says what is drawn and how to read it."""

    name: str
    caption: str
    draw: Callable[[plots.Layout], Any]

    def spec(self, layout: plots.Layout) -> dict[str, Any]:
        """The Vega-Lite specification; the tests, not every report, check it against the schema."""
        with debug_mode(False):
            return _specification(self.draw(layout))


def _specification(chart: Any, **context: Any) -> dict[str, Any]:
    """`chart.to_dict()`, composed of its parts' specifications.

    Altair copies a chart deeply, with all its parts and tables, at every level of it.
    """
    whole: dict[str, Any] = {}
    for kind, name in ((alt.ConcatChart, "concat"), (alt.LayerChart, "layer")):
        if isinstance(chart, kind):
            whole[name] = [_specification(part, top_level=False) for part in chart[name]]
            chart[name] = []
    if context.get("top_level", True):
        whole["datasets"], chart.datasets = chart.datasets, alt.Undefined
    return chart.to_dict(validate=False, context=context) | whole


@dataclass(frozen=True)
class Diagnostic:
    """A diagnostic that cells report: its key in `history`, and how it is drawn."""

    key: str
    name: str
    title: str
    y_title: str
    log: bool
    caption: str


DIAGNOSTICS = (
    Diagnostic(
        "attn/max_logit",
        "max_logit",
        "Largest attention logit",
        "max attention logit",
        True,
        "The largest attention logit on the probe batch at a cell's last report. Logits that grow "
        "with the learning rate saturate the softmax; QK-norm bounds them.",
    ),
    Diagnostic(
        "attn/entropy",
        "attn_entropy",
        "Attention entropy",
        "attention entropy (nats)",
        False,
        "Mean entropy of the attention rows on the probe batch at a cell's last report (Zhai et "
        "al. 2023). 0 means that every query attends to one position: attention has collapsed.",
    ),
    Diagnostic(
        "act/kurtosis",
        "kurtosis",
        "Activation kurtosis",
        "kurtosis (m4 / m2²)",
        True,
        "Kurtosis of the residual stream's activations at a cell's last report; 3 for a Gaussian. "
        "Large values mean that few channels carry most of the magnitude.",
    ),
    Diagnostic(
        "attn/sink",
        "attn_sink",
        "Attention sinks",
        "share of sink heads",
        False,
        "Share of heads whose mean attention to the first token exceeds 0.3 (Gu et al. 2024) at a "
        "cell's last report.",
    ),
)


def figures(results: Results, summary: dict[str, Any]) -> list[Figure]:
    """The figures of a report, in reading order.

    Args:
        results: as `analysis.load.load` gives them.
        summary: as `analysis.summary.summarise` makes it of them.
    """
    cells, history, study = results.cells, results.history, results.study
    arms = summary["arms"]
    curve, rules = loss_curve(cells), reference_losses(cells)
    sensitivity = estimators.lr_sensitivity(cells, study.margins.lr_range)
    edges = estimators.max_stable_lr(cells)
    lrs = sorted(cells["lr"].unique())
    drawn = [
        Figure(
            "lr_loss",
            "Final validation loss against the peak learning rate, one panel a depth. Each mark "
            "is one cell, its shape the cell's state; a line is the median over seeds and ends "
            "where no seed has a loss; a band is the 95 % t interval of the mean, drawn where "
            "every seed is stable. Marks above the curves are cells without a loss. QK-norm is "
            "worth having from where the lines part. Beneath: LR sensitivity, the mean excess "
            "over the best loss across the grid, after figure 1 of Wortsman et al. (2023). "
            "Click a mark to follow its cell through the other figures; shift-click adds one.",
            lambda layout: plots.lr_loss(cells, curve, rules, sensitivity, arms, layout),
        ),
        Figure(
            "max_stable_lr",
            "The highest learning rate at which it and all lower ones are stable, against depth. "
            "The grid only says between which two learning rates the edge of a seed lies, so a "
            "seed is a bar; an arrow at an end of the grid says that the edge lies beyond it.",
            lambda layout: plots.max_stable_lr(edges, arms, lrs, layout),
        ),
    ]
    if has_pairs(cells):
        gains = estimators.paired_by_lr(cells)
        needed = estimators.necessity_by_seed(cells, study.margins.necessity)
        thresholds = estimators.necessity_threshold(cells, study.margins.necessity)
        drawn.append(
            Figure(
                "necessity",
                "The lowest learning rate from which on QK-norm is needed, against depth: off is "
                "unstable where on is stable, or loses to it by more than "
                f"{study.margins.necessity:g} nats a token, from there up to on's own edge.",
                lambda layout: plots.necessity(needed, thresholds, lrs, layout=layout),
            )
        )
    else:
        gains = _no_gains()
    drawn.append(
        Figure(
            "phase",
            "How many seeds are stable at each learning rate and depth, arm by arm, and the "
            "paired difference of the final losses, same seed: blue where QK-norm ends lower.",
            lambda layout: plots.phase_map(curve, gains, layout),
        )
    )
    target = halfway_loss(cells)
    if len(history) and np.isfinite(target):
        times = estimators.steps_to_threshold(cells, history, target)
        medians = estimators.median_steps(times)
        drawn.append(
            Figure(
                "steps_to_loss",
                f"Steps until the validation loss is at {target:.2f} nats a token, half of the way "
                "from the unigram entropy to the study's best loss, interpolated between reports. "
                "An arrow is a cell that did not get there within the steps it was given.",
                lambda layout: plots.steps_to_loss(times, medians, target, layout),
            )
        )
    drawn.extend(_diagnostic_figures(cells, history))
    if len(history):
        drawn.append(
            Figure(
                "curves",
                "Validation loss over training, one line a cell, from the loss at initialisation; "
                "the mark at its end is the cell's state at the step where its verdict fell. "
                "Cells chosen in the other figures or in the table are brought out here.",
                lambda layout: plots.training_curves(cells, history, layout),
            )
        )
    if summary["verdicts"] and cells["seed"].nunique() > 1:
        # Judging some twenty times takes seconds, so only once and only for a drawing.
        panel = functools.cache(lambda: robustness.panel(cells, study.margins, _rejudged(results)))
        drawn.append(
            Figure(
                "robustness",
                "The verdicts when one choice behind them is made otherwise: the learning rates, a "
                "margin, the rules of divergence, the seeds without one of them. A conclusion to "
                "rely on keeps its verdict.",
                lambda layout: plots.robustness(panel(), layout),
            )
        )
    return drawn


def _rejudged(results: Results) -> dict[str, Callable[[], pd.DataFrame]]:
    """The cells judged by each preset of divergence that is not the study's own."""
    source, study = results.source, results.study
    if source is None:
        return {}

    def cells_under(criterion: Criterion) -> pd.DataFrame:
        return load(source, study, criterion).cells

    return {
        name: functools.partial(cells_under, criterion)
        for name, criterion in CRITERIA.items()
        if criterion.replace(name=study.criterion.name) != study.criterion
    }


def loss_curve(cells: pd.DataFrame) -> pd.DataFrame:
    """Final loss as a function of the learning rate, none above the loss at initialisation."""
    finite = cells["loss"].where(np.isfinite(cells["loss"]))
    lost = finite.isna() & cells["state"].isin(["diverged", "failed"])
    clamped = finite.clip(upper=cells["loss_init"]).mask(lost, cells["loss_init"])
    return estimators.by_lr(cells.assign(loss=clamped))


def reference_losses(cells: pd.DataFrame) -> pd.DataFrame:
    """The losses that the curves are read against: depth, name, value (median over cells)."""
    names = {
        "loss_init": "loss at init",
        "unigram_entropy": "unigram entropy",
        "loss_floor": "entropy floor",
    }
    medians = cells.groupby("depth")[list(names)].median().rename(columns=names).reset_index()
    table = medians.melt(id_vars="depth", var_name="name", value_name="value")
    return table[np.isfinite(table["value"])].reset_index(drop=True)


def halfway_loss(cells: pd.DataFrame) -> float:
    """Half of the way from the unigram entropy to the best final loss of a stable cell."""
    stable = cells[cells["state"].eq("stable") & np.isfinite(cells["loss"])]
    return float((cells["unigram_entropy"].median() + stable["loss"].min()) / 2)


def _diagnostic_figures(cells: pd.DataFrame, history: pd.DataFrame) -> Iterator[Figure]:
    """A figure for each diagnostic that the study recorded."""
    for diagnostic in DIAGNOSTICS:
        values = diagnostic_values(cells, history, diagnostic.key)
        if values is None:
            continue
        curve = layer_curves(values)
        yield Figure(
            diagnostic.name,
            diagnostic.caption,
            lambda layout, d=diagnostic, v=values, c=curve: plots.metric(  # type: ignore[misc]
                v, c, d.title, d.y_title, d.log, layout
            ),
        )


def layer_curves(values: pd.DataFrame) -> pd.DataFrame:
    """What `diagnostic_values` gives, as functions of the learning rate, layer by layer.

    Returns:
        DataFrame: as `analysis.estimators.by_lr`, with `layer` in place of `metric`.
    """
    layers = values["layer"].unique().tolist()
    keys = ["cell", "lr", "depth", "qk_norm", "seed", "state"]
    wide = values.pivot(index=keys, columns="layer", values="value").reset_index()
    curve = estimators.by_lr(wide, layers).rename(columns={"metric": "layer"})
    number = curve["layer"].where(curve["layer"] != ALL_LAYERS, "-1").astype(int)
    return curve[curve["depth"] > number].reset_index(drop=True)


def diagnostic_values(cells: pd.DataFrame, history: pd.DataFrame, key: str) -> pd.DataFrame | None:
    """A diagnostic at each cell's last report, over all layers and layer by layer.

    Returns:
        One row a (cell, layer): the cell's axes and state, layer, value; None where the study
        did not record it.
    """
    if key not in history.columns:
        return None
    prefix = f"{key}/layer_"
    per_layer = sorted(
        (name for name in history.columns if name.startswith(prefix)),
        key=lambda name: int(name.removeprefix(prefix)),
    )
    last = estimators.with_last_report(cells, history, [key, *per_layer])
    keep = ["cell", "lr", "depth", "qk_norm", "seed", "state"]
    parts = [last[keep].assign(layer=ALL_LAYERS, value=last[key])]
    for name in per_layer:
        number = int(name.removeprefix(prefix))
        inside = last[last["depth"] > number]
        parts.append(inside[keep].assign(layer=str(number), value=inside[name]))
    return pd.concat(parts, ignore_index=True)


def _no_gains() -> pd.DataFrame:
    """What `estimators.paired_by_lr` would give without a pair of arms."""
    columns = {"depth": "int64", "qk_norm": "str", "lr": "float64", "gain": "float64"}
    columns["significant"] = "bool"
    return pd.DataFrame(columns=list(columns)).astype(columns)
