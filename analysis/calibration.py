"""What a rule of divergence does to the answer: replayed over a study that stopped nothing.

A control study runs every cell to its end, so the end is known of the cells a rule would have
stopped. `replay` cuts the histories where the rule says stop; the estimators then see what a
sweep under that rule would have left, and everything they say is compared with the control.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis import estimators, hypotheses
from analysis.estimators import SEED_KEYS
from analysis.load import Results, judge_finished
from analysis.tables import NO_EVIDENCE, as_cells
from tune_study.config import CRITERIA, ConfigError, Criterion
from tune_study.divergence import diverged

Array = NDArray[np.float64]

SIGNALS = ("val/loss", "val/loss_init", "train/loss_ema", "attn/max_logit", "nonfinite_step")
"""The columns of `history` that `divergence.diverged` reads, beside the step."""

STOPPED_LOSS: Mapping[str, Callable[[pd.DataFrame], pd.Series]] = {
    "loss at stop": lambda cells: cells["loss"],
    "loss at init": lambda cells: cells["loss_init"],
    "unigram entropy": lambda cells: cells["unigram_entropy"],
    "larger of stop and unigram": lambda cells: cells[["loss", "unigram_entropy"]].max(axis=1),
    "smaller of stop and unigram": lambda cells: cells[["loss", "unigram_entropy"]].min(axis=1),
    "best before the stop": lambda cells: cells["loss_best"],
    "smaller of stop and near unigram": lambda cells: _near_unigram(cells),
}
"""What may stand for the final loss of a stopped cell, by name."""

BINS = tuple(round(0.1 * k, 1) for k in range(11))
"""Edges of the histogram of normalised losses; what lies beyond them counts in the end bins."""


def _near_unigram(cells: pd.DataFrame) -> pd.Series:
    """The rule of `estimators.lr_sensitivity`: STOPPED_SHARE of the way from l* to H1."""
    best = cells["loss"].where(cells["state"] == "stable")
    best = best.groupby([cells[key] for key in SEED_KEYS]).transform("min")
    near = best + estimators.STOPPED_SHARE * (cells["unigram_entropy"] - best)
    return near.clip(upper=cells["loss"])


@dataclass(frozen=True)
class Calibration:
    """What the criteria do to one control study.

    Attributes:
        study: its name.
        cells: how many there are.
        criteria: one row a criterion: n_stopped, n_failures (unstable in the control), false_stops,
            caught, missed (ran to its end), relabelled (stable on one side only), saved (share of
            all steps), edge_shift (largest, grid steps), sensitivity_shift (of the (depth, arm)
            with the largest in units of its spread), sensitivity_shift_sd, verdicts (changes).
        shifts: one row a (criterion, depth, arm): mean and largest shift of LR sensitivity over
            seeds in nats, its standard deviation over seeds in the control, their ratio, and the
            largest shift of the maximum stable LR in grid steps.
        rules: one row a (criterion, rule for a stopped cell's loss): mean absolute shift and
            largest mean shift of LR sensitivity over (depth, arm), in nats and spreads.
        losses: histogram of normalised final losses above each arm's best LR, one row a
            (arm, bin).
        stops: one row a stopped cell: criterion, cell, control_state, step, control_loss, loss,
            reason.
    """

    study: str
    cells: int
    criteria: pd.DataFrame
    shifts: pd.DataFrame
    rules: pd.DataFrame
    losses: pd.DataFrame
    stops: pd.DataFrame


def calibrate(results: Results, criteria: Iterable[Criterion] | None = None) -> Calibration:
    """Compares what each criterion would have left with the control.

    Args:
        results: a study swept with stopping off, loaded under any criterion.
        criteria: the presets by default.

    Raises:
        ConfigError: if a cell did not run to its end; names the remedy.
    """
    control = replay(results, CRITERIA["off"])
    _require_complete(results, control)
    summary, shifts, rules, stops = [], [], [], []
    for criterion in criteria if criteria is not None else CRITERIA.values():
        cells = replay(results, criterion)
        shift = sensitivity_shift(results, cells, control)
        shifts.append(_named(criterion, shift))
        rules.append(_named(criterion, stopped_loss_rules(results, cells, control)))
        stops.append(_named(criterion, _stops(cells, control)))
        summary.append(_summary(results, criterion, cells, control, shift))
    return Calibration(
        study=results.study.name,
        cells=len(control),
        criteria=pd.DataFrame(summary),
        shifts=pd.concat(shifts, ignore_index=True),
        rules=pd.concat(rules, ignore_index=True),
        losses=normalised_losses(control),
        stops=pd.concat(stops, ignore_index=True),
    )


def replay(results: Results, criterion: Criterion) -> pd.DataFrame:
    """The cells as a sweep under `criterion` would have left them.

    Returns:
        DataFrame: a `cells` table, with `steps_run` beside it: the report at which each cell
        would have ended. Under a criterion that does not stop, states are judged and every cell
        keeps its last row.
    """
    warmup = {config.label: config.warmup_steps for config in results.study.cells()}
    reports = dict(list(results.history.groupby("cell", sort=False)))
    rows: list[dict[str, Any]] = []
    for record in results.cells.to_dict("records"):
        cell = {str(key): value for key, value in record.items()}
        history = reports.get(cell["cell"], results.history[:0]).sort_values("step")
        if cell["state"] in NO_EVIDENCE:
            rows.append(cell | {"steps_run": int(history["step"].max()) if len(history) else 0})
        else:
            rows.append(cell | _outcome(cell, history, criterion, warmup[cell["cell"]]))
    judge_finished(rows, criterion)
    table = as_cells([{k: v for k, v in row.items() if k != "steps_run"} for row in rows])
    table["steps_run"] = [row["steps_run"] for row in rows]
    return table


def _outcome(
    cell: dict[str, Any], history: pd.DataFrame, criterion: Criterion, warmup_steps: int
) -> dict[str, Any]:
    """What the criterion makes of one history: the columns of `cells` that it changes."""
    verdict = diverged(_rows(history, cell["unigram_entropy"]), criterion, warmup_steps)
    state, reason, step = "stable", "", cell["steps"]
    if verdict is not None:
        state, reason, step = verdict.state, verdict.reason, verdict.step
        if criterion.stop:
            # The stop falls at the report that shows it, which a non-finite step precedes.
            history = history.iloc[: int((history["step"] < step).sum()) + 1]
    end = history.iloc[-1]
    return {
        "state": state,
        "reason": reason,
        "step": step,
        "loss": end["val/loss"],
        "loss_best": history["val/loss"].min(),
        "normalised_loss": np.nan,
        "steps_run": int(end["step"]),
    }


def _rows(history: pd.DataFrame, unigram_entropy: float) -> list[dict[str, Any]]:
    """Reports as `diverged` reads them: what is not a number is None."""
    table = history[["step", *SIGNALS]].astype(object)
    rows = table.where(table.notna(), None).to_dict("records")
    return [
        {str(key): value for key, value in row.items()} | {"data/unigram_entropy": unigram_entropy}
        for row in rows
    ]


def _require_complete(results: Results, control: pd.DataFrame) -> None:
    short = control[control["steps_run"] < control["steps"]]
    if len(short):
        name = results.study.name
        raise ConfigError(
            f"{name}: is no control study, {len(short)} of {len(control)} cells did not run to "
            f"their end ({short['cell'].iloc[0]}, among others). Sweep it without stopping: "
            f"python -m tune_study sweep {name} --criterion off --name {name}-control"
        )


def _named(criterion: Criterion, table: pd.DataFrame) -> pd.DataFrame:
    table.insert(0, "criterion", criterion.name)
    return table


def _unstable(cells: pd.DataFrame) -> pd.Series:
    return cells["state"].isin(["failed", "diverged"])


def _summary(
    results: Results,
    criterion: Criterion,
    cells: pd.DataFrame,
    control: pd.DataFrame,
    shift: pd.DataFrame,
) -> dict[str, Any]:
    failures = _unstable(control)
    stopped = cells["steps_run"] < cells["steps"]
    worst = shift.iloc[int(shift["shift_sd"].abs().fillna(0).to_numpy().argmax())]
    return {
        "criterion": criterion.name,
        "n_stopped": int(stopped.sum()),
        "n_failures": int(failures.sum()),
        "false_stops": int((stopped & ~failures).sum()),
        "caught": int((stopped & failures).sum()),
        "missed": int((~stopped & failures).sum()),
        "relabelled": int((_unstable(cells) != failures).sum()),
        "saved": float(1 - cells["steps_run"].sum() / cells["steps"].sum()),
        "edge_shift": int(shift["edge_shift"].max()),
        "sensitivity_shift": float(worst["shift"]),
        "sensitivity_shift_sd": float(worst["shift_sd"]),
        "verdicts": "; ".join(verdict_changes(results, cells, control)),
    }


def _stops(cells: pd.DataFrame, control: pd.DataFrame) -> pd.DataFrame:
    stopped = (cells["steps_run"] < cells["steps"]).to_numpy()
    table = cells.loc[stopped, ["cell", "lr", "depth", "qk_norm", "seed", "step", "loss"]]
    table["reason"] = cells.loc[stopped, "reason"]
    table["control_state"] = control.loc[stopped, "state"]
    table["control_loss"] = control.loc[stopped, "loss"]
    table["control_normalised_loss"] = control.loc[stopped, "normalised_loss"]
    return table.reset_index(drop=True)


def sensitivity_shift(results: Results, cells: pd.DataFrame, control: pd.DataFrame) -> pd.DataFrame:
    """By how much LR sensitivity and the maximum stable LR move, arm by arm.

    Returns:
        DataFrame: depth, qk_norm, n (seeds), control (mean LR sensitivity), sd (of the control,
        over seeds), shift (mean over seeds), shift_max (of one seed, by size), shift_sd
        (shift / sd), edge_shift (largest of one seed, grid steps).
    """
    lr_range = results.study.margins.lr_range
    was = estimators.lr_sensitivity(control, lr_range)
    now = estimators.lr_sensitivity(cells, lr_range)
    table = was[SEED_KEYS].assign(control=was["value"], shift=now["value"] - was["value"])
    table["edge"] = (_edge_position(cells) - _edge_position(control)).abs().to_numpy()
    return _by_arm(table)


def _edge_position(cells: pd.DataFrame) -> pd.Series:
    """How many learning rates of the grid lie at or below the maximum stable one."""
    edge = estimators.max_stable_lr(cells)
    grid = np.unique(cells["lr"])
    return pd.Series(np.searchsorted(grid, edge["low"].to_numpy(float) * (1 + 1e-9)))


def _by_arm(table: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for (depth, arm), group in table.groupby(["depth", "qk_norm"], sort=True):
        shift, sd = group["shift"], float(group["control"].std(ddof=1))
        mean = float(shift.mean())
        rows.append(
            {
                "depth": depth,
                "qk_norm": arm,
                "n": int(shift.notna().sum()),
                "control": float(group["control"].mean()),
                "sd": sd,
                "shift": mean,
                "shift_max": float(shift.iloc[shift.abs().to_numpy().argmax()]),
                "shift_sd": mean / sd if sd > 0 else np.nan,
                "edge_shift": int(group["edge"].max()),
            }
        )
    return pd.DataFrame(rows)


def stopped_loss_rules(
    results: Results, cells: pd.DataFrame, control: pd.DataFrame
) -> pd.DataFrame:
    """How far each rule for a stopped cell's loss moves LR sensitivity from the control.

    Returns:
        DataFrame: rule, shift_mean_abs and shift_worst (over depths and arms, of the mean over
        seeds, nats), shift_worst_sd (in standard deviations over seeds), loss_error (mean of the
        rule's loss minus the true final loss of the stopped cells).
    """
    stopped = cells["steps_run"] < cells["steps"]
    rows = []
    for rule, loss in STOPPED_LOSS.items():
        supposed = cells.assign(loss=cells["loss"].where(~stopped, loss(cells)))
        # The rule is in the table now: a cell that the estimator takes as run to its end.
        supposed["state"] = supposed["state"].where(~stopped, "failed")
        shift = sensitivity_shift(results, supposed, control)
        error = (supposed["loss"] - control["loss"])[stopped]
        worst = shift["shift"].abs().to_numpy().argmax()
        rows.append(
            {
                "rule": rule,
                "shift_mean_abs": float(shift["shift"].abs().mean()),
                "shift_worst": float(shift["shift"].iloc[worst]),
                "shift_worst_sd": float(shift["shift_sd"].abs().max()),
                "loss_error": float(error.mean()),
            }
        )
    return pd.DataFrame(rows)


def verdict_changes(results: Results, cells: pd.DataFrame, control: pd.DataFrame) -> list[str]:
    """The verdicts on H1, H2, H3 that the stops change, such as `H2 (rmsnorm): a -> b`."""
    if not estimators.arms(control) or estimators.OFF not in set(control["qk_norm"].unique()):
        return []
    margins = results.study.margins
    was, now = hypotheses.judge(control, margins), hypotheses.judge(cells, margins)
    return [
        f"{a.hypothesis} ({a.arm}): {a.verdict} -> {b.verdict}"
        for a, b in zip(was, now, strict=True)
        if a.verdict != b.verdict
    ]


def normalised_losses(control: pd.DataFrame) -> pd.DataFrame:
    """Histogram of the final normalised losses of cells above their arm's best LR.

    Returns:
        DataFrame: qk_norm, low, high (edges of the bin), count.
    """
    best = estimators.best_lr(control)[[*SEED_KEYS, "value"]].rename(columns={"value": "best"})
    above = control.merge(best, on=SEED_KEYS)
    above = above[(above["lr"] > above["best"]) & above["normalised_loss"].notna()]
    rows = []
    for arm, group in above.groupby("qk_norm", sort=True):
        counts, edges = np.histogram(group["normalised_loss"].clip(BINS[0], BINS[-1]), BINS)
        rows += [
            {"qk_norm": arm, "low": low, "high": high, "count": int(count)}
            for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)
        ]
    return pd.DataFrame(rows, columns=["qk_norm", "low", "high", "count"])
