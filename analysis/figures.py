"""Which figures a report has: the tables each is drawn from, and what its caption says."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis import early_warning, estimators, plots, robustness, stabiliser_report
from analysis.arms import qk_norm_cells, qk_norm_part
from analysis.figure import Figure
from analysis.figure_data import (
    depth_trend,
    diagnostic_values,
    layer_curves,
    loss_curve,
    no_gains,
    reference_losses,
)
from analysis.load import Results, load
from analysis.summary import arms_in_question, has_pairs, json_safe
from tune_study.config import CRITERIA, Criterion


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
    """The figures of a report, in reading order; those for which the study has no data are absent.

    In a study of many arms all but the last are about QK-norm: they are drawn from the baseline and
    RMSNorm alone.

    Args:
        results: as `analysis.load.load` gives them.
        summary: as `analysis.summary.summarise` makes it of them.
    """
    part, asked = qk_norm_part(results), summary | {"arms": arms_in_question(summary)}
    drawn = [figure for draw in _DRAWN for figure in draw(part, asked)]
    if summary["stabilisers"] is not None:
        drawn += stabiliser_report.figures(results, json_safe(summary["stabilisers"]))
    return drawn


def _lr_loss(results: Results, summary: dict[str, Any]) -> Iterator[Figure]:
    cells = results.tried.cells
    curve, rules = loss_curve(cells), reference_losses(cells)
    sensitivity = estimators.lr_sensitivity(results.cells, results.study.margins.lr_range)
    yield Figure(
        "lr_loss",
        f"Final validation loss of {_n(len(cells), 'cell')} against the peak learning rate, one "
        "panel a depth. Each mark is one cell, its shape the cell's state; a line is the median "
        "over seeds and ends where no seed has a loss; a band is the 95 % t interval of the mean, "
        "drawn where every seed is stable. Marks above the curves are cells without a loss. "
        "QK-norm is worth having from where the lines part. Beneath: LR sensitivity, the mean "
        "excess over the best loss across the grid, after figure 1 of Wortsman et al. (2023).",
        lambda layout: plots.lr_loss(cells, curve, rules, sensitivity, summary["arms"], layout),
    )


def _curves(results: Results, summary: dict[str, Any]) -> Iterator[Figure]:
    cells, history = results.tried.cells, results.history
    if len(history):
        yield Figure(
            "curves",
            "Validation loss over training, one line for each of the "
            f"{_n(_reported(history), 'cell')} that reported, from the loss at initialisation. The "
            "mark on a line is the cell's state, at the step where the verdict fell. Cells chosen "
            "in another figure or in the table are brought out here.",
            lambda layout: plots.training_curves(cells, history, layout),
        )


def _max_stable_lr(results: Results, summary: dict[str, Any]) -> Iterator[Figure]:
    edges = estimators.max_stable_lr(results.cells)
    yield Figure(
        "max_stable_lr",
        "The highest learning rate at which it and all lower ones are stable, against depth, for "
        f"{_n(len(edges), 'series')} of learning rates, one a seed, arm and depth. The grid only "
        "says between which two learning rates a seed's edge lies, so a seed is a bar; an arrow at "
        "an end of the grid says that the edge lies beyond it.",
        lambda layout: plots.max_stable_lr(edges, summary["arms"], _lrs(results), layout),
    )


def _phase(results: Results, summary: dict[str, Any]) -> Iterator[Figure]:
    cells = results.tried.cells
    curve = loss_curve(cells)
    gains = estimators.paired_by_lr(cells) if has_pairs(cells) else no_gains()
    significant, tested = int(gains["significant"].sum()), int(gains["gain"].notna().sum())
    yield Figure(
        "phase",
        f"How many seeds, of {cells['seed'].nunique()}, are stable at each learning rate and "
        "depth, arm by arm."
        + (
            " Last, the paired difference of the final losses, same seed: blue where QK-norm ends "
            f"lower. A dot marks the {significant} of {tested} differences that are significant "
            "at 5 % (paired t test, Holm's adjustment for testing all of them)."
            if tested
            else ""
        ),
        lambda layout: plots.phase_map(curve, gains, layout),
    )


def _necessity(results: Results, summary: dict[str, Any]) -> Iterator[Figure]:
    cells, margin = results.cells, results.study.margins.necessity
    if not has_pairs(cells):
        return
    needed = estimators.necessity_by_seed(cells, margin)
    thresholds = estimators.necessity_threshold(cells, margin)
    trend = depth_trend(needed, summary["verdicts"])
    yield Figure(
        "necessity",
        "The lowest learning rate from which on QK-norm is needed, against depth: off is unstable "
        f"where on is stable, or loses to it by more than {margin:g} nats a token, from there up "
        f"to on's own edge; {_n(len(needed), 'pair')} of seed and depth. The dashed line has the "
        "slope that H3 is judged by, its band the slope's 95 % interval: below level, the need "
        "comes earlier in deeper models.",
        lambda layout: plots.necessity(needed, thresholds, _lrs(results), *trend, layout=layout),
    )


def _steps_to_loss(results: Results, summary: dict[str, Any]) -> Iterator[Figure]:
    cells, history = results.tried.cells, results.history
    target = results.study.margins.target_loss
    if not len(history) or target is None:
        return
    times = estimators.steps_to_threshold(cells, history, target)
    times = times.merge(cells[[*estimators.AXIS_KEYS, "cell"]], on=estimators.AXIS_KEYS)
    medians = estimators.median_steps(times)
    yield Figure(
        "steps_to_loss",
        f"Steps until the validation loss is at {target:.2f} nats a token, the target that the "
        f"study declares, interpolated between reports, for {_n(len(times), 'cell')}. An arrow is "
        "a cell that did not get there within the steps it was given, a square one that errored or "
        "is missing, at the last step seen.",
        lambda layout: plots.steps_to_loss(times, medians, target, layout),
    )


def _diagnostics(results: Results, summary: dict[str, Any]) -> Iterator[Figure]:
    for diagnostic in DIAGNOSTICS:
        values = diagnostic_values(results.tried.cells, results.history, diagnostic.key)
        if values is None:
            continue
        curve = layer_curves(values)
        yield Figure(
            diagnostic.name,
            f"{diagnostic.caption} {_n(_reported(results.history), 'cell')}; on the page, a layer "
            "can be chosen beneath the figure.",
            lambda layout, d=diagnostic, v=values, c=curve: plots.metric(  # type: ignore[misc]
                v, c, d.title, d.y_title, d.log, layout
            ),
        )


def _early_warning(results: Results, summary: dict[str, Any]) -> Iterator[Figure]:
    warned = early_warning.warnings(results.tried.cells, results.history)
    if len(warned):
        counts = early_warning.warning_summary(warned)
        yield Figure(
            "early_warning",
            "How many steps before the loss each signal announced a failure, one mark for each of "
            f"the {_n(warned['cell'].nunique(), 'cell')} that failed or diverged: right of 0 the "
            "signal came first. A signal warns at the first report where it is more extreme than "
            "in any stable cell at or above its arm's best learning rate; the loss leaves its "
            "course where it rises above theirs for good. So no stable cell warns, and leads are "
            "known to one report.",
            lambda layout: plots.early_warning(warned, counts, layout),
        )


def _robustness(results: Results, summary: dict[str, Any]) -> Iterator[Figure]:
    cells, margins = results.cells, results.study.margins
    if not summary["verdicts"] or cells["seed"].nunique() < 2:
        return
    # Judging some twenty times takes a second, so only once and only for a drawing.
    panel = functools.cache(lambda: robustness.panel(cells, margins, _rejudged(results)))
    yield Figure(
        "robustness",
        "The verdicts when one choice behind them is made otherwise: the learning rates, a "
        "margin, the rules of divergence, the "
        f"{_n(cells['seed'].nunique(), 'seed')} without one of them. A conclusion to rely on "
        "keeps its verdict.",
        lambda layout: plots.robustness(panel(), layout),
    )


_DRAWN = (
    _lr_loss,
    _curves,
    _max_stable_lr,
    _phase,
    _necessity,
    _steps_to_loss,
    _diagnostics,
    _early_warning,
    _robustness,
)


def _lrs(results: Results) -> list[float]:
    return sorted(results.cells["lr"].unique())


def _reported(history: pd.DataFrame) -> int:
    return int(history["cell"].nunique())


def _n(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 or noun.endswith('s') else 's'}"


def _rejudged(results: Results) -> dict[str, Callable[[], pd.DataFrame]]:
    """The cells judged by each preset of divergence that is not the study's own."""
    source, study = results.source, results.study
    if source is None:
        return {}

    def cells_under(criterion: Criterion) -> pd.DataFrame:
        return qk_norm_cells(load(source, study, criterion).cells)

    return {
        name: functools.partial(cells_under, criterion)
        for name, criterion in CRITERIA.items()
        if criterion.replace(name=study.criterion.name) != study.criterion
    }
